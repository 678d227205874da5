"""Loss scaling between ranks: the weights and the scale of one process, and one decision for all ranks.

The models compute in float64, and each parameter's gradient is rounded to float16 on its way: it overflows and vanishes
as in a float16 model, and all else is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from microparallel.errors import Mismatch
from microparallel.learn.exam import Exam, Stuck
from microparallel.learn.graders import _fewer_bytes as fewer
from microparallel.learn.graders._common import LEARNING_RATE, batch, mean_loss, names, require_all_waited, small_model
from microparallel.learn.log import Called, Row
from microparallel.learn.requirements import first_difference, flat, require_number
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Bucket, Named
from microparallel.program import ops as o

_ALLOWED = ("all_reduce", "all_reduce_mean", "all_gather")
_NAMES = names(small_model())
_SIZES = [parameter.numel() for parameter in small_model().parameters()]
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Plan:
    """What happens in each step, on each rank."""

    ranks: int
    steps: int
    size: float = 1.0  # of the loss
    overflows: tuple[tuple[int, int], ...] = ()  # steps and ranks whose loss is far too large for the scale
    spoiled: tuple[tuple[int, int, int, float], ...] = ()  # steps, ranks, parameters: one number is inf, or nan
    scale: float = 1024.0
    interval: int = 1000
    max_norm: float = 1e9


_SMALL = Plan(ranks=2, steps=3, size=1e-7, scale=65536.0, max_norm=5e-8)
_ONE_RANK = Plan(
    ranks=2,
    steps=7,
    overflows=((1, 0), (1, 1), (3, 1)),
    spoiled=((4, 0, len(_NAMES) - 1, float("inf")), (5, 1, 0, float("nan"))),
    max_norm=1.0,
)
_GROWS = Plan(ranks=2, steps=9, overflows=((5, 0),), interval=3, max_norm=0.5)


@dataclass
class Did:
    """What came of the steps on one rank; in the row, where each of them begins."""

    taken: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    changes: list[torch.Tensor] = field(default_factory=list)  # of the weights since the beginning
    begins: list[int] = field(default_factory=list)


def check(exam: Exam) -> None:
    """Small gradients; an overflow on one rank; the scale; what travels; other numbers of ranks."""
    with exam.step("gradients of 1e-7 are not lost: scaled, averaged, divided, clipped") as notes:
        _require_steps(_run(exam, _SMALL), _SMALL)
        notes.append("the weights of one process after 3 steps")
    with exam.step("an overflow on one rank: no rank takes the step, and each halves the scale once") as notes:
        found = _run(exam, _ONE_RANK)
        rows = exam.rows
        _require_steps(found, _ONE_RANK)
        notes.append(f"{found[0].taken.count(False)} of {_ONE_RANK.steps} steps left out")
    with exam.step("one decision for all ranks; the gradients are averaged before the update"):
        _require_programs(found, rows)
    with exam.step("the scale doubles after `interval` good steps in a row"):
        _require_steps(_run(exam, _GROWS), _GROWS)
    with exam.step("three ranks; and a world of one"):
        for plan in (replace(_ONE_RANK, ranks=3, overflows=((1, 0), (1, 2), (3, 2))), replace(_GROWS, ranks=1)):
            _require_steps(_run(exam, plan), plan)


# ── the model ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Rounded(torch.autograd.Function):
    """A parameter whose gradient is rounded to float16; one number of it may be spoiled."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, spoiled: float | None) -> torch.Tensor:
        """The parameter as it is."""
        ctx.spoiled = spoiled
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """What float16 leaves of the gradient."""
        rounded = gradient.half().double()
        if ctx.spoiled is not None:
            rounded.view(-1)[-1] = ctx.spoiled
        return rounded, None


def _loss(model: nn.Module, plan: Plan, step: int, rank: int) -> torch.Tensor:
    spoiled = {number: value for at, who, number, value in plan.spoiled if (at, who) == (step, rank)}
    rounded = {
        name: _Rounded.apply(parameter, spoiled.get(number))  # type: ignore[no-untyped-call]
        for number, (name, parameter) in enumerate(model.named_parameters())
    }
    inputs, targets = batch(4, 100 * step + rank)
    outputs = torch.func.functional_call(model, rounded, (inputs,))
    too_large = 1e4 if (step, rank) in plan.overflows else 1.0
    return mean_loss(outputs, targets) * plan.size * too_large


