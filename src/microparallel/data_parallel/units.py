"""Units: parameters that are gathered together, used, and let go. Between uses each rank keeps its part of them.

```
                         rank 0                     rank 1
between uses             [shard   ]                          [shard   ]      what `model.parameters()` gives
gather            →      [ whole  │ whole  ]        [ whole  │ whole  ]      what the layers compute with
let go            →      [shard   ]                          [shard   ]
```

A parameter is two objects. The model's own one, `whole`, is what autograd and the layers know; its memory comes and
goes with its unit. Its `shard` has the elements that this rank keeps, side by side, and an optimizer updates it.

With mixed precision the shards are the master, in float32. Before a gather each rank converts its part to 16 bits: that
is what ranks send, and what the whole parameters are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.data_parallel.layout import Layout, Part
from microparallel.data_parallel.precision import MixedPrecision
from microparallel.data_parallel.sharding import empty_like_of
from microparallel.errors import UsageError
from microparallel.observe import Activity, Observation
from microparallel.program import AllGather, Parameters
from microparallel.torch_private import own_parameters_of

Choose = Literal["auto"] | Callable[[nn.Module], bool] | None
Dtypes = tuple[torch.dtype, torch.dtype]  # of the master, and of what layers compute with


class ShardedParameters:
    """Parameters of one dtype, on one device, in one flat tensor, of which each rank keeps its part.

    Args:
        named: the model's own parameters by name; `keep` copies their contents, and `begin` lets these go.
        comms: the ranks that keep the parts.
        device: where the parts and the whole parameters are.
        dtypes: of the shards, and of the whole parameters; None: as these are.

    Attributes:
        whole: the model's own parameters; they have memory only while the unit is whole.
        shards: for each of them, the elements that this rank keeps; it may keep none.
        flat: this rank's part, in which the shards lie.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], comms: Comms, device: torch.device, dtypes: Dtypes | None = None
    ) -> None:
        self.names = list(named)
        self.whole = list(named.values())
        self.shapes = [parameter.shape for parameter in self.whole]
        self._comms = comms
        self.layout = Layout(self.whole, comms.world_size)
        self.pieces = {piece.index: piece for piece in self.layout.pieces(comms.rank)}
        self.gathered: torch.Tensor | None = None  # all parts, while they are here
        self._from = self._to = 0  # where these begin and end in memory
        self._where: list[int] = []  # the addresses of the shards
        self._begin, self._end = self.layout.bounds[comms.rank : comms.rank + 2]
        master, compute = dtypes or (self.whole[0].dtype, None)
        self._compute = compute if compute is not master else None  # None: whole parameters are as shards are
        example = torch.empty(0, dtype=master, device=device)
        self.flat = empty_like_of(example, self._end - self._begin, comms).zero_()
        self.shards = [self._new_shard(index) for index in range(len(self.whole))]
        self._nothing: list[torch.Tensor] = []

    def begin(self) -> None:
        """Let the model's own parameters go: their contents have been kept in parts.

        Those on the meta device are replaced: torch gives memory of one device to tensors of that device only.
        """
        empty = torch.empty(0, dtype=self.compute, device=self.flat.device)
        self.whole = [nn.Parameter(empty, one.requires_grad) if one.is_meta else one for one in self.whole]
        for shard, parameter in zip(self.shards, self.whole, strict=True):
            shard.part_of = parameter  # type: ignore[attr-defined]  # for those who are handed the shard alone
            parameter.grad = None
            parameter.is_in_parts = True  # type: ignore[attr-defined]  # for an optimizer that was made of it before
        self._look_again()

    @property
    def compute(self) -> torch.dtype:
        """Of the whole parameters that layers compute with."""
        return self.flat.dtype if self._compute is None else self._compute

    def _look_again(self) -> None:
        """The shards have other memory than before, or another dtype: so has what stands for whole parameters."""
        self._where = [shard.data_ptr() for shard in self.shards]
        self._nothing = self._without_memory()
        self.let_go()

    def _without_memory(self) -> list[torch.Tensor]:
        """What the model's own parameters are while the unit is not whole: not a number, wherever one reads them."""
        value = math.nan if self.flat.is_floating_point() or self.flat.is_complex() else 0
        nothing = torch.full((), value, dtype=self.compute, device=self.flat.device)
        return [nothing.expand(shape) for shape in self.shapes]

    def _place(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Where this rank's elements of a parameter lie; with as many dimensions as the parameter has, or one."""
        piece = self.pieces.get(index)
        mine = flat[:0] if piece is None else piece.of(flat, self._begin)
        return mine.view(-1, *(1 for _ in self.shapes[index][1:]))

    def _new_shard(self, index: int) -> nn.Parameter:
        return nn.Parameter(self._place(index, self.flat), requires_grad=self.whole[index].requires_grad)

    def keep(self, index: int, contents: torch.Tensor) -> None:
        """Copy this rank's elements out of the contents of a whole parameter."""
        piece = self.pieces.get(index)
        if piece is not None:
            mine = contents.reshape(-1)[piece.start : piece.stop]
            with torch.no_grad():
                self.shards[index].copy_(mine.view(self.shards[index].shape))

    def part(self, index: int) -> Part:
        """The elements of a parameter that this rank has, and where they belong."""
        piece = self.pieces.get(index)
        return Part(
            self.shards[index].detach().view(-1), 0 if piece is None else piece.start, tuple(self.shapes[index])
        )

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Of the shards, as they are now: not that of `flat` after `module.double()`, `.to(device)` and the like."""
        return self.shards[0].dtype, self.shards[0].device

    def move_with_shards(self) -> None:
        """Take over shards that were converted, moved or replaced: they lie side by side again afterwards."""
        alike = self.shards[0].dtype is self.flat.dtype  # a rank may have no elements, and so no addresses
        if alike and self._where == [shard.data_ptr() for shard in self.shards]:
            return
        dtype, device = self.kind
        example = torch.empty(0, dtype=dtype, device=device)
        self.flat = empty_like_of(example, self._end - self._begin, self._comms).zero_()
        for index, shard in enumerate(self.shards):
            place = self._place(index, self.flat)
            place.copy_(shard.detach())
            shard.data = place
        self._look_again()

    # ── whole, for a while ──────────────────────────────────────────────────────────────────────────────────────

    def gather(self, operation: AllGather, *, overlap: bool, exact: bool) -> Request[list[torch.Tensor]] | None:
        """Put all parts together, which is `operation` of the program; None if they are here already.

        Without `overlap` the calling thread does it: handing it to another one and waiting takes longer. `exact`: as
        the shards are, not as layers compute with them.
        """
        mine = self.flat
        if exact or self._compute is None:
            if self._comms.world_size == 1:
                self.gathered = mine
                return None
            self.gathered = empty_like_of(mine, self.layout.length, self._comms)
        else:
            example = torch.empty(0, dtype=self._compute, device=mine.device)
            self.gathered = empty_like_of(example, self.layout.length, self._comms)
            mine = self.gathered[self._begin : self._end].copy_(mine)
            if self._comms.world_size == 1:
                return None
        if overlap:
            return self._comms.all_gather(mine, self.gathered, async_op=True, operation=operation)
        self._comms.all_gather(mine, self.gathered, operation=operation)
        return None

    def show(self) -> None:
        """Let the model's own parameters be what was gathered."""
        assert self.gathered is not None
        self._from = self.gathered.data_ptr()
        self._to = self._from + self.gathered.nbytes
        for index, parameter in enumerate(self.whole):
            parameter.data = self.layout.whole(self.gathered, index).view(self.shapes[index])

    def let_go(self) -> None:
        """Drop what was gathered. A tensor that still lies there, as in a kernel that runs, keeps the memory."""
        for parameter, empty in zip(self.whole, self._nothing, strict=True):
            parameter.data = empty
        self.gathered = None
        self._from = self._to = 0  # other tensors may have this memory next

    def take_back(self) -> None:
        """Copy this rank's part of what was gathered into its shards: the user has changed the whole parameters."""
        assert self.gathered is not None
        if self.gathered is not self.flat:
            with torch.no_grad():
                for index, shard in enumerate(self.shards):
                    piece = self.pieces.get(index)
                    if piece is not None:
                        shard.copy_(piece.of(self.gathered).view(shard.shape))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in what was gathered, and is shown."""
        return self._from <= tensor.data_ptr() < self._to


class Unit:
    """Parameters that are gathered together: those of a module that belong to no other unit.

    Args:
        module: the module, whose call uses them.
        name: of the module in the model; nothing for the model itself.
        parts: the parameters, those of one dtype together, and those that are trained apart from frozen ones.
        comms: the ranks that keep the parts.

    Attributes:
        stage: its place in the order of first uses.
        number: that of its parameters and of its gradients in the program.
        last: the stage that uses it for the last time in a forward.
        is_whole: whether its parameters can be used.
        active: how many calls of its module are under way, also calls of modules that read its parameters.
        parameters: the model's own parameters of this unit.
    """

    def __init__(self, module: nn.Module, name: str, parts: Sequence[ShardedParameters], comms: Comms) -> None:
        self.module = module
        self.name = name
        self.parts = parts
        self.stage = self.number = self.last = 0
        self.is_whole = False
        self.active = 0
        self.planned = True  # whether the program lets it go
        self._comms = comms
        self._requests: list[Request[list[torch.Tensor]]] | None = None
        self.parameters: list[nn.Parameter] = []

    def begin(self) -> None:
        """Let the model's own parameters go: their contents have been kept in parts."""
        for part in self.parts:
            part.begin()
        self.parameters = [parameter for part in self.parts for parameter in part.whole]

    @property
    def is_started(self) -> bool:
        """Whether its parameters are whole, or on their way."""
        return self.is_whole or self._requests is not None

    def gather(self, *, overlap: bool, exact: bool = False) -> None:
        """Start gathering; without `overlap`, return when its parameters are there.

        `exact`: in the dtype in which they are kept; otherwise in that in which layers compute.
        """
        operation = AllGather(Parameters(self.number), "dp")
        if len(self.parts) == 1 and self._comms.world_size > 1:  # the call itself tells the observers
            started = [part.gather(operation, overlap=overlap, exact=exact) for part in self.parts]
        else:
            with Observation(self._comms.observers, Activity(operation)):  # one operation, however many calls it takes
                started = [part.gather(operation, overlap=overlap, exact=exact) for part in self.parts]
        self._requests = [request for request in started if request is not None]
        if not overlap:
            self.wait()

    def wait(self) -> None:
        """Return when its parameters can be used; they are on their way."""
        requests, self._requests = self._requests or [], None
        for request in requests:
            request.wait()
        for part in self.parts:
            part.show()
        self.is_whole = True

    def let_go(self) -> None:
        """Drop what was gathered; other ranks may still need this rank's part of it, so a gather is waited for."""
        requests, self._requests = self._requests or [], None
        for request in requests:
            request.wait()
        for part in self.parts:
            part.let_go()
        self.is_whole = False
        self.planned = True


class ParametersWhenRead(dict[str, nn.Parameter | None]):
    """A module's `_parameters`: those who list them see them as they are; a layer that reads one may get another.

    So a layer reads a whole parameter, where a shard is listed; or a copy in 16 bits, where one in 32 is listed.

    Args:
        listed: what the module's parameters are between uses.
        read: called with one of these; returns what is read.
    """

    def __init__(self, listed: dict[str, nn.Parameter | None], read: Callable[[nn.Parameter], nn.Parameter]) -> None:
        super().__init__(listed)
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._read(parameter)

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[str, nn.Parameter | None]]]:
        """In a copy of the module, or in a file of it, parameters are read as they are."""
        return dict, (dict(self.items()),)


