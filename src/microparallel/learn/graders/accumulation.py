"""Accumulation: one set of all-reduces a step, in the last backward; right weights; the same after an exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    batch,
    combined,
    gradients,
    in_one_process,
    mean_loss,
    names,
    require_no_gradient_lost,
    small_model,
)
from microparallel.learn.graders._during_backward import Spared
from microparallel.learn.log import Row, calls
from microparallel.learn.requirements import flat, listed, require_equal, require_number, suspects
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.observe import Activity
from microparallel.program.ops import Forward, Join

_ALLOWED = ("all_reduce",)
_SIZES = (4, 4, 2)  # of the micro-batches


def check(exam: Exam) -> None:
    """no_sync alone; a step; two steps; an exception; a layer that only the first micro-batch uses."""
    with exam.step("within no_sync nothing is sent, however the block ends"):
        exam.run(_quiet, 2, allowed=_ALLOWED)
    with exam.step("the gradients leave once, while the last backward computes") as notes:
        for sizes in (_SIZES, (5,)):
            found = exam.run(_steps, 2, "plain", [sizes, sizes], allowed=_ALLOWED)
            for rank, steps in enumerate(found):
                _require_once(steps[0], rank, sizes)
        notes.append(f"{len(calls(found[0][0].row))} all-reduces for {len(names(small_model()))} gradients")
    with exam.step("they are those of one batch, also when the last micro-batch is smaller"):
        for sizes in (_SIZES, (5,)):
            _require_gradients(exam, "plain", 2, [sizes])
    with exam.step("the second step is as good as the first"):
        _require_gradients(exam, "plain", 2, [_SIZES, (3, 3)])
    with exam.step("so is the one after a micro-batch that failed"):
        _require_gradients(exam, "plain", 2, [_SIZES, _SIZES], fails=True)
    with exam.step("three ranks, and a layer that only the first micro-batch uses"):
        _require_gradients(exam, "spare", 3, [_SIZES, _SIZES])


# ── on the ranks ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Fails(Exception):
    """What a micro-batch raises here."""


@dataclass
class _Step:
    """What one rank did in a step, the gradients that it left, and the loss that it returned."""

    row: Row
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    loss: float = 0.0

    @property
    def begun(self) -> list[int | None]:
        """For each all-reduce, in which micro-batch it began; None if that was in finish or after it."""
        places: list[int | None] = []
        now: int | None = None
        for moment in self.row:
            if isinstance(moment.op, Forward):
                now = moment.op.microbatch
            elif isinstance(moment.op, Join):
                now = None
            elif moment.phase == "begins":
                places.append(now)
        return places


def _make_model(kind: str) -> nn.Module:
    return Spared() if kind == "spare" else small_model()


def _micro_batches(rank: int, step: int, sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = batch(sum(sizes), 100 * step + rank)
    return list(zip(torch.split(inputs, list(sizes)), torch.split(targets, list(sizes)), strict=True))


class _Watched:
    """A model with the learner's hooks, which counts the micro-batches that have begun."""

    def __init__(self, learner: Any, comms: Any, kind: str) -> None:
        self.learner, self.comms = learner, comms
        self.model = _make_model(kind)
        self.hooks = learner.AccumulatingHooks(self.model, comms)
        self.micro_batch = -1
        self.model.register_forward_pre_hook(self._begins)
        if not callable(getattr(self.hooks, "finish", None)):
            raise Wrong("the hooks have no finish(): was it renamed or removed?")
        self._finish, self.hooks.finish = self.hooks.finish, self._finishes

    def _begins(self, *_: object) -> None:
        self.micro_batch += 1
        self.comms.log.begins(Activity(Forward(0, self.micro_batch)))
        if isinstance(self.model, Spared):
            self.model.used = self.micro_batch == 0

    def _finishes(self) -> None:
        self.comms.log.begins(Activity(Join()))
        self._finish()

    def step(self, number: int, sizes: Sequence[int], loss_fn: Callable[..., torch.Tensor] = mean_loss) -> _Step:
        """Let the learner accumulate a step's micro-batches."""
        self.model.zero_grad()
        self.micro_batch, begin, rank = -1, len(self.comms.row), self.comms.rank
        try:
            loss = self.learner.accumulate(self.model, self.hooks, _micro_batches(rank, number, sizes), loss_fn)
        except NotAllowed:
            raise
        except Wrong:  # perhaps when the all-reduces began explains it better
            if not isinstance(self.model, Spared):
                _require_once(_Step(self.comms.row[begin:]), rank, sizes)
            raise
        return _Step(self.comms.row[begin:], gradients(self.model), require_number(loss, "accumulate's loss"))