def _changes(model: nn.Module) -> torch.Tensor:
    """What has changed in the weights, in a row: some steps change them in the eighth digit only."""
    return flat(model.parameters()).detach() - flat(small_model().parameters()).detach()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=_MOMENTUM)


# ── what the learner's ranks do ─────────────────────────────────────────────────────────────────────────────────────


def _run(exam: Exam, plan: Plan) -> list[Did]:
    try:
        return exam.run(_train, plan.ranks, plan, allowed=_ALLOWED)
    except Stuck as stuck:
        raise Wrong(f"{_ALONE}\n  {stuck}") from None


_ALONE = (
    "the ranks do not make the same calls: does each decide alone whether there is an overflow? Then one leaves the "
    "step out while another waits for it in an all-reduce. First share the answer, then decide"
)


@contextmanager
def _about_calls() -> Iterator[None]:
    try:
        yield
    except Mismatch as error:
        raise Wrong(f"{_ALONE}\n  {error}") from None


def _train(learner: Any, comms: Any, plan: Plan) -> Did:
    model, did = small_model(), Did()
    optimizer = _optimizer(model)
    optimizer.register_step_pre_hook(lambda *_: comms.log.begins(Activity(o.OptimizerStep())))
    parameters = list(model.parameters())
    with _about_calls():
        scaling = learner.LossScaling(parameters, optimizer, comms, plan.scale, plan.interval)
        for step in range(plan.steps):
            did.begins.append(len(comms.row))
            taken = scaling.step(_loss(model, plan, step, comms.rank), plan.max_norm)
            if not isinstance(taken, bool):
                raise Wrong(f"step should return True or False, whether the step was taken, and returns {taken!r:.40}")
            did.taken.append(taken)
            did.scales.append(require_number(scaling.scale, "scale"))
            did.changes.append(_changes(model))
        require_all_waited(comms)
    return did


# ── what one process does, and what mistakes do ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Behaviour:
    """How the steps are taken; without arguments, in the right way."""

    scaled: bool = True
    divided: Literal["before clipping", "after clipping", "never", "twice", "by the new scale"] = "before clipping"
    averaged: Literal["mean", "sum", "no", "twice"] = "mean"
    finite: Literal["all", "not inf", "the first", "the last", "the loss"] = "all"
    decided: Literal["together", "alone", "if all overflow", "never", "together, but taken", "with zeros"] = "together"
    clipped: bool = True
    halved: Literal["once", "for each rank", "never", "quartered"] = "once"
    grows: Literal["in a row", "never", "counts on", "every step from then on", "counts overflows"] = "in a row"


def _simulated(plan: Plan, how: Behaviour) -> list[Did]:
    """Take all steps of all ranks in this process."""
    models = [small_model() for _ in range(plan.ranks)]
    optimizers, dids = [_optimizer(model) for model in models], [Did() for _ in models]
    scales, good = [plan.scale] * plan.ranks, [0] * plan.ranks
    for step in range(plan.steps):
        own, losses = [], []
        for rank, model in enumerate(models):
            scaled = _loss(model, plan, step, rank) * (scales[rank] if how.scaled else 1.0)
            own.append([one.detach() for one in torch.autograd.grad(scaled, list(model.parameters()))])
            losses.append(scaled.detach())
        looked_at = [[loss] for loss in losses] if how.finite == "the loss" else own
        bad = [not _finite(tensors, how) for tensors in looked_at]
        for rank, model in enumerate(models):
            overflow = {
                "alone": bad[rank],
                "if all overflow": all(bad),
                "never": False,
            }.get(how.decided, any(bad))
            before = scales[rank]
            _change_scale(plan, how, scales, good, rank, overflow, bad)
            divisor = scales[rank] if how.divided == "by the new scale" else before
            gradients = _combined(own, rank, how)
            if overflow and how.decided == "with zeros":
                gradients = [torch.zeros_like(one) for one in gradients]
            if not overflow or how.decided in ("with zeros", "together, but taken"):
                _update(model, optimizers[rank], gradients, divisor if how.scaled else 1.0, plan.max_norm, how)
            dids[rank].taken.append(not overflow)
            dids[rank].scales.append(scales[rank])
            dids[rank].changes.append(_changes(model))
    return dids


def _finite(gradients: Sequence[torch.Tensor], how: Behaviour) -> bool:
    looked_at = {"the first": gradients[:1], "the last": gradients[-1:]}.get(how.finite, gradients)
    if how.finite == "not inf":
        return not any(bool(one.isinf().any()) for one in looked_at)
    return all(bool(one.isfinite().all()) for one in looked_at)