# ── which parameters are gathered together ──────────────────────────────────────────────────────────────────────────

_LARGE = 4  # a module with more than 1/4 of all parameters is cut further
_SMALL = 64  # a module with less than 1/64 of them stays with the module around it, unless it is one of a list
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which are never called
_LISTS = (*_CONTAINERS, nn.Sequential)
_CUT = (*_LISTS, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # of torch's own modules


def unit_modules(model: nn.Module, choose: Choose) -> dict[str, nn.Module]:
    """The modules whose parameters are gathered together, by name, in the order in which the model has them.

    Args:
        model: whose modules they are; what belongs to none of them is gathered for the model itself.
        choose: None: the whole model is one unit. "auto": layers of a list, and other modules that are not small; a
            module that has a large part of all parameters is cut further. A function: says of a module whether it is.
    """
    if choose is None:
        return {"": model}
    if choose == "auto":
        chosen = set(_cut(model, _bytes(model)))
    elif callable(choose):
        chosen = {module for module in model.modules() if choose(module)}
    else:
        raise UsageError(
            f"FullyShardedDataParallel: units={choose!r}; choose 'auto', None (the whole model is one unit) or a "
            "function that says of a module whether its parameters are gathered together"
        )
    for name, module in model.named_modules():
        if module in chosen and isinstance(module, _CONTAINERS):
            raise UsageError(
                f"FullyShardedDataParallel: units: {name or 'the model'} is a {type(module).__name__}, which is never "
                "called; choose the modules in it"
            )
    return {name: module for name, module in model.named_modules() if module in chosen or module is model}


def _cut(module: nn.Module, total: int) -> Iterator[nn.Module]:
    for child in module.children():
        size = _bytes(child)
        if not size:
            continue
        own = type(child).__module__.startswith("torch.nn.")
        can_be_cut = isinstance(child, _CUT) if own else any(map(_bytes, child.children()))
        if isinstance(child, _CONTAINERS) or (can_be_cut and size > total / _LARGE):
            yield from _cut(child, total)
            if not isinstance(child, _CONTAINERS):
                yield child
        elif isinstance(module, _LISTS) or size >= total / _SMALL:
            yield child


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def cut_into_units(
    model: nn.Module, choose: Choose, comms: Comms, device: torch.device, precision: MixedPrecision | None = None
) -> list[Unit]:
    """Cut a model into units: each parameter belongs to the first module that has it, and its innermost unit."""
    modules = unit_modules(model, choose)
    exact = {
        one for module in model.modules() if keeps_statistics(module) for one in own_parameters_of(module).values()
    }

    def dtypes(parameter: nn.Parameter) -> Dtypes:
        if precision is None or not parameter.is_floating_point():
            return parameter.dtype, parameter.dtype
        return precision.master, precision.master if parameter in exact else precision.compute

    mine: dict[str, dict[str, nn.Parameter]] = {name: {} for name in modules}
    for name, parameter in model.named_parameters():
        inside = (unit for unit in modules if not unit or name.startswith(f"{unit}."))
        mine[max(inside, key=len)][name] = parameter
    units = []
    for name, named in mine.items():
        if named:
            groups: dict[tuple[Dtypes, bool], dict[str, nn.Parameter]] = {}
            for one, parameter in named.items():
                groups.setdefault((dtypes(parameter), parameter.requires_grad), {})[one] = parameter
            parts = [ShardedParameters(group, comms, device, kind) for (kind, _), group in groups.items()]
            units.append(Unit(modules[name], name, parts, comms))
    return units


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module has real buffers, as batch normalisation has: it adds up small numbers, so it is left exact."""
    return any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
