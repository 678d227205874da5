"""A trainer from an empty file: its samples, its numbers beside one process's, and what is left after kills.

The order of the samples is the learner's own. So one process is given the batches that the ranks have drawn in the
undisturbed run, and what it finds is what is right.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._history import History, Rows, Training, require_each_sample, require_each_step
from microparallel.learn.graders._killing import INPUTS, SAMPLES, Kill, Log, Plan, Row, Watch, table
from microparallel.learn.requirements import Suspect, flat, require_equal
from microparallel.learn.verdict import Wrong

_RANKS, _BATCH, _STEPS, _SAVE_EVERY = 3, 10, 30, 4
_AN_EPOCH = -(-SAMPLES // _BATCH)  # steps
_TOLERANCE = 1e-12
_BETWEEN_SAVES = (
    Kill(0, "draw", 2),
    Kill(1, "draw", 7),
    Kill(None, "backward", 6),
    Kill(2, "backward", 3),
    Kill(None, "report", 5),
    Kill(1, "report", 7),
)


@dataclass(frozen=True)
class Job:
    """What a learner's `train` is given; the exercise's contract says what each is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    data: Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
    samples: int
    batch: int
    report: Callable[[int, float], None]
    folder: Path
    steps: int
    save_every: int


def check(exam: Exam) -> None:
    """The undisturbed run beside one process; kills between saves and in a save; a power cut, and the end."""
    truth = _Truth()
    training = Training(_attempt, _RANKS, _STEPS, _SAVE_EVERY, truth.require_right, truth.explanation, waits=True)
    with tempfile.TemporaryDirectory(prefix="trainer-") as name:
        history = History(exam, Path(name), training)
        with exam.step("three ranks: each sample once an epoch, and losses and weights of one process"):
            history.learn_what_is_right()
        with exam.step("two ranks, and one"):
            for ranks in (2, 1):
                other = History(exam, Path(name), replace(training, ranks=ranks))
                _Truth().require_right(*other.undisturbed(f"{ranks} ranks", _SAVE_EVERY))
        with exam.step("saving changes nothing"):
            history.learn_what_a_save_does()
        history.survive(
            _BETWEEN_SAVES,
            Kill(None, "draw", _SAVE_EVERY + 1),
            between="one rank is killed, or all are, between two saves: the same samples and losses",
            saving="killed while it saves: the checkpoint is complete, or the one before is there",
        )


def _attempt(load: Callable[[], Any], comms: Any, plan: Plan) -> list[torch.Tensor]:
    """Call the learner's `train` on this rank; returns the model's weights."""
    watch = Watch(comms, plan)
    learner = load()
    model = _model(comms.rank)
    optimizer = _optimizer(model)
    folder = Path(plan.folder)
    model.register_forward_pre_hook(lambda _, inputs: _require_own(watch, comms.rank, inputs[0]))
    job = Job(model, optimizer, _loss, watch.data, SAMPLES, _BATCH, watch.report, folder, plan.steps, plan.save_every)
    learner.train(comms, job)
    watch.ends()
    return _weights(model)


def _require_own(watch: Watch, rank: int, inputs: torch.Tensor) -> None:
    if len(inputs) > watch.asked_for:
        raise Wrong(
            f"rank {rank} computes {len(inputs)} samples, and its share of this batch is {watch.asked_for}: the ranks "
            "share the work, and what they tell each other are gradients"
        )


def _model(rank: int) -> nn.Module:
    """A rank's model, as it is at first: each has other weights."""
    model = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    generator = torch.Generator().manual_seed(rank)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ── one process ─────────────────────────────────────────────────────────────────────────────────────────────────────


Shares = Sequence[tuple[int, ...]]  # of one batch: the samples of each rank
Weigh = Callable[[Shares, int], float]  # how much of a rank's mean loss is in the sum


