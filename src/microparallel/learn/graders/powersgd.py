"""PowerSGD: two small all-reduces that need each other, the same Q on every rank, and a residual."""

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
from microparallel.learn.requirements import first_difference, require_like, require_type
from microparallel.learn.verdict import Wrong
from microparallel.program import Bucket, Named
from microparallel.program import ops as o

_ALLOWED = ("all_reduce", "all_reduce_mean")
_SHAPES = [(8, 6), (8,), (5, 9), (6, 6)]
_STEPS = 4


@dataclass
class Did:
    """What came of all steps on one rank."""

    first_q: dict[int, torch.Tensor] = field(default_factory=dict)  # by the parameter's number
    averages: list[torch.Tensor] = field(default_factory=list)  # a row of all parameters' gradients, for each step
    begins: list[list[int]] = field(default_factory=list)  # for each step and parameter, where in the row it begins


def check(exam: Exam) -> None:
    """The first Q; the averages; what travels; the same bits; other columns and ranks."""
    with exam.step("every rank begins with the same Q, for each matrix"):
        _require_first_q(exam.run(_average, 2, 2, 0, allowed=_ALLOWED), 2)
    with exam.step("four steps: P, Q and the residual as in one process") as notes:
        found = exam.run(_average, 2, 2, _STEPS, allowed=_ALLOWED)
        rows = exam.rows
        _require_averages(found, columns=2)
        notes.append(_telescopes(found))
    with exam.step("two small all-reduces a matrix, the second after the first") as notes:
        sent = _require_calls(found, rows, columns=2)
        notes.append(f"a rank all-reduces {sent} bytes of {8 * sum(map(fewer.numbers, _SHAPES))} in a step")
    with exam.step("the same bits on every rank"):
        fewer.require_same_bits([did.averages for did in found], _BITS)
    with exam.step("one column; three ranks; and a world of one"):
        for ranks, columns in ((2, 1), (3, 2), (1, 2)):
            _require_averages(exam.run(_average, ranks, columns, _STEPS, allowed=_ALLOWED), columns)


_BITS = "P and Q come from all-reduces, which leave the same bits on every rank; is a rank's own number still in it?"


# ── what the learner's ranks do ─────────────────────────────────────────────────────────────────────────────────────


def _gradient(step: int, rank: int, number: int) -> torch.Tensor:
    """Something of low rank, and some noise."""
    shape = _SHAPES[number]
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 1:
        return noise
    thin = [torch.randn(size, 1, generator=generator, dtype=torch.float64) for size in shape]
    return 0.3 * noise + thin[0] @ thin[1].T


def _average(learner: Any, comms: Any, columns: int, steps: int) -> Did:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in _SHAPES]
    did = Did()
    with _about_calls():
        sgd = learner.PowerSGD(parameters, comms, columns)
        kept = require_type(getattr(sgd, "q", None), dict, "PowerSGD's q", "a dict with a Q for each matrix")
        for number, parameter in enumerate(parameters):
            if parameter in kept:
                did.first_q[number] = kept[parameter].detach().clone()
        for step in range(steps):
            begins, row = [], []
            for number, parameter in enumerate(parameters):
                begins.append(len(comms.row))
                parameter.grad = _gradient(step, comms.rank, number)
                sgd.average(parameter)
                what = f"step {step + 1}, rank {comms.rank}: parameter.grad after average"
                row.append(require_like(parameter.grad, parameter.detach(), what).detach().reshape(-1).clone())
            did.begins.append([*begins, len(comms.row)])
            did.averages.append(torch.cat(row))
        require_all_waited(comms)
    return did


@contextmanager
def _about_calls() -> Iterator[None]:
    try:
        yield
    except Mismatch as error:
        raise Wrong(f"{error}: all ranks all-reduce P, then Q, of the same parameter") from None


def _require_first_q(found: Sequence[Did], columns: int) -> None:
    for rank, did in enumerate(found):
        for number, shape in enumerate(_SHAPES):
            if len(shape) != 2:
                continue
            q, what = did.first_q.get(number), f"rank {rank}'s first Q for a matrix of {shape[0]} × {shape[1]}"
            if q is None:
                raise Wrong(f"{what} is missing: self.q has one for each parameter with two dimensions")
            require_like(q, torch.empty(shape[1], columns, dtype=torch.float64), what)
            if not bool(q.any(0).all()):
                raise Wrong(f"{what} has a column of zeros: M · Q would be zero there, too; begin with random numbers")
            if not torch.equal(q, found[0].first_q[number]):
                raise Wrong(
                    f"{what} is not that of rank 0: P is the mean of M · Q over ranks, which means nothing if each has "
                    "another Q. Give the generator the same seed on every rank"
                )


