"""What the exercises on sharding share: an optimizer that is watched, and what one process would have done.

Parameters and gradients of the small model are looked at in a row, all numbers one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from microparallel.errors import Mismatch
from microparallel.learn.graders._common import LEARNING_RATE, batch, in_one_process, same, small_model
from microparallel.learn.log import Called
from microparallel.learn.requirements import Suspect, flat, require_equal
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import OptimizerStep

ALLOWED = ("reduce_scatter", "all_gather")
Kind = Literal["momentum", "adam"]
_KEPT = {"momentum": 1, "adam": 2}  # numbers of state for each parameter


def samples_of(rank: int, step: int, turn: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's samples in a step, or those of one of its micro-batches."""
    return batch(4, 100 * step + 10 * turn + rank)


def in_parts(row: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A row, filled up with zeros and cut into equal parts."""
    return list(torch.cat([row, row.new_zeros(-len(row) % ranks)]).view(ranks, -1).unbind())


# ── the optimizer ───────────────────────────────────────────────────────────────────────────────────────────────────


def _make(kind: Kind, tensors: Any) -> torch.optim.Optimizer:
    if kind == "momentum":
        return torch.optim.SGD(tensors, lr=LEARNING_RATE, momentum=0.9)
    return torch.optim.Adam(tensors, lr=LEARNING_RATE)


class Optimizers:
    """The function that the learner makes an optimizer with; it remembers what it was given, and tells of updates.

    Attributes:
        made: all that were made.
        given: for each, the tensors that it shall update, as they were then.
        memory: for each, the memory that these tensors keep, as bytes by address; a view keeps its whole tensor.
    """

    def __init__(self, comms: Any, kind: Kind) -> None:
        self.made: list[torch.optim.Optimizer] = []
        self.given: list[list[torch.Tensor]] = []
        self.memory: list[dict[int, int]] = []
        self._comms, self._kind = comms, kind

    def __call__(self, tensors: Any) -> torch.optim.Optimizer:
        """Make one, as the learner asks for it."""
        optimizer = _make(self._kind, tensors)
        optimizer.register_step_pre_hook(lambda *_: self._comms.log.begins(Activity(OptimizerStep())))
        self.made.append(optimizer)
        known = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self.given.append([tensor.detach().clone() for tensor in known])
        storages = [tensor.untyped_storage() for tensor in known]
        self.memory.append({storage.data_ptr(): storage.nbytes() for storage in storages})
        return optimizer

    def state(self) -> int:
        """For how many parameters' numbers state is kept now."""
        kept = [one for optimizer in self.made for values in optimizer.state.values() for one in values.values()]
        numbers = sum(one.numel() for one in kept if isinstance(one, torch.Tensor) and one.dim() > 0)
        return numbers // _KEPT[self._kind]


def require_own_parts(rank: int, given: Sequence[Sequence[torch.Tensor]], parts: Sequence[torch.Tensor]) -> None:
    """Refuse an optimizer that was made for something else than this rank's part of the parameters.

    Args:
        rank: whose optimizer it is.
        given: for each optimizer that was made, its tensors.
        parts: what would be right on each rank, in a row.
    """
    if not given:
        raise Wrong(f"rank {rank} has no optimizer: make_optimizer was never called")
    found, mine = flat(given[0]), parts[rank]
    if len(found) > len(mine):
        raise Wrong(
            f"rank {rank}'s optimizer is given {len(found)} numbers, and the rank's part has {len(mine)}: it would "
            "keep state for all parameters, as every other rank does; give it only this rank's part"
        )
    for other, theirs in enumerate(parts):
        if other != rank and same([found], [theirs]):
            raise Wrong(
                f"rank {rank}'s optimizer is given part {other}, which is rank {other}'s; reduce_scatter gives rank "
                f"{rank} part {rank} of the gradients"
            )
    shorter = not mine[len(found) :].any()  # it may leave out the zeros that fill up
    require_equal(
        found,
        mine[: len(found)] if shorter else mine,
        f"what rank {rank}'s optimizer is given, its part of the parameters,",
    )


def require_once(rank: int, given: Sequence[object]) -> None:
    """Refuse an optimizer that is made anew in every step."""
    if len(given) > 1:
        raise Wrong(
            f"rank {rank} has called make_optimizer {len(given)} times: a new optimizer begins without momentum; "
            "make it once, in __init__"
        )


@contextmanager
def about_parts() -> Iterator[None]:
    """Say what is wrong with parts that differ in size, or that do not fit."""
    try:
        yield
    except Mismatch as error:
        raise Wrong(
            f"{error}: all_gather needs a tensor of the same shape on every rank; fill up with zeros, so that all "
            "parts have the same size"
        ) from None
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # torch's own, as where a tensor does not have the size of a shape
            raise
        raise Wrong(
            f"{error}: if this is about a size, what does not divide by the number of ranks is filled up with zeros "
            "before it is cut into parts, and these are cut off again before it gets its old shape; if it is about "
            "gradients, backward returns one for each argument of forward, in the same order: for rows and comms None"
        ) from None


def refuse_gathered_gradients(call: Called, gradient: torch.Tensor) -> None:
    """Refuse an all-gather of a rank's part of the gradients, where new parameters should be gathered."""
    if call.content is not None and starts_with(call.content.reshape(-1), gradient):
        raise Wrong(
            f"line {call.line} gathers gradients: then every rank would have to update all parameters, with state for "
            "all of them. Each updates its own part, and the new parameters are gathered"
        )


def starts_with(found: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Whether a row begins with these numbers; zeros may follow, which fill it up."""
    return len(found) >= len(numbers) and same([found[: len(numbers)]], [numbers])


# ── one process ─────────────────────────────────────────────────────────────────────────────────────────────────────

Combine = Callable[[torch.Tensor], torch.Tensor]  # of all ranks' gradients, by rank and micro-batch


def mean(own: torch.Tensor) -> torch.Tensor:
    """What is right: the mean over ranks and micro-batches."""
    return own.mean((0, 1))


def carried_over() -> Combine:
    """The gradients of the steps before count again, since they were not removed."""
    total: list[torch.Tensor] = []

    def combine(own: torch.Tensor) -> torch.Tensor:
        total.append(mean(own))
        return torch.stack(total).sum(0)

    return combine


def own_gradients(own: torch.Tensor) -> torch.Tensor:
    """Each rank updates its part with its own gradient, which was not averaged."""
    ranks, _, numbers = own.shape
    return torch.cat([in_parts(own[rank].mean(0), ranks)[rank] for rank in range(ranks)])[:numbers]


@dataclass
class Update:
    """One step of one process, in rows."""

    before: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor


def updates(kind: Kind, ranks: int, steps: int, turns: int = 1, combine: Combine = mean) -> list[Update]:
    """Train in one process with the gradients that `combine` makes of those of all ranks."""
    model, found = small_model(), []
    row = flat(model.parameters()).detach().clone()
    optimizer = _make(kind, [row])
    for step in range(steps):
        own = [
            torch.stack([flat(in_one_process(model, *samples_of(rank, step, turn))[1]) for turn in range(turns)])
            for rank in range(ranks)
        ]
        before, row.grad = row.clone(), combine(torch.stack(own))
        optimizer.step()
        nn.utils.vector_to_parameters(row.clone(), model.parameters())
        found.append(Update(before, row.grad.clone(), row.clone()))
    return found


def require_weights(
    found: Sequence[Sequence[torch.Tensor]],
    kind: Kind,
    turns: int,
    mistakes: dict[str, Combine],
) -> None:
    """Refuse weights that are not those of one process.

    Args:
        found: for each rank, its weights after each step.
        kind: of the optimizer.
        turns: how many micro-batches a rank has.
        mistakes: the words for each, and the gradients that it would use.
    """
    ranks, steps = len(found), len(found[0])
    right = updates(kind, ranks, steps, turns)
    wrong = {words: updates(kind, ranks, steps, turns, combine) for words, combine in mistakes.items()}
    for step in range(steps):
        suspects = [Suspect(one[step].weights, words) for words, one in wrong.items()]
        for rank in range(ranks):
            still = f"rank {rank}'s parameters are as they were before the step: copy the new ones into parameter.data"
            unchanged = Suspect(right[step].before, still)
            what = f"step {step + 1}, {ranks} ranks: the row of rank {rank}'s parameters"
            require_equal(found[rank][step], right[step].weights, what, [unchanged, *suspects])
            if not torch.equal(found[rank][step], found[0][step]):
                raise Wrong(
                    f"step {step + 1}: rank {rank}'s parameters differ from rank 0's in their last digits: every rank "
                    "takes all parts from the all-gather"
                )
