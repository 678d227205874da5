"""Several stages a rank: is it right, is the bubble as small as it can be, and does it run?"""

from __future__ import annotations

from microparallel.learn.exam import Exam
from microparallel.learn.graders._programs import (
    Orders,
    ask_for_orders,
    compare,
    make_program,
    require_complete,
    run_program,
    split,
    tokens,
)
from microparallel.learn.requirements import listed
from microparallel.learn.verdict import Wrong
from microparallel.program import Program, peak_activations
from microparallel.schedules import interleaved, lower
from microparallel.simulator import Costs, simulate
from microparallel.text import count

Case = tuple[int, int, int]  # ranks, micro-batches, stages a rank
_CASES: list[Case] = [(2, 4, 2), (3, 6, 2), (4, 8, 2), (2, 4, 3), (2, 6, 1), (1, 3, 2), (4, 4, 2)]
_WITH_MESSAGES = Costs(latency=0.2)


def check(exam: Exam) -> None:
    """Complete; verified; the bubble; the activations; run."""
    with exam.step("every rank does all that its stages need, once"):
        answers = ask_for_orders(exam, _CASES, "FB")
        for case, orders in zip(_CASES, answers, strict=True):
            _require_complete(case, orders)
    with exam.step("a backward comes after its forward, and no rank waits for ever") as notes:
        programs = []
        for case, orders in zip(_CASES, answers, strict=True):
            _require_rounds(case, orders)
            _require_backwards_from_the_end(case, orders)
            programs.append(_verified(case, orders))
        notes.append(f"{len(programs)} programs verified")
    with exam.step("the bubble is that of 1F1B, divided by the stages a rank") as notes:
        for one in zip(_CASES, answers, programs, strict=True):
            _require_bubble(*one, notes)
    with exam.step("no rank holds more activations than its warm-up has forwards, and one") as notes:
        for one in zip(_CASES, answers, programs, strict=True):
            _require_few(*one)
        notes.append("two ranks, two stages each: 5 and 3, of stages half as large")
    with exam.step("also when messages take time, no rank waits longer than it must"):
        for one in zip(_CASES, answers, programs, strict=True):
            _require_few_gaps(*one)
    with exam.step("on real ranks it finds the loss and gradients of one process"):
        run_program(exam, programs[0])
        run_program(exam, programs[1])


def _named(case: Case) -> str:
    ranks, microbatches, stages_per_rank = case
    return f"{ranks} ranks, {microbatches} micro-batches, {count(stages_per_rank, 'stage')} a rank"


def _verified(case: Case, orders: Orders) -> Program:
    try:
        return make_program("interleaved", orders, case[0] * case[2], case[1])
    except Wrong as wrong:
        raise Wrong(f"{_named(case)}: {wrong}\n{_reason(case, orders)}") from None


def _require_complete(case: Case, orders: Orders) -> None:
    ranks, microbatches, stages_per_rank = case
    for rank, order in enumerate(orders):
        own = [lap * ranks + rank for lap in range(stages_per_rank)]
        stages = sorted({split(word)[1] for word in order})
        neighbours = [rank * stages_per_rank + lap for lap in range(stages_per_rank)]
        if stages != own and stages_per_rank > 1 and stages == neighbours:
            raise Wrong(
                f"{_named(case)}: rank {rank} has stages {listed(stages)}, which are neighbours: then a micro-batch "
                f"does not go round, and nothing is gained. On lap l, rank r does stage l · p + r: {listed(own)}"
            )
        if stages != own:
            raise Wrong(f"{_named(case)}: rank {rank} works on stages {listed(stages)}, and has {listed(own)}")
        needed = [f"{kind}{stage}.{m}" for kind in "FB" for m in range(microbatches) for stage in own]
        require_complete(orders, rank, needed)


