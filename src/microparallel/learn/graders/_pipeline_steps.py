"""Let ranks do pipeline steps with a learner's function, and hold what they find against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microparallel.errors import Mismatch
from microparallel.learn.graders._common_pp import (
    gradients,
    make_batch,
    make_layers,
    many,
    mean_loss,
    require_all_waited,
    require_gradients,
)
from microparallel.learn.graders._counted_stage import CountedStage
from microparallel.learn.verdict import Wrong
from microparallel.learn.words import Suspect, flat, require_equal, require_number, shown

_STEPS = 2
_RATE = 0.5


@dataclass
class Outcome:
    """What one rank found in each step."""

    losses: list[Any]
    gradients: list[list[torch.Tensor | None]]
    orders: list[list[str]]
    most_held: int
    most_kept: int


def share(depth: int, rank: int, ranks: int) -> range:
    """A rank's layers."""
    parts = torch.arange(depth).tensor_split(ranks)
    return range(int(parts[rank][0]), int(parts[rank][-1]) + 1)


def do_steps(
    learner: Any, comms: Any, steps: int, function: str, samples: int, *options: Any, diaries: Path | None = None
) -> Outcome:
    """Some steps of this rank; gradients are added up over all, and the weights change in between."""
    comms.line_of_ranks = True
    ranks, rank = comms.world_size, comms.rank
    own = share(ranks + 1, rank, ranks)
    stage = CountedStage(make_layers(ranks + 1)[own.start : own.stop], rank, diaries and diaries / str(rank))
    outcome = Outcome([], [], [], 0, 0)
    for step in range(steps):
        inputs, targets = make_batch(samples, seed=step)
        inputs = inputs if rank == 0 else torch.full_like(inputs, torch.nan)
        targets = targets if rank == ranks - 1 else torch.full_like(targets, torch.nan)
        stage.begin()
        before = len(comms.log)
        loss_function = _loss_of_the_last(rank, ranks)
        try:
            loss = getattr(learner, function)(stage, comms, inputs, targets, loss_function, *options)
        except Mismatch:
            raise Wrong(
                f"rank {rank}, line {comms.log[-1].line}: what one rank sends is not what the other asks for. Both "
                "must mean the same shape and dtype (recv_tensor expects float32 unless it is told)"
            ) from None
        except RuntimeError as error:
            raise _in_words(error, rank, ranks) from None
        _require_each_once(stage, options[0] if options else 1)
        require_all_waited(comms)
        _require_messages(comms, comms.log[before:], options[0] if options else 1, inputs.nbytes)
        _require_no_graph(loss, rank)
        _require_proper_loss(loss, rank, ranks)
        _note(outcome, stage, loss)
        _update(stage)
    return outcome


def _note(outcome: Outcome, stage: CountedStage, loss: Any) -> None:
    outcome.losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
    outcome.gradients.append(gradients(stage))
    outcome.orders.append(list(stage.order))
    outcome.most_held = max(outcome.most_held, stage.most_held)
    outcome.most_kept = max(outcome.most_kept, stage.most_kept)


def _require_each_once(stage: CountedStage, microbatches: int) -> None:
    """Say so at once: other ranks may wait for what this one leaves out."""
    forwards, backwards = (sum(word[0] == kind for word in stage.order) for kind in "FB")
    if forwards != microbatches:
        raise Wrong(f"rank {stage.rank} does {many(forwards, 'forward')}, and there {_are(microbatches)}: one for each")
    if backwards < microbatches:
        raise Wrong(
            f"rank {stage.rank} does {many(backwards, 'backward')}, and there {_are(microbatches)}: one for each"
            f"{_which_are_missing(stage, microbatches)}"
        )


def _which_are_missing(stage: CountedStage, microbatches: int) -> str:
    missing = [number for number in range(microbatches) if f"B{stage.rank}.{number}" not in stage.order]
    if microbatches == 1 or not missing:
        return ""
    if 0 < missing[0] == microbatches - len(missing):
        return ". Those of the last ones are still to be done when no forward is left"
    return f". Micro-batch {', '.join(map(str, missing))} has none"