# ── what one process does, and what mistakes do ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Behaviour:
    """How gradients are averaged; without arguments, in the right way."""

    feedback: Literal["yes", "no", "never reduced", "of the old Q"] = "yes"
    p_shared: bool = True
    orthonormal: Literal["after", "before", "never", "Q", "before, Q of its own P"] = "after"
    q_divided: int = 1
    q_shared: bool = True
    q_kept: Literal["yes", "no", "own"] = "yes"
    product: Literal["new Q", "old Q"] = "new Q"
    q_of: Literal["sum", "gradient"] = "sum"
    small: Literal["mean", "sum", "own"] = "mean"


def _simulated(first: Sequence[Did], how: Behaviour) -> list[Did]:
    """Average in this process, from the Q with which each rank began."""
    ranks = range(len(first))
    dids = [Did(did.first_q) for did in first]
    q_of = [dict(did.first_q) for did in first]
    residuals: dict[tuple[int, int], torch.Tensor] = {}
    for step in range(_STEPS):
        parts: list[list[torch.Tensor]] = [[] for _ in ranks]
        for number, shape in enumerate(_SHAPES):
            gradients = [_gradient(step, rank, number) for rank in ranks]
            if len(shape) == 1:
                found = _of_small(gradients, how)
            else:
                kept = [residuals.get((rank, number), torch.zeros(shape, dtype=torch.float64)) for rank in ranks]
                old = [q_of[rank][number] for rank in ranks]
                found, new, left = _round(gradients, kept, old, how)
                for rank in ranks:
                    residuals[rank, number], q_of[rank][number] = left[rank], new[rank]
            for rank in ranks:
                parts[rank].append(found[rank].reshape(-1))
        for rank in ranks:
            dids[rank].averages.append(torch.cat(parts[rank]))
    return dids


Tensors = list[torch.Tensor]  # one for each rank


def _of_small(gradients: Tensors, how: Behaviour) -> Tensors:
    if how.small == "own":
        return gradients
    total = torch.stack(gradients).sum(0)
    return [total / (len(gradients) if how.small == "mean" else 1)] * len(gradients)


def _round(gradients: Tensors, kept: Tensors, old: Tensors, how: Behaviour) -> tuple[Tensors, Tensors, Tensors]:
    """One step for a matrix: what each rank has at the end, the Q it keeps, and its residual."""
    with_kept = how.feedback != "no"
    matrices = [gradient + rest if with_kept else gradient for gradient, rest in zip(gradients, kept, strict=True)]
    own_p = [matrix @ q for matrix, q in zip(matrices, old, strict=True)]
    if how.orthonormal in ("before", "before, Q of its own P"):
        own_p = [torch.linalg.qr(p).Q for p in own_p]
    p = _mean(own_p) if how.p_shared else own_p
    if how.orthonormal == "after":
        p = [torch.linalg.qr(one).Q for one in p]
    in_q = own_p if how.orthonormal == "before, Q of its own P" else p
    of = matrices if how.q_of == "sum" else gradients
    own_q = [matrix.T @ one for matrix, one in zip(of, in_q, strict=True)]
    q = _mean(own_q, how.q_divided) if how.q_shared else own_q
    if how.orthonormal == "Q":
        q = [torch.linalg.qr(one).Q for one in q]
    in_product = q if how.product == "new Q" else old
    averages = [one @ other.T for one, other in zip(p, in_product, strict=True)]
    residual_q = old if how.feedback == "of the old Q" else own_q
    left = [matrix - one @ other.T for matrix, one, other in zip(matrices, p, residual_q, strict=True)]
    if how.feedback == "never reduced":
        left = matrices
    return averages, {"yes": q, "no": old, "own": own_q}[how.q_kept], left


def _mean(tensors: Tensors, divided: int = 1) -> Tensors:
    return [torch.stack(tensors).sum(0) / len(tensors) ** divided] * len(tensors)