def _require_rounds(case: Case, orders: Orders) -> None:
    ranks, microbatches, stages_per_rank = case
    program = interleaved(ranks, microbatches, stages_per_rank)
    for rank, order in enumerate(orders):
        found, expected = ([word for word in words if word[0] == "F"] for words in (order, tokens(program, rank)))
        all_first = [f"F{lap * ranks + rank}.{m}" for lap in range(stages_per_rank) for m in range(microbatches)]
        if found == all_first != expected:
            raise Wrong(
                f"{_named(case)}: rank {rank} lets all micro-batches through its first stage before the second sees "
                f"any: they come in rounds of {ranks}, one for each rank{compare(found, expected, 'rounds')}"
            )


def _require_backwards_from_the_end(case: Case, orders: Orders) -> None:
    ranks, _, stages_per_rank = case
    for rank, order in enumerate(orders):
        first = next(word for word in order if word[0] == "B")
        last_stage = (stages_per_rank - 1) * ranks + rank
        if split(first)[1] != last_stage:
            raise Wrong(
                f"{_named(case)}: rank {rank}'s backwards begin with {first}, but a gradient begins at the last stage "
                f"and comes to this rank's last stage first, stage {last_stage}: count the laps down"
            )


def _require_bubble(case: Case, orders: Orders, program: Program, notes: list[str]) -> None:
    """A forward takes 1, a backward 2; the bubble is what one rank waits."""
    ranks, microbatches, stages_per_rank = case
    work, best = 3 * microbatches * stages_per_rank, 3 * (ranks - 1)
    bubble = simulate(program).makespan - work
    if bubble > best:
        raise Wrong(
            f"{_named(case)}: a rank waits {bubble:g} units of time, and {best} are enough: (p − 1)(F + B) for one "
            f"stage, with F = 1 and B = 2. {_reason(case, orders)}"
        )
    if case == (4, 8, 2):
        notes.append(f"{_named(case)}: waits {bubble:g} of {work + bubble:g}, 1F1B would wait {best * stages_per_rank}")


def _require_few_gaps(case: Case, orders: Orders, program: Program) -> None:
    """Messages that take a fifth of a forward: a warm-up that is just long enough for free ones leaves gaps."""
    ranks, microbatches, stages_per_rank = case
    best = simulate(lower(interleaved(ranks, microbatches, stages_per_rank)), _WITH_MESSAGES).makespan
    found = simulate(program, _WITH_MESSAGES).makespan
    if found > best + 1e-6:
        work = 3 * microbatches * stages_per_rank
        raise Wrong(
            f"{_named(case)}: with messages that take 0.2 a rank waits {found - work:.1f} units of time, and "
            f"{best - work:.1f} are enough. {_reason(case, orders)}"
        )


def _reason(case: Case, orders: Orders) -> str:
    """Why a bubble is too large, or too much is held: the first thing that differs from the schedule."""
    ranks, microbatches, stages_per_rank = case
    program = interleaved(ranks, microbatches, stages_per_rank)
    for rank, order in enumerate(orders):
        found, wanted = (_before_first_backward(words) for words in (order, tokens(program, rank)))
        if found != wanted:
            warm_up = (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank)
            return (
                f"Rank {rank} does {count(found, 'forward')} before its first backward, and should do {wanted}: "
                f"a warm-up of (v − 1) p + 2 (p − 1 − r) = {warm_up} and one"
                f"{compare(order, tokens(program, rank), 'interleaved')}"
            )
    differing = next((r for r, order in enumerate(orders) if order != tokens(program, r)), 0)
    return f"Rank {differing}{compare(orders[differing], tokens(program, differing), 'interleaved')}"


def _before_first_backward(order: list[str]) -> int:
    return next(place for place, word in enumerate(order) if word[0] == "B")


def _require_few(case: Case, orders: Orders, program: Program) -> None:
    ranks, microbatches, stages_per_rank = case
    for rank, ops in enumerate(program.ranks):
        most = min(microbatches * stages_per_rank, (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1)
        found = peak_activations(ops)
        if found > most:
            raise Wrong(
                f"{_named(case)}: rank {rank} holds {found} activations at once, and {most} are enough. "
                f"{_reason(case, orders)}"
            )