def _steps(learner: Any, comms: Any, kind: str, steps: Sequence[Sequence[int]], fails: bool = False) -> list[_Step]:
    """Several steps; with `fails`, a micro-batch within no_sync fails before the last of them, and its step is left."""
    watched = _Watched(learner, comms, kind)
    found = []
    for number, sizes in enumerate(steps):
        if fails and number == len(steps) - 1:
            _fail(watched, sizes)
        found.append(watched.step(number, sizes))
    return found


def _fail(watched: _Watched, sizes: Sequence[int]) -> None:
    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if watched.micro_batch == 1:
            raise _Fails("this micro-batch fails, as the check wants it")
        return mean_loss(outputs, targets)

    try:
        watched.step(99, sizes, loss_fn)
    except _Fails:
        return
    raise Wrong("a micro-batch raised an exception, and accumulate returned as if nothing had happened")


def _quiet(learner: Any, comms: Any) -> None:
    """Backwards within no_sync, and within two of them, from which one leaves in different ways."""
    watched = _Watched(learner, comms, "plain")
    hooks, sent = watched.hooks, f"rank {comms.rank}: within no_sync a backward began an all-reduce"

    def require_quiet(why: str) -> None:
        mean_loss(watched.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if calls(comms.row):
            raise Wrong(sent + why)

    [(inputs, targets)] = _micro_batches(comms.rank, 0, (4,))
    with hooks.no_sync():
        require_quiet(": on_gradient is to do nothing there")
        with hooks.no_sync():
            pass
        require_quiet(
            ", after another no_sync inside it had ended: leave it as it was *before* the block, and that was quiet"
        )
    try:
        with hooks.no_sync():
            raise _Fails
    except _Fails:
        pass
    else:
        raise Wrong("no_sync swallows an exception of its block: the caller must see it")
    mean_loss(watched.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    if not calls(comms.row):
        raise Wrong(
            f"rank {comms.rank}: after an exception within no_sync the hooks stay quiet, and nothing is averaged any "
            "more. What follows `yield` is then not reached, unless it stands in `finally:`"
        )
    hooks.finish()


# ── when they leave ─────────────────────────────────────────────────────────────────────────────────────────────────


def _require_once(one: _Step, rank: int, sizes: Sequence[int]) -> None:
    last, total = len(sizes) - 1, len(names(small_model()))
    early = [place for place in one.begun if place is not None and place < last]
    if len(early) == last * total and len(one.begun) > total:
        raise Wrong(
            f"rank {rank} began {len(one.begun)} all-reduces for {total} gradients: every micro-batch's backward "
            "sends them. Compute all micro-batches but the last within no_sync()"
        )
    if early:
        raise Wrong(
            f"rank {rank} begins all-reduces in micro-batch {early[0]} of {len(sizes)}: what later ones add is then "
            "not in the average. Only the *last* one may stand outside of no_sync()"
        )
    if len(one.begun) > total:
        raise Wrong(f"rank {rank} began {len(one.begun)} all-reduces for {total} gradients: each leaves once")
    if one.begun and one.begun[0] is None:
        raise Wrong(
            f"rank {rank}'s first all-reduce begins in finish(), after the last backward is over: then nothing travels "
            "while it computes. The last micro-batch stands outside of no_sync()"
        )
    waiting = [call.line for call in calls(one.row) if not call.asynchronous]
    if waiting:
        raise Wrong(
            f"line {waiting[0]} waits for its all-reduce, and so does backward: start it with async_op=True, and "
            "wait in finish()"
        )
    unfinished = [call.line for call in calls(one.row) if not call.ended]
    if unfinished:
        raise Wrong(
            f"rank {rank}: {len(unfinished)} all-reduces (begun in line {unfinished[0]}) were never waited "
            "for: accumulate ends with hooks.finish(), which waits for every request"
        )


# ── what comes out ──────────────────────────────────────────────────────────────────────────────────────────────────


def _own(kind: str, rank: int, step: int, sizes: Sequence[int]) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The loss and the gradients of each micro-batch of a rank."""
    model = _make_model(kind)
    losses, found = [], []
    for number, one in enumerate(_micro_batches(rank, step, sizes)):
        if isinstance(model, Spared):
            model.used = number == 0
        loss, own = in_one_process(model, *one)
        losses.append(loss.item())
        found.append(own)
    return losses, found


def _require_gradients(
    exam: Exam, kind: str, ranks: int, steps: Sequence[Sequence[int]], *, fails: bool = False
) -> None:
    found = exam.run(_steps, ranks, kind, steps, fails, allowed=_ALLOWED)
    labels = names(_make_model(kind))
    for number, sizes in enumerate(steps):
        shares = [size / sum(sizes) for size in sizes]
        own = [_own(kind, rank, number, sizes) for rank in range(ranks)]

        def averaged(factors: Sequence[float], over: float = ranks) -> list[torch.Tensor]:
            return combined([combined(mine, factors) for _, mine in own], [1 / over] * ranks)  # noqa: B023

        last = [float(place == len(sizes) - 1) for place in range(len(sizes))]
        for rank, mine in enumerate(found):
            one, where = mine[number], f"step {number + 1}, micro-batches of {listed(sizes)}: rank {rank}'s gradient"
            if fails and number and not one.begun:
                raise Wrong(
                    f"after a micro-batch has failed, rank {rank} sends nothing in the next step: the hooks are still "
                    "quiet. `finally:` in no_sync is reached however its block ends"
                )
            alone = combined(own[rank][1], shares)
            require_no_gradient_lost(one.gradients, labels, f"rank {rank}")
            not_sent = [
                label
                for label, gradient, single, right in zip(labels, one.gradients, alone, averaged(shares), strict=True)
                if torch.equal(_rounded(gradient), _rounded(single))
                and not torch.equal(_rounded(single), _rounded(right))
            ]
            if not_sent and len(not_sent) < len(labels) and number:
                raise Wrong(
                    f"rank {rank}: in step 1 {', '.join(not_sent)} was averaged, and in step {number + 1} it was not: "
                    "finish() must forget the requests that it has waited for, or they count for the next step"
                )
            if not_sent and len(not_sent) < len(labels):
                raise Wrong(
                    f"rank {rank}: {', '.join(not_sent)} still {'has' if len(not_sent) == 1 else 'have'} this rank's "
                    "own gradient. The last micro-batch did not use that layer, so its hook did not fire outside of "
                    "no_sync: finish() must send what has added up before"
                )
            mistakes = {
                f"rank {rank} still holds its own gradient: nothing was averaged": alone,
                "these are the gradients of the last micro-batch alone: what the others had added is lost": averaged(
                    [share * place for share, place in zip(shares, last, strict=True)]
                ),
                "the gradients of all micro-batches were added as they are: each counts by its part of the samples, so "
                "multiply its loss by that before backward": averaged([1.0] * len(sizes)),
                f"each micro-batch counts 1/{len(sizes)}, but one is smaller than the others: weight each loss by its "
                "samples": averaged([1 / len(sizes)] * len(sizes)),
                "this is the sum over the samples: divide by how many this rank has": averaged([*map(float, sizes)]),
                'this is the sum over the ranks: divide by the world size, or use op="mean"': averaged(shares, 1.0),
                "only the last micro-batch was averaged over the ranks, and this rank's own gradients of the others "
                "were added": combined(
                    [averaged([s * p for s, p in zip(shares, last, strict=True)]), _but_last(own[rank][1], shares)],
                    [1.0, 1.0],
                ),
            }
            require_equal(flat(one.gradients), flat(averaged(shares)), where, suspects(mistakes))
            right = sum(loss * share for loss, share in zip(own[rank][0], shares, strict=True))
            _require_loss(one.loss, right, own[rank][0], sizes, rank)


def _but_last(own: Sequence[Sequence[torch.Tensor]], shares: Sequence[float]) -> list[torch.Tensor]:
    return combined(own, [*shares[:-1], 0.0])


def _rounded(tensor: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if tensor is None else tensor.float()


def _require_loss(found: float, right: float, own: Sequence[float], sizes: Sequence[int], rank: int) -> None:
    what = f"micro-batches of {listed(sizes)}: rank {rank}'s loss"
    mistakes = {
        "this is the loss of the last micro-batch: add up all of them, each by its part of the samples": own[-1],
        "the losses were added as they are: each counts by its part of the samples": sum(own),
        "the losses were averaged as if all micro-batches had equally many samples": sum(own) / len(own),
    }
    known = suspects({words: [torch.tensor([value]).double()] for words, value in mistakes.items()})
    require_equal(torch.tensor([found]).double(), torch.tensor([right]).double(), what, known, tolerance=1e-6)
