"""One forward, one backward: the order, few activations, and sends that do not wait for each other."""

from __future__ import annotations

import functools
from typing import Any

from microparallel.learn.exam import Exam, Stuck
from microparallel.learn.graders._pipeline_steps import (
    Outcome,
    do_steps,
    microbatch_suspects,
    operations,
    require_freed,
    take_steps,
)
from microparallel.learn.graders._programs import compare, tokens
from microparallel.learn.log import RECEIVES, Row, waited_for
from microparallel.learn.verdict import Wrong
from microparallel.program import Program, peak_activations
from microparallel.schedules import one_f_one_b
from microparallel.text import count


def check(exam: Exam) -> None:
    """Gradients; order; activations; fewer micro-batches than ranks; other shapes."""
    with exam.step("three ranks and five micro-batches: the gradients of the whole batch"):
        outcomes, programs = _require_steps(exam, 3, 10, 5, steps=1)
    with exam.step("in 1F1B's order"):
        _require_order(programs, 5)
    with exam.step("rank r of p holds at most p − r activations") as notes:
        notes.append(_require_few(outcomes, programs, 5))
    with exam.step("fewer micro-batches than ranks"):
        for ranks, samples, microbatches in ((4, 4, 2), (3, 2, 1)):
            _require_all(exam, ranks, samples, microbatches, steps=1)
    with exam.step("four ranks, two, one; and several steps"):
        for ranks, samples, microbatches in ((4, 6, 6), (2, 5, 3), (1, 4, 2)):
            _require_all(exam, ranks, samples, microbatches, steps=2)


def _do_steps(learner: Any, comms: Any, steps: int, function: str, samples: int, microbatches: int) -> Outcome:
    try:
        return do_steps(learner, comms, steps, function, samples, microbatches)
    except IndexError:
        forwards, backwards = (sum(word[0] == kind for word in operations(comms.row)) for kind in "FB")
        if not backwards < forwards == microbatches:  # else it looks for something else than one more to go forward
            raise
        raise Wrong(
            f"rank {comms.rank} of {comms.world_size} asks for a micro-batch that there is not: there are "
            f"{microbatches}. A warm-up is never longer than that: min(…, microbatches)"
        ) from None
    except KeyError as error:
        if error.args[0] not in range(microbatches):
            raise
        raise Wrong(
            f"rank {comms.rank} begins the backward of micro-batch {error} and has nothing kept for it: its forward "
            "comes first, and every backward comes once"
        ) from None


_take_steps = functools.partial(take_steps, function="one_f_one_b_step", suspects=microbatch_suspects, body=_do_steps)


def _require_steps(
    exam: Exam, ranks: int, samples: int, microbatches: int, steps: int
) -> tuple[list[Outcome], list[Program]]:
    try:
        return _take_steps(exam, ranks, samples, microbatches, steps=steps)
    except Stuck as stuck:
        raise _with_place(stuck, exam.rows, one_f_one_b(ranks, microbatches)) from None


def _with_place(stuck: Stuck, rows: list[Row], program: Program) -> Wrong:
    """Add to a deadlock which rank waits for what 1F1B does not need yet."""
    for wait in stuck.waits:
        call, done, expected = waited_for(rows, wait), operations(rows[wait.rank]), tokens(program, wait.rank)
        if call.call not in RECEIVES:
            continue
        kind, name = ("F", "an activation") if call.peer < call.rank else ("B", "a gradient")
        if done == expected[: len(done)] and len(done) < len(expected) and expected[len(done)][0] != kind:
            after = f"after {done[-1]}" if done else "at first"
            words = f"rank {call.rank} waits for {name} {after}, where 1F1B goes on with {expected[len(done)]}"
            return Wrong(f"{words}: is its warm-up right?\n{stuck}")
    return stuck


def _require_all(exam: Exam, ranks: int, samples: int, microbatches: int, steps: int) -> None:
    outcomes, programs = _require_steps(exam, ranks, samples, microbatches, steps)
    _require_order(programs, microbatches)
    _require_few(outcomes, programs, microbatches)


def _require_order(programs: list[Program], microbatches: int) -> None:
    for program in programs:
        ranks = program.world_size
        for rank in range(ranks):
            order, expected = tokens(program, rank), tokens(one_f_one_b(ranks, microbatches), rank)
            if order != expected:
                words = _warm_up_mistake(order, rank, ranks, microbatches) or (
                    f"rank {rank} leaves 1F1B's order: after the warm-up, one forward and one backward in turn"
                )
                raise Wrong(f"the gradients are right, but {words}{compare(order, expected, '1F1B')}")


def _warm_up_mistake(order: list[str], rank: int, ranks: int, microbatches: int) -> str:
    """What the number of forwards before the first backward says; nothing if it is right."""
    found = next((place for place, word in enumerate(order) if word[0] == "B"), len(order))
    behind = ranks - 1 - rank
    expected = min(behind + 1, microbatches)
    one = f"rank {rank}, with {count(behind, 'rank')} behind it,"
    if found == microbatches > expected:
        return f"{one} does all {found} forwards before its first backward: that is GPipe, and keeps all activations"
    if found > expected:
        return (
            f"{one} does {count(found, 'forward')} before its first backward, and {expected} are enough: a warm-up of "
            f"{behind}, then one forward and one backward in turn. It holds {found} activations"
        )
    if found < expected:
        return (
            f"{one} does {count(found, 'forward')} before its first backward, and should do {expected}: a warm-up of "
            f"{behind}, then one forward and one backward in turn. Too short a warm-up leaves it waiting"
        )
    return ""


def _require_few(outcomes: list[Outcome], programs: list[Program], microbatches: int) -> str:
    held: list[int] = []
    for rank, outcome in enumerate(outcomes):
        most = min(microbatches, len(outcomes) - rank)
        held.append(max(peak_activations(program.ranks[rank]) for program in programs))
        if held[-1] > most:
            raise Wrong(f"rank {rank} holds {held[-1]} activations at once, and {most} are enough")
        require_freed(rank, outcome.most_kept)
    return f"{' '.join(map(str, held))} on ranks 0 to {len(outcomes) - 1}; GPipe holds {microbatches} on each"
