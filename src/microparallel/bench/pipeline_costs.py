"""What the stages of a pipeline cost by themselves: the seconds of their computations, and the bytes of activations.

The simulator is given these seconds to say how fast a schedule could be if messages took no time.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from microparallel.bench.engine import seconds_of, total
from microparallel.models.loss import cross_entropy
from microparallel.pipeline.microbatches import split_batch
from microparallel.pipeline.stage import Boundary, Content, SavedForward, Stage
from microparallel.program import Backward, BackwardInput, BackwardWeight, Forward, ForwardBackward, Op, Program, halves
from microparallel.simulator import Costs
from microparallel.torch_private import pytree

if TYPE_CHECKING:
    from microparallel.bench.pipeline import OurPipeline
    from microparallel.bench.subjects import Batch


# ── seconds ─────────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = ("F", "B", "I", "W")
_LETTERS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one micro-batch's computations, stage by stage; 0 for what no schedule of this cut does."""

    homes: tuple[int, ...]  # the rank of each stage
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    @property
    def busiest_rank(self) -> float:
        """One micro-batch's forward and whole backward, on the rank where they take longest."""
        ranks = [0.0] * (max(self.homes) + 1)
        for home, forward, backward in zip(self.homes, self.forward, self.backward, strict=True):
            ranks[home] += forward + backward
        return max(ranks)

    @property
    def costs(self) -> Costs:
        """The same for the simulator, where messages cost nothing."""
        return _MeasuredCosts(
            forward=self.forward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            backward=self.backward,
        )


@dataclass(frozen=True, kw_only=True)
class _MeasuredCosts(Costs):
    """Costs where a whole backward takes a time of its own, not that of its two halves."""

    backward: Sequence[float] = field(default=())

    def of(self, op: Op, rank: int = 0) -> float:
        match op:
            case Backward(stage):
                return self.backward[stage]
            case ForwardBackward(forward, backward):
                return self.of(forward, rank) + self.of(backward, rank)
        return super().of(op, rank)


def kinds_in(programs: Iterable[Program]) -> frozenset[str]:
    """Which of F, B, I and W these programs do."""
    return frozenset(
        _LETTERS[type(half)] for program in programs for ops in program.ranks for op in ops for half in halves(op)
    )


