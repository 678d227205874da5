"""What one rank computes in a training step, and what it holds meanwhile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from microparallel.errors import ProgramError, StageError, UsageError
from microparallel.observe import UNOBSERVED, Activity, Observation, Observer
from microparallel.pipeline.stage import Boundary, Pass, Stage
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
    Send,
    Value,
    halves,
)
from microparallel.program.rules import Compute
from microparallel.torch_private import pytree
from microparallel.transport.base import Exchange, Transport, Work

_WORDS = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input half of the backward",
    BackwardWeight: "weight half of the backward",
}


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch, as a rank sees it.

    Attributes:
        boundaries: what crosses into each of the rank's stages and out of it: -1 is the batch itself, s what stage s
            returns.
        inputs: what the first stage gets, where this rank has it.
        targets: what the last stage's outputs are compared with, where this rank has it.
        weight: how much of the whole batch it is.
    """

    boundaries: Mapping[int, Boundary]
    inputs: Any = None
    targets: Any = None
    weight: float = 1.0


class Worker:
    """The stages of a rank, and the tensors of one step by the names that a program gives them."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        last_stage: int,
        microbatches: Sequence[Microbatch],
        device: torch.device,
    ) -> None:
        self.values: dict[Value, list[torch.Tensor]] = {}
        self.loss = torch.zeros((), dtype=torch.float64)  # the mean over the batch, as far as it is known here
        self.outputs: dict[int, Any] = {}  # the last stage's, where there is no loss to compute
        self.most_kept = 0  # activations at once
        self._rank = rank
        self._stages = stages
        self._last = last_stage
        self._microbatches = microbatches
        self._device = device
        self._kept: dict[tuple[int, int], Pass] = {}

    def compute(self, op: Op) -> None:
        """Do an operation on a stage, or a pair of them."""
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

    # ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, stage: Stage, number: int) -> None:
        microbatch = self._microbatches[number]
        boundary = microbatch.boundaries[stage.index - 1]
        targets = self._targets(number) if stage.index == self._last else None
        outputs, leaves, put_off = stage.forward(boundary, self._inputs(stage.index, number), targets)
        results = self._results(stage, number, outputs)
        self.values[Act(stage.index, number)] = [result.detach() for result in results]
        if torch.is_grad_enabled():
            self._kept[stage.index, number] = Pass(
                leaves, [result for result in results if result.requires_grad], put_off
            )
            self.most_kept = max(self.most_kept, len(self._kept))

    def _inputs(self, stage: int, number: int) -> list[torch.Tensor]:
        if stage > 0:
            return self.values[Act(stage - 1, number)]
        leaves = pytree.tree_leaves(self._microbatches[number].inputs)
        return [leaf.to(self._device) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _targets(self, number: int) -> Any:
        targets = self._microbatches[number].targets
        return pytree.tree_map_only(torch.Tensor, lambda target: target.to(self._device), targets)

    def _results(self, stage: Stage, number: int, outputs: Any) -> list[torch.Tensor]:
        """What is sent on: the outputs; at the end of the model, the loss."""
        microbatch = self._microbatches[number]
        if stage.index != self._last:
            expected = microbatch.boundaries[stage.index]
            returned = Boundary.of(outputs, f"what stage {stage.index} returns")
            if returned != expected:
                raise self._failure(
                    Forward(stage.index, number),
                    f"returned {returned}, and its dry run {expected}{_and_gradients(returned, expected)}",
                )
            return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if microbatch.targets is None:
            self.outputs[number] = outputs
            return []
        if not isinstance(outputs, torch.Tensor) or outputs.numel() != 1:
            got = f"a tensor of shape {list(outputs.shape)}" if isinstance(outputs, torch.Tensor) else repr(outputs)
            raise UsageError(f"loss_fn returned {got}; it must return the mean over the samples, one number")
        weighted = outputs * microbatch.weight
        self.loss += weighted.detach().double().cpu().reshape(())
        return [weighted]

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
        """Forget a value."""
        self.values.pop(value, None)

    def buffers(self, value: Value) -> list[torch.Tensor]:
        """Memory to receive a value into."""
        if not isinstance(value, Act | Grad):
            raise UsageError(f"{value} cannot be received; only activations and their gradients travel")
        boundary = self._microbatches[value.microbatch].boundaries[value.stage]
        contents = boundary.contents if isinstance(value, Act) else boundary.gradients
        return [torch.empty(content.shape, dtype=content.dtype, device=self._device) for content in contents]

    def _failure(self, op: Compute, reason: str) -> StageError:
        boundary = self._microbatches[op.microbatch].boundaries[op.stage - 1]
        return StageError(
            f"rank {self._rank}, stage {op.stage}, {_WORDS[type(op)]} of micro-batch {op.microbatch} on {boundary}: "
            f"{reason}"
        )


def _and_gradients(returned: Boundary, expected: Boundary) -> str:
    """Where shapes agree, the difference is in who needs a gradient."""
    if str(returned) != str(expected):
        return ""
    needs = [content.needs_gradient for content in returned.contents]
    return f": tensors need gradients {needs}; freeze parameters before the pipeline is made"


# Run one rank's operations of a training step on real tensors: one interpreter for every schedule and transport.
#
# It is a generator that yields whatever it must wait for. A rank in its own process waits; ranks that share a process
# take turns.
#
# Messages that stand next to each other in the program leave together, as one exchange. NCCL needs that: in 1F1B two
# neighbours send to each other at the same time, and each would wait inside its send for the other to receive.


# Messages of a pipeline have a tag of their own, so that they never mix with the caller's.
PIPELINE_TAG = 5


class Reduction(Protocol):
    """A sum over some ranks that can be started and waited for."""

    def start(self, operation: AllReduce) -> None:
        """Begin to add up, as the program says."""

    def finish(self) -> None:
        """Return when the sum is there."""


class Interpreter:
    """One rank's way through a step.

    Args:
        ops: what to do, in order.
        worker: who computes, and holds the tensors.
        transport: how messages travel.
        reductions: for each value that is all-reduced, the sum.
        ahead: how many receives are posted before they are needed.
        line: the rank's messages in the order that all ranks keep (`line_up`), where a transport runs them one after
            another. It says when a receive is posted, instead of `ahead`.
        observers: are told of every operation.
        as_told: the operation as the program of all ranks has it, which observers are told.
        world_ranks: of the pipeline's ranks.
        doing: is told what is about to be computed.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        worker: Worker,
        transport: Transport,
        reductions: Mapping[Value, Reduction] | None = None,
        *,
        ahead: int = 0,
        line: Sequence[Send | Recv] | None = None,
        observers: Sequence[Observer] = (),
        as_told: Callable[[Op], Op] = lambda op: op,
        world_ranks: Sequence[int] = (),
        doing: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._doing = doing
        self.now: Op | None = None  # what is being done
        self._ops = ops
        self._worker = worker
        self._transport = transport
        self._reductions = {} if reductions is None else reductions
        self._ahead = ahead
        self._observers = tuple(observers)
        self._as_told = as_told
        self._world_ranks = world_ranks
        self._to_post = deque(op for op in ops if isinstance(op, Recv))
        self._line = None if line is None else deque(line)
        self._posted: dict[Recv, list[tuple[Work, torch.Tensor]]] = {}
        self._leaving: list[tuple[Work, torch.Tensor]] = []  # a tensor stays alive until it has left

    def run(self) -> Iterator[Work]:
        """Do everything; yields what must be waited for."""
        reducing: list[tuple[AllReduce, Reduction]] = []
        for run in runs(self._ops):
            if isinstance(run, tuple):
                yield from self._exchange(run)
                continue
            self.now = run
            self._doing(str(run))
            if isinstance(run, AllReduce):
                reduction = self._reduction(run)
                with self._told(run):  # a sum may be several calls, or none
                    reduction.start(run)
                reducing.append((run, reduction))
            elif isinstance(run, Join):
                self._finish(reducing)
            else:
                with self._told(run):
                    self._worker.compute(run)
        self._finish(reducing)
        for work, _ in self._leaving:
            yield work

    def _finish(self, reducing: list[tuple[AllReduce, Reduction]]) -> None:
        """Wait for all sums that were started."""
        for op, reduction in reducing:
            self.now = op
            reduction.finish()
        reducing.clear()

    def _reduction(self, op: AllReduce) -> Reduction:
        if op.value not in self._reductions:
            raise ProgramError(f"{op}: this rank has nobody to sum {op.value} with")
        return self._reductions[op.value]

    def _told(self, op: Op, size: int = 0, peer: int | None = None) -> Observation:
        """`with` this around an operation, so that the observers are told of it."""
        if not self._observers:
            return UNOBSERVED
        other = None if peer is None else self._world_ranks[peer]
        return Observation(self._observers, Activity(self._as_told(op), size=size, peer=other))

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def _exchange(self, run: tuple[Send | Recv | Free, ...]) -> Iterator[Work]:
        """Send and receive what stands together, then forget what may be forgotten."""
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
        self._leaving = [(work, tensor) for work, tensor in self._leaving if not has_ended(work)]
        for op in sends:
            self.now = op
            tensors = [tensor.contiguous() for tensor in self._worker.values[op.value]]
            with self._told(op, sum(tensor.nbytes for tensor in tensors), op.to) as told:
                told.waits()  # to hand it over takes the rank's own time
                self._leaving += [(exchange.isend(tensor, op.to), tensor) for tensor in tensors]

    def _due(self, run: tuple[Send | Recv | Free, ...]) -> Iterator[Recv]:
        """The receives to post now: those that are needed, and some that come after them."""
        missing = {op for op in run if isinstance(op, Send | Recv) and op not in self._posted}
        if self._line is not None:
            while missing:
                op = self._line.popleft()
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
            self._posted[op] = [(exchange.irecv(buffer, op.source), buffer) for buffer in buffers]

    def _receive(self, op: Recv) -> Iterator[Work]:
        self.now = op
        works = self._posted.pop(op)
        with self._told(op, sum(buffer.nbytes for _, buffer in works), op.source) as told:
            told.waits()
            for work, _ in works:
                yield work
            if self._observers:  # what lies before the message's arrival is waiting, not communication
                told.activity.arrived = max((getattr(work, "arrived", math.nan) for work, _ in works), default=math.nan)
        self._worker.values[op.value] = [buffer for _, buffer in works]


def has_ended(work: Work) -> bool:
    """Whether a transfer is known to be over, without waiting for it."""
    poll = getattr(work, "poll", None)
    return poll is not None and bool(poll())


Run = Op | tuple[Send | Recv | Free, ...]


def runs(ops: Iterable[Op]) -> Iterator[Run]:
    """Cut operations into computations, one by one, and messages that stand together.

    ```
    F0.1 >A0.1@1 <G0.0@1 B0.0 !A0.0 !G0.0 F0.2   →   F0.1 | >A0.1@1 <G0.0@1 | B0.0 | !A0.0 !G0.0 | F0.2
    ```

    What a rank receives and passes on is in two runs: it must arrive before it can leave.
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
    if not halves(op) and not isinstance(op, AllReduce | Join):
        raise ProgramError(
            f"{op} cannot be run in a pipeline: it runs F, B, I, W, messages, frees and all-reduces; "
            "the caller's optimizer updates the weights"
        )