_MISTAKES: dict[str, Behaviour] = {
    "there is no feedback: what P · Qᵀ leaves out is lost. Add the residual to the gradient, and keep what is left "
    "out": Behaviour(feedback="no"),
    "the residual keeps what was sent, too: subtract P · Qᵀ from M": Behaviour(feedback="never reduced"),
    "the residual is made with the old Q: what was sent is P times the new one": Behaviour(feedback="of the old Q"),
    "P is made orthonormal before it is all-reduced: a mean of orthonormal matrices is not orthonormal. First the "
    "all-reduce, then orthonormal": Behaviour(orthonormal="before"),
    "Q is computed with this rank's own P, before the all-reduce: the two all-reduces cannot be made at once. All "
    "ranks need the same P for their Q": Behaviour(orthonormal="before, Q of its own P"),
    "P is never made orthonormal: P · Qᵀ is then M times a large number. See orthonormal(…)": Behaviour(
        orthonormal="never"
    ),
    "Q is made orthonormal, and not P: the size of the gradient is in Q, and is lost": Behaviour(orthonormal="Q"),
    "P is not all-reduced: every rank has another P, and the sum of their Q belongs to none": Behaviour(p_shared=False),
    'Q is added up over ranks and not averaged: op="mean"': Behaviour(q_divided=0),
    "Q is divided twice by the number of ranks": Behaviour(q_divided=2),
    "Q is not all-reduced: P · Qᵀ is the rank's own gradient, and each rank has another": Behaviour(q_shared=False),
    "Q is not kept: begin each step with the Q of the step before, which is close already": Behaviour(q_kept="no"),
    "each rank keeps its own Q for the next step: keep the all-reduced one, which is the same on all ranks": Behaviour(
        q_kept="own"
    ),
    "the product is made with the old Q: P · Qᵀ needs the Q that was computed with this P": Behaviour(product="old Q"),
    "Q is computed without the residual: M is the gradient and the residual, for P and for Q": Behaviour(
        q_of="gradient"
    ),
    "biases are added up and not averaged": Behaviour(small="sum"),
    "biases are not averaged: they are not compressed, but every rank needs their mean": Behaviour(small="own"),
}


def _require_averages(found: Sequence[Did], columns: int) -> None:
    ranks, right = len(found), _simulated(found, Behaviour())
    for step, rank in itertools.product(range(_STEPS), range(ranks)):
        if not _same(found[rank], right[rank], step):
            guesses = {words: _simulated(found, how) for words, how in _MISTAKES.items()}
            otherwise = "the averages are not those of one process"
            words = fewer.explanation(found, guesses, _same, _STEPS, step, otherwise)
            place = first_difference(found[rank].averages[step], right[rank].averages[step])
            what = f"{ranks} ranks, {columns} columns, step {step + 1}: the row of rank {rank}'s averages"
            raise Wrong(f"{words}\n  {what}{place}")


def _same(found: Did, right: Did, step: int) -> bool:
    return torch.allclose(found.averages[step], right.averages[step], rtol=1e-8, atol=1e-8)


def _telescopes(found: Sequence[Did]) -> str:
    """How much of all gradients has arrived after the last step, in words."""
    gradients = torch.zeros(sum(map(fewer.numbers, _SHAPES)), dtype=torch.float64)
    for step, rank in itertools.product(range(_STEPS), range(len(found))):
        gradients += torch.cat([_gradient(step, rank, number).reshape(-1) for number in range(len(_SHAPES))])
    gradients /= len(found)
    without = _simulated(found, Behaviour(feedback="no"))[0]
    arrived = [torch.stack(one.averages).sum(0) for one in (found[0], without)]
    missing, lost = ((gradients - one).norm() / gradients.norm() for one in arrived)
    return f"{missing:.0%} of all gradients are still to come; without feedback {lost:.0%} would be lost"


# ── what travels ────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_calls(found: Sequence[Did], rows: Sequence[Row], columns: int) -> int:
    """Refuse other calls than all-reduces of P and Q, and of small tensors; returns the bytes of a rank's step."""
    for step in range(_STEPS):
        ops: list[list[o.Op]] = []
        for rank, (did, row) in enumerate(zip(found, rows, strict=True)):
            made = [calls(row[start:stop]) for start, stop in itertools.pairwise(did.begins[step])]
            mine: list[o.Op] = []
            for number, reduces in enumerate(made):
                mine += _operations(rank, number, reduces, columns)
            ops.append([*mine, o.OptimizerStep()])
        fewer.require_step(ops, len(_SHAPES), what=f"step {step + 1}")
    return sum(call.bytes for call in calls(rows[0][: found[0].begins[0][-1]]))


def _operations(rank: int, number: int, reduces: Sequence[Called], columns: int) -> list[o.Op]:
    """A parameter's all-reduces: for a matrix P, and then Q, with which the sum of the gradient is there."""
    shape = _SHAPES[number]
    sent = [0 if call.content is None else call.content.numel() for call in reduces]
    for call, size in zip(reduces, sent, strict=True):
        if len(shape) == 2 and size >= fewer.numbers(shape):
            raise Wrong(
                f"rank {rank} all-reduces {size} numbers in line {call.line}, and the matrix has as many: that is what "
                "PowerSGD avoids. Only P and Q travel"
            )
    wanted = [shape[0] * columns, shape[1] * columns] if len(shape) == 2 else [shape[0]]
    if sent != wanted:
        raise Wrong(
            f"rank {rank} all-reduces {sent} numbers for a parameter of shape {list(shape)}, and {wanted} are enough: "
            + ("P, then Q" if len(shape) == 2 else "it is averaged as it is")
        )
    first = [o.AllReduce(Named(f"P{number}"), "dp")] if len(shape) == 2 else []
    return [*first, o.AllReduce(Bucket(number), "dp")]
