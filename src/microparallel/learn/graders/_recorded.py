"""Where the time of recorded steps went: a learner's functions on traces of real runs, which lie beside the exercises.

What is right is found here with the library's own intervals; so are the answers that known mistakes would give.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from microparallel.learn.catalogue import exercises_folder
from microparallel.learn.exam import Exam
from microparallel.learn.requirements import require_number, shown
from microparallel.learn.sandbox import trusted
from microparallel.learn.verdict import Wrong
from microparallel.trace import Event, Trace
from microparallel.trace.intervals import Interval, length, outside, union

Spans = list[Interval]
Answer = Callable[[Trace], Any]
Mistakes = Sequence[tuple[str, Answer]]  # the words for a mistake, and what it would find

_RECORDINGS = {
    "slow_rank": "rank 1 has three times the samples",
    "slow_link": "the batch is small, the model wide and the link slow",
    "shared_cores": "other programs used the same cores",
}
_BACKWARDS = "rank 1 has three times the samples, and the events come in another order"


def traces() -> dict[str, Trace]:
    """The recordings, and one of them with its events in another order, by what is said of them."""
    folder = exercises_folder() / "recordings"
    found = {
        words: Trace.from_json((folder / f"{name}.json").read_text("utf-8")) for name, words in _RECORDINGS.items()
    }
    first = next(iter(found.values()))
    return found | {_BACKWARDS: dataclasses.replace(first, events=first.events[::-1])}


def require_computing(exam: Exam, notes: list[str]) -> None:
    """Refuse a `computing` that finds other spans than those of the rank's computations."""
    _require(exam, "computing", _computing, _COMPUTING, notes)


def require_all_reduces(exam: Exam, notes: list[str]) -> None:
    """Refuse an `all_reduces` that does not bring together what belongs together."""
    _require(exam, "all_reduces", _all_reduces, _ALL_REDUCES, notes)


def require_where_it_went(exam: Exam, notes: list[str]) -> None:
    """Refuse a `where_it_went` that finds other parts of a step."""
    _require(exam, "where_it_went", _where_it_went, _WHERE, notes)


def _require(exam: Exam, name: str, right: Answer, mistakes: Mistakes, notes: list[str]) -> None:
    """Refuse the first recording whose answer is wrong, in the words of the mistake that explains all of them."""
    cases = traces()
    texts = [trace.to_json() for trace in cases.values()]
    [found] = exam.run(_ask, 1, name, texts, allowed=())
    for (words, trace), one in zip(cases.items(), found, strict=True):
        expected = right(trace)
        if not _alike(one, expected):
            answers = list(zip(cases.values(), found, strict=True))
            mistake = next((said for said, wrong in mistakes if _explains(wrong, answers)), "")
            if words == _BACKWARDS:  # the same step was right before
                mistake = "the events of a trace are in no order that you can rely on: sort them yourself"
            because = f"{mistake}\n  " if mistake else ""
            raise Wrong(f"{because}{name}, recorded where {words}: {_difference(one, expected)}")
    notes.append(f"{len(_RECORDINGS)} recorded steps")


def _ask(learner: Any, _: Any, name: str, texts: list[str]) -> list[Any]:
    answers = []
    for text in texts:
        with trusted():
            trace = Trace.from_json(text)
        if name == "computing":
            answers.append([_plain(learner.computing(trace, rank), "computing") for rank in range(trace.ranks)])
        else:
            answers.append(_plain(getattr(learner, name)(trace), name))
    return answers


def _plain(value: Any, name: str) -> Any:
    """What was returned, if it is made of lists, numbers and texts."""
    if isinstance(value, Event) or value is None:
        raise Wrong(f"{name} should be made of lists, pairs and numbers, and there is {shown(value)} in it")
    if isinstance(value, list | tuple):
        return [_plain(one, name) for one in value]
    if isinstance(value, str):
        return value
    return require_number(value, f"what is in {name}")


def _explains(wrong: Answer, answers: list[tuple[Trace, Any]]) -> bool:
    return all(_alike(one, wrong(trace)) for trace, one in answers)


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        if not isinstance(found, list) or len(found) != len(expected):
            return False
        if expected and all(isinstance(one, tuple) and len(one) == 2 for one in expected) and _are_spans(found):
            found, expected = _in_order(found, expected)
        return all(map(_alike, found, expected))
    if isinstance(expected, str) or not isinstance(found, float):
        return bool(found == expected)
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)


def _are_spans(found: list[Any]) -> bool:
    return all(isinstance(one, list) and len(one) == 2 and not isinstance(one[0], list) for one in found)


def _in_order(found: list[Any], expected: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """Spans of computation may come in any order; what ranks saw of an all-reduce may not, so it is a list there."""
    return sorted(found), sorted(expected)


def _difference(found: Any, expected: Any) -> str:
    """Where two answers part, in a few words."""
    place: list[int] = []
    while isinstance(expected, list | tuple):
        if not isinstance(found, list) or len(found) != len(expected):
            size = f"a list of {len(found)}" if isinstance(found, list) else shown(found)
            return f"{_at(place)} is {size}, and should be a list of {len(expected)}"
        at = next((at for at, pair in enumerate(zip(found, expected, strict=True)) if not _alike(*pair)), 0)
        place.append(at)
        found, expected = found[at], expected[at]
    return f"{_at(place)} is {_show(found)}, and should be {_show(expected)}"


def _at(place: list[int]) -> str:
    return "what it returns" + "".join(f"[{number}]" for number in place)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r:.80}"


