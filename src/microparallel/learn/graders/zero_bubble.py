"""The backward split in two: is it right, is the bubble that of ZB-H1, and is no more held than in 1F1B?"""

from __future__ import annotations

from microparallel.learn.exam import Exam
from microparallel.learn.graders._halves import follow_program, require_input_half, require_weight_half
from microparallel.learn.graders._programs import (
    Orders,
    ask_for_orders,
    compare,
    make_program,
    require_complete,
    tokens,
)
from microparallel.learn.verdict import Wrong
from microparallel.program import Program, peak_activations
from microparallel.schedules import lower, zb_h1
from microparallel.simulator import Costs, simulate
from microparallel.text import count

Case = tuple[int, int]  # ranks, micro-batches
_CASES: list[Case] = [(3, 6), (2, 4), (4, 8), (4, 2), (3, 1), (1, 3)]
_COSTS = [Costs(), Costs(forward=2, backward_input=3, backward_weight=1)]


def check(exam: Exam) -> None:
    """The halves; then the order: complete, verified, activations, the bubble; then both together, on ranks."""
    with exam.step("I finds the gradient of what entered the stage, and no other"):
        require_input_half(exam)
    with exam.step("W finds the gradients of the weights later, and adds them"):
        require_weight_half(exam)
    with exam.step("every micro-batch has its forward and both halves of its backward, once"):
        answers = ask_for_orders(exam, _CASES, "FIW")
        for case, orders in zip(_CASES, answers, strict=True):
            for rank in range(case[0]):
                _require_complete(case, orders, rank)
    with exam.step("W comes after I, I after F, and no rank waits for ever") as notes:
        programs = [_verified(case, orders) for case, orders in zip(_CASES, answers, strict=True)]
        notes.append(f"{len(programs)} programs verified")
    with exam.step("no rank of p holds more than p activations") as notes:
        for case, orders, program in zip(_CASES, answers, programs, strict=True):
            _require_few(case, orders, program)
        notes.append(f"three ranks: {' '.join(str(peak_activations(ops)) for ops in programs[0].ranks)}")
    with exam.step("a rank waits (p − 1)(F + I − W)") as notes:
        for case, orders, program in zip(_CASES, answers, programs, strict=True):
            for costs in _COSTS:
                _require_bubble(case, orders, program, costs)
        notes.append("four ranks, F = I = W = 1: waits 3, and 1F1B 9")
    with exam.step("with your halves, in your order, the ranks find the loss and gradients of one process"):
        for program in programs[:4]:
            follow_program(exam, program)


def _named(case: Case) -> str:
    return f"{count(case[0], 'rank')}, {count(case[1], 'micro-batch', 'es')}"


def _require_complete(case: Case, orders: Orders, rank: int) -> None:
    left_over = [m for m in range(case[1]) if f"W{rank}.{m}" not in orders[rank]]
    all_else = all(f"{kind}{rank}.{m}" in orders[rank] for kind in "FI" for m in range(case[1]))
    if left_over and all_else and len(orders[rank]) == len(set(orders[rank])):
        raise Wrong(
            f"{_named(case)}: rank {rank} never does W{rank}.{left_over[0]}: a W that waits must be done in the end, "
            "or the gradients of the weights lack a micro-batch"
        )
    try:
        require_complete(orders, rank, [f"{kind}{rank}.{m}" for kind in "FIW" for m in range(case[1])])
    except Wrong as wrong:
        raise Wrong(f"{_named(case)}: {wrong}") from None


def _verified(case: Case, orders: Orders) -> Program:
    try:
        return make_program("zero-bubble", orders, *case)
    except Wrong as wrong:
        raise Wrong(f"{_named(case)}: {wrong}\n{_reason(case, orders)}") from None


def _require_few(case: Case, orders: Orders, program: Program) -> None:
    for rank, ops in enumerate(program.ranks):
        held = peak_activations(ops)
        if held > case[0]:
            raise Wrong(
                f"{_named(case)}: rank {rank} holds {held} activations at once, and {case[0]} are allowed: an "
                f"activation is kept until its W is done. {_reason(case, orders)}"
            )


def _require_bubble(case: Case, orders: Orders, program: Program, costs: Costs) -> None:
    """What a rank waits, against the formula; where there are too few micro-batches for it, against the schedule."""
    ranks, microbatches = case
    forward, inputs, weights = (costs.forward, costs.backward_input, costs.backward_weight)
    work = microbatches * (forward + inputs + weights)  # type: ignore[operator]
    best = simulate(lower(zb_h1(ranks, microbatches)), costs).makespan - work
    found = simulate(program, costs).makespan - work
    if found > best + 1e-9:
        formula = "(p − 1)(F + I − W)" if microbatches >= ranks else "as ZB-H1 does"
        raise Wrong(
            f"{_named(case)}, F = {forward}, I = {inputs}, W = {weights}: a rank waits {found:g}, and {best:g} are "
            f"enough, {formula}. {_reason(case, orders)}"
        )


def _reason(case: Case, orders: Orders) -> str:
    """The first thing that differs from the schedule."""
    ranks, microbatches = case
    program = zb_h1(ranks, microbatches)
    for rank, order in enumerate(orders):
        expected = tokens(program, rank)
        where = compare(order, expected, "ZB-H1")
        forwards, wanted = _before("I", "F", order), _before("I", "F", expected)
        if forwards != wanted:
            done = count(forwards, "forward")
            return f"Rank {rank} does {done} before its first I, and should do {wanted}, as in 1F1B{where}"
        inputs, wanted = _before("W", "I", order), _before("W", "I", expected)
        if inputs < wanted:
            return (
                f"Rank {rank} does its first W after {inputs} I, and should let {rank} of them wait, so after "
                f"{wanted}: W is for when there is nothing else to do{where}"
            )
        if inputs > wanted:
            return f"Rank {rank} lets {inputs - 1} W wait, and should let {rank} wait: what they need is kept{where}"
    differing = next((rank for rank, order in enumerate(orders) if order != tokens(program, rank)), 0)
    return f"Rank {differing}:{compare(orders[differing], tokens(program, differing), 'ZB-H1')}"


def _before(kind: str, counted: str, order: list[str]) -> int:
    """How many operations of one kind come before the first of another."""
    first = next(place for place, word in enumerate(order) if word[0] == kind)
    return sum(word[0] == counted for word in order[:first])