class StagesAlone:
    """The computations of one cut of the model, by themselves.

    Every rank does the forwards and backwards of its own stages, all ranks at the same time, without a single message:

        rank 0   F0.0 B0.0   F0.0 I0.0 W0.0   F0.1 B0.1   F0.1 I0.1 W0.1   …
        rank 1   F1.0 B1.0   F1.0 I1.0 W1.0   F1.1 B1.1   F1.1 I1.1 W1.1   …

    A backward that is cut into its halves may take longer than the whole one, so both are measured. In the naive
    schedule only one rank computes at a time and has the machine to itself; for that, ranks take turns here too.

    Args:
        ours: a pipeline with that cut.
        kinds: what to measure, of F, B, I and W.
        model: the whole model, which says what enters the stages of this rank.
        batch: inputs and targets.
        microbatches: of the batch.
    """

    alone = True

    def __init__(
        self, ours: OurPipeline, kinds: frozenset[str], model: nn.Module, batch: Batch, microbatches: int
    ) -> None:
        pipe = ours.pipe
        self._comms = pipe.comms
        self._homes = ours.homes
        self._together = ours.computes_together
        self._ways = [way for way, needed in ((self._whole, "B"), (self._in_halves, "I")) if needed in kinds]
        self._stages = {
            index: Stage(index, copy.deepcopy(stage.layers), cross_entropy) for index, stage in pipe.stages.items()
        }
        firsts = {index: stage.layers[0].name for index, stage in pipe.stages.items()}
        inputs, targets = (split_batch(part, microbatches, "samples") for part in batch)
        self._inputs = [_what_enters(firsts, model, one) for one in inputs]
        self._targets = targets
        self._times: dict[tuple[str, int], list[float]] = {}  # of the last step
        self._kept: list[dict[tuple[str, int], float]] = []  # means of steps that count
        self._one_by_one: list[dict[tuple[str, int], list[float]]] = []  # the same, micro-batch by micro-batch
        self._microbatches = microbatches

    def step(self) -> None:
        """All computations of a step that this rank has, each backward once whole and once in halves."""
        self._times = {}
        if self._together:
            self._compute()
            return
        for rank in range(self._comms.world_size):
            if rank == self._comms.rank:
                self._compute()
            self._comms.barrier()

    def _compute(self) -> None:
        for number, (entering, targets) in enumerate(zip(self._inputs, self._targets, strict=True)):
            for way in self._ways:
                for index, stage in sorted(self._stages.items()):
                    if number == 0:  # as in a step, the first gradients are not added to others
                        for parameter in stage.parameters:
                            parameter.grad = None
                    way(index, entering[index], targets)

    def keep(self) -> None:
        """The last step counts."""
        self._kept.append({key: statistics.fmean(seconds) for key, seconds in self._times.items()})
        self._one_by_one.append(self._times)

    def stage_times(self) -> StageTimes:
        """The medians over all steps that count; all ranks call this, and get the same."""
        mine = {key: statistics.median(step[key] for step in self._kept) for key in self._kept[0]}
        stages = range(len(self._homes))
        by_kind = [total(self._comms, [mine.get((kind, stage), 0.0) for stage in stages]) for kind in KINDS]
        return StageTimes(self._homes, *(tuple(times) for times in by_kind))

    def steps(self) -> list[dict[Op, float]]:
        """How long each computation took in each step that counts; all ranks call this, and get the same."""
        kinds: dict[str, Callable[[int, int], Op]] = {
            "F": Forward,
            "B": Backward,
            "I": BackwardInput,
            "W": BackwardWeight,
        }
        ops = [
            (letter, kinds[letter](stage, number))
            for letter in KINDS
            for stage in range(len(self._homes))
            for number in range(self._microbatches)
        ]
        return [
            dict(zip((op for _, op in ops), total(self._comms, [self._sample(step, *one) for one in ops]), strict=True))
            for step in self._one_by_one
        ]

    def _sample(self, step: dict[tuple[str, int], list[float]], letter: str, op: Any) -> float:
        """The time of one operation here; of forwards, which there are for each way of going back, the first."""
        samples = step.get((letter, op.stage), [])
        return samples[op.microbatch * len(samples) // self._microbatches] if samples else 0.0

    def _whole(self, index: int, entering: torch.Tensor, targets: Any) -> None:
        kept = self._forward(index, entering, targets)
        gradients = [torch.ones_like(output) for output in kept.outputs]
        self._timed("B", index, lambda: self._stages[index].backward(kept, gradients))

    def _in_halves(self, index: int, entering: torch.Tensor, targets: Any) -> None:
        kept = self._forward(index, entering, targets, splits=True)
        gradients = [torch.ones_like(output) for output in kept.outputs]
        self._timed("I", index, lambda: self._stages[index].backward_input(kept, gradients))
        self._timed("W", index, lambda: self._stages[index].backward_weight(kept))

    def _forward(self, index: int, entering: torch.Tensor, targets: Any, splits: bool = False) -> SavedForward:
        stage = self._stages[index]
        stage.splits = splits
        boundary = Boundary(pytree.tree_structure(entering), (_content(entering, needs_gradient=index > 0),))
        answers = targets if index == len(self._homes) - 1 else None
        outputs, leaves, deferred = self._timed("F", index, lambda: stage.forward(boundary, [entering], answers))
        return SavedForward(leaves, [outputs], deferred)

    def _timed(self, kind: str, stage: int, work: Callable[[], Any]) -> Any:
        results: list[Any] = []
        seconds = seconds_of(lambda: results.append(work()), self._comms.device)
        self._times.setdefault((kind, stage), []).append(seconds)
        return results[0]


def _content(tensor: torch.Tensor, needs_gradient: bool) -> Content:
    return Content(tuple(tensor.shape), tensor.dtype, needs_gradient)


def _what_enters(firsts: dict[int, str], model: nn.Module, inputs: torch.Tensor) -> dict[int, torch.Tensor]:
    """What the whole model hands to each of some stages, which begin at the named layers."""
    found: dict[int, torch.Tensor] = {}

    def catch(index: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def keep(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            found[index] = arguments[0].detach().clone()

        return keep

    handles = [model.get_submodule(name).register_forward_pre_hook(catch(index)) for index, name in firsts.items()]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class SavedBytes:
    """Counts, within its `with` block, what is saved for backward and not freed yet; weights do not count.

    A tensor that several operations save counts once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.most = 0
        self._now = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._held: Counter[tuple[int, int]] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if tensor.untyped_storage().data_ptr() in self._weights:
            return _Saved(tensor, None, self)
        size = min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor takes less than it seems
        key = tensor.data_ptr(), size
        self._held[key] += 1
        if self._held[key] == 1:
            self._now += size
            self.most = max(self.most, self._now)
        return _Saved(tensor, key, self)

    def let_go(self, key: tuple[int, int]) -> None:
        """One operation less needs the tensor with this key; without any, it no longer counts."""
        self._held[key] -= 1
        if not self._held[key]:
            self._now -= key[1]


class _Saved:
    """What autograd keeps instead of a tensor: when autograd drops it, the counter is told."""

    def __init__(self, tensor: torch.Tensor, key: tuple[int, int] | None, counter: SavedBytes) -> None:
        self._tensor = tensor.detach()  # as it is, an output would lead back to the operation that saved it: a cycle
        self._key = key
        self._counter = counter

    def unpack(self) -> torch.Tensor:
        return self._tensor

    def __del__(self) -> None:
        if self._key is not None:
            self._counter.let_go(self._key)