# ── what is right, and what people write instead ────────────────────────────────────────────────────────────────────


def _computing(trace: Trace) -> list[Any]:
    return _spans(trace, lambda event, rank: event.computes and event.rank == rank)


def _spans(trace: Trace, which: Callable[[Event, int], bool]) -> list[Any]:
    """For each rank, the spans of the events that belong to it."""
    return [[(one.start, one.end) for one in trace.events if which(one, rank)] for rank in range(trace.ranks)]


def _all_reduces(trace: Trace, begin: Callable[[Event], float] = lambda event: event.asked) -> list[Any]:
    """By number, and by rank."""
    reduces = sorted((event for event in trace.events if event.kind == "collective"), key=lambda one: one.rank)
    numbers = sorted({event.number for event in reduces})
    return [[[begin(event), event.end] for event in reduces if event.number == number] for number in numbers]


def _where_it_went(trace: Trace) -> list[Any]:
    return [_of_rank(trace, rank) for rank in range(trace.ranks)]


def _of_rank(
    trace: Trace,
    rank: int,
    *,
    waits_beside_travel: bool = False,
    all_is_travel: bool = False,
    nothing_hides: bool = False,
    step: float = 0.0,
) -> tuple[float, float, float, str]:
    """A rank's parts; the options are mistakes."""
    busy = union((event.start, event.end) for event in trace.compute[rank])
    joined = [(own[rank], max(start for start, _ in own)) for own in _all_reduces(trace)]
    waits = union((start, all_joined) for (start, _), all_joined in joined)
    travels = union((start if all_is_travel else all_joined, end) for (start, end), all_joined in joined)
    waits = [] if all_is_travel else waits
    communication = travels if nothing_hides else outside(travels, busy)
    waiting = outside(waits, busy if waits_beside_travel else union([*busy, *travels]))
    hides = length(travels) - length(outside(travels, busy))
    talk, wait = length(communication), length(waiting)
    return hides, talk, wait, _bound(step or trace.makespan, talk, wait)


def _bound(step: float, communication: float, waiting: float) -> str:
    if max(communication, waiting) < step / 5:
        return "compute"
    return "communication" if communication > waiting else "straggler"


def _each(**mistake: Any) -> Answer:
    return lambda trace: [_of_rank(trace, rank, **mistake) for rank in range(trace.ranks)]


_COMPUTING: Mistakes = [
    (
        "communication is among these spans: only events for which event.computes is true are computations",
        lambda trace: _spans(trace, lambda event, rank: event.rank == rank),
    ),
    (
        "the spans of all ranks are here: take only those of the rank that is asked for (event.rank)",
        lambda trace: _spans(trace, lambda event, _: event.computes),
    ),
    (
        "these are the times of communication, and not of computation",
        lambda trace: _spans(trace, lambda event, rank: event.rank == rank and not event.computes),
    ),
    (
        "only backwards are here: forwards and the optimizer's step are computations, too",
        lambda trace: _spans(trace, lambda event, rank: event.rank == rank and event.kind == "backward"),
    ),
]
_ALL_REDUCES: Mistakes = [
    (
        "the spans begin at event.start, when the last rank had joined; when *this* rank joined is event.asked",
        lambda trace: _all_reduces(trace, lambda event: event.start),
    ),
    (
        "the spans begin where the rank began to wait (event.waited): it had joined before, and went on computing",
        lambda trace: _all_reduces(trace, lambda event: event.start if event.waited is None else event.waited),
    ),
    (
        "these are grouped by rank: group them by all-reduce (event.number), and in each from rank 0 on",
        lambda trace: [[one[rank] for one in _all_reduces(trace)] for rank in range(trace.ranks)],
    ),
    (
        "the ranks of each all-reduce are the wrong way round: rank 0 comes first",
        lambda trace: [one[::-1] for one in _all_reduces(trace)],
    ),
    (
        "the last all-reduce comes first here: sort them by event.number",
        lambda trace: _all_reduces(trace)[::-1],
    ),
]
_WHERE: Mistakes = [
    (
        "waiting is counted also while something travels: such a time is communication, so hand exposed(…) the spans "
        "that travel as well",
        _each(waits_beside_travel=True),
    ),
    (
        "waiting is counted as communication: an all-reduce travels from the moment when the last rank has joined",
        _each(all_is_travel=True),
    ),
    ("communication is counted also where it is hidden behind computation", _each(nothing_hides=True)),
    (
        "hidden and exposed communication have changed places",
        lambda trace: [(talk, hides, wait, by) for hides, talk, wait, by in _each()(trace)],
    ),
    (
        "communication and waiting have changed places",
        lambda trace: [(hides, wait, talk, by) for hides, talk, wait, by in _each()(trace)],
    ),
    (
        "the step is compared with what this rank computes: the step's seconds are trace.makespan",
        lambda trace: [
            (*parts[:3], _bound(length(trace.computing[rank]), *parts[1:3]))
            for rank, parts in enumerate(_each()(trace))
        ],
    ),
    ("every rank has the parts of rank 0", lambda trace: [_of_rank(trace, 0)] * trace.ranks),
]
