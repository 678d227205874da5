"""A bucket of which each rank keeps its part: of the gradients' sum, and of the parameters it is responsible for.

```
                     rank 0                     rank 1
gradients            [g0 g0 g0│g0 g0 g0]        [g1 g1 g1│g1 g1 g1]
reduce-scatter  →    [ sum    ]                          [ sum    ]
optimizer       →    [ new    ]                          [ new    ]       each updates its part of the parameters
all-gather      →    [ new    │ new    ]        [ new    │ new    ]
```

In mixed precision each rank is sent its part of all ranks' buffers in 16 bits, and adds them up in float32.

At level 1 the gradients stay in the bucket's buffer, and the sum is made in the rank's own part of it. At level 2 the
buffer is borrowed from a pool while the bucket is filled and summed, and only the rank's part of the sum is kept.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from microparallel.comms import Comms, Request
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.bucket import FlatBucket
from microparallel.data_parallel.layout import By, Layout, Piece
from microparallel.data_parallel.skipped_steps import is_finite
from microparallel.errors import UsageError
from microparallel.program import NORM, AllGather, AllReduce, ReduceScatter

_IN_FLIGHT = 2  # buffers of a pool, beside those that are being filled


class GradientInParts(torch.Tensor):
    """Stands in `parameter.grad` for a gradient that no rank has whole: each has its part of the sum.

    It has the gradient's shape, and the memory of one element. So gradients are removed as others are (`zero_grad`, or
    `grad = None`), while what would compute with one, as torch's `clip_grad_norm_` does, is refused, not wrong.
    """

    refusal = (
        "this gradient is in parts, of which each rank has one; to update, use mp.ShardedOptimizer; to clip, call "
        "clip_grad_norm_ of the wrapped model; to look at gradients, use a model without shard="
    )

    @classmethod
    def like(cls, parameter: nn.Parameter) -> GradientInParts:
        """What stands for a parameter's gradient."""
        element = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return element.expand(parameter.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Answer what a gradient is (its shape, its dtype); refuse to compute with it."""
        name = getattr(function, "__name__", str(function))
        if name == "__get__" or name in _HARMLESS:
            return super().__torch_function__(function, types, arguments, named or {})  # type: ignore[no-untyped-call]
        raise UsageError(f"{name}: {cls.refusal}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is: it has no numbers."""
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"


_HARMLESS = {"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "data_ptr", "element_size"}
_HARMLESS |= {"__len__", "__hash__", "requires_grad_", "detach_", "storage_offset", "is_contiguous"}


class Buffers:
    """A pool of flat tensors, borrowed by buckets while they are filled and summed.

    Args:
        example: a parameter; the buffers have its dtype and device.
        comms: the ranks.
    """

    def __init__(self, example: torch.Tensor, comms: Comms) -> None:
        self._example = example
        self._comms = comms
        self._length = 0
        self._free: list[torch.Tensor] = []
        self._summing: deque[ShardedBucket] = deque()

    def must_hold(self, length: int) -> None:
        """Make buffers as long as the longest bucket; every bucket says how long it is before it borrows one."""
        self._length = max(self._length, length)

    def borrow(self, length: int) -> torch.Tensor:  # noqa: ARG002
        """A buffer that no bucket uses; if too many sums are under way, the calling thread waits for the oldest."""
        if not self._free:
            self._wait_for_oldest()
        return self._free.pop() if self._free else self._new(self._length)

    def _wait_for_oldest(self) -> None:
        if len(self._summing) >= _IN_FLIGHT:
            self._summing[0].wait()

    def _new(self, length: int) -> torch.Tensor:
        return empty_like_of(self._example, length, self._comms)

    @property
    def free(self) -> Sequence[torch.Tensor]:
        """The buffers that no bucket uses at the moment; they are kept for the next ones."""
        return self._free

    def is_summing(self, bucket: ShardedBucket) -> None:
        """Note that a bucket's sum is under way."""
        self._summing.append(bucket)

    def give_back(self, bucket: ShardedBucket, buffer: torch.Tensor) -> None:
        """Take a buffer back, whose bucket has been summed."""
        if bucket in self._summing:
            self._summing.remove(bucket)
        self._keep(buffer)

    def _keep(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


class FreshBuffers(Buffers):
    """Buffers of just the length that is needed, which are not kept: for buckets of very different lengths."""

    def borrow(self, length: int) -> torch.Tensor:
        """A new buffer; if too many sums are under way, the calling thread waits for the oldest."""
        self._wait_for_oldest()
        return self._new(length)

    def _keep(self, buffer: torch.Tensor) -> None:
        """Let it go: whoever allocates memory, the transport's arena or torch, has it ready for the next one."""


def empty_like_of(example: torch.Tensor, length: int, comms: Comms) -> torch.Tensor:
    """A flat tensor where the ranks' collectives are fastest, with the dtype and on the device of an example."""
    if example.device.type == "cpu":
        return comms.empty((length,), example.dtype)
    return torch.empty(length, dtype=example.dtype, device=example.device)


class Wire:
    """In which dtype gradients in parts are sent, and by what they are multiplied meanwhile.

    Attributes:
        dtype: 16 bits.
        factor: float16 has no numbers below 6e-8. All ranks have the same; it may change between passes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.factor = 1.0


class ShardedBucket(FlatBucket):
    """The gradients of some parameters, of whose sum over the ranks each rank keeps its part.

    Args:
        parameters: whose gradients it holds, all of one dtype and on one device.
        comms: the ranks.
        number: its place among the buckets of the model.
        owners: the rank of each parameter, if whole parameters are given to ranks.
        pool: where buffers are borrowed from (level 2); None: the bucket keeps a buffer of its own (level 1).
        layout: the places of the parameters, if they have some already.
        wire: how gradients are sent; None: as they are.

    Attributes:
        layout: the places of the parameters, and each rank's part.
        pieces: what lies in this rank's part.
        shard: this rank's part of the sum.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comms: Comms,
        number: int = 0,
        *,
        owners: Sequence[int] | None = None,
        pool: Buffers | None = None,
        layout: Layout | None = None,
        wire: Wire | None = None,
    ) -> None:
        self._sent_as = wire
        self._shares: torch.Tensor | None = None  # in 16 bits, from each rank its share of this rank's part
        self._sent: torch.Tensor | None = None  # in 16 bits, this rank's shares of all parts, while they are read
        self._factor = 1.0  # by which these are multiplied
        self.layout = Layout(parameters, comms.world_size, owners) if layout is None else layout
        self.pieces = self.layout.pieces(comms.rank)
        self._begin = self.layout.bounds[comms.rank]
        self._pool = pool
        self._stand_ins = [GradientInParts.like(parameter) for parameter in parameters]
        self._taken = [False] * len(parameters)  # whose sums of earlier passes are kept, without standing in `grad`
        self._earlier: torch.Tensor | None = None  # these sums, while gradients are put into the buffer
        self._flat: FlatParameters | None = None
        super().__init__(parameters, comms, number)

    @property
    def _example(self) -> torch.Tensor:
        """What the sums are like."""
        return self.parameters[0]

    def _lay_out(self) -> None:
        first = self._example
        self._kind = self.parameters[0].dtype, first.device
        self.ranks_with_gradient = torch.zeros(len(self.parameters), device="cpu")
        self._not_finite_on_all = torch.zeros((), device="cpu")
        self._buffer: torch.Tensor | None = None
        self._open = False
        if self._pool is None:
            self._use(empty_like_of(first, self.layout.length, self._comms))
            self.shard = self.layout.part(self.buffer, self._comms.rank)
        else:
            self._pool.must_hold(self.layout.length)
            begin, end = self.layout.bounds[self._comms.rank : self._comms.rank + 2]
            self.shard = empty_like_of(first, end - begin, self._comms)

    def _use(self, buffer: torch.Tensor) -> None:
        """Put gradients into this buffer from now on."""
        self.buffer = buffer[: self.layout.length]
        self._buffer = buffer
        self.views = [
            self.layout.whole(self.buffer, index).view(parameter.shape)
            for index, parameter in enumerate(self.parameters)
        ]

    @property
    def fits(self) -> bool:
        """Whether gradients still fit into their places; not after `module.double()`, `.to(device)` and the like."""
        return all((parameter.dtype, parameter.device) == self._kind for parameter in self.parameters)

    # ── a pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take_stand_ins(self) -> None:
        """Before autograd adds gradients to `grad`: remove what stands for the sums of earlier passes.

        Their sums are kept, unless `grad` was removed meanwhile: then the sum of that parameter is gone, too.
        """
        for index, (parameter, stand_in) in enumerate(self._in_place()):
            if parameter.grad is stand_in:
                parameter.grad = None
                self._taken[index] = True
            elif parameter.grad is None:
                self._taken[index] = False

    def put_stand_ins_back(self) -> None:
        """After a backward that was not summed: parameters without a gradient of this rank have their sums again."""
        for index, parameter in enumerate(self.parameters):
            if self._taken[index] and parameter.grad is None:
                self.hand_out(index)

    def _in_place(self) -> Iterator[tuple[nn.Parameter, GradientInParts]]:
        return zip(self.parameters, self._stand_ins, strict=True)

    @property
    def keeps_sum(self) -> bool:
        """Whether gradients of this pass are added to the sum of an earlier one."""
        return any(self._taken)

    def open(self) -> None:
        """Before anything of a pass is put into the buffer: borrow one, or keep the sum that lies in the bucket's own.

        With a buffer of its own, the sum of earlier passes lies where the gradients of this one go.
        """
        if self._open:
            return
        self._open = True
        if self._pool is not None:
            self._use(self._pool.borrow(self.layout.length))
        if not self.keeps_sum:
            return
        self._earlier = self.shard if self._pool is not None else self.shard.clone()
        for piece in self.pieces:
            if not self._taken[piece.index]:
                piece.of(self._earlier, self._begin).zero_()

    def put(self, index: int, scale: float) -> None:
        """Copy the gradient of `parameters[index]` into the buffer, multiplied by `scale`, and let it go."""
        if not self._open:
            self.open()
        parameter = self.parameters[index]
        if parameter.grad is self._stand_ins[index]:
            raise UsageError(
                "backward did not come through the outputs of the wrapped model, and there were gradients before; call "
                "the wrapped model, or zero_grad() first"
            )
        if parameter.grad is not None:
            torch.mul(parameter.grad, scale, out=self.views[index])
            parameter.grad = None
        self.ready[index] = True
        self.missing -= 1

    def hand_out(self, index: int) -> None:
        """Let `grad` of `parameters[index]` be what stands for a gradient in parts."""
        self.parameters[index].grad = self._stand_ins[index]
        self._taken[index] = False

    def start(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool) -> None:
        """Sum the buffers of all ranks, part by part, which is `operation` of the program."""
        if self._sent_as is not None:
            self._hand_out_shares(comms, operation, overlap, self._sent_as)
            return
        if self._earlier is not None:
            self.layout.part(self.buffer, comms.rank).add_(self._earlier)
            self._earlier = None
        parts = self.layout.parts(self.buffer)
        if overlap:
            self.request = comms.reduce_scatter(parts, into=self.shard, async_op=True, operation=operation)
            if self._pool is not None:
                self._pool.is_summing(self)
        else:
            comms.reduce_scatter(parts, into=self.shard, operation=operation)
            self._let_go()

    def _hand_out_shares(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool, wire: Wire) -> None:
        """Hand each rank its part of this rank's buffer in 16 bits; what comes is added up when it is waited for."""
        self._factor = wire.factor
        example = torch.empty(0, dtype=wire.dtype, device=self.buffer.device)
        self._sent = empty_like_of(example, len(self.buffer), comms)
        self._sent.copy_(self.buffer if self._factor == 1.0 else self.buffer.mul_(self._factor))
        self._shares = empty_like_of(example, comms.world_size * len(self.shard), comms)
        to_each = [self.layout.part(self._sent, rank) for rank in range(comms.world_size)]
        from_each = list(self._shares.view(comms.world_size, len(self.shard)).unbind())
        if overlap:
            self.request = comms.all_to_all(to_each, from_each, async_op=True, operation=operation)
            if self._pool is not None:
                self._pool.is_summing(self)
        else:
            comms.all_to_all(to_each, from_each, operation=operation)
            self._add_shares()
            self._let_go()

    def _add_shares(self) -> None:
        """Add up what has come in 16 bits, in rank order, and to that the sum of earlier passes."""
        shares, self._shares, self._sent = self._shares, None, None
        if shares is None:
            return
        first, *others = shares.view(self._comms.world_size, len(self.shard)).unbind()
        total = first.to(self.shard.dtype)
        for other in others:
            total.add_(other)
        earlier, self._earlier = self._earlier, None
        total.div_(self._factor)
        self.shard.copy_(total if earlier is None else total.add_(earlier))

    def memory(self) -> list[torch.Tensor]:
        """The tensors in which gradients lie: this rank's part, the buffer, and what its pool keeps for later."""
        pooled = [] if self._pool is None else self._pool.free
        under_way = [one for one in (self._buffer, self._sent, self._shares) if one is not None]
        return [self.shard, *under_way, *pooled]

    def wait(self) -> None:
        """Return when this rank's part of the sum is there."""
        super().wait()
        self._add_shares()
        self._let_go()

    def _let_go(self) -> None:
        """Return a borrowed buffer."""
        buffer, self._buffer = self._buffer, self._buffer if self._pool is None else None
        if self._pool is not None and buffer is not None:
            self._pool.give_back(self, buffer)
            self.views = []
            del self.buffer

    def presence(self) -> list[float]:
        """What all ranks must know: for each parameter, whether this rank has a gradient; how many are not finite."""
        return [*map(float, self.ready), float(max(self.not_finite, len(self.found_not_finite())))]

    def take_presence(self, counts: torch.Tensor) -> None:
        """Take the sums of what all ranks said in `presence`."""
        self.ranks_with_gradient = counts[:-1]
        self._not_finite_on_all = counts[-1]

    @property
    def sums_are_finite(self) -> bool:
        """Whether this rank's part of the sum is; between gradients, where nothing was ever written, all may stand."""
        return is_finite(self.shard) or all(is_finite(piece.of(self.shard, self._begin)) for piece in self.pieces)

    def take_results(self) -> None:
        """After a pass: every parameter that has a gradient somewhere gets what stands for it."""
        for index, ranks in enumerate(self.ranks_with_gradient.tolist()):
            if ranks > 0 or self._taken[index]:
                self.hand_out(index)

    def reset(self) -> None:
        """Make all gradients missing again, before the next pass."""
        super().reset()
        self._earlier = self._shares = self._sent = None
        self._let_go()

    def scale(self, factor: float) -> None:
        """Multiply this rank's part of the sum by a number."""
        self.shard.mul_(factor)

    def forget(self) -> None:
        """Let the sum go: a pass has failed, and left a part of one."""
        for index, (parameter, stand_in) in enumerate(self._in_place()):
            if parameter.grad is stand_in:
                parameter.grad = None
            self._taken[index] = False

    # ── this rank's part ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def flat_parameters(self) -> FlatParameters:
        """The parameters of this bucket in one flat tensor, moved there when this is first asked for."""
        if self._flat is None or not self._flat.fits:
            self._flat = FlatParameters(self.parameters, self.layout, self._comms, self.number)
        return self._flat

    def gradients(self) -> list[torch.Tensor | None]:
        """For each piece of this rank, the sum of its gradients; None if no rank had one, or if it was removed."""
        there = [parameter.grad is stand_in for parameter, stand_in in self._in_place()]
        return [piece.of(self.shard, self._begin) if there[piece.index] else None for piece in self.pieces]


class FlatParameters:
    """The parameters of a bucket in one flat tensor, of which each rank updates its part and gathers the others'.

    Every parameter becomes a view of the flat tensor, so what is gathered there is in the model at once.

    Args:
        parameters: of one dtype and on one device, as in the layout.
        layout: their places, and each rank's part.
        comms: the ranks.
        number: the bucket's place among all.

    Attributes:
        pieces: what lies in this rank's part.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, comms: Comms, number: int) -> None:
        self.parameters = parameters
        self.layout = layout
        self.number = number
        self.pieces: list[Piece] = layout.pieces(comms.rank)
        self._comms = comms
        self._flat = empty_like_of(parameters[0], layout.length, comms).zero_()
        for index, parameter in enumerate(parameters):
            place = layout.whole(self._flat, index).view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
        self._addresses = [parameter.data_ptr() for parameter in parameters]

    @property
    def fits(self) -> bool:
        """Whether the parameters still lie here; not after `module.double()`, `.to(device)` and the like."""
        return self._addresses == [parameter.data_ptr() for parameter in self.parameters]

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parts of it."""
        return self._comms.world_size > 1

    @property
    def tensor(self) -> torch.Tensor:
        """The flat tensor."""
        return self._flat

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape of a piece: that of its parameter where whole parameters are given to ranks, otherwise flat."""
        return tuple(self.parameters[piece.index].shape) if self.layout.by_parameter else (piece.stop - piece.start,)

    def of(self, piece: Piece) -> torch.Tensor:
        """A piece of this rank's part."""
        return piece.of(self._flat).view(self.shape(piece))

    def gather(self, operation: AllGather) -> Request[list[torch.Tensor]]:
        """Start fetching the parts of the other ranks, which is `operation` of the program."""
        mine = self.layout.part(self._flat, self._comms.rank)
        return self._comms.all_gather(mine, self.layout.parts(self._flat), async_op=True, operation=operation)

    def whole_state(self, mine: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Put the optimizer's state of all ranks together, for the parameters of this bucket; every rank calls this.

        Args:
            mine: for each parameter's number in the bucket, the state of this rank's piece of it.
        """
        shapes = {piece.index: self.shape(piece) for piece in self.pieces}
        contents = {
            index: {key: _content(value, shapes[index]) for key, value in state.items()}
            for index, state in mine.items()
        }
        kinds: dict[int, dict[str, Any]] = defaultdict(dict)
        for rank, theirs in enumerate(gather_json(contents, self._comms)):
            for index, state in theirs.items():
                kinds[int(index)] |= {key: (rank, content) for key, content in state.items()}
        whole: dict[int, dict[str, Any]] = {index: {} for index, keys in sorted(kinds.items()) if keys}
        flats: dict[tuple[str, str], torch.Tensor] = {}
        for index, state in whole.items():
            for key, (rank, content) in kinds[index].items():
                kind, dtype, detail = content
                if kind == "elements":
                    if (key, dtype) not in flats:
                        flats[key, dtype] = self._gather_state(mine, key, getattr(torch, dtype))
                    shape = self.parameters[index].shape
                    state[key] = self.layout.whole(flats[key, dtype], index).clone().view(shape)
                elif kind == "number":
                    state[key] = torch.tensor(detail, dtype=getattr(torch, dtype))
                elif kind == "tensor":
                    device = self.parameters[index].device
                    room = torch.empty(detail, dtype=getattr(torch, dtype), device=device)
                    state[key] = self._comms.broadcast(mine[index][key] if rank == self._comms.rank else room, rank)
                else:
                    state[key] = detail
        return whole

    def _gather_state(self, mine: Mapping[int, Mapping[str, Any]], key: str, dtype: torch.dtype) -> torch.Tensor:
        """One kind of state of all parameters here, such as the momentum, in one flat tensor."""
        flat = torch.zeros(self.layout.length, dtype=dtype, device=self.parameters[0].device)
        for piece in self.pieces:
            value = mine[piece.index].get(key)
            if isinstance(value, torch.Tensor) and value.dtype == dtype:
                piece.of(flat).copy_(value.reshape(-1))
        self._comms.all_gather(self.layout.part(flat, self._comms.rank), self.layout.parts(flat))
        return flat


def _content(value: Any, shape: tuple[int, ...]) -> list[Any]:
    """What a state of a piece is, for the other ranks: elements, a number, a tensor of another shape, …."""
    if not isinstance(value, torch.Tensor):
        return ["value", "", value]
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.dim():
        return ["number", dtype, value.item()]
    return ["elements", dtype, None] if value.shape == shape else ["tensor", dtype, list(value.shape)]


# ── all buckets of a model ──────────────────────────────────────────────────────────────────────────────────────────


class PartKeeper(Protocol):
    """What an optimizer must know of those that sum its parameters' gradients: a model's Reducer, a pipeline's Column.

    Attributes:
        comms: the ranks that have the same parameters.
        sharded_buckets: of which each of these ranks keeps its part; none if gradients are whole.
        gathered: numbers of parameters that its program gathers after an update, also if there are none of them.
    """

    @property
    def comms(self) -> Comms: ...  # noqa: D102
    @property
    def sharded_buckets(self) -> list[ShardedBucket]: ...  # noqa: D102
    @property
    def gathered(self) -> Sequence[int]: ...  # noqa: D102

    def shard_by(self, by: By) -> None:
        """Cut buckets by element, or give whole parameters to ranks."""

    def step_ends(self) -> None:
        """The optimizer has updated the weights."""

    def forget_sums(self) -> None:
        """Remove gradients that are in parts."""


class PartKeepers:
    """Knows which PartKeeper sums the gradient of a parameter, as long as both exist.

    A wrapped model enters its parameters. An optimizer, which is handed parameters alone, finds the buckets here.

    Attributes:
        entries: how often parameters were entered: as long as this is the same, so are the answers.
    """

    def __init__(self) -> None:
        self.entries = 0
        self._keeper_of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def enter(self, parameters: Iterable[nn.Parameter], keeper: PartKeeper) -> None:
        """Note who sums the gradients of these parameters."""
        self._keeper_of.update(dict.fromkeys(parameters, weakref.ref(keeper)))
        self.entries += 1

    def of(self, parameter: nn.Parameter) -> PartKeeper | None:
        """Who sums the gradient of a parameter, if anything does."""
        reference = self._keeper_of.get(parameter)  # type: ignore[no-untyped-call]
        return None if reference is None else reference()


part_keepers = PartKeepers()


def clip_parts(
    buckets: Sequence[ShardedBucket],
    comms: Comms,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    counted: Sequence[ShardedBucket] | None = None,
    axis: str = "dp",
) -> torch.Tensor:
    """Scale gradients in parts so that the norm of all of them is at most `max_norm`; returns what it was.

    Every rank of `comms` calls this, and gets the same norm, bit for bit.

    Args:
        buckets: of this rank: their gradients are scaled.
        comms: all ranks that have parts.
        max_norm: the largest norm.
        norm_type: which norm: 2, ….
        counted: the buckets that count here, if others have the same parts of some; None: all of them.
        axis: of these ranks in the program's mesh.
    """
    counting = buckets if counted is None else counted
    gradients = [gradient for bucket in counting for gradient in bucket.gradients() if gradient is not None]
    largest = math.isinf(norm_type)
    powers = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) for gradient in gradients]
    mine = torch.stack(powers).cpu() if powers else torch.zeros(1, dtype=torch.float64, device="cpu")
    total = mine.max().reshape(1) if largest else mine.pow(norm_type).sum().reshape(1)
    comms.all_reduce(total, "max" if largest else "sum", operation=AllReduce(NORM, axis))
    norm = total[0] if largest else total[0].pow(1 / norm_type)
    factor = max_norm / (float(norm) + 1e-6)  # as torch does
    if factor < 1 or not math.isfinite(factor):
        for bucket in buckets:
            bucket.scale(factor)
    return norm
