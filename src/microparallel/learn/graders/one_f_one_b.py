"""One forward, one backward: the order, the whole step, few activations, and sends that do not wait."""

from __future__ import annotations

import functools
import re
from typing import Any

from microparallel.learn.exam import Exam
from microparallel.learn.graders._pipeline_steps import (
    Outcome,
    do_steps,
    microbatch_suspects,
    require_freed,
    take_steps,
)
from microparallel.learn.graders._programs import compare, split, tokens
from microparallel.learn.requirements import shown
from microparallel.learn.verdict import Wrong
from microparallel.program import Program, peak_activations
from microparallel.schedules import one_f_one_b
from microparallel.text import count

_SHAPES = [(4, 6), (3, 5), (2, 3), (4, 2), (3, 1), (1, 2)]  # ranks, micro-batches


def check(exam: Exam) -> None:
    """The order, as words; one rank alone; three ranks; activations; fewer micro-batches than ranks; other shapes."""
    with exam.step("each rank's order: the warm-up, the pairs, the backwards that are left") as notes:
        answers = exam.run(_ask, 1, allowed=())[0]
        for (ranks, microbatches), orders in zip(_SHAPES, answers, strict=True):
            for rank, words in enumerate(orders):
                _require_complete(words, rank, ranks, microbatches)
            for rank, words in enumerate(orders):
                _require_words(words, rank, ranks, microbatches)
        notes.append(f"{len(_SHAPES)} shapes")
    with exam.step("one rank alone: the gradients of the whole batch, from micro-batches of 3 and 2 samples"):
        _require_steps(exam, 1, 5, 2, steps=1)
    with exam.step("three ranks and five micro-batches: the gradients of the whole batch"):
        outcomes, programs = _require_steps(exam, 3, 10, 5, steps=1)
    with exam.step("the ranks work in 1F1B's order"):
        _require_order(programs, 5)
    with exam.step("rank r of p holds at most p − r activations") as notes:
        notes.append(_require_few(outcomes, programs, 5))
    with exam.step("fewer micro-batches than ranks"):
        for ranks, samples, microbatches in ((4, 4, 2), (3, 2, 1)):
            _require_all(exam, ranks, samples, microbatches, steps=1)
    with exam.step("four ranks, two, one; and several steps"):
        for ranks, samples, microbatches in ((4, 6, 6), (2, 5, 3), (1, 4, 2)):
            _require_all(exam, ranks, samples, microbatches, steps=2)


# ── the order, as words ─────────────────────────────────────────────────────────────────────────────────────────────


def _ask(learner: Any, _: Any) -> list[list[list[str]]]:
    """The learner's words for every rank of each shape."""
    answers = []
    for ranks, microbatches in _SHAPES:
        orders = [learner.order(rank, ranks, microbatches) for rank in range(ranks)]
        for rank, words in enumerate(orders):
            _require_right_kind(words, f"order({rank}, {ranks}, {microbatches})")
        answers.append([list(words) for words in orders])
    return answers


def _require_right_kind(words: Any, call: str) -> None:
    if not isinstance(words, list | tuple):
        raise Wrong(f"{call} should be a list of words such as F0, and is {shown(words)}")
    for word in words:
        if not isinstance(word, str) or re.fullmatch(r"[FB]-?\d+", word) is None:
            raise Wrong(
                f"{call} has {shown(word)} in it: a word is F or B, and the number of a micro-batch, such as F0"
            )


def _require_complete(words: list[str], rank: int, ranks: int, microbatches: int) -> None:
    """Refuse an order in which something is missing, comes twice, or comes too early."""
    named = f"{count(ranks, 'rank')}, {_batches(microbatches)}: rank {rank}"
    strange = [word for word in words if not 0 <= int(word[1:]) < microbatches]
    if strange:
        raise Wrong(
            f"{named} has {strange[0]} in its order, and there is no such micro-batch. A warm-up is never longer than "
            "the number of micro-batches: min(…, microbatches)"
        )
    for m in range(microbatches):
        for word in (f"F{m}", f"B{m}"):
            times = words.count(word)
            if not times:
                last = word[0] == "B" and m == microbatches - 1
                why = ": the backwards of the last micro-batches are still to be done when no forward is left" * last
                raise Wrong(f"{named} never does {word}{why}")
            if times > 1:
                raise Wrong(f"{named} does {word} {times} times: every micro-batch has one forward and one backward")
        if words.index(f"B{m}") < words.index(f"F{m}"):
            raise Wrong(f"{named} does B{m} before F{m}: a backward needs what its own forward has left")


def _require_words(words: list[str], rank: int, ranks: int, microbatches: int) -> None:
    """Refuse an order that is not 1F1B's, and say what is wrong with its warm-up."""
    expected = [f"{word[0]}{split(word)[2]}" for word in tokens(one_f_one_b(ranks, microbatches), rank)]
    if words != expected:
        found = _warm_up_mistake(words, rank, ranks, microbatches) or (
            f"rank {rank} leaves 1F1B's order: after the warm-up come one forward and one backward in turn"
        )
        raise Wrong(f"{count(ranks, 'rank')}, {_batches(microbatches)}: {found}{compare(words, expected, '1F1B')}")


def _batches(microbatches: int) -> str:
    return count(microbatches, "micro-batch", "es")


# ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _do_steps(learner: Any, comms: Any, steps: int, function: str, samples: int, microbatches: int) -> Outcome:
    try:
        return do_steps(learner, comms, steps, function, samples, microbatches)
    except KeyError as error:
        if error.args[0] not in range(microbatches):
            raise
        raise Wrong(
            f"rank {comms.rank} begins the backward of micro-batch {error} and has nothing kept for it: forward keeps "
            "what entered the stage and what came out, as kept[m]"
        ) from None


_require_steps = functools.partial(
    take_steps, function="one_f_one_b_step", suspects=microbatch_suspects, body=_do_steps
)


def _require_all(exam: Exam, ranks: int, samples: int, microbatches: int, steps: int) -> None:
    outcomes, programs = _require_steps(exam, ranks, samples, microbatches, steps=steps)
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