def _combined(own: Sequence[Sequence[torch.Tensor]], rank: int, how: Behaviour) -> list[torch.Tensor]:
    ranks = len(own)
    if how.averaged == "no":
        return [one.clone() for one in own[rank]]
    divisor = {"mean": ranks, "sum": 1, "twice": ranks**2}[how.averaged]
    return [torch.stack(same).sum(0) / divisor for same in map(list, zip(*own, strict=True))]


def _update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[torch.Tensor],
    scale: float,
    max_norm: float,
    how: Behaviour,
) -> None:
    divisors = {"never": (1.0, 1.0), "after clipping": (1.0, scale), "twice": (scale**2, 1.0)}
    before, after = divisors.get(how.divided, (scale, 1.0))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient / before
    if how.clipped:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad / after
    optimizer.step()


def _change_scale(
    plan: Plan, how: Behaviour, scales: list[float], good: list[int], rank: int, overflow: bool, bad: Sequence[bool]
) -> None:
    if overflow:
        scales[rank] /= {"once": 2, "for each rank": 2 ** sum(bad), "never": 1, "quartered": 4}[how.halved]
        good[rank] = good[rank] if how.grows == "counts on" else 0
        if how.grows != "counts overflows":
            return
    good[rank] += 1
    enough = good[rank] >= plan.interval if how.grows == "every step from then on" else good[rank] == plan.interval
    if enough and how.grows != "never":
        scales[rank] *= 2
        good[rank] = good[rank] if how.grows == "every step from then on" else 0


_MISTAKES: dict[str, Behaviour] = {
    "the loss is not scaled: in float16 these gradients are zero. backward() is that of loss · scale": Behaviour(
        scaled=False
    ),
    "the gradients are never divided by the scale: the update is too large by that factor": Behaviour(divided="never"),
    "the gradients are clipped while they are still scaled: their norm is then `scale` times too large, and nearly all "
    "of them are cut off. Divide first, then clip": Behaviour(divided="after clipping"),
    "the gradients are divided by the scale twice": Behaviour(divided="twice"),
    "the gradients are divided by the new scale: they were made with the old one. Change the scale at the end": (
        Behaviour(divided="by the new scale")
    ),
    'the gradients are added up over ranks and not averaged: op="mean"': Behaviour(averaged="sum"),
    "the gradients are not averaged: each rank takes another step": Behaviour(averaged="no"),
    "divided twice by the number of ranks": Behaviour(averaged="twice"),
    "the gradients are not clipped": Behaviour(clipped=False),
    "a rank decides alone: it looks at its own gradients before they are averaged, and the others' inf is in the mean "
    "of all. Share the answer, or look at the mean": Behaviour(decided="alone"),
    "the step is left out only if all ranks have an overflow: one is enough. Which answer is 1, and which is the "
    "largest?": Behaviour(decided="if all overflow"),
    "the loss is looked at, and not the gradients: a finite loss can have gradients that are not": Behaviour(
        finite="the loss"
    ),
    "an overflow is never found, and the optimizer takes a step with gradients that are not finite: look at every "
    "parameter.grad after backward": Behaviour(decided="never"),
    "there is an overflow, and the optimizer takes a step all the same: after that the weights are not numbers": (
        Behaviour(decided="together, but taken")
    ),
    "the optimizer takes a step with zeros instead of leaving it out: momentum goes on without a gradient, and so does "
    "weight decay. Do not call optimizer.step()": Behaviour(decided="with zeros"),
    "nan is not noticed: an overflow may be inf or nan (inf − inf); isfinite finds both": Behaviour(finite="not inf"),
    "only the first gradient is looked at: any parameter may overflow": Behaviour(finite="the first"),
    "only the last gradient is looked at: any parameter may overflow": Behaviour(finite="the last"),
    "the scale is halved once for each rank that has an overflow: halve it once": Behaviour(halved="for each rank"),
    "the scale is not halved after an overflow: the next step would overflow, too": Behaviour(halved="never"),
    "the scale is halved twice": Behaviour(halved="quartered"),
    "the scale never grows: after many halvings small gradients are lost again": Behaviour(grows="never"),
    "good steps are counted on over an overflow: they must come in a row": Behaviour(grows="counts on"),
    "once the scale has doubled, it doubles in every step: begin to count again": Behaviour(
        grows="every step from then on"
    ),
    "steps that were left out are counted as good ones": Behaviour(grows="counts overflows"),
}


