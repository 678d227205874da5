"""DataParallel: your model on every rank, with gradients that are averaged when `backward()` returns."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from microparallel.comms import Comms
from microparallel.compression import Cast, Compressor
from microparallel.data_parallel.compressed_bucket import as_compressor
from microparallel.data_parallel.compute_copies import ComputeCopies
from microparallel.data_parallel.deferred import require_contents
from microparallel.data_parallel.precision import (
    LossScale,
    MixedPrecision,
    Precision,
    as_precision,
    convert_parameters,
)
from microparallel.data_parallel.reducer import Reducer
from microparallel.data_parallel.replicate import broadcast_buffers, filled, replicate, require_same_model
from microparallel.data_parallel.sharding import GradientInParts, clip_parts, part_keepers
from microparallel.data_parallel.single_rank import GradientChecks, SingleRank
from microparallel.data_parallel.skipped_steps import StepGuard
from microparallel.data_parallel.sync_batch_norm import LayerSums
from microparallel.errors import UsageError
from microparallel.observe import UNOBSERVED, Activity, Observation
from microparallel.program import BUFFERS, Broadcast, ForwardStages, Program
from microparallel.schedules import data_parallel_step
from microparallel.torch_private import (
    leave_uncompiled,
    not_compiled,
    not_compiled_itself,
    pytree,
    share_tensors,
)

_LARGEST_BUCKET, _SMALLEST_BUCKET = 25.0, 4.0  # megabytes, unless the user says something else
Shard = Literal["optimizer", "gradients"]
LEVELS: dict[str | None, int] = {None: 0, "optimizer": 1, "gradients": 2}


class DataParallel(nn.Module):
    """A model whose ranks each compute on their own samples and all end up with the average gradients.

    Rank 0's parameters and buffers are copied to all ranks. From then on every rank calls the model on its own share of
    the batch, and when `backward()` returns, `grad` of every parameter is the average over the ranks. Gradients are
    averaged in buckets, while backward still computes.

    Args:
        module: the model, the same on every rank; already on its device.
        comms: the ranks.
        bucket_cap_mb: a bucket is sent as soon as it holds so many megabytes of gradients; 25 unless something else is
            said. With `shard="gradients"` it is a sixteenth of all gradients, from 4 to 25, since what is in flight is
            whole.
        overlap: whether buckets are averaged in the background while backward goes on, or at once; None: in the
            background, unless that takes a core from the computation (`Comms.can_overlap`).
        broadcast_buffers: give every rank rank 0's buffers (BatchNorm's running statistics, say) before each training
            pass; with False, each rank keeps its own.
        find_unused_parameters: let ranks skip parameters in a pass. The gradient of a skipped parameter counts as zero
            on that rank; a parameter that all ranks skip keeps no gradient. With False, a skipped parameter raises
            `GradientError`, on every rank, with its name and the ranks that skipped it.
        check_finite: raise `GradientError`, on every rank, with the step, the rank and the parameters whose gradients
            are infinite or not a number.
        gradient_as_bucket_view: let gradients of the next pass overwrite those of the last one, as torch's option does:
            `grad` is then the same memory in every pass, and what you keep of it changes. With False, a pass whose
            gradients begin anew leaves gradients that you keep alone.
        shard: what each rank keeps only its part of (ZeRO): "optimizer", the optimizer's state; "gradients", the
            gradients, too, which then leave after every backward (inside of `no_sync()` they stay whole). The optimizer
            must be a `mp.ShardedOptimizer`, and gradients are clipped with this model's `clip_grad_norm_`. After a
            backward, `grad` of a parameter only says that there is a gradient: no rank has it whole.
        precision: in which dtypes the model computes and keeps its parameters: "bf16" or "fp16" (the module's own
            parameters are float32, and are what the optimizer updates; layers compute with 16-bit copies of them),
            "float32" or "float64" (the module is converted, and that is all), or a `mp.MixedPrecision`. None: the
            module is left as it is.
        compress: send fewer bytes: an object of `mp.compression`, such as `mp.compression.TopK(0.01)`, or its name,
            such as "topk:0.01"; all ranks give the same. Gradients are then nearly the average, and the same bits on
            every rank. A world of one rank sends nothing, and compresses nothing.

    Attributes:
        precision: the `mp.MixedPrecision` that was asked for, or None.
        loss_scale: with "fp16", by what gradients are multiplied on their way through the model. What you see of them
            is never scaled. If they are infinite or not a number anywhere, then on every rank `grad` of all parameters
            is None until an optimizer has made its step, which so changes nothing; and the scale is halved.

    Example:
        ```python
        model = mp.DataParallel(build_model(), comms)
        optimizer = torch.optim.AdamW(model.parameters())
        for inputs, targets in my_share_of_the_batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        ```
    """

    precision: MixedPrecision | None = None
    loss_scale: LossScale | None = None
    _copies: ComputeCopies | None = None
    _guard: StepGuard | None = None

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        bucket_cap_mb: float | None = None,
        *,
        overlap: bool | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = True,
        check_finite: bool = False,
        gradient_as_bucket_view: bool = False,
        shard: Shard | None = None,
        precision: Precision | None = None,
        compress: str | Compressor | None = None,
    ) -> None:
        super().__init__()
        mixed = as_precision(precision, "DataParallel")
        if shard not in LEVELS:
            raise UsageError(f"DataParallel: shard={shard!r}; choose None, 'optimizer' or 'gradients'")
        compressor = as_compressor(compress, module)
        if shard is not None and compressor is not None:
            raise UsageError(
                f"DataParallel: compress={compressor.name} with shard={shard!r}: a compressed sum leaves each rank "
                "with all gradients, and shard= with its part; choose one of the two"
            )
        if bucket_cap_mb is None:
            bucket_cap_mb = _fitting_buckets(module, shard)
        _require_sensible(bucket_cap_mb, broadcast_buffers, find_unused_parameters, gradient_as_bucket_view)
        require_plain(module, "DataParallel")
        require_contents(module, "DataParallel")
        settings = f"compress={compressor and compressor.description}" + (f", precision={mixed}" if mixed else "")
        require_same_model(module, comms, settings)  # before the next check: all ranks then find the same in it
        require_dense_gradients(module)
        if mixed is not None:
            require_skipping(mixed, check_finite, "DataParallel")
            convert_parameters(module, mixed.master)
            self.precision = mixed
            self.loss_scale = LossScale() if mixed.scales_loss else None
            if compressor is None and shard is None and mixed.wire is not None:
                compressor = Cast(mixed.wire, smallest=0)
        replicate(module, comms)
        self.module = module
        self.comms = comms
        self._make_reducer = functools.partial(
            Reducer,
            comms=comms,
            bucket_bytes=bucket_cap_mb * 2**20,
            overlap=comms.can_overlap if overlap is None else overlap,
            check_finite=check_finite,
            refuse_unused=not find_unused_parameters,
            overwrites=gradient_as_bucket_view,
            level=LEVELS[shard],
            wire=None if mixed is None else mixed.wire,
            compressor=compressor if comms.world_size > 1 else None,
        )
        self._averages = comms.world_size > 1
        self._checks_alone = {"finite": check_finite, "unused": not find_unused_parameters}
        self._broadcasts_buffers = broadcast_buffers and comms.world_size > 1 and bool(filled(module.buffers()))
        self._connect()
        if self._averages:
            self._reducer.prepare()

    def _connect(self) -> None:
        """Give this model a reducer of its own; it makes its buckets before the first pass."""
        if self.precision is not None and self.precision.is_mixed:
            self._copies = ComputeCopies(self.module, self.precision, self.loss_scale)
        if self.loss_scale is not None:
            self._guard = StepGuard(self.loss_scale)
            self._guard.watch(self.module.parameters())
        share_tensors(self, self.module)
        self._sums_inside = LayerSums(self.module)
        self._reducer = self._make_reducer(
            dict(self.module.named_parameters()), sums_inside=self._sums_inside, guard=self._guard
        )
        self._reducer.refuses_not_finite = self.loss_scale is None  # otherwise the step is not taken
        self._reducer.begin_if_wanted = self._begin_if_wanted
        self._reducer.pass_ended = self._pass_ended
        self._single = None if self._averages else self._make_single()
        if self._single is None and self._reducer.level:
            part_keepers.enter(self.module.parameters(), self._reducer)
        self._no_sync_depth = 0  # how many no_sync() this rank is inside of
        self._forward_was_local = False  # whether the last forward was inside of no_sync()
        self._registrations = registrations().count  # when its parameters were last looked at

    def _make_single(self) -> SingleRank:
        named = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        return SingleRank(self.comms, GradientChecks(named, self._guard, **self._checks_alone))

    # ── a pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    @not_compiled_itself
    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the module, and put hooks on its outputs, which torch calls when backward begins.

        Under `torch.compile` the module is what is compiled; what stands around it here is not.
        """
        single = self._single
        nothing_to_do = single is not None and self._copies is None and single.has_nothing_to_do
        if nothing_to_do or not torch.is_grad_enabled():
            return self._compute(inputs, named_inputs)
        observation = self._forward_begins(inputs, named_inputs)
        outputs: Any = None
        try:
            outputs = self._compute(inputs, named_inputs)
        finally:
            self._forward_ends(observation, outputs)
        self._wait_for_backward(outputs)
        return outputs

    @not_compiled_itself
    def _compute(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> Any:
        """Call the module; in mixed precision, on converted inputs and with copies of its parameters."""
        if self._copies is None:
            return _call(self.module, inputs, named_inputs)
        inputs, named_inputs = self._copies.inputs((inputs, named_inputs))
        with self._copies.forward():
            outputs = _call(self.module, inputs, named_inputs)
        return self._copies.outputs(outputs)

    @not_compiled
    def _forward_begins(self, *given: Any) -> Observation:
        """Make ready for a pass, and tell the observers, if there are any, that its forward begins."""
        self._forward_was_local = self._no_sync_depth > 0
        self._sums_inside.seen.clear()
        if self._single is None:
            self._prepare()
            self._reducer.take_stand_ins()  # torch.compile would look at them, as at any gradient
            self._broadcast_buffers_before_forward()
            stages, microbatch = len(self._reducer.buckets), self._reducer.microbatch
        else:
            self._single.prepare()
            stages, microbatch = 1, self._single.microbatch
        if not self.comms.observers or not stages:
            return UNOBSERVED
        number = microbatch * self.comms.world_size + self.comms.rank
        batch = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
        activity = Activity(
            ForwardStages(0, stages, number),
            parameters=self._parameters_by_stage(),
            given=[*self.module.buffers(), *batch],
        )
        return Observation(self.comms.observers, activity).__enter__()

    def _parameters_by_stage(self) -> dict[int, list[nn.Parameter]]:
        """Those of each bucket, the last layers' bucket first; frozen ones belong to stage 0."""
        stages = [list(bucket.parameters) for bucket in reversed(self._reducer.buckets)] or [[]]
        known = set(chain(*stages))
        stages[0] += [parameter for parameter in self.module.parameters() if parameter not in known]
        return dict(enumerate(stages))

    @not_compiled
    def _forward_ends(self, observation: Observation, outputs: Any) -> None:
        """Tell the observers, if there are any, that the forward has ended, and what its backward will need."""
        if observation is not UNOBSERVED:
            activity = observation.activity
            activity.kept = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
            observation.__exit__()
            activity.kept = ()  # an observer that keeps the activity does not keep the outputs
        self._reducer.put_stand_ins_back()

    @not_compiled
    def _wait_for_backward(self, outputs: Any) -> None:
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _prepare(self) -> None:
        """Notice parameters that were added since the last pass, and let the reducer make ready for the next one."""
        if self._registrations != registrations().count:
            self._reducer.require_known(self.module)
            self._registrations = registrations().count
        self._reducer.prepare()

    def _broadcast_buffers_before_forward(self) -> None:
        joining = self._reducer.participants.joining  # then _pass_ended does it
        if self._broadcasts_buffers and self.training and not self._no_sync_depth and not joining:
            self._broadcast_buffers(0)

    @leave_uncompiled
    def _backward_begins(self, _: torch.Tensor) -> None:
        if self._copies is not None:
            self._copies.backward_begins()
        if self._single is not None:
            self._single.backward_begins(local=self._no_sync_depth > 0 or self._forward_was_local)
        elif not self._reducer.running and not self._begin_if_wanted():
            self._reducer.observe_backward()

    def _begin_if_wanted(self) -> bool:
        """Let the reducer begin, unless this backward is local (in `no_sync`); returns whether it has begun."""
        if self._no_sync_depth or self._forward_was_local or not self._reducer.buckets:
            return False
        self._reducer.begin()
        return True

    def _pass_ended(self, source: int) -> None:
        """Broadcast the buffers inside of `join()`: ranks that have run out of data do no forward to do it before."""
        if self._broadcasts_buffers and self._reducer.participants.joining:
            self._broadcast_buffers(source)

    def _broadcast_buffers(self, source: int) -> None:
        operation = Broadcast(BUFFERS, self._reducer.axis, source)
        broadcast_buffers(self.module.buffers(), self.comms, source, operation)

    # ── how gradients are averaged ──────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the first backward outside averages all of them.

        It may stand around forward and backward, or around one of them.
        """
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @contextmanager
    def weighted(self, weight: float | torch.Tensor, total: float | torch.Tensor | None = None) -> Iterator[None]:
        """Let this rank's gradients count by what they were computed from: its samples, or tokens.

        With `weight` samples on each rank and a loss that is the mean over them, gradients are those of the mean over
        all samples of all ranks. Every rank calls this, around its backward.

        Args:
            weight: how much this rank has: a number, or a tensor with one number, as a loss that counts tokens returns.
            total: how much all ranks have together, if the caller knows it; otherwise an all-reduce adds it up.
        """
        mine, everyones = _number(weight), None if total is None else _number(total)
        if not (math.isfinite(mine) and mine >= 0):
            raise UsageError(f"weighted: weight={weight!r} must be a finite number, at least 0")
        if everyones is not None and not (math.isfinite(everyones) and everyones >= mine and everyones > 0):
            raise UsageError(f"weighted: total={total!r} must be a finite number, at least this rank's {weight}")
        participants = self._reducer.participants
        before = participants.weight, participants.total
        participants.weight, participants.total = mine, everyones
        try:
            yield
        finally:
            participants.weight, participants.total = before

    def sit_out(self) -> None:
        """Take part in a step for which this rank has no data; it gets the average of the other ranks' gradients.

        Call it inside `weighted(0)`, so that this rank does not count in the average. Inside of `no_sync()`, where
        nothing is averaged, it does nothing.
        """
        if self._single is not None:
            return
        self._require_no_sums_inside("sit_out")
        if self._no_sync_depth:
            return
        self._prepare()
        self._broadcast_buffers_before_forward()
        self._reducer.find_participants()
        self._reducer.take_part(take_results=True)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks run out of data at different times: put it around the training loop of every rank.

        Gradients are averaged over the ranks that still have data. A rank that has none left stays until all others are
        done, and then gets their parameters and buffers.
        """
        self._require_no_sums_inside("join")
        if self._reducer.level and self._single is None:
            raise UsageError(
                "join: with shard= every rank updates its part of the parameters in every step, also one that has run "
                "out of data; let it call sit_out() inside of weighted(0), and step its optimizer, as the others do"
            )
        participants = self._reducer.participants
        participants.joining = True
        try:
            yield
            if self._single is None:
                self._take_part_until_all_are_done()
        finally:
            participants.joining = False

    def _require_no_sums_inside(self, call: str) -> None:
        if self.comms.world_size > 1 and self._sums_inside.synchronise:
            raise UsageError(
                f"{call}: a SyncBatchNorm needs every rank in every forward and backward; a rank without samples calls "
                "the model on an empty batch"
            )

    def _take_part_until_all_are_done(self) -> None:
        participants = self._reducer.participants
        while True:
            last = participants.ranks
            self._prepare()
            self._reducer.find_participants(has_data=False)
            if not participants.ranks:
                break
            self._reducer.take_part(take_results=False)
            if self._guard is not None:
                self._guard.forget()  # no optimizer's step ends a step here
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            self.comms.broadcast(tensor.data, src=last[0])
        if self.loss_scale is not None and self._guard is not None:
            state = self.loss_scale.state_dict()
            numbers = self.comms.broadcast(
                torch.tensor([*state.values()], dtype=torch.float64, device="cpu"), src=last[0]
            )
            self.loss_scale.load_state_dict(dict(zip(state, numbers.tolist(), strict=True)))
            self._guard.forget()

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether all ranks get rank 0's buffers before each training pass; so it is where there are no buffers."""
        return self._broadcasts_buffers or not filled(self.module.buffers())

    @property
    def sums_at_once(self) -> bool:
        """Whether every backward outside of `no_sync()` sums its gradients and lets them go (`shard="gradients"`)."""
        return self._single is None and self._reducer.level > 1

    def program(
        self,
        microbatches: int | Sequence[int] = 1,
        *,
        samples: bool = False,
        loss: bool = False,
        gone: Collection[int] = (),
        clip: bool = False,
        at_once: bool = True,
    ) -> Program:
        """The program that the next step follows, on all ranks; it can be verified, simulated and drawn.

        A stage is a bucket of gradients. Buckets are put in order in the first backward, so the program is final after
        that. Inside of `weighted()` and `join()` it has what the ranks exchange there. A world of one rank has nothing
        to sum, and so no buckets: its program is a forward and a backward of the whole model.

        Args:
            microbatches: how many each rank has, or for each rank how many; all but its last are inside of `no_sync()`.
                A rank that has none sits out (`sit_out`): it takes part in the sums.
            samples: the ranks add up their samples first, as `accumulated_step` does without `samples=`.
            loss: the ranks add up the loss in the end, as `accumulated_step` does.
            gone: the ranks that have run out of data, inside of `join()`.
            clip: `clip_grad_norm_` is called before the update; with `shard` the ranks add up the norm.
            at_once: with `shard="gradients"`, whether every micro-batch's gradients leave after its backward; False if
                all but the last are inside of `no_sync()`.

        Example:
            ```python
            print(mp.draw(model.program()))
            ```
        """
        each = microbatches if isinstance(microbatches, int) else tuple(microbatches)
        if self._single is not None:
            return data_parallel_step(1, 1, each, sums=False, samples=samples, loss=loss)
        self._prepare()
        broadcasts = self._broadcasts_buffers and (self.training or self._reducer.participants.joining)
        return self._reducer.program(
            each, buffers=broadcasts, samples=samples, loss=loss, gone=tuple(gone), norm=clip, at_once=at_once
        )

    # ── gradients, whole or in parts ────────────────────────────────────────────────────────────────────────────

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns what it was.

        Every rank calls it, after backward. Without `shard` it is `torch.nn.utils.clip_grad_norm_`. With `shard`, where
        each rank has its part of the gradients, an all-reduce adds up the parts' norms.
        """
        buckets = [] if self._single is not None else self._reducer.sharded_buckets
        if not buckets:
            norm: torch.Tensor = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
            return norm
        return clip_parts(buckets, self.comms, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove all gradients, or set them to zero; those that are in parts are always removed."""
        if self._single is None:
            self._reducer.forget_sums()
        super().zero_grad(set_to_none)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a number, whether each rank has them whole or in parts."""
        if self._single is None:
            for bucket in self._reducer.sharded_buckets:
                bucket.scale(factor)
        for parameter in self.module.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, GradientInParts):
                parameter.grad.mul_(factor)

    def gradient_memory(self) -> list[torch.Tensor]:
        """The tensors of this rank in which gradients are summed and kept; some may be parts of others."""
        return [tensor for bucket in self._reducer.buckets for tensor in bucket.memory()]

    # ── compression ─────────────────────────────────────────────────────────────────────────────────────────────

    def compression_state(self) -> dict[str, Any]:
        """What this rank keeps from pass to pass with `compress=`: for a checkpoint, which needs that of every rank.

        Returns:
            `"residuals"`: by the parameters' names, what this rank has not sent; `"methods"`: the state of the methods;
            `"passes"`: how many were averaged. Tensors are copies.
        """
        return self._reducer.compression_state()

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what `compression_state` returned on all ranks; every rank calls this.

        There may be more ranks now than there were, or fewer: rank r takes the residuals of the old ranks r, r + ranks,
        and so on, so nothing that was not sent is lost.

        Args:
            states: those of all old ranks, in rank order. Of those whose residuals this rank does not take, the
                residuals may be left out.
        """
        if self._single is None:
            self._reducer.load_compression_state(states)

    # ── the order of gradients ──────────────────────────────────────────────────────────────────────────────────

    def gradient_order(self) -> list[str] | None:
        """The names of parameters in the order in which they are put into buckets, once a backward has shown it.

        Where gradients lie decides in which order three ranks and more add them up, and so their last bits. For a
        checkpoint; None where there is nothing to keep.
        """
        return None if self._single is not None else self._reducer.gradient_order()

    def expect_gradients(self, order: Sequence[str]) -> None:
        """Put gradients into buckets as `gradient_order` once said; every rank calls this, before a pass."""
        if self._single is None:
            self._reducer.expect(order)

    # ── the plain model's state ─────────────────────────────────────────────────────────────────────────────────

    def state_dict(self, *arguments: Any, **named_arguments: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own, without a prefix."""
        state: dict[str, Any] = self.module.state_dict(*arguments, **named_arguments)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named_arguments: Any) -> Any:
        """The module's own; every rank must load the same."""
        return self.module.load_state_dict(state_dict, *arguments, **named_arguments)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, without a prefix."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own, without a prefix."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Find the module's layers under their plain names as well, as its parameters are."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = {} if name == "module" else dict(self.module.named_children())
            if name not in layers:
                raise
            return layers[name]

    # ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy of the model, on the same ranks, with a reducer of its own; nothing is sent for it."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        of_this_one = ("_make_reducer", "_reducer", "_single", "_sums_inside", "_copies", "_guard")
        parts = {name: part for name, part in vars(self).items() if name not in of_this_one}
        copied.__dict__ |= {name: copy.deepcopy(part, memo) for name, part in parts.items()}
        copied._make_reducer = self._make_reducer
        copied._connect()
        return copied

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a DataParallel cannot be pickled: its connection to the other ranks belongs to this process; "
            "save or return model.state_dict(), or model.module for the module itself"
        )


def require_skipping(precision: MixedPrecision, check_finite: bool, caller: str) -> None:
    """Raise `UsageError` if gradients that are not finite should be an error, where they skip a step."""
    if precision.scales_loss and check_finite:
        raise UsageError(
            f"{caller}: check_finite=True with float16: gradients that are not finite are expected there, and skip "
            "the step; leave check_finite out, and watch model.loss_scale.skipped"
        )


def _number(value: Any) -> float:
    """A number of Python, NumPy or torch as a float; not a number for anything else."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _call(module: nn.Module, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> Any:
    """Call a module, in a function that `torch.compile` begins with; it does not begin with torch's own layers."""
    return module(*inputs, **named_inputs)


def _fitting_buckets(module: nn.Module, shard: Shard | None) -> float:
    """How many megabytes of gradients a bucket should have."""
    if shard != "gradients":
        return _LARGEST_BUCKET
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, trained / 2**20 / 16))


