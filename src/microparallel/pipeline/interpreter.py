"""The interpreter: it runs one rank's operations of a training step on real tensors, for every schedule and transport.

`Interpreter.run` is a generator that yields each transfer it must wait for. A rank in its own process waits; ranks that
share a process go on one by one. The `Worker` does the computations, and holds the tensors meanwhile.

Messages that stand next to each other in the program start together, as one exchange. NCCL needs that: in 1F1B two
neighbours send to each other at the same time, and each would wait inside its send for the other to receive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from microparallel.errors import ProgramError, StageError, UsageError
from microparallel.observe import UNOBSERVED, Activity, Observation, Observer
from microparallel.pipeline.activations import ActivationWire
from microparallel.pipeline.stage import Boundary, SavedForward, Stage
from microparallel.program import (
    Act,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Free,
    Grad,
    Join,
    Op,
    Recv,
    ReduceScatter,
    Send,
    Value,
    halves,
)
from microparallel.program.rules import Compute
from microparallel.torch_private import pytree
from microparallel.transport.base import Exchange, Transport, Work

# Messages of a pipeline have a tag of their own, so that they never mix with the caller's.
PIPELINE_TAG = 5

Sum = AllReduce | ReduceScatter


class Interpreter:
    """Runs one rank's operations of a step.

    Args:
        ops: the rank's operations, in order.
        worker: computes, and holds the tensors.
        transport: sends and receives.
        sums: for each value that is all-reduced or reduce-scattered, the sum.
        ahead: how many receives are posted before they are needed.
        message_order: the rank's messages in the order that all ranks keep (`programs.message_order`), for a transport
            that runs them one after another. It decides when a receive is posted, instead of `ahead`.
        observers: are told of every operation.
        in_program: translates an operation to the numbers of the program of all ranks, which observers are told.
        world_ranks: the rank in the world of each rank of the pipeline.
        doing: is called with the text of each operation before it is done.
        wire: in which form values travel; None: as they are.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        worker: Worker,
        transport: Transport,
        sums: Mapping[Value, GroupSum] | None = None,
        *,
        ahead: int = 0,
        message_order: Sequence[Send | Recv] | None = None,
        observers: Sequence[Observer] = (),
        in_program: Callable[[Op], Op] = lambda op: op,
        world_ranks: Sequence[int] = (),
        doing: Callable[[str], None] = lambda _: None,
        wire: ActivationWire | None = None,
    ) -> None:
        self.now: Op | None = None  # the operation that is being done
        self._doing = doing
        self._wire = wire
        self._ops = ops
        self._worker = worker
        self._transport = transport
        self._sums = {} if sums is None else sums
        self._ahead = ahead
        self._observers = tuple(observers)
        self._in_program = in_program
        self._world_ranks = world_ranks
        self._to_post = deque(op for op in ops if isinstance(op, Recv))
        self._message_order = None if message_order is None else deque(message_order)
        self._posted: dict[Recv, list[tuple[Work, torch.Tensor]]] = {}
        self._decoded: dict[Recv, list[torch.Tensor]] = {}  # where messages of another form are decoded into
        self._sending: list[tuple[Work, torch.Tensor]] = []  # keeps each tensor alive until it is sent

    def run(self) -> Iterator[Work]:
        """Do all operations; yields each transfer that the caller must wait for before it asks for the next."""
        started: list[tuple[Sum, GroupSum]] = []
        for run in runs(self._ops):
            if isinstance(run, tuple):
                yield from self._exchange(run)
                continue
            self.now = run
            self._doing(str(run))
            if isinstance(run, Sum):
                group_sum = self._sum(run)
                with self._told(run):  # one operation, however many calls of the Comms it takes
                    group_sum.start(run)
                started.append((run, group_sum))
            elif isinstance(run, Join):
                self._finish(started)
            else:
                with self._told_compute(run) as told:
                    self._worker.compute(run)
                    if told is not UNOBSERVED:
                        told.activity.kept = self._worker.kept(run)
        self._finish(started)
        for work, _ in self._sending:
            yield work

    def _finish(self, started: list[tuple[Sum, GroupSum]]) -> None:
        """Wait for all sums that were started."""
        for op, group_sum in started:
            self.now = op
            group_sum.finish()
        started.clear()

    def _sum(self, op: Sum) -> GroupSum:
        if op.value not in self._sums:
            raise ProgramError(f"{op}: this rank shares {op.value} with no other rank, so there is nothing to sum")
        return self._sums[op.value]

    def _told(self, op: Op, size: int = 0, peer: int | None = None) -> Observation:
        """A `with` block that tells the observers when an operation begins and ends."""
        if not self._observers:
            return UNOBSERVED
        other = None if peer is None else self._world_ranks[peer]
        return Observation(self._observers, Activity(self._in_program(op), size=size, peer=other))

    def _told_compute(self, op: Op) -> Observation:
        """The same for a computation, with the tensors that are there before it."""
        if not self._observers:
            return UNOBSERVED
        parameters, given = self._worker.present(op)
        return Observation(self._observers, Activity(self._in_program(op), parameters=parameters, given=given))

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def _exchange(self, run: tuple[Send | Recv | Free, ...]) -> Iterator[Work]:
        """Do messages and frees that stand next to each other: start all messages, wait for receives, then free."""
        if any(isinstance(op, Send | Recv) for op in run):
            exchange = self._transport.exchange(PIPELINE_TAG)
            self._start_sends([op for op in run if isinstance(op, Send)], exchange)
            self._post(self._due(run), exchange)
            exchange.close()
        for op in run:
            if isinstance(op, Recv):
                yield from self._receive(op)
            elif isinstance(op, Free):
                with self._told(op):
                    self._worker.free(op.value)

    def _start_sends(self, sends: Iterable[Send], exchange: Exchange) -> None:
        self._sending = [(work, tensor) for work, tensor in self._sending if not has_ended(work)]
        for op in sends:
            self.now = op
            tensors = [self._message(tensor) for tensor in self._worker.values[op.value]]
            with self._told(op, sum(tensor.nbytes for tensor in tensors), op.to) as told:
                told.waits()  # the rank does nothing else while it starts the sends
                self._sending += [(exchange.isend(tensor, op.to), tensor) for tensor in tensors]

    def _message(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous() if self._wire is None else self._wire.message(tensor)

    def _due(self, run: tuple[Send | Recv | Free, ...]) -> Iterator[Recv]:
        """The receives to post now: those that are needed, and some ahead of their need."""
        missing = {op for op in run if isinstance(op, Send | Recv) and op not in self._posted}
        if self._message_order is not None:
            while missing:
                op = self._message_order.popleft()
                missing.discard(op)
                if isinstance(op, Recv):
                    yield op
            return
        needed = [op for op in run if isinstance(op, Recv)]
        late = sum(op in missing for op in needed)
        for _ in range(max(late, len(needed) + self._ahead - len(self._posted))):
            if self._to_post:
                yield self._to_post.popleft()

    def _post(self, receives: Iterable[Recv], exchange: Exchange) -> None:
        for op in receives:
            self.now = op
            buffers = self._worker.buffers(op.value)
            if self._wire is not None:
                self._decoded[op] = buffers
                buffers = [self._wire.room(buffer) for buffer in buffers]
            self._posted[op] = [(exchange.irecv(buffer, op.source), buffer) for buffer in buffers]

    def _receive(self, op: Recv) -> Iterator[Work]:
        self.now = op
        works = self._posted.pop(op)
        with self._told(op, sum(buffer.nbytes for _, buffer in works), op.source) as told:
            told.waits()
            for work, _ in works:
                yield work
            if self._observers:  # the time before the message arrived is waiting, not communication
                told.activity.arrived = max((getattr(work, "arrived", math.nan) for work, _ in works), default=math.nan)
        arrived = [buffer for _, buffer in works]
        if self._wire is not None:
            into = self._decoded.pop(op)
            arrived = [self._wire.read(message, place) for message, place in zip(arrived, into, strict=True)]
        self._worker.values[op.value] = arrived


class GroupSum(Protocol):
    """A sum over a group of ranks, such as of a stage's gradients over its replicas."""

    def start(self, operation: Sum) -> None:
        """Begin the sum, which is this operation of the program."""

    def finish(self) -> None:
        """Return when the sum is there."""


def has_ended(work: Work) -> bool:
    """Whether a transfer is known to have ended, without waiting for it."""
    poll = getattr(work, "poll", None)
    return poll is not None and bool(poll())


Run = Op | tuple[Send | Recv | Free, ...]


def runs(ops: Iterable[Op]) -> Iterator[Run]:
    """Cut operations into computations, one by one, and messages that stand together.

    ```
    F0.1 >A0.1@1 <G0.0@1 B0.0 !A0.0 !G0.0 F0.2   →   F0.1 | >A0.1@1 <G0.0@1 | B0.0 | !A0.0 !G0.0 | F0.2
    ```

    A value that a rank receives and passes on is in two runs: it must be received before it is sent.
    """
    current: list[Send | Recv | Free] = []
    arriving: set[Value] = set()
    for op in ops:
        if not isinstance(op, Send | Recv | Free) or (isinstance(op, Send) and op.value in arriving):
            if current:
                yield tuple(current)
            current, arriving = [], set()
        if isinstance(op, Send | Recv | Free):
            current.append(op)
            if isinstance(op, Recv):
                arriving.add(op.value)
        else:
            _require_known(op)
            yield op
    if current:
        yield tuple(current)


def _require_known(op: Op) -> None:
    if not halves(op) and not isinstance(op, Sum | Join):
        raise ProgramError(
            f"{op} cannot be run in a pipeline: it runs F, B, I, W, messages, frees and sums; "
            "the caller's optimizer updates the weights"
        )


# ── computing ───────────────────────────────────────────────────────────────────────────────────────────────────────

_WORDS = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input half of the backward",
    BackwardWeight: "weight half of the backward",
}


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch on one rank.

    Attributes:
        boundaries: what crosses into each of the rank's stages and out of it: -1 is the batch itself, s what stage s
            returns.
        inputs: what the first stage gets, on the rank that has it.
        targets: what the last stage's outputs are compared with, on the rank that has it.
        weight: its part of the whole batch's samples.
        sample: one sample's part of them.
        counts: for how much its mean loss counts, where that is not its number of samples.
        before_layer: is called with the number of each layer in the whole model before that computes.
        moves_buffers: whether it counts in buffers, such as BatchNorm's running statistics.
    """

    boundaries: Mapping[int, Boundary]
    inputs: Any = None
    targets: Any = None
    weight: float = 1.0
    sample: float = 1.0
    counts: float | None = None
    before_layer: Callable[[int], None] | None = None
    moves_buffers: bool = True


class Worker:
    """Computes a rank's stages in one step, and holds the tensors of that step under their names in the program.

    Attributes:
        values: the tensors of each value that was computed or received, and not freed.
        count: this rank's part of the count; None where losses are means over samples.
        outputs: for each micro-batch what the last stage returned, where there are no targets.
        most_kept: the largest number of activations that were held at once.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        last_stage: int,
        microbatches: Sequence[Microbatch],
        device: torch.device,
    ) -> None:
        self.values: dict[Value, list[torch.Tensor]] = {}
        self._losses: list[torch.Tensor] = []  # of micro-batches, on their device: reading one would wait for the GPU
        self.count: float | None = None
        self.outputs: dict[int, Any] = {}
        self.most_kept = 0
        self._rank = rank
        self._stages = stages
        self._last = last_stage
        self._microbatches = microbatches
        self._device = device
        self._kept: dict[tuple[int, int], SavedForward] = {}  # by stage and micro-batch, until its backward

    @property
    def loss(self) -> torch.Tensor:
        """A rank's part of the batch's mean loss; where losses are counted, of their sum for each sample.

        On the host: the calling thread waits for all forwards of the last stage.
        """
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for loss in torch.stack(self._losses).cpu() if self._losses else ():
            total += loss
        return total

    def compute(self, op: Op) -> None:
        """Do a computation of a stage, or a pair of them."""
        for half in halves(op):
            try:
                self._compute(half)
            except (StageError, UsageError):
                raise
            except Exception as error:
                raise self._failure(half, f"{type(error).__name__}: {error}") from error

    def _compute(self, op: Compute) -> None:
        match op:
            case Forward(stage, number):
                self._forward(self._stages[stage], number)
            case Backward(stage, number):
                self._pass_on(op, self._stages[stage].backward(self._kept[stage, number], self._gradients(op)))
                del self._kept[stage, number]
            case BackwardInput(stage, number):
                self._pass_on(op, self._stages[stage].backward_input(self._kept[stage, number], self._gradients(op)))
            case BackwardWeight(stage, number):
                self._stages[stage].backward_weight(self._kept.pop((stage, number)))

    def present(self, op: Op) -> tuple[dict[int, Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Of the forwards of an operation, the parameters of each stage; and the buffers and the batch."""
        parameters: dict[int, Sequence[torch.Tensor]] = {}
        given: list[torch.Tensor] = []
        for half in halves(op):
            if isinstance(half, Forward):
                stage, microbatch = self._stages[half.stage], self._microbatches[half.microbatch]
                parameters[half.stage] = stage.parameters
                given += [buffer for module in stage.modules for buffer in module.buffers()]
                given += stage.precision.copies
                given += _tensors((microbatch.inputs, microbatch.targets))
        return parameters, given

    def kept(self, op: Op) -> list[torch.Tensor]:
        """What an operation that has ended has left for the backwards of its micro-batches."""
        kept = (self._kept.get((half.stage, half.microbatch)) for half in halves(op))
        return [tensor for saved in kept if saved is not None for tensor in saved.tensors]

    # ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, stage: Stage, number: int) -> None:
        microbatch = self._microbatches[number]
        boundary = microbatch.boundaries[stage.index - 1]
        targets = self._targets(number) if stage.index == self._last else None
        outputs, leaves, deferred = stage.forward(
            boundary,
            self._inputs(stage.index, number),
            targets,
            microbatch.before_layer,
            moves_buffers=microbatch.moves_buffers,
        )
        results = self._results(stage, number, outputs)
        self.values[Act(stage.index, number)] = [result.detach() for result in results]
        if torch.is_grad_enabled():
            needed = [result for result in results if result.requires_grad]
            self._kept[stage.index, number] = SavedForward(leaves, needed, deferred)
            self.most_kept = max(self.most_kept, len(self._kept))

    def _inputs(self, stage: int, number: int) -> list[torch.Tensor]:
        if stage > 0:
            return self.values[Act(stage - 1, number)]
        return [placed(leaf, self._device) for leaf in _tensors(self._microbatches[number].inputs)]

    def _targets(self, number: int) -> Any:
        targets = self._microbatches[number].targets
        return pytree.tree_map_only(torch.Tensor, lambda target: placed(target, self._device), targets)

    def _results(self, stage: Stage, number: int, outputs: Any) -> list[torch.Tensor]:
        """The tensors that a stage passes on: its outputs; of the last stage, the loss."""
        microbatch = self._microbatches[number]
        if stage.index != self._last:
            expected = microbatch.boundaries[stage.index]
            returned = Boundary.of(outputs, f"what stage {stage.index} returns")
            if returned != expected:
                raise self._failure(
                    Forward(stage.index, number),
                    f"returned {returned}, and its dry run {expected}{_and_gradients(returned, expected)}",
                )
            return _tensors(outputs)
        if microbatch.targets is None:
            self.outputs[number] = outputs
            return []
        weighted = self._weighted(outputs, microbatch)
        self._losses.append(weighted.detach().double().reshape(()))
        return [weighted]

    def _weighted(self, outputs: Any, microbatch: Microbatch) -> torch.Tensor:
        """A micro-batch's part of the whole batch's loss.

        The count of the whole batch is known at the end of the step. Until then, what is counted is divided by the
        number of samples; `LossSum` has the factor for the rest.
        """
        counted = isinstance(outputs, tuple) and len(outputs) == 2
        loss, count = outputs if counted else (outputs, microbatch.counts)
        if counted and microbatch.counts is not None:
            raise UsageError("loss_fn returned (sum, count), and step was given weight=: leave out one of them")
        if not _is_number(loss) or not isinstance(loss, torch.Tensor) or (counted and not _is_number(count)):
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(outputs, torch.Tensor) else repr(outputs)
            raise UsageError(
                f"loss_fn returned {got}; it must return the mean over the samples, one number, or (sum, count)"
            )
        if count is None:
            return loss * microbatch.weight
        self.count = (self.count or 0.0) + float(count)
        return loss * (microbatch.sample if counted else microbatch.sample * float(count))

    # ── backward ────────────────────────────────────────────────────────────────────────────────────────────────

    def _gradients(self, op: Backward | BackwardInput) -> list[torch.Tensor]:
        """The gradients of a stage's outputs; the loss's own is 1."""
        if op.stage == self._last:
            return [torch.ones_like(output) for output in self._kept[op.stage, op.microbatch].outputs]
        return self.values[Grad(op.stage, op.microbatch)]

    def _pass_on(self, op: Backward | BackwardInput, gradients: list[torch.Tensor]) -> None:
        if op.stage > 0:
            self.values[Grad(op.stage - 1, op.microbatch)] = gradients

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────

    def free(self, value: Value) -> None:
        """Drop a value's tensors."""
        self.values.pop(value, None)

    def buffers(self, value: Value) -> list[torch.Tensor]:
        """Memory to receive a value into."""
        if not isinstance(value, Act | Grad):
            raise UsageError(f"{value} cannot be received: pipeline ranks send activations and their gradients only")
        boundary = self._microbatches[value.microbatch].boundaries[value.stage]
        contents = boundary.contents if isinstance(value, Act) else boundary.gradients
        return [torch.empty(content.shape, dtype=content.dtype, device=self._device) for content in contents]

    def _failure(self, op: Compute, reason: str) -> StageError:
        boundary = self._microbatches[op.microbatch].boundaries[op.stage - 1]
        return StageError(
            f"rank {self._rank}, stage {op.stage}, {_WORDS[type(op)]} of micro-batch {op.microbatch} on {boundary}: "
            f"{reason}"
        )


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device that computes; the host does not wait until a GPU has done what was started before."""
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor.to(device)  # whoever has pinned it may write to it again: so this waits
    return tensor.pin_memory().to(device, non_blocking=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _and_gradients(returned: Boundary, expected: Boundary) -> str:
    """More words for an error where shapes agree: then the two differ in which tensors need gradients."""
    if str(returned) != str(expected):
        return ""
    needs = [content.needs_gradient for content in returned.contents]
    return f": tensors need gradients {needs}; freeze parameters before the pipeline is made"