def _require_steps(found: Sequence[Did], plan: Plan) -> None:
    """Refuse weights, scales and decisions that are not those of one process, with the mistake that explains them."""
    right = _simulated(plan, Behaviour())
    for step, rank in itertools.product(range(plan.steps), range(plan.ranks)):
        place = _difference(found[rank], right[rank], step)
        if place:
            what = f"{plan.ranks} ranks, step {step + 1}: rank {rank}'s {place}"
            raise Wrong(f"{_explanation(found, plan, step)}\n  {what}")
    for rank, did in enumerate(found):
        if not torch.equal(did.changes[-1], found[0].changes[-1]):
            raise Wrong(f"rank {rank}'s weights differ from rank 0's in their last digits: all ranks use the same mean")


def _explanation(found: Sequence[Did], plan: Plan, step: int) -> str:
    guesses = {words: _simulated(plan, how) for words, how in _MISTAKES.items()}
    otherwise = "the steps are not those of one process"
    return fewer.explanation(
        found, guesses, lambda mine, theirs, at: not _difference(mine, theirs, at), plan.steps, step, otherwise
    )


def _difference(found: Did, right: Did, step: int) -> str:
    """What differs after a step, in words; nothing if all is the same."""
    if found.taken[step] != right.taken[step]:
        return f"step returns {found.taken[step]}, and should return {right.taken[step]}"
    mine, theirs = found.changes[step], right.changes[step]
    if not torch.allclose(mine, theirs, rtol=1e-6, atol=1e-15, equal_nan=True):
        if bool(mine.isnan().any()) != bool(theirs.isnan().any()):
            return "weights are no numbers (nan)"
        return f"row of weights, as the change since the beginning,{first_difference(mine, theirs, 1e-12)}"
    if found.scales[step] != right.scales[step]:
        return f"scale is {found.scales[step]:g}, and should be {right.scales[step]:g}"
    return ""


# ── what travels ────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_programs(dids: Sequence[Did], rows: Sequence[Row]) -> None:
    """Verify each step that was taken as a program; in one that was left out, all ranks make the same calls."""
    for step, taken in enumerate(dids[0].taken):
        pairs = enumerate(zip(dids, rows, strict=True))
        ops = [_operations(_of_step(did, row, step), rank) for rank, (did, row) in pairs]
        if taken:
            fewer.require_step(ops, len(_SIZES), _buckets(ops[0]), f"step {step + 1}")
        for rank, mine in enumerate(ops):
            if mine != ops[0]:
                words = " ".join(map(str, mine)), " ".join(map(str, ops[0]))
                raise Wrong(f"step {step + 1}: rank {rank} does {words[0]}, and rank 0 does {words[1]}")


def _of_step(did: Did, row: Row, step: int) -> Row:
    bounds = [*did.begins, len(row)]
    return row[bounds[step] : bounds[step + 1]]


def _operations(row: Row, rank: int) -> list[o.Op]:
    begun = [moment.op for moment in row if moment.phase == "begins"]
    return [_operation(op, rank) if isinstance(op, Called) else op for op in begun]


def _operation(call: Called, rank: int) -> o.Op:
    """What a call took, known by its size: all parameters have different ones."""
    numbers = 0 if call.content is None else call.content.numel()
    if numbers == 1:
        return o.AllReduce(Named("overflow"), "dp")
    if call.call == "all_gather":
        raise Wrong(
            f"rank {rank} gathers {numbers} numbers in line {call.line}: average gradients by an all-reduce, which "
            "sends fewer bytes; to agree about an overflow one number is enough"
        )
    if numbers in _SIZES:
        return o.AllReduce(Bucket(_SIZES.index(numbers)), "dp")
    if numbers == sum(_SIZES):
        return o.AllReduce(Bucket(0), "dp")
    raise Wrong(
        f"line {call.line}: an all-reduce of {numbers} numbers: one number says whether there is an overflow, and no "
        "gradient has so many"
    )


def _buckets(ops: Sequence[o.Op]) -> tuple[tuple[int, int], ...]:
    """A bucket for each parameter, or one for all of them."""
    sums = [op for op in ops if isinstance(op, o.AllReduce) and isinstance(op.value, Bucket)]
    return ((0, len(_SIZES)),) if len(sums) == 1 else tuple((stage, stage + 1) for stage in range(len(_SIZES)))