def _require_sensible(
    bucket_cap_mb: float, broadcast_buffers: bool, find_unused_parameters: bool, gradient_as_bucket_view: bool
) -> None:
    if not (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0):
        raise UsageError(f"DataParallel: bucket_cap_mb={bucket_cap_mb!r} must be a number of megabytes greater than 0")
    options = {
        "broadcast_buffers": broadcast_buffers,
        "find_unused_parameters": find_unused_parameters,
        "gradient_as_bucket_view": gradient_as_bucket_view,
    }
    for name, value in options.items():
        if not isinstance(value, bool):
            raise UsageError(f"DataParallel: {name}={value!r} must be True or False")


def require_plain(module: nn.Module, wanted: str) -> None:
    """Raise `UsageError` if a model is wrapped already, or a part of it is: two would sum the same gradients."""
    for name, part in module.named_modules():
        if isinstance(part, DataParallel):
            place, kind = name or "this model", type(part).__name__
            raise UsageError(
                f"{wanted}: {place} is a {kind} already, and its gradients would be summed twice; give a plain model"
            )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "part_of"):
            raise UsageError(
                f"{wanted}: {name} is in parts, since this model was given to a FullyShardedDataParallel before; "
                "build it again"
            )


def require_dense_gradients(module: nn.Module) -> None:
    """Raise `UsageError` unless a module has gradients, and none that are sparse."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError(
            f"DataParallel: {type(module).__name__} has no trainable parameters, so there are no gradients to average; "
            "use the model itself"
        )
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise UsageError(
                f"DataParallel: {name or type(part).__name__} gives sparse gradients, and buckets are dense; "
                "build it with sparse=False"
            )


# ── parameters that come later ──────────────────────────────────────────────────────────────────────────────────────


class Registrations:
    """Counts the parameters and modules that were given to any module of this process since the first was wrapped.

    Looking through all parameters of a model before each forward would take some hundred microseconds. So this is done
    only if something was registered somewhere since the last time.
    """

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._registered)
        register_module_module_registration_hook(self._registered)

    def _registered(self, _module: nn.Module, _name: str, _part: Any) -> None:
        self.count += 1


@functools.cache
def registrations() -> Registrations:
    """The process's only one, made when the first model is wrapped: torch calls it from then on."""
    return Registrations()
