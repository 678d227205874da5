"""Top-k with error feedback: what is chosen, what travels, what is kept, and the same bits on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from microparallel.errors import Mismatch
from microparallel.learn.exam import Exam
from microparallel.learn.graders import _fewer_bytes as fewer
from microparallel.learn.graders._common import require_all_waited
from microparallel.learn.log import Called, Row, calls
from microparallel.learn.requirements import first_difference, require_equal, require_like, require_tensor
from microparallel.learn.verdict import Wrong
from microparallel.program import Bucket
from microparallel.program import ops as o

_ALLOWED = ("all_gather",)
_SHAPES = [(4, 5), (7,), (4, 5)]  # two of one shape: each has a residual of its own
_STEPS = 5


@dataclass(frozen=True)
class Plan:
    """Which gradients the ranks have, and how many of them they send."""

    ranks: int
    share: float
    spoiled: tuple[tuple[int, int, float], ...] = ()  # steps and ranks whose gradients have a number that is not finite


_FEW = Plan(ranks=2, share=0.15)  # of seven numbers one is sent, since 0.15 · 7 is less than two
_MANY = Plan(ranks=3, share=0.6)
_SPOILED = Plan(ranks=2, share=0.3, spoiled=((1, 1, float("nan")), (3, 0, float("inf"))))


@dataclass
class Did:
    """What came of all steps on one rank."""

    averages: list[torch.Tensor] = field(default_factory=list)  # a row of all parameters' gradients, for each step
    begins: list[list[int]] = field(default_factory=list)  # for each step and parameter, where in the row it begins


def check(exam: Exam) -> None:
    """The choice; the averages; what travels; the same bits; gradients that are not finite."""
    with exam.step("the k largest in magnitude, with their places"):
        exam.run(_choose, 1, allowed=())
    with exam.step("what is not sent now is sent later: five steps as in one process") as notes:
        found = exam.run(_average, 2, _FEW, allowed=_ALLOWED)
        rows = exam.rows
        _require_averages(found, _FEW)
        notes.append(_telescopes(_FEW))
    with exam.step("k values and k places a rank; every rank makes the same calls") as notes:
        sent = _require_calls(found, rows, _FEW)
        numbers = sum(map(fewer.numbers, _SHAPES))
        notes.append(f"a rank sends {sent} bytes of {8 * numbers} in a step, to each other rank")
    with exam.step("three ranks that choose the same places: the same bits on every rank"):
        found = exam.run(_average, 3, _MANY, allowed=_ALLOWED)
        _require_averages(found, _MANY)
        fewer.require_same_bits([did.averages for did in found], _ORDER)
    with exam.step("a gradient with inf or nan is left out, and does not stay"):
        _require_averages(exam.run(_average, 2, _SPOILED, allowed=_ALLOWED), _SPOILED)
    with exam.step("everything is sent, and then it is an average; and a world of one"):
        for plan in (Plan(ranks=2, share=1.0), Plan(ranks=1, share=0.3)):
            _require_averages(exam.run(_average, plan.ranks, plan, allowed=_ALLOWED), plan)


_ORDER = (
    "add in the order of ranks, 0 first, on every rank. Another order rounds otherwise, and after many steps the ranks "
    "have other weights"
)


# ── what the learner's ranks do ─────────────────────────────────────────────────────────────────────────────────────


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in _SHAPES]


def _choose(learner: Any, comms: Any) -> None:
    parameters = _parameters()
    topk = learner.TopKFeedback(parameters, comms, 0.3)
    row = torch.tensor([0.5, -4.0, 3.0, 0.0, -2.0, 1.0, 2.5, -0.1, 0.2, 1.5], dtype=torch.float64)
    given = row.clone()
    found = topk.chosen(row)
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(f"chosen should return two tensors, values and places, and returns {found!r:.80}")
    values, places = (require_tensor(one, "each of the two that chosen returns") for one in found)
    require_like(values, values.new_empty(3, dtype=torch.float64), "the values that chosen returns")
    words = f"of {given.tolist()} the 3 largest in magnitude are -4, 3, 2.5"
    if torch.equal(values.sort().values, given.sort().values[-3:]):
        raise Wrong(f"the largest by value are chosen, and not by magnitude: {words}. A large negative number matters")
    if torch.equal(values.sort().values, given.abs().sort().values[-3:]):
        raise Wrong(f"the magnitudes are sent instead of the numbers: their signs are lost. {words}")
    if torch.equal(values.abs().sort().values, given.abs().sort().values[:3]):
        raise Wrong(f"the smallest are chosen: {words}")
    require_equal(values.sort().values, torch.tensor([-4.0, 2.5, 3.0], dtype=torch.float64), "what is chosen, sorted,")
    if places.is_floating_point() or not torch.equal(given[places.reshape(-1).long()], values.reshape(-1)):
        raise Wrong(f"chosen returns the places {places.tolist()} for the values {values.tolist()}: {words}")
    if not torch.equal(row, given):
        raise Wrong("chosen changes the tensor that it is given: take what was sent out of the residual in average")


def _gradient(plan: Plan, step: int, rank: int, number: int) -> torch.Tensor:
    """Some large numbers and many small ones; the same places are large on all ranks, in some parameters."""
    shape = _SHAPES[number]
    own = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    shared = torch.Generator().manual_seed(number)
    size = torch.randn(shape, generator=shared, dtype=torch.float64).exp()
    gradient = torch.randn(shape, generator=own, dtype=torch.float64) * size + 0.3
    for at, who, value in plan.spoiled:
        if (at, who) == (step, rank):
            gradient.view(-1)[2] = value
    return gradient


def _average(learner: Any, comms: Any, plan: Plan) -> Did:
    parameters, did = _parameters(), Did()
    with _about_gathers():
        topk = learner.TopKFeedback(parameters, comms, plan.share)
        for step in range(_STEPS):
            begins, row = [], []
            for number, parameter in enumerate(parameters):
                begins.append(len(comms.row))
                parameter.grad = _gradient(plan, step, comms.rank, number)
                topk.average(parameter)
                _require_a_call(comms, begins[-1], step)
                what = f"step {step + 1}, rank {comms.rank}: parameter.grad after average"
                row.append(require_like(parameter.grad, parameter.detach(), what).detach().reshape(-1).clone())
            did.begins.append([*begins, len(comms.row)])
            did.averages.append(torch.cat(row))
        require_all_waited(comms)
    return did


def _require_a_call(comms: Any, begins: int, step: int) -> None:
    if len(comms.row) == begins:
        raise Wrong(
            f"step {step + 1}: rank {comms.rank} makes no call. The others gather all the same: its next call, for "
            "another parameter, would meet this one of theirs. Every rank makes every call, even with nothing to add"
        )


@contextmanager
def _about_gathers() -> Iterator[None]:
    try:
        yield
    except Mismatch as error:
        raise Wrong(
            f"{error}: every rank gathers the same number of values, and of places; k is the same on all ranks, "
            "whatever their gradients are"
        ) from None


# ── what one process does, and what mistakes do ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Behaviour:
    """How gradients are averaged; without arguments, in the right way."""

    feedback: Literal["yes", "no", "never reduced", "reduced by the average"] = "yes"
    chosen: Literal["magnitude", "value"] = "magnitude"
    values: Literal["together", "the gradient's"] = "together"
    places: Literal["sent", "own"] = "sent"
    divided: int = 1
    own_only: bool = False
    combined: Literal["added", "replaced"] = "added"
    not_finite: Literal["left out", "kept", "sent", "emptied"] = "left out"
    residuals: Literal["own", "by shape", "one"] = "own"


def _simulated(plan: Plan, how: Behaviour) -> list[Did]:
    """Average in this process."""
    dids = [Did() for _ in range(plan.ranks)]
    residuals: dict[tuple[int, object], torch.Tensor] = {}
    for step in range(_STEPS):
        parts: list[list[torch.Tensor]] = [[] for _ in range(plan.ranks)]
        for number, shape in enumerate(_SHAPES):
            key = {"own": number, "by shape": shape, "one": 0}[how.residuals]
            sent = []
            for rank in range(plan.ranks):
                gradient = _gradient(plan, step, rank, number).reshape(-1)
                zeros = torch.zeros_like(gradient)
                residual = residuals.get((rank, key), zeros)
                residual = residual if residual.shape == zeros.shape else zeros
                sent.append(_sent(gradient, residual.clone(), plan.share, how))
            averages = [_added(sent, rank, len(gradient), how) for rank in range(plan.ranks)]
            for rank, (values, places, together) in enumerate(sent):
                residuals[rank, key] = _kept(together, values, places, averages[rank], how)
                parts[rank].append(averages[rank])
        for rank, did in enumerate(dids):
            did.averages.append(torch.cat(parts[rank]))
    return dids


Sent = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # values, places, and what they were chosen from


def _sent(gradient: torch.Tensor, residual: torch.Tensor, share: float, how: Behaviour) -> Sent:
    finite = bool(gradient.isfinite().all())
    together = residual + gradient
    if how.feedback == "no":
        together = gradient.clone()
    if not finite and how.not_finite == "left out":
        together = residual
    elif not finite and how.not_finite == "emptied":
        together = (residual + gradient).nan_to_num(0.0, 0.0, 0.0)
    k = max(1, int(share * len(gradient)))
    key = together.abs() if how.chosen == "magnitude" else together
    places = key.topk(k).indices
    values = (gradient if how.values == "the gradient's" else together)[places]
    return values, places, together


def _added(sent: Sequence[Sent], rank: int, size: int, how: Behaviour) -> torch.Tensor:
    total = torch.zeros(size, dtype=torch.float64)
    for other, (values, places, _) in enumerate(sent):
        if how.own_only and other != rank:
            continue
        at = sent[rank][1] if how.places == "own" else places
        if how.combined == "added":
            total.index_add_(0, at, values)
        else:
            total[at] = values
    total /= len(sent) ** how.divided
    return total


def _kept(
    together: torch.Tensor, values: torch.Tensor, places: torch.Tensor, average: torch.Tensor, how: Behaviour
) -> torch.Tensor:
    kept = together.clone()
    if how.feedback == "yes":
        kept[places] -= values
    elif how.feedback == "reduced by the average":
        kept -= average
    return kept


_MISTAKES: dict[str, Behaviour] = {
    "there is no feedback: what was not sent is lost, and small gradients are never sent. Add the residual before "
    "you choose, and keep what was not sent": Behaviour(feedback="no"),
    "what was sent is still in the residual: it would be sent again and again. Subtract it": Behaviour(
        feedback="never reduced"
    ),
    "the average is taken out of the residual: take out what this rank has sent itself": Behaviour(
        feedback="reduced by the average"
    ),
    "the largest by value are sent, and not by magnitude: large negative numbers wait for ever": Behaviour(
        chosen="value"
    ),
    "the values of the gradient are sent at these places, without what was kept there: send those of the sum": (
        Behaviour(values="the gradient's")
    ),
    "the other ranks' values are added at this rank's own places: each rank has other places, so they are sent, too": (
        Behaviour(places="own")
    ),
    "added up and not divided by the number of ranks": Behaviour(divided=0),
    "divided twice by the number of ranks": Behaviour(divided=2),
    "only what this rank has sent is in it: add what all ranks have sent": Behaviour(own_only=True),
    "where two ranks have sent the same place, one replaces the other: add them (index_add_)": Behaviour(
        combined="replaced"
    ),
    "parameters of the same shape share a residual: each parameter has its own": Behaviour(residuals="by shape"),
    "all parameters share a residual: each parameter has its own": Behaviour(residuals="one"),
    "a number that is not finite (inf or nan) was sent: it is in the average of all ranks, and in the residual for "
    "ever. Leave out a gradient that has one": Behaviour(not_finite="kept"),
    "only the numbers that are not finite are left out: leave out the whole gradient, its other numbers are as wrong": (
        Behaviour(not_finite="emptied")
    ),
}


def _require_averages(found: Sequence[Did], plan: Plan) -> None:
    right = _simulated(plan, Behaviour())
    for step, rank in itertools.product(range(_STEPS), range(plan.ranks)):
        if not _same(found[rank], right[rank], step):
            what = f"{plan.ranks} ranks, share {plan.share:g}, step {step + 1}: the row of rank {rank}'s averages"
            place = first_difference(found[rank].averages[step], right[rank].averages[step])
            raise Wrong(f"{_explanation(found, plan, step)}\n  {what}{place}")


def _explanation(found: Sequence[Did], plan: Plan, step: int) -> str:
    guesses = {words: _simulated(plan, how) for words, how in _MISTAKES.items()}
    return fewer.explanation(found, guesses, _same, _STEPS, step, "the averages are not those of one process")


def _same(found: Did, right: Did, step: int) -> bool:
    return torch.allclose(found.averages[step], right.averages[step], rtol=1e-9, atol=1e-9, equal_nan=True)


def _telescopes(plan: Plan) -> str:
    """How much of all gradients has arrived after the last step, in words."""
    right = _simulated(plan, Behaviour())[0]
    without = _simulated(plan, Behaviour(feedback="no"))[0]
    gradients = torch.stack([_row(plan, step) for step in range(_STEPS)]).sum(0)
    arrived = [torch.stack(one.averages).sum(0) for one in (right, without)]
    missing, lost = ((gradients - one).norm() / gradients.norm() for one in arrived)
    return f"{missing:.0%} of all gradients are still to come; without feedback {lost:.0%} would be lost"


def _row(plan: Plan, step: int) -> torch.Tensor:
    own = [
        torch.cat([_gradient(plan, step, rank, number).reshape(-1) for number in range(len(_SHAPES))])
        for rank in range(plan.ranks)
    ]
    return torch.stack(own).mean(0)


# ── what travels ────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_calls(found: Sequence[Did], rows: Sequence[Row], plan: Plan) -> int:
    """Refuse other calls than a gather of k values and one of k places; returns the bytes of a rank's step."""
    for step in range(_STEPS):
        ops: list[list[o.Op]] = []
        for rank, (did, row) in enumerate(zip(found, rows, strict=True)):
            made = [calls(row[start:stop]) for start, stop in itertools.pairwise(did.begins[step])]
            for gathers, shape in zip(made, _SHAPES, strict=True):
                _require_few(rank, gathers, shape, plan.share)
            # What is gathered for a parameter is its sum over ranks, made on each of them.
            sums = [o.AllReduce(Bucket(number), "dp") for number, gathers in enumerate(made) if gathers]
            ops.append([*sums, o.OptimizerStep()])
        fewer.require_step(ops, len(_SHAPES), what=f"step {step + 1}")
    return sum(call.bytes for call in calls(rows[0][: found[0].begins[0][-1]]))


def _require_few(rank: int, gathers: Sequence[Called], shape: tuple[int, ...], share: float) -> None:
    size = fewer.numbers(shape)
    k = max(1, int(share * size))
    sent = [0 if call.content is None else call.content.numel() for call in gathers]
    if not gathers:
        raise Wrong(f"rank {rank} gathers nothing for a gradient of {size} numbers")
    for call, numbers in zip(gathers, sent, strict=True):
        if numbers >= size and k < size:
            raise Wrong(
                f"rank {rank} gathers {numbers} numbers in line {call.line}, where the gradient has {size}: that is "
                f"the whole of it, with zeros. Send the {k} values and their {k} places"
            )
    if sum(sent) > 2 * k:
        raise Wrong(
            f"rank {rank} gathers {sum(sent)} numbers for a gradient of {size}: {k} values and {k} places are enough"
        )