class _OneProcess:
    """The same training in one process; or with a mistake, in how the ranks' losses are weighted."""

    def __init__(self, weigh: Weigh, rank: int = 0, kept: float = 0.0) -> None:
        self.model = _model(rank)
        self.optimizer = _optimizer(self.model)
        self._weigh = weigh
        self._kept = (
            kept  # by what a step multiplies the gradients of the step before, to add its own: 0 lets go of them
        )

    def step(self, shares: Shares) -> float:
        """Do a step with these samples; returns its loss."""
        inputs, targets = table()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= self._kept
        total = torch.zeros((), dtype=torch.float64)
        for rank, mine in enumerate(shares):
            if mine:
                chosen = [*mine]
                total = total + self._weigh(shares, rank) * _loss(self.model(inputs[chosen]), targets[chosen])
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return total.item()

    def state(self) -> tuple[Any, Any]:
        """Copies of the weights and of the optimizer's state."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


def _by_samples(shares: Shares, rank: int) -> float:
    return len(shares[rank]) / sum(map(len, shares))


def _alike(shares: Shares, rank: int) -> float:  # noqa: ARG001
    return 1 / len(shares)


def _added(shares: Shares, rank: int) -> float:  # noqa: ARG001
    return 1.0


_MISTAKES: dict[str, Weigh] = {
    "every rank counts the same, but their shares have different numbers of samples: weight each rank's gradients (and "
    "its loss) by its share of the batch": _alike,
    "the ranks' gradients are added up, and each is that of a mean: the sum is too large. Weight each by its rank's "
    "share of the batch": _added,
}


class _Truth:
    """What one process finds with the batches of the undisturbed run, and its state after each step."""

    def __init__(self) -> None:
        self._batches: list[Shares] = []
        self._losses: list[float] = []
        self._states: list[tuple[Any, Any]] = []

    # ── an undisturbed run ──────────────────────────────────────────────────────────────────────────────────────

    def require_right(self, logs: Sequence[Log], weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Refuse samples, weights and losses of an undisturbed run that are not right."""
        require_each_step(logs, _STEPS)
        _require_own_samples(logs)
        require_each_sample(logs, _STEPS, _AN_EPOCH)
        self._batches = [[log.rows[step].samples for log in logs] for step in range(_STEPS)]
        _require_shares(self._batches)
        _require_other_orders(self._batches)
        one = _OneProcess(_by_samples)
        self._states = [one.state()]
        for shares in self._batches:
            self._losses.append(one.step(shares))
            self._states.append(one.state())
        self._require_weights(weights, _weights(one.model), logs)
        self._require_losses(logs)

    def _require_weights(
        self, found: Sequence[Sequence[torch.Tensor]], right: Sequence[torch.Tensor], logs: Sequence[Log]
    ) -> None:
        if self._gradients_add_up(logs):
            raise Wrong(
                "the gradients of all steps so far are added up: torch adds to .grad, so let go of a step's gradients "
                "before the next backward (zero_grad)"
            )
        apart = [flat(mine) - flat(found[0]) for mine in found]
        for rank in range(len(found)):
            begun_apart = flat(_weights(_model(rank))) - flat(_weights(_model(0)))
            if rank and torch.allclose(apart[rank], begun_apart, rtol=0, atol=1e-9):
                raise Wrong(
                    f"rank {rank} has begun with its own weights, and stays as far from rank 0 as it was: the weights "
                    "of rank 0 are those to begin with (comms.broadcast)"
                )
        suspects = []
        for words, weigh in _MISTAKES.items():
            suspects.append(Suspect(flat(self._trained(weigh, 0)), words))
        for rank, mine in enumerate(found):
            if _in_float32(flat(mine), flat(right)):
                raise Wrong(f"without any kill, rank {rank}'s weights are right {_FLOAT32}")
            alone = Suspect(
                flat(self._trained(lambda _, other, rank=rank: float(other == rank), 0)),  # type: ignore[misc]
                f"rank {rank} has learned from its own samples alone: average the gradients of all ranks in each step",
            )
            require_equal(
                flat(mine),
                flat(right),
                f"without any kill, rank {rank}'s row of weights",
                [*suspects, alone],
                _TOLERANCE,
            )
        for rank, difference in enumerate(apart):
            if bool(difference.any()):
                raise Wrong(
                    f"without any kill, the weights of rank {rank} and rank 0 differ in their last digits: all ranks "
                    "must take the same step, with the same bits. Let every rank use what one all-reduce has left"
                )

    def _gradients_add_up(self, logs: Sequence[Log]) -> bool:
        """Whether the losses are those of ranks that never let go of a gradient; a sum takes what is there p times."""
        reported = [log.rows[step].loss for log in logs for step in range(_AN_EPOCH)]
        for kept in {1, len(logs)}:
            one = _OneProcess(_by_samples, kept=kept)
            losses = [one.step(shares) for shares in self._batches[:_AN_EPOCH]] * len(logs)
            if all(math.isclose(mine, theirs, rel_tol=1e-9) for mine, theirs in zip(reported, losses, strict=True)):
                return True
        return False

    def _trained(self, weigh: Weigh, rank: int) -> list[torch.Tensor]:
        one = _OneProcess(weigh, rank)
        for shares in self._batches:
            one.step(shares)
        return _weights(one.model)

    def _require_losses(self, logs: Sequence[Log]) -> None:
        for step, right in enumerate(self._losses):
            for rank, log in enumerate(logs):
                found = log.rows[step].loss
                if math.isclose(found, right, rel_tol=_TOLERANCE):
                    continue
                words = (
                    f"the weights are right, but in step {step + 1} rank {rank} reports a loss of {found:.12g}, and "
                    f"that of the whole batch is {right:.12g}"
                )
                own, part = self._own_loss(step, rank), _by_samples(self._batches[step], rank)
                if len(logs) > 1 and math.isclose(found, own, rel_tol=1e-9):
                    words += ": it is the loss of its own share"
                elif len(logs) > 1 and math.isclose(found, own * part, rel_tol=1e-9):
                    words += ": it is its own share's part of it, and all ranks' parts add up to it"
                elif math.isclose(found, right, rel_tol=1e-6):
                    words += f": it is right {_FLOAT32}"
                raise Wrong(words)

    def _own_loss(self, step: int, rank: int) -> float:
        model = _model(0)
        model.load_state_dict(self._states[step][0])
        inputs, targets = table()
        mine = [*self._batches[step][rank]]
        return _loss(model(inputs[mine]), targets[mine]).item()

    # ── after a kill ────────────────────────────────────────────────────────────────────────────────────────────

    def explanation(self, found: Rows, saved: int) -> str | None:
        """What was forgotten, if ranks that should go on from a saved step do what was found."""
        parts = ("weights", "optimizer", "order", "steps")
        for missing in itertools.chain(*(itertools.combinations(parts, number) for number in (1, 2, 3))):
            weights = 0 if "weights" in missing else saved
            optimizer = 0 if "optimizer" in missing else saved
            number = 0 if "steps" in missing else saved
            for first in (0, saved - saved % _AN_EPOCH) if "order" in missing else (saved,):
                if self._does(found, weights, optimizer, first, number):
                    return "; ".join(_FORGOTTEN[name] for name in missing)
        if self._begins_with_own_weights(found):
            return _FORGOTTEN["weights"]
        if saved and self._does(found, saved, saved, saved - 1, saved - 1):
            return (
                f"step {saved} is done twice: its update is in the weights of the checkpoint, and then it is done once "
                f"more. Go on with step {saved + 1}"
            )
        if saved and self._does(found, saved - 1, saved - 1, saved, saved):
            return (
                f"the checkpoint is that of step {saved} before optimizer.step(), and counts this step as done: its "
                "update is lost"
            )
        return None

    def _begins_with_own_weights(self, found: Rows) -> bool:
        """Whether the first loss is the one of ranks that have their first weights, each its own."""
        rows = [mine[0] for mine in found if mine]
        if len(rows) < len(found):
            return False
        inputs, targets = table()
        losses = [
            _loss(_model(rank)(inputs[[*row.samples]]), targets[[*row.samples]]).item() * len(row.samples)
            for rank, row in enumerate(rows)
        ]
        whole = sum(losses) / sum(len(row.samples) for row in rows)
        return all(math.isclose(row.loss, whole, rel_tol=1e-9) for row in rows)

    def _does(self, found: Rows, weights: int, optimizer: int, first: int, number: int) -> bool:
        """Whether these rows are what comes of such a state: weights and optimizer of these steps, and so on."""
        one = _OneProcess(_by_samples)
        one.model.load_state_dict(copy.deepcopy(self._states[weights][0]))
        one.optimizer.load_state_dict(copy.deepcopy(self._states[optimizer][1]))
        for at in range(max(map(len, found))):
            if first + at >= _STEPS:
                return False
            loss = one.step(self._batches[first + at])
            for rank, rows in enumerate(found):
                if at < len(rows) and not _is(rows[at], number + at + 1, self._batches[first + at][rank], loss):
                    return False
        return True