def _are(microbatches: int) -> str:
    return f"are {microbatches} micro-batches" if microbatches > 1 else "is 1 batch"


def _require_no_graph(loss: Any, rank: int) -> None:
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        raise Wrong(
            f"the loss that rank {rank} returns still hangs on its graph, and with it everything that was computed: "
            "add up losses without their graphs (detach)"
        )


def _require_proper_loss(loss: Any, rank: int, ranks: int) -> None:
    if rank < ranks - 1 and loss is not None:
        raise Wrong(f"rank {rank} returns {shown(loss)} as the loss: only the last rank knows it")
    if rank == ranks - 1 and loss is not None and not isinstance(loss, torch.Tensor):
        require_number(loss, f"the loss that rank {rank} returns")


def _require_messages(comms: Any, log: Sequence[Any], microbatches: int, size: int) -> None:
    """Refuse a step in which not every micro-batch has sent its activation one way and its gradient the other.

    There may be more messages: somebody may send a header before each. And what was never sent is found on the other
    side, by a rank that waits for it or has not received it.
    """
    rank, needed = comms.rank, f"in a step, and there {_are(microbatches)}"
    for peer in (rank - 1, rank + 1):
        if not 0 <= peer < comms.world_size:
            continue
        comes, goes = ("activation", "gradient") if peer < rank else ("gradient", "activation")
        received = sum(entry.peer == peer and entry.call in ("recv_tensor", "irecv") for entry in log)
        if received < microbatches:
            raise Wrong(
                f"rank {rank} receives {many(received, 'message')} from rank {peer} {needed}: one {comes} for each"
            )
        sent = [entry.bytes for entry in log if entry.peer == peer and entry.call in ("send_tensor", "isend")]
        if sent and not microbatches <= len(sent) <= 2 * microbatches:
            raise Wrong(
                f"rank {rank} sends {many(len(sent), 'message')} to rank {peer} {needed}: one {goes} for each, as soon "
                "as it is there"
            )
        if sent and sum(sent) < size:
            raise Wrong(f"rank {rank} sends {sum(sent)} bytes to rank {peer}, and the {goes}s of the batch have {size}")


def _in_words(error: RuntimeError, rank: int, ranks: int) -> Exception:
    if "grad can be implicitly created only for scalar" in str(error) and rank == ranks - 1:
        return Wrong(
            f"rank {rank} is the last, and starts its backward from its outputs: it begins with the loss, which is "
            "loss_function(outputs, targets)"
        )
    if "grad can be implicitly created only for scalar" in str(error):
        return Wrong(
            f"rank {rank} starts its backward without a gradient: what its stage returns is no loss. The gradient of "
            f"it comes from rank {rank + 1}"
        )
    if "second time" in str(error):
        return Wrong(
            f"rank {rank} goes back through the same graph twice: every micro-batch has one backward, through what its "
            "own forward left (or was that overwritten by the next one's?)"
        )
    return error


