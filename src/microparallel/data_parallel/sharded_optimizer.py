"""ShardedOptimizer: any of torch's optimizers, of whose state each rank keeps its part (ZeRO).

```
outer: what the user sees          inner: one of torch's own, on this rank's pieces
param_groups: whole parameters     param_groups: flat views of the pieces of these parameters
step()                         →   hyperparameters are copied in, step(), then the parts of all ranks are gathered
```
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.bucket import split
from microparallel.data_parallel.layout import By, Layout, Part, Piece, owners
from microparallel.data_parallel.sharding import FlatParameters, PartKeeper, ShardedBucket, part_keepers
from microparallel.errors import UsageError
from microparallel.observe import Activity, Observation
from microparallel.program import AllGather, Parameters

# Optimizers that update each element from its own gradient and state alone: they may be cut anywhere.
_BY_ELEMENT = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# Optimizers that cannot be given a part of the parameters at all.
_NEVER = {"LBFGS": "looks at all parameters together", "SparseAdam": "takes sparse gradients"}
SCALARS = ("step", "eta", "mu", "mu_product")  # state that is one number for a parameter, also for one of shape []


@dataclass(frozen=True)
class _Kept:
    """A piece that this rank keeps: of which parameter, and what the inner optimizer updates."""

    flat: FlatParameters
    piece: Piece
    parameter: nn.Parameter
    inner: nn.Parameter

    @property
    def key(self) -> tuple[int, int, int]:
        """The same for the same elements of the same parameter."""
        return id(self.parameter), self.piece.start, self.piece.stop


class ReadsState(Protocol):
    """Reads an optimizer's state from where it was saved."""

    def __call__(self, index: int, key: str, start: int = 0, stop: int | None = None) -> Any:
        """Return elements of the flattened tensor `key` of parameter `index`, or what is there if it is no tensor."""

    def shapes(self, index: int) -> Mapping[str, tuple[int, ...] | None]:
        """Return what there is of a parameter's state: the shape of each tensor, None for what is no tensor."""


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is kept in parts: each rank updates its part of the parameters, and all gather them.

    It is used as any of torch's optimizers: parameter groups, schedulers, closures, `zero_grad`, `state_dict`. Every
    rank makes the same calls. Gradients may be whole on every rank, as `mp.DataParallel` and torch's
    DistributedDataParallel leave them, or in parts, as `mp.DataParallel(shard=…)` does. The replicas of a stage of a
    `mp.Pipeline` share its state.

    Args:
        params: parameters or groups of them, as for the optimizer itself; the same on every rank that shares them.
        optimizer_class: one of torch's optimizers, such as `torch.optim.AdamW`.
        comms: the ranks that share the state; of a pipeline, all its ranks.
        by: "element" cuts parameters anywhere, into equal parts; it is for optimizers that update each element by
            itself. "parameter" gives whole parameters to ranks, balanced by size; it is for any optimizer that treats
            each parameter by itself (Muon, Adafactor, your own).
        bucket_cap_mb: parameters are gathered in buckets of so many megabytes, unless the model has buckets already.
        options: for the optimizer: `lr`, `weight_decay`, ….

    Example:
        ```python
        model = mp.DataParallel(build_model(), comms, shard="optimizer")
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=1e-3)
        for inputs, targets in my_share_of_the_batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        ```
    """

    updates_inside = True  # for observers: the update is that of an optimizer inside of this one

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        comms: Comms,
        *,
        by: By = "element",
        bucket_cap_mb: float = 25.0,
        **options: Any,
    ) -> None:
        _require_divisible(optimizer_class, by)
        if not (isinstance(bucket_cap_mb, int | float) and bucket_cap_mb > 0):
            raise UsageError(f"ShardedOptimizer: bucket_cap_mb={bucket_cap_mb!r} must be a number greater than 0")
        self.comms = comms
        self._class = optimizer_class
        self._by: By = by
        self._bucket_bytes = bucket_cap_mb * 2**20
        self._options = options
        self._own: list[FlatParameters] = []  # of parameters whose gradients are whole
        self._kept: list[_Kept] = []
        self._inner: torch.optim.Optimizer | None = None
        self._count = 0  # parameters in all groups
        self._entries = -1  # of `part_keepers`, when these were found there:
        self._found: list[weakref.ref[PartKeeper]] = []
        groups = _as_groups(params)
        if any(hasattr(parameter, "part_of") for group in groups for parameter in group["params"]):
            raise UsageError(
                "ShardedOptimizer: these parameters are parts already; give them to the optimizer itself: "
                f"{optimizer_class.__name__}(model.parameters(), …)"
            )
        template = optimizer_class([{**group, "params": [_stand_in()]} for group in groups], **options)
        super().__init__(groups, template.defaults)
        self._require_same_on_all_ranks()
        self._lay_out()

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's part of the parameters, and gather the parts of all ranks; every rank calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_known_groups()
        # Parameters may have been frozen, converted, or given other memory since.
        if self._buckets() != self._laid_out_for or not all(flat.fits for flat in self._flats()):
            self._lay_out()
        self._hand_over_gradients()
        inner = self._inner
        assert inner is not None
        _copy_options(self.param_groups, inner.param_groups)
        inner.step()
        _copy_options(inner.param_groups, self.param_groups)
        for kept in self._kept:
            kept.inner.grad = None
        self._gather()
        for reducer in self._reducers():
            reducer.step_ends()
        return loss

    def _gather(self) -> None:
        trained = (flat for flat in self._flats() if any(parameter.requires_grad for parameter in flat.parameters))
        flats = [flat for flat in trained if flat.is_shared]
        numbers = {flat.number for flat in flats}.union(*(reducer.gathered for reducer in self._reducers()))
        requests = []
        for number in sorted(numbers, reverse=True):  # the first layers' first
            operation = AllGather(Parameters(number), "dp")
            with Observation(self.comms.observers, Activity(operation)):  # one, however many calls it takes
                requests += [flat.gather(operation) for flat in flats if flat.number == number]
        for request in requests:
            request.wait()
        torch.autograd.graph.increment_version([one for flat in flats for one in flat.parameters])

    def _hand_over_gradients(self) -> None:
        """Give each piece of this rank its gradient: its part of the sum, or a part of a gradient that is whole."""
        summed: dict[tuple[int, int, int], torch.Tensor | None] = {}
        for bucket in self._laid_out_for:
            for piece, gradient in zip(bucket.pieces, bucket.gradients(), strict=True):
                parameter = bucket.parameters[piece.index]
                summed[id(parameter), piece.start, piece.stop] = gradient
        for kept in self._kept:
            if kept.key in summed:
                gradient = summed[kept.key]
                if gradient is None and kept.parameter.grad is not None:
                    raise UsageError(
                        "step: there are gradients that were not summed over the ranks; the last backward before a "
                        "step must be one of the wrapped model, outside of no_sync()"
                    )
            else:
                whole = kept.parameter.grad
                gradient = None if whole is None else whole.reshape(-1)[kept.piece.start : kept.piece.stop]
            kept.inner.grad = None if gradient is None else gradient.view(kept.inner.shape)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove all gradients; those that are in parts are always removed, never set to zero."""
        for reducer in self._reducers():
            reducer.forget_sums()
        super().zero_grad(set_to_none)

    def memory(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of this rank by kind: "parameters", which are whole, and "optimizer", its part of the state."""
        assert self._inner is not None
        states = [value for state in self._inner.state.values() for value in state.values()]
        return {
            "parameters": [flat.tensor for flat in self._flats()],
            "optimizer": [value for value in states if isinstance(value, torch.Tensor)],
        }

    # ── which parameters are where ──────────────────────────────────────────────────────────────────────────────

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _reducers(self) -> list[PartKeeper]:
        """Those that sum the gradients of these parameters, and may keep them in parts."""
        if self._entries != part_keepers.entries:  # looking all parameters up takes longer than a small model's update
            self._entries = part_keepers.entries
            found = dict.fromkeys(map(part_keepers.of, self._parameters()))
            self._found = [weakref.ref(reducer) for reducer in found if reducer is not None]
        return [reducer for reference in self._found if (reducer := reference()) is not None]

    def _sharers(self, parameter: nn.Parameter) -> Comms:
        """The ranks that have a parameter."""
        reducer = part_keepers.of(parameter)
        return self.comms if reducer is None else reducer.comms

    def _buckets(self) -> list[ShardedBucket]:
        """The buckets of these reducers that hold parameters of this optimizer."""
        mine = set(self._parameters())
        buckets = (bucket for reducer in self._reducers() for bucket in reducer.sharded_buckets)
        return [bucket for bucket in buckets if mine.intersection(bucket.parameters)]

    def _flats(self) -> list[FlatParameters]:
        return list(dict.fromkeys([*(kept_in for kept_in in self._used), *self._own]))

    def _lay_out(self) -> None:
        """Find this rank's pieces, and make the inner optimizer for them; state that there is already moves along."""
        state = {} if self._inner is None else _by_parameter(self, self._whole_state())
        for reducer in self._reducers():
            reducer.shard_by(self._by)
        buckets = self._buckets()
        self._laid_out_for = buckets
        self._used = [bucket.flat_parameters for bucket in buckets]
        self._own = list(self._lay_out_own({one for bucket in buckets for one in bucket.parameters}))
        group_of = {parameter: index for index, group in enumerate(self.param_groups) for parameter in group["params"]}
        self._kept = [
            _Kept(flat, piece, parameter, nn.Parameter(flat.of(piece)))
            for flat in self._flats()
            for piece in flat.pieces
            if (parameter := flat.parameters[piece.index]) in group_of
        ]
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self.param_groups]
        for kept in self._kept:
            groups[group_of[kept.parameter]]["params"].append(kept.inner)
        self._inner = self._class(groups, **self._options)
        self._count = len(group_of)
        if state:
            self._take_state(state)

    def _lay_out_own(self, elsewhere: set[nn.Parameter]) -> Iterator[FlatParameters]:
        """Put parameters that are in no bucket into flat tensors of this optimizer's own.

        Their gradients are whole, or they are frozen. Frozen ones stand apart, since they need not be gathered, and
        keep their state until they are trained again.
        """
        numbers = itertools.count()
        for comms, shared in self._by_sharers():
            mine = [one for one in shared if one not in elsewhere]
            owner_of = owners(mine, comms.world_size) if self._by == "parameter" else {}
            trained, frozen = ([one for one in mine if one.requires_grad is wanted] for wanted in (True, False))
            for group in (*split(trained, self._bucket_bytes), *split(frozen, self._bucket_bytes)):
                if owner_of:
                    group.sort(key=owner_of.__getitem__)
                given = [owner_of[parameter] for parameter in group] if owner_of else None
                yield FlatParameters(group, Layout(group, comms.world_size, given), comms, next(numbers))

    def _by_sharers(self) -> list[tuple[Comms, list[nn.Parameter]]]:
        """The parameters of this optimizer, by the ranks that have them."""
        found: dict[Comms, list[nn.Parameter]] = {}
        for parameter in self._parameters():
            found.setdefault(self._sharers(parameter), []).append(parameter)
        return list(found.items())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; every rank adds the same."""
        super().add_param_group(param_group)
        if self._inner is not None:
            self._entries = -1
            self._require_same_on_all_ranks()
            self._lay_out()

    def _require_known_groups(self) -> None:
        if len(self._parameters()) != self._count:
            raise UsageError(
                f"step: param_groups have {len(self._parameters())} parameters, and this optimizer was made for "
                f"{self._count}; add parameters with add_param_group, on every rank"
            )

    def _require_same_on_all_ranks(self) -> None:
        for comms, _ in self._by_sharers():
            self._require_same(comms)

    def _require_same(self, comms: Comms) -> None:
        """Compare the parameters that these ranks share."""
        mine = [
            [
                [list(one.shape), str(one.dtype), one.requires_grad]
                for one in group["params"]
                if self._sharers(one) is comms
            ]
            for group in self.param_groups
        ]
        for rank, theirs in enumerate(everyones := gather_json(mine, comms)):
            if theirs == everyones[0]:
                continue
            pairs: Iterable[tuple[list[Any], list[Any]]] = itertools.zip_longest(everyones[0], theirs, fillvalue=[])
            group, (first, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
            one, another = comms.world_ranks[0], comms.world_ranks[rank]
            raise UsageError(
                f"ShardedOptimizer: group {group} has {_described(first)} on rank {one} and {_described(other)} on "
                f"rank {another}; give every rank the same parameters, in the same order"
            )

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the optimizer itself would have it for all parameters; every rank calls this.

        It can be loaded by this class on any number of ranks, and by the optimizer itself in one process.
        """
        mine = super().state_dict()
        return {**mine, "state": self._whole_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a whole state: of this class, or of the optimizer itself in one process."""
        self._load_groups(state_dict["param_groups"])
        self._take_state(_by_parameter(self, state_dict["state"]))

    def state_parts(self) -> dict[str, Any]:
        """The part of the state that this rank keeps: as `state_dict`, with a `Part` for each tensor in parts."""
        inner, number = self._inner, {one: index for index, one in enumerate(self._parameters())}
        assert inner is not None
        state: dict[int, dict[str, Any]] = {}
        for kept in self._kept:
            if kept.inner in inner.state:
                state[number[kept.parameter]] = {
                    key: Part(value.reshape(-1), kept.piece.start, tuple(kept.parameter.shape))
                    if isinstance(value, torch.Tensor) and value.shape == kept.inner.shape and value.dim()
                    else value
                    for key, value in inner.state[kept.inner].items()
                }
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def state_bytes(self) -> dict[nn.Parameter, int]:
        """How large the whole state of each parameter is of which this rank keeps a piece: for observers."""
        inner = self._inner
        assert inner is not None
        found = {}
        for kept in self._kept:
            values = [value for value in inner.state.get(kept.inner, {}).values() if isinstance(value, torch.Tensor)]
            elements = sum(value.element_size() for value in values if value.shape == kept.inner.shape and value.dim())
            rest = sum(value.nbytes for value in values if value.shape != kept.inner.shape or not value.dim())
            found[kept.parameter] = elements * kept.parameter.numel() + rest
        return found

    def load_state_parts(self, groups: list[dict[str, Any]], read: ReadsState) -> None:
        """Load this rank's part of a state, and read no more than that.

        Args:
            groups: the parameter groups of the whole state.
            read: reads the state of a parameter by its number.
        """
        self._load_groups(groups)
        number = {one: index for index, one in enumerate(self._parameters())}

        def state_of(kept: _Kept) -> dict[str, Any]:
            index, piece = number[kept.parameter], kept.piece
            state = {}
            for key, shape in read.shapes(index).items():
                if shape is not None and shape == kept.parameter.shape and key not in SCALARS:
                    state[key] = read(index, key, piece.start, piece.stop).view(kept.inner.shape)
                else:
                    state[key] = read(index, key) if shape is None else read(index, key).view(shape)
            return state

        self._set_state({kept.inner: state_of(kept) for kept in self._kept})

    def _load_groups(self, param_groups: list[dict[str, Any]]) -> None:
        mine = super().state_dict()["param_groups"]
        counts = [len(group["params"]) for group in mine], [len(group["params"]) for group in param_groups]
        if counts[0] != counts[1]:
            raise UsageError(
                f"load_state_dict: it has groups of {counts[1]} parameters, and this optimizer has {counts[0]}"
            )
        for group, theirs in zip(self.param_groups, param_groups, strict=True):
            group |= {key: value for key, value in theirs.items() if key != "params"}

    def _take_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take the pieces of this rank out of the whole state of each parameter."""
        states = {}
        for kept in self._kept:
            whole, piece = kept.parameter, kept.piece
            states[kept.inner] = {
                key: value.reshape(-1)[piece.start : piece.stop].clone().view(kept.inner.shape)
                if isinstance(value, torch.Tensor) and value.shape == whole.shape and key not in SCALARS
                else value
                for key, value in state.get(whole, {}).items()
            }
        self._set_state(states)

    def _set_state(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        inner = self._inner
        assert inner is not None
        _copy_options(self.param_groups, inner.param_groups)
        order = [one for group in inner.param_groups for one in group["params"]]
        numbered = {index: dict(states[one]) for index, one in enumerate(order) if states.get(one)}
        inner.load_state_dict({"state": numbered, "param_groups": inner.state_dict()["param_groups"]})

    def _whole_state(self) -> dict[int, dict[str, Any]]:
        """The state of every parameter, put together from all ranks, a bucket at a time; every rank calls this."""
        inner, number = self._inner, {one: index for index, one in enumerate(self._parameters())}
        assert inner is not None
        mine = {(id(kept.flat), kept.piece.index): inner.state.get(kept.inner, {}) for kept in self._kept}
        whole: dict[int, dict[str, Any]] = {}
        for flat in self._flats():
            states = {index: mine.get((id(flat), index), {}) for index in range(len(flat.parameters))}
            for index, state in flat.whole_state(states).items():
                if flat.parameters[index] in number:
                    whole[number[flat.parameters[index]]] = state
        return dict(sorted(whole.items()))

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a ShardedOptimizer cannot be pickled or copied: its connection to the other ranks belongs to this "
            "process; save state_dict(), which every rank calls"
        )


def _by_parameter(optimizer: ShardedOptimizer, state: Mapping[int, Any]) -> dict[nn.Parameter, Mapping[str, Any]]:
    parameters = optimizer._parameters()
    return {parameters[index]: values for index, values in state.items()}


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if not given:
        raise UsageError("ShardedOptimizer: there are no parameters")
    if isinstance(given[0], dict):
        return [{**group, "params": _as_list(group["params"])} for group in given]
    return [{"params": given}]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _stand_in() -> nn.Parameter:
    """A parameter of two dimensions, for an optimizer that is only asked for its defaults."""
    return nn.Parameter(torch.zeros(1, 1))


def is_of_torch(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether this is one of torch's own optimizers."""
    return getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class


def is_known(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Whether this is one of torch's own optimizers that can be sharded, by element or by parameter."""
    return is_of_torch(optimizer_class) and optimizer_class.__name__ not in _NEVER


def finest_cut(optimizer_class: type[torch.optim.Optimizer]) -> By:
    """By what an optimizer can be sharded: by element if it updates each by itself, otherwise by parameter."""
    return "element" if is_known(optimizer_class) and optimizer_class.__name__ in _BY_ELEMENT else "parameter"


def _require_divisible(optimizer_class: type[torch.optim.Optimizer], by: str) -> None:
    """Refuse an optimizer whose update of a part is not the part of its update."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UsageError(
            f"ShardedOptimizer: {type(optimizer_class).__name__} is no class of optimizers; give the class itself, "
            "such as torch.optim.AdamW, and its options by name"
        )
    if by not in ("element", "parameter"):
        raise UsageError(f"ShardedOptimizer: by={by!r}; choose 'element' or 'parameter'")
    name = optimizer_class.__name__
    known = is_of_torch(optimizer_class)
    if known and name in _NEVER:
        raise UsageError(f"ShardedOptimizer: {name} cannot be sharded, since it {_NEVER[name]}")
    if by == "element" and not (known and name in _BY_ELEMENT):
        raise UsageError(
            f"ShardedOptimizer: {name} is not known to update each element by itself, so its parameters cannot be cut; "
            "by='parameter' gives whole parameters to ranks"
        )


def _copy_options(groups: list[dict[str, Any]], to: list[dict[str, Any]]) -> None:
    """Copy all options of parameter groups, such as the learning rate that a scheduler has set."""
    for group, other in zip(groups, to, strict=True):
        other |= {key: value for key, value in group.items() if key != "params"}


def _described(group: list[Any]) -> str:
    return f"{len(group)} parameters" + (f", the first {group[0][0]}" if group else "")