_FORGOTTEN = {
    "weights": "the weights are forgotten: the model begins anew. model.state_dict() belongs into the checkpoint",
    "optimizer": "the optimizer's state is forgotten: momentum begins with nothing. optimizer.state_dict() belongs "
    "into the checkpoint",
    "order": "the place in the epoch is forgotten: samples that were used are used again. Where was it?",
    "steps": "the number of steps is forgotten: it counts from 1 again",
}


_FLOAT32 = (
    "to six digits only, so somewhere there is float32, which torch.tensor(number) gives if it is not told another "
    "dtype"
)


def _in_float32(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether numbers are right but for what float32 leaves out."""
    if found.shape != right.shape or torch.allclose(found, right, rtol=_TOLERANCE, atol=_TOLERANCE):
        return False
    apart = (found - right).abs().max().item()
    return apart > 1e-9 and torch.allclose(found, right, rtol=1e-5, atol=1e-6)


def _is(row: Row, step: int, samples: Sequence[int], loss: float) -> bool:
    return row.step == step and row.samples == tuple(samples) and math.isclose(row.loss, loss, rel_tol=1e-9)


def _require_own_samples(logs: Sequence[Log]) -> None:
    if len(logs) == 1:
        return
    for step in range(_STEPS):
        first, *others = ({*log.rows[step].samples} for log in logs)
        if first and all(other == first for other in others):
            everybody = "both ranks" if len(logs) == 2 else f"all {len(logs)} ranks"
            raise Wrong(
                f"{everybody} ask for the same samples in step {step + 1}: each takes a share of the batch, and no two "
                "the same sample"
            )


def _require_shares(batches: Sequence[Shares]) -> None:
    for step, shares in enumerate(batches, 1):
        sizes = [len(mine) for mine in shares]
        left = SAMPLES - (step - 1) % _AN_EPOCH * _BATCH
        wanted = min(_BATCH, left)
        if sum(sizes) != wanted:
            why = "the last batch of an epoch has what is left" if wanted < _BATCH else "that is job.batch"
            raise Wrong(f"in step {step} the ranks use {sum(sizes)} samples together, and should use {wanted}: {why}")
        if max(sizes) - min(sizes) > 1:
            raise Wrong(f"in step {step} the ranks have {_and(sizes)} samples: shares differ by one at most")


def _and(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _require_other_orders(batches: Sequence[Shares]) -> None:
    epochs = [
        [{sample for mine in shares for sample in mine} for shares in batches[first : first + _AN_EPOCH]]
        for first in range(0, len(batches), _AN_EPOCH)
    ]
    for number, (before, after) in enumerate(itertools.pairwise(epochs), 2):
        if before == after:
            raise Wrong(
                f"epoch {number} has the same batches as the one before: shuffle anew in each epoch. All ranks must "
                "shuffle alike, so take the number of the epoch for a seed"
            )