def _loss_of_the_last(rank: int, ranks: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss_function(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if rank < ranks - 1:
            raise Wrong(
                f"rank {rank} computes a loss: only the last rank, {ranks - 1}, has the model's outputs. Everybody "
                "else begins the backward with the gradient that comes from the next rank"
            )
        return mean_loss(outputs, targets)

    return loss_function


def _update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(_RATE * parameter.grad)


# ── one process ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Truth:
    """What one process finds in the same steps."""

    def __init__(self, ranks: int, samples: int, microbatches: int = 1) -> None:
        self.ranks, self.samples, self.microbatches = ranks, samples, microbatches
        self._model = nn.Sequential(*make_layers(ranks + 1))
        self.losses: list[torch.Tensor] = []
        self.gradients: list[list[torch.Tensor]] = []
        self.last_alone: list[list[torch.Tensor]] = []  # of the last step only
        self._first_model = [parameter.detach().clone() for parameter in self._model.parameters()]
        for step in range(_STEPS):
            before = [torch.zeros_like(parameter) for parameter in self._first_model]
            if self.gradients:
                before = self.gradients[-1]
            loss = mean_loss(self._model(make_batch(samples, seed=step)[0]), make_batch(samples, seed=step)[1])
            loss.backward()  # type: ignore[no-untyped-call]
            self.losses.append(loss.detach())
            self.gradients.append(self._now())
            self.last_alone.append([now - old for now, old in zip(self._now(), before, strict=True)])
            _update(self._model)

    def _now(self) -> list[torch.Tensor]:
        return [gradient for gradient in gradients(self._model) if gradient is not None]

    def of(self, all_gradients: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """A rank's part; every layer has two parameters."""
        own = share(self.ranks + 1, rank, self.ranks)
        return all_gradients[2 * own.start : 2 * own.stop]

    def of_first_step(self, start: Callable[[nn.Sequential, torch.Tensor, torch.Tensor], None]) -> list[torch.Tensor]:
        """The gradients that a certain backward leaves in the first step."""
        model = nn.Sequential(*make_layers(self.ranks + 1))
        start(model, *make_batch(self.samples, seed=0))
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    def require(self, outcomes: list[Outcome], suspects: Callable[[int], list[Suspect]]) -> None:
        """Hold losses and gradients of both steps against these, from the last rank to the first."""
        for step in range(len(outcomes[0].losses)):
            for rank in reversed(range(self.ranks)):
                self._require_gradients(outcomes[rank], step, rank, suspects(rank) if step == 0 else [])
            self._require_loss(outcomes, step)

    def _require_gradients(self, outcome: Outcome, step: int, rank: int, suspects: list[Suspect]) -> None:
        only_last = Suspect(
            flat(self.of(self.last_alone[step], rank)),
            "gradients of the step before are gone: a step adds to them, and the caller decides when to begin anew",
        )
        require_gradients(
            outcome.gradients[step],
            self.of(self.gradients[step], rank),
            f"rank {rank}" + " after a second step" * step,
            f"rank {rank} has no gradients: its backward was not done",
            [*suspects, *([only_last] if step else [])],
        )

    def _require_loss(self, outcomes: list[Outcome], step: int) -> None:
        found = outcomes[-1].losses[step]
        if found is None:
            raise Wrong(f"rank {self.ranks - 1} is the last and returns no loss")
        found = found if isinstance(found, torch.Tensor) else torch.tensor(found, dtype=torch.float64)
        both = sum(self.losses[: step + 1])
        suspects = [Suspect(torch.as_tensor(both), "the loss of the step before is in it: begin with 0 in every step")]
        suspects += [
            Suspect(
                self.losses[step] * self.microbatches,
                "the losses of the micro-batches are added up and not divided by their number",
            ),
            Suspect(self._last_microbatch(step), "that is the loss of the last micro-batch alone"),
        ]
        require_equal(found, self.losses[step], f"the loss that rank {self.ranks - 1} returns", suspects)

    def _last_microbatch(self, step: int) -> torch.Tensor:
        if step:
            return torch.empty(0)
        inputs, targets = (tensor.tensor_split(self.microbatches)[-1] for tensor in make_batch(self.samples, seed=0))
        return mean_loss(nn.Sequential(*make_layers(self.ranks + 1))(inputs), targets).detach()


def begun_with(truth: Truth, rank: int, what: str) -> torch.Tensor:
    """A rank's gradients if its backward had begun with ones, or with the activation itself."""
    own = share(truth.ranks + 1, rank, truth.ranks)

    def start(model: nn.Sequential, inputs: torch.Tensor, _: torch.Tensor) -> None:
        outputs = model[: own.stop](inputs)
        outputs.backward(torch.ones_like(outputs) if what == "ones" else outputs.detach())

    return flat(truth.of(truth.of_first_step(start), rank))
