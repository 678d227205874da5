"""FullyShardedDataParallel: each rank keeps its part of the model, and gathers layers just before it uses them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.deferred import fill, is_deferred
from microparallel.data_parallel.filling import Filling, require_same_numbers
from microparallel.data_parallel.layout import Part
from microparallel.data_parallel.optimizers_of_parts import optimizers_of_parts
from microparallel.data_parallel.precision import LossScale, Precision, as_precision, convert_parameters, converted
from microparallel.data_parallel.replicate import filled, replicate, require_same_model
from microparallel.data_parallel.saved_by_name import SavedByName
from microparallel.data_parallel.sharding import clip_parts
from microparallel.data_parallel.skipped_steps import StepGuard
from microparallel.data_parallel.sync_batch_norm import LayerSums
from microparallel.data_parallel.unit_reducer import UnitReducer
from microparallel.data_parallel.units import (
    Choose,
    ParametersWhenRead,
    ShardedParameters,
    Unit,
    cut_into_units,
    keeps_statistics,
)
from microparallel.data_parallel.wrapper import (
    DataParallel,
    registrations,
    require_dense_gradients,
    require_plain,
    require_skipping,
)
from microparallel.errors import CheckpointError, UsageError
from microparallel.files.atomic import written_aside
from microparallel.files.tensor_file import DTYPES, Kind, TensorWriter
from microparallel.torch_private import (
    compiles_what_is_called,
    leave_uncompiled,
    not_compiled,
    not_compiled_itself,
    own_parameters_of,
    pytree,
    replace_own_parameters,
    share_tensors,
)


class FullyShardedDataParallel(DataParallel):
    """A model of which each rank keeps its part: parameters, gradients and the optimizer's state (ZeRO-3).

    The layers are put into *units*. A unit's parameters are gathered from all ranks just before they are used, in
    forward and again in backward, and let go after. While one unit computes, the next is gathered. So a model may be
    larger than the memory of any rank. Gradients of a unit are summed as soon as they are there, and each rank keeps
    its part of the average.

    `parameters()` gives this rank's parts, under the plain model's names: an optimizer of torch's that updates each
    element by itself (SGD, Adam, AdamW, …) updates them as they are. A part has as many dimensions as its parameter,
    all of size 1 but the first, so that rules such as "no weight decay for vectors" still work.

    Args:
        module: the model, the same on every rank. Rank 0's parameters and buffers are copied to all ranks. A model that
            was built inside of `mp.deferred_init()` has no memory yet: it is filled part by part.
        comms: the ranks.
        units: which layers are gathered together. "auto": layers of a list (transformer blocks, say) and other modules
            that are not small; a module with more than a quarter of all parameters is cut further. A function says of a
            module whether its parameters are one unit. None: the whole model is one.
        prefetch: how many units ahead of the one that computes parameters are gathered. No more than `prefetch` + 1
            units are whole at a time, but for parameters that the model itself has beside its layers, or that are used
            by several units: these stay whole from their first use to the last.
        reshard_after_forward: whether parameters are let go after their forward, and gathered again for their backward;
            with False they stay until then, which saves a third of what is sent.
        replicas: cut the ranks into so many groups, each of which keeps the whole model in parts (hybrid sharding):
            neighbours, such as the ranks of a node, form a group. Parameters are then gathered inside of a group only.
        precision: "float32", "float64", "bf16", "fp16" or an `mp.MixedPrecision`. Parts, their gradients and the
            optimizer's state are kept in its `master` dtype; parameters are gathered, and layers compute, in `compute`;
            gradients are sent in `reduce`. Modules with real buffers (batch normalisation) keep `master` parameters.
            None: all of it is as the model is. With "fp16" the model has a `loss_scale`, as `DataParallel` has.
        overlap: whether gathers and sums run in the background; None: unless that takes a core from the computation.
        broadcast_buffers: as for `DataParallel`.
        find_unused_parameters: as for `DataParallel`.
        check_finite: as for `DataParallel`.
        compress: refused: gradients in parts are not compressed.

    Example:
        ```python
        model = mp.FullyShardedDataParallel(build_model(), comms)
        optimizer = torch.optim.AdamW(model.parameters())
        for inputs, targets in my_share_of_the_batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
        model.save("model.safetensors")  # under the plain model's names
        ```
    """

    _reducer: UnitReducer

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        *,
        units: Choose = "auto",
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        replicas: int = 1,
        precision: Precision | None = None,
        overlap: bool | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = True,
        check_finite: bool = False,
        compress: None = None,
    ) -> None:
        nn.Module.__init__(self)
        if compress is not None:
            raise UsageError(
                f"FullyShardedDataParallel: compress={compress!r}: a compressed sum leaves each rank with all "
                "gradients, and here a rank keeps its part; use mp.DataParallel"
            )
        _require_sensible(comms, prefetch, replicas)
        mixed = as_precision(precision, "FullyShardedDataParallel")
        if mixed is not None:
            require_skipping(mixed, check_finite, "FullyShardedDataParallel")
        require_plain(module, "FullyShardedDataParallel")
        require_same_model(module, comms, f"precision={mixed}")
        require_dense_gradients(module)
        _require_no_sums_inside(module)
        self.comms = comms
        self.precision = mixed
        deferred = is_deferred(module)
        if not deferred:
            if mixed is not None:
                convert_parameters(module, mixed.master)
            replicate(module, comms)
        self._shard_comms, self._across = _groups(comms, replicas)
        self.units = cut_into_units(module, units, self._shard_comms, comms.device, self.precision)
        self._places = {name: (part, index) for part in self._parts() for index, name in enumerate(part.names)}
        self.module = module
        self._fill(deferred)
        if mixed is not None and mixed.scales_loss:
            self.loss_scale = LossScale()
            self._guard = StepGuard(self.loss_scale)
            self._guard.watch(chain.from_iterable(part.shards for part in self._parts()))
        options: dict[str, Any] = {
            "prefetch": prefetch,
            "reshard_after_forward": reshard_after_forward,
            "precision": mixed,
            "guard": self._guard,
            "overlap": comms.can_overlap if overlap is None else overlap,
            "check_finite": check_finite,
            "refuse_unused": not find_unused_parameters,
        }
        whole = {name: part.whole[index] for name, (part, index) in self._places.items()}
        self._sums_inside = LayerSums(module)
        self._reducer = UnitReducer(
            whole, comms, self.units, self._shard_comms, self._across, self._sums_inside, **options
        )
        self._reducer.begin_if_wanted = self._begin_if_wanted
        self._reducer.pass_ended = self._pass_ended
        self._averages, self._single = True, None
        self._broadcasts_buffers = broadcast_buffers and comms.world_size > 1 and bool(filled(module.buffers()))
        self._no_sync_depth = 0
        self._forward_was_local = False
        self._registrations = registrations().count
        self._read_through_units()
        share_tensors(self, module)
        self._reducer.prepare()
        optimizers_of_parts()

    def _fill(self, deferred: bool) -> None:
        """Keep this rank's part of each parameter. Those of a deferred model are made one after the other."""
        if deferred:
            master = None if self.precision is None else self.precision.master
            filling = Filling(self.module, self._places, self.comms.device, master)
            end = fill(self.module, filling.keep)
            filling.place_buffers()
            require_same_numbers(end, self.comms)
        else:
            for part, index in self._places.values():
                part.keep(index, part.whole[index].detach())
        before = [parameter for part in self._parts() for parameter in part.whole]
        for unit in self.units:
            unit.begin()
        if deferred:
            after = dict(zip(before, (parameter for part in self._parts() for parameter in part.whole), strict=True))
            for module in self.module.modules():
                for name, parameter in list(own_parameters_of(module).items()):
                    if parameter is not None:
                        setattr(module, name, after[parameter])

    def _parts(self) -> Iterator[ShardedParameters]:
        return chain.from_iterable(unit.parts for unit in self.units)

    def _read_through_units(self) -> None:
        """Let the modules list shards and compute with whole parameters, and units notice when they are used."""
        reducer = self._reducer
        unit_of: dict[nn.Parameter, Unit] = {}
        whole_of: dict[nn.Parameter, nn.Parameter] = {}
        for unit in self.units:
            for part in unit.parts:
                unit_of |= dict.fromkeys(part.shards, unit)
                whole_of |= zip(part.shards, part.whole, strict=True)
        shard_of = {whole: shard for shard, whole in whole_of.items()}

        @not_compiled
        def read(parameter: nn.Parameter) -> nn.Parameter:
            if not reducer.computes or parameter not in whole_of:
                return parameter
            reducer.read(unit_of[parameter])
            return whole_of[parameter]

        of_module = {unit.module: unit for unit in self.units}
        # A unit is in use while its module is, with all units inside of that; and where another module has one of its
        # parameters, too. Such a module belongs to the stage of the last unit before it.
        users = {unit: [of_module[one] for one in unit.module.modules() if one in of_module] for unit in self.units}
        current = self.units[0]
        for module in self.module.modules():
            current = of_module.get(module, current)
            parameters = dict(own_parameters_of(module))
            shards = {name: None if one is None else shard_of[one] for name, one in parameters.items()}
            for shard in shards.values():
                if shard is not None:
                    users[unit_of[shard]].append(current)
            if shards:
                replace_own_parameters(module, ParametersWhenRead(shards, read))
        reducer.guess_last_uses(users)
        for unit in self.units:
            if unit.module is not self.module:  # `forward` does that for the model itself
                unit.module.register_forward_pre_hook(functools.partial(_enter, reducer, unit), prepend=True)
                unit.module.register_forward_hook(functools.partial(_leave, reducer, unit), always_call=True)
        if self.precision is not None and self.precision.is_mixed:
            for module in self.module.modules():
                if module is not self.module and keeps_statistics(module):
                    module.register_forward_hook(self._statistics_are_made)
        self._root = next((unit for unit in self.units if unit.module is self.module), None)

    # ── a pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    @not_compiled_itself
    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the module; its units are gathered when it uses them, and let go after."""
        if compiles_what_is_called():
            raise UsageError(
                "torch.compile cannot compile a FullyShardedDataParallel, whose parameters come and go; compile its "
                "layers before it is wrapped: for block in model.blocks: block.compile()"
            )
        self._forward_was_local = self._no_sync_depth > 0
        self._sums_inside.seen.clear()
        self._prepare()
        self._reducer.take_stand_ins()
        computes_gradients = torch.is_grad_enabled()
        if computes_gradients:
            self._broadcast_buffers_before_forward()
        given: list[torch.Tensor] = []
        if self.comms.observers:
            given = [*self.module.buffers(), *_tensors((inputs, named_inputs))]
        if computes_gradients:
            self._reducer.in_float16 = _autocasts_to_float16(self.comms.device)
        inputs, named_inputs = self._to_compute((inputs, named_inputs), 1 / self._scale)
        self._reducer.begin_forward(given)
        outputs: Any = None
        try:
            if self._root is not None:
                self._reducer.enter(self._root)
            if computes_gradients:
                with SavedByName(self._reducer, self.units):
                    outputs = self.module(*inputs, **named_inputs)
            else:
                outputs = self.module(*inputs, **named_inputs)
            if self._root is not None:
                self._reducer.leave(self._root)
            outputs = self._to_master(outputs)
        finally:
            self._reducer.end_forward(_tensors(outputs), keep=computes_gradients)
        if computes_gradients:
            self._reducer.outputs_are_scaled = any(output.requires_grad for output in _tensors(outputs))
            self._wait_for_backward(outputs)
        return outputs

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _to_compute(self, given: Any, factor: float = 1.0) -> Any:
        """What the model is given, in the dtype that its layers compute in; its gradient is multiplied by a factor."""
        if self.precision is None or not self.precision.is_mixed:
            return given
        return converted(given, self.precision.compute, factor)

    def _to_master(self, outputs: Any) -> Any:
        """What the model returns, in the dtype in which its parameters are kept; gradients that come in are scaled."""
        if self.precision is None or not self.precision.is_mixed:
            return outputs
        return converted(outputs, self.precision.master, self._scale)

    @not_compiled
    def _wait_for_backward(self, outputs: Any) -> None:
        begins = functools.partial(self._backward_begins_with, self._scale)
        for output in _tensors(outputs):
            if output.requires_grad:
                output.register_hook(begins)  # type: ignore[no-untyped-call]

    @leave_uncompiled
    def _backward_begins_with(self, scale: float, gradient: torch.Tensor) -> None:
        self._reducer.take_scale(scale)
        self._backward_begins(gradient)

    @not_compiled
    def _statistics_are_made(self, _module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        """A module that computes with master parameters has returned something, for layers that do not."""
        return self._to_compute(outputs) if self._reducer.computes else outputs

    def _begin_if_wanted(self) -> bool:
        wanted = not self._no_sync_depth and not self._forward_was_local and self._reducer.adds_gradients()
        if wanted and self._reducer.computes:
            raise UsageError(
                "FullyShardedDataParallel: every layer is inside of a reentrant checkpoint, so backward does not know "
                "of them when it begins; use checkpoint(..., use_reentrant=False)"
            )
        return wanted and super()._begin_if_wanted()

    def sit_out(self) -> None:
        """Take part in a pass for which this rank has no data; it gets the average of the other ranks' gradients.

        Call it inside `weighted(0)`, so that this rank does not count in the average; and inside of `no_sync()` for
        each pass that the other ranks do there, since they gather parameters in it.
        """
        self._prepare()
        self._broadcast_buffers_before_forward()
        self._reducer.take_scale(self._scale)
        self._reducer.take_part_in_forward()
        if self._no_sync_depth:
            self._reducer.take_part_in_local_backward()
            return
        self._reducer.find_participants()
        self._reducer.take_part(take_results=True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns what it was.

        Every rank calls it, after backward. An all-reduce adds up the norms of the parts.
        """
        return clip_parts(self._reducer.sharded_buckets, self._shard_comms, max_norm, norm_type)

    # ── whole parameters ────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def summon_full_parameters(self, *, write_back: bool = True) -> Iterator[nn.Module]:
        """Within this block the module's parameters are whole, on every rank; every rank enters and leaves it.

        Args:
            write_back: whether changes count: each rank then takes its part of them when the block ends. All ranks must
                make the same changes.

        Returns:
            The plain module.
        """
        self._reducer.prepare()
        for unit in self.units:
            unit.gather(overlap=False, exact=True)
        mine = {id(shard): part.whole[index] for part in self._parts() for index, shard in enumerate(part.shards)}
        read = {module: own_parameters_of(module) for module in self.module.modules()}
        try:
            for module, parameters in read.items():
                whole = {name: one if one is None else mine.get(id(one), one) for name, one in parameters.items()}
                replace_own_parameters(module, whole)
            yield self.module
            if write_back:
                for part in self._parts():
                    part.take_back()
        finally:
            for module, parameters in read.items():
                replace_own_parameters(module, parameters)
            for unit in self.units:
                unit.let_go()

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter and buffer of the plain model by name, whole, one unit at a time; every rank goes through it.

        A tensor is there until the next one is asked for.
        """
        self._reducer.prepare()
        for unit in self.units:
            unit.gather(overlap=False, exact=True)
            for part in unit.parts:
                for name, parameter in zip(part.names, part.whole, strict=True):
                    yield name, parameter.detach()
            unit.let_go()
        yield from self.module.named_buffers()

    def full_state_dict(self, *, on: int | None = None) -> dict[str, torch.Tensor]:
        """The plain model's whole state, on the CPU; every rank calls this.

        Args:
            on: the rank that gets it; the others get an empty one. None: every rank.
        """
        wanted = on is None or self.comms.rank == on
        state = {}
        for name, tensor in self.whole_tensors():
            if wanted:
                state[name] = tensor.detach().to("cpu", copy=True)
        if not wanted:
            return {}
        return self._in_order_of_module(state)

    def _in_order_of_module(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `state_dict()` of the plain module has it: shared tensors under all names, buffers that are saved."""
        names = {
            id(tensor): name for name, tensor in chain(self.module.named_parameters(), self.module.named_buffers())
        }
        found = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            first = names.get(id(tensor))
            if first is not None:
                found[name] = state[first]
        return found

    def state_dict(self, *arguments: Any, **named_arguments: Any) -> dict[str, Any]:  # type: ignore[override]
        """The plain model's whole state, on the CPU of every rank; every rank calls this."""
        if arguments or named_arguments:
            raise UsageError("state_dict: FullyShardedDataParallel takes no arguments here; full_state_dict(on=0) does")
        return self.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's part of a whole state of the plain model; nothing is sent."""
        if assign:
            raise UsageError("load_state_dict: assign=True would replace the parts; leave it out")
        mine = self.module.state_dict(keep_vars=True)
        missing = [name for name in mine if name not in state_dict]
        unexpected = [name for name in state_dict if name not in mine]
        if strict and (missing or unexpected):
            words = [f"missing: {', '.join(missing)}"] * bool(missing)
            words += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
            raise UsageError(f"load_state_dict: {'; '.join(words)}; the names are those of the plain model")
        part_of = {id(part.shards[index]): (part, index) for part, index in self._places.values()}
        for name, tensor in mine.items():
            if name not in state_dict:
                continue
            theirs = state_dict[name]
            part, index = part_of.get(id(tensor), (None, 0))
            shape = tensor.shape if part is None else part.whole[index].shape
            if theirs.shape != shape:
                raise UsageError(
                    f"load_state_dict: {name} has shape {list(theirs.shape)}, and the model has {list(shape)}"
                )
            if part is None:
                tensor.detach().copy_(theirs)
            else:
                part.keep(index, theirs)
        return IncompatibleKeys(missing, unexpected)

    # ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UsageError(
            "a FullyShardedDataParallel cannot be copied: its parts belong to these ranks; build the model again and "
            "load full_state_dict()"
        )

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a FullyShardedDataParallel cannot be pickled: no rank has the whole model; save full_state_dict(), which "
            "every rank calls"
        )

    # ── parts, and a file of all of them ────────────────────────────────────────────────────────────────────────

    def parameter_parts(self) -> dict[str, Part]:
        """The elements of each parameter that this rank has, by the plain model's names; nothing is sent.

        They are the memory that the model computes with: what is copied there is loaded.
        """
        self._reducer.prepare()
        return {name: part.part(index) for name, (part, index) in self._places.items()}

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a number: this rank's parts of the sums, and what was not summed (`no_sync`)."""
        self._reducer.scale_gradients(factor)

    def sit_out_of_forward(self) -> None:
        """Take part in a forward without gradients for which this rank has no data: it gathers what the others need."""
        self._prepare()
        self._reducer.take_part_in_forward()
        self._reducer.prepare()  # no backward follows: let all units go

    def save(self, path: Path | str) -> None:
        """Write the whole model into a safetensors file, under the plain model's names; every rank calls this.

        Rank 0 writes it, a tensor at a time, while all ranks gather one unit after another: no rank has all of it.
        The file is that of `plain_model.state_dict()`; what has several names is there under each. It has its name only
        when all of it is on the disk; until then, what was there before is there.
        """
        tensors = self.module.state_dict(keep_vars=True)
        parts = {id(part.shards[index]): part.whole[index] for part, index in self._places.values()}
        named = chain(self.module.named_parameters(), self.module.named_buffers())
        first_names = {id(tensor): name for name, tensor in named}
        names: dict[str, list[str]] = {}
        kinds: dict[str, Kind] = {}
        for name, tensor in tensors.items():
            if id(tensor) in first_names:
                names.setdefault(first_names[id(tensor)], []).append(name)
                kinds[name] = tensor.dtype, tuple(parts.get(id(tensor), tensor).shape)
        for name, (dtype, _) in kinds.items():
            if dtype not in DTYPES.values():
                raise CheckpointError(f"{name} is of {dtype}, which safetensors cannot store")
        failure = None
        whole = self.whole_tensors()
        if self.comms.rank == 0:
            try:
                with written_aside(Path(path)) as aside, TensorWriter(aside, kinds) as file:
                    for first, tensor in whole:
                        for name in names.get(first, ()):
                            file.write(name, tensor)
            except OSError as error:
                failure = f"cannot write {path}: {error.strerror or error}; make room, or choose another place"
        for _ in whole:  # the ranks that write nothing, or cannot any more, take part in the gathers
            pass
        failure = gather_json(failure, self.comms)[0]
        if failure is not None:
            raise CheckpointError(failure)


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` did not find, and what it found and does not know: as torch's own returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@not_compiled
def _enter(reducer: UnitReducer, unit: Unit, _module: nn.Module, _inputs: Any) -> None:
    reducer.enter(unit)


@not_compiled
def _leave(reducer: UnitReducer, unit: Unit, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    reducer.leave(unit)


def _autocasts_to_float16(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) is torch.float16


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _groups(comms: Comms, replicas: int) -> tuple[Comms, Comms | None]:
    """The ranks that keep the parts together with this one, and those that keep the same part in other groups."""
    if replicas == 1:
        return comms, None
    size = comms.world_size // replicas
    inside = [comms.group(range(start, start + size)) for start in range(0, comms.world_size, size)]
    across = [comms.group(range(start, comms.world_size, size)) for start in range(size)]
    return next(one for one in inside if one is not None), next(one for one in across if one is not None)


def _require_sensible(comms: Comms, prefetch: int, replicas: int) -> None:
    if not isinstance(prefetch, int) or prefetch < 0:
        raise UsageError(f"FullyShardedDataParallel: prefetch={prefetch!r} must be a number of units, from 0")
    if not isinstance(replicas, int) or replicas < 1 or comms.world_size % replicas:
        raise UsageError(
            f"FullyShardedDataParallel: replicas={replicas!r}: {comms.world_size} ranks cannot be cut into as many "
            "equal groups"
        )


def _require_no_sums_inside(module: nn.Module) -> None:
    if LayerSums(module).layers:
        raise UsageError(
            "FullyShardedDataParallel: SyncBatchNorm sums inside of a forward, where units are gathered; use another "
            "norm, or mp.DataParallel"
        )
