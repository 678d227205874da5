"""Nine small functions about a step's time: are they right in every case, and if not, which formula was it?

Six are asked about spans and numbers, here. Three are asked about recorded steps, in `_recorded.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from microparallel.learn.exam import Exam
from microparallel.learn.graders._recorded import require_all_reduces, require_computing, require_where_it_went
from microparallel.learn.requirements import require_number
from microparallel.learn.verdict import Wrong

Span = tuple[float, float]
Spans = list[Span]
_RANDOM = 20240


@dataclass(frozen=True)
class _Mistake:
    words: str
    formula: Callable[..., Any]


def check(exam: Exam) -> None:
    """One function after another, each on its edge cases and on many others."""
    cases = span_cases(random.Random(_RANDOM))
    with exam.step("exposed: what nothing hides") as notes:
        _require(
            exam, "exposed", cases, lambda spans, compute: length(spans) - overlap(spans, compute), _EXPOSED, notes
        )
    with exam.step("hidden: what goes on behind computation") as notes:
        _require(exam, "hidden", cases, overlap, _HIDDEN, notes)
    with exam.step("split: waiting is not communication") as notes:
        _require(exam, "split", join_cases(random.Random(_RANDOM)), _split, _SPLIT, notes)
    with exam.step("efficiency: strong and weak scaling") as notes:
        _require(exam, "efficiency", EFFICIENCY_CASES, _efficiency, _EFFICIENCY, notes)
    with exam.step("ring_seconds: from latency and bandwidth") as notes:
        _require(exam, "ring_seconds", RING_CASES, _ring, _RING, notes)
    with exam.step("bound: what would help") as notes:
        _require(exam, "bound", BOUND_CASES, bound, _BOUND, notes)
    with exam.step("a recorded step: when a rank computed") as notes:
        require_computing(exam, notes)
    with exam.step("a recorded step: its all-reduces, as each rank saw them") as notes:
        require_all_reduces(exam, notes)
    with exam.step("a recorded step: where its time went") as notes:
        require_where_it_went(exam, notes)


def _call(learner: Any, _comms: Any, name: str, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    function = getattr(learner, name)
    return [_plain(function(*case), name) for case in cases]


def _plain(value: Any, name: str) -> Any:
    """What was returned, if it is made of numbers and texts; what else it is meant to be is looked at later."""
    if isinstance(value, list | tuple):
        return [_plain(one, name) for one in value]
    if value is None or isinstance(value, str):
        return value
    number = require_number(value, name)
    return value if isinstance(value, int) else number


def _require(
    exam: Exam,
    name: str,
    cases: Sequence[tuple[Any, ...]],
    right: Callable[..., Any],
    mistakes: Sequence[_Mistake],
    notes: list[str],
) -> None:
    """Refuse the first case that is wrong, in the words of the mistake that explains all cases."""
    found = exam.run(_call, 1, name, cases, allowed=())[0]
    for case, one in zip(cases, found, strict=True):
        expected = right(*case)
        if not _alike(one, expected):
            words = next((mistake.words for mistake in mistakes if _explains(mistake, cases, found)), "")
            shown = ", ".join(f"{argument!r}" for argument in case)
            because = f"{words}\n  " if words else ""
            raise Wrong(f"{because}{name}({shown}) is {_show(one)}, and should be {_show(expected)}")
    notes.append(f"{len(cases)} cases")


def _explains(mistake: _Mistake, cases: Sequence[tuple[Any, ...]], found: list[Any]) -> bool:
    return all(_alike(one, mistake.formula(*case)) for case, one in zip(cases, found, strict=True))


def _alike(found: Any, expected: Any) -> bool:
    """Whether two results are the same, but for rounding."""
    if isinstance(expected, list | tuple):
        same_kind = isinstance(found, list | tuple) and len(found) == len(expected)
        return same_kind and all(map(_alike, found, expected))
    if isinstance(expected, str) or not isinstance(found, int | float):
        return bool(found == expected)
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r:.160}"


# ── the cases: edges first, then many others ──────────────────────────────────────────────────────────────────────────


def span_cases(chance: random.Random) -> list[tuple[Spans, Spans]]:
    """Spans, and computation beside them."""
    edges: list[tuple[Spans, Spans]] = [
        ([(4.0, 6.0)], [(0.0, 10.0)]),  # all hidden
        ([(10.0, 14.0)], [(0.0, 10.0)]),  # all exposed, and touching
        ([(8.0, 14.0)], [(0.0, 10.0)]),  # partly
        ([(2.0, 6.0), (4.0, 9.0)], [(0.0, 5.0)]),  # two at the same time
        ([(0.0, 12.0)], [(2.0, 4.0), (6.0, 9.0)]),  # two computations within
        ([(3.0, 8.0)], [(0.0, 6.0), (4.0, 7.0)]),  # two computations at the same time
        ([], [(0.0, 5.0)]),
        ([(1.0, 5.0)], []),
        ([], []),
        ([(3.0, 3.0)], [(0.0, 2.0)]),  # no time at all
        ([(9.0, 11.0), (1.0, 2.0)], [(5.0, 10.0), (0.0, 1.0)]),  # not in order
    ]
    return [*edges, *((_spans(chance), _spans(chance)) for _ in range(40))]


def _spans(chance: random.Random) -> Spans:
    starts = [chance.randrange(30) for _ in range(chance.randrange(1, 5))]
    return [(float(start), float(start + chance.randrange(1, 9))) for start in starts]


def join_cases(chance: random.Random) -> list[tuple[Spans]]:
    """One all-reduce, as each rank saw it."""
    edges: list[tuple[Spans]] = [
        ([(1.0, 8.0), (4.0, 8.0)],),
        ([(4.0, 8.0), (1.0, 8.0), (2.0, 9.0)],),
        ([(3.0, 5.0), (3.0, 5.0)],),  # all at once
        ([(2.0, 6.0)],),  # alone
        ([(0.0, 7.0), (7.0, 7.0)],),  # nothing to send
    ]
    for _ in range(20):
        starts = [float(chance.randrange(20)) for _ in range(chance.randrange(2, 6))]
        edges.append(([(start, max(starts) + chance.randrange(1, 5)) for start in starts],))
    return edges


EFFICIENCY_CASES = [
    ((32, 4.0), (32, 2.0), 2),  # strong, ideal
    ((32, 4.0), (32, 1.25), 4),  # strong
    ((32, 4.0), (64, 4.0), 2),  # weak, ideal
    ((32, 4.0), (128, 5.0), 4),  # weak
    ((32, 4.0), (32, 4.0), 1),
    ((30, 6.0), (45, 8.0), 3),  # neither
    ((32, 4.0), (32, 8.0), 2),  # slower than alone
]
RING_CASES = [
    (2, 1000, 0.0, 0.001),
    (4, 1000, 0.0, 0.001),
    (2, 0, 0.5, 0.001),  # nothing but latency
    (4, 1024, 0.5, 0.001),
    (1, 1024, 0.5, 0.001),  # alone: nothing to do
    (8, 100_000_000, 1e-5, 1e-10),
    (3, 7, 0.25, 0.125),
]
BOUND_CASES = [
    (10.0, 4.0, 1.0),
    (10.0, 1.0, 4.0),
    (10.0, 1.0, 1.5),
    (10.0, 3.0, 5.0),
    (10.0, 5.0, 3.0),
    (10.0, 1.5, 1.0),
    (10.0, 2.0, 0.0),  # exactly a fifth
    (10.0, 0.0, 2.0),
    (10.0, 0.0, 0.0),
    (10.0, 1.5, 1.75),  # together more than a fifth
]


# ── what is right, and what people write instead ────────────────────────────────────────────────────────────────────


def length(spans: Spans) -> float:
    """How long at least one of them goes on; edges are whole numbers, so one can look at each unit of time."""
    return float(len(_units(spans)))


def overlap(spans: Spans, compute: Spans) -> float:
    """How long one of each goes on at the same time."""
    return float(len(_units(spans) & _units(compute)))


def _units(spans: Spans) -> set[int]:
    return {unit for start, end in spans for unit in range(int(start), int(end))}


def bound(step: float, communication: float, waiting: float) -> str:
    """What bounds a step."""
    if max(communication, waiting) < step / 5:
        return "compute"
    return "communication" if communication > waiting else "straggler"


def _total(spans: list[Any]) -> float:
    return float(sum(end - start for start, end in spans))


def _pairwise(spans: list[Any], compute: list[Any]) -> float:
    return float(sum(overlap([one], [other]) for one in spans for other in compute))


_TWICE = "two spans at the same time are counted twice: use seconds(…), which counts them once"
_EXPOSED = (
    _Mistake("this is all of the time, also what goes on behind computation", lambda spans, _: length(spans)),
    _Mistake("this is what is hidden: exposed is the rest", overlap),
    _Mistake(
        "the totals were subtracted, as if all computation went on beside the spans: only what happens at the same "
        "time hides something",
        lambda spans, compute: length(spans) - length(compute),
    ),
    _Mistake(
        "the totals were subtracted, as if all computation went on beside the spans: only what happens at the same "
        "time hides something",
        lambda spans, compute: max(0.0, length(spans) - length(compute)),
    ),
    _Mistake(_TWICE, lambda spans, compute: _total(compute + spans) - _total(compute)),
    _Mistake(_TWICE, lambda spans, compute: _total(spans) - _pairwise(spans, compute)),
    _Mistake(_TWICE, lambda spans, compute: _total(spans) - overlap(spans, compute)),
    _Mistake("this is the time of everything: take computing off", lambda spans, compute: length(compute + spans)),
)
_HIDDEN = (
    _Mistake("this is what is exposed: hidden is the rest", lambda s, c: length(s) - overlap(s, c)),
    _Mistake("this is all of the time, also what is exposed", lambda spans, _: length(spans)),
    _Mistake(_TWICE, _pairwise),
    _Mistake(_TWICE, lambda s, c: _total(s) - (length(s) - overlap(s, c))),
    _Mistake(
        "this is the time in which the rank only computes: hidden is taken off the spans, not off the computation",
        lambda s, c: length(c) - (length(s) - overlap(s, c)),
    ),
    _Mistake(
        "this is the shorter of the two totals: only what happens at the same time hides something",
        lambda spans, compute: min(length(spans), length(compute)),
    ),
)


def _split_at(joined: list[Any], moment: float) -> list[Any]:
    return [((start, moment), (moment, end)) for start, end in joined]


def _split(joined: list[Any]) -> list[Any]:
    return _split_at(joined, max(start for start, _ in joined))


_SPLIT = (
    _Mistake(
        "waiting is counted as communication: nothing travels before the last rank has joined",
        lambda joined: [((start, start), (start, end)) for start, end in joined],
    ),
    _Mistake(
        "the tensor travels from the *earliest* start here, but an all-reduce needs all ranks: the latest start counts",
        lambda joined: _split_at(joined, min(start for start, _ in joined)),
    ),
    _Mistake(
        "every rank waits until the end here: the wait is over when the last rank has joined; then the tensor travels",
        lambda joined: _split_at(joined, max(end for _, end in joined)),
    ),
    _Mistake(
        "the two are swapped: first the waiting, then the travelling", lambda j: [pair[::-1] for pair in _split(j)]
    ),
    _Mistake(
        "these are lengths: return spans, a start and an end each, which show what hides them",
        lambda joined: [tuple(end - start for start, end in pair) for pair in _split(joined)],
    ),
    _Mistake("this is a single pair: every rank has its own", lambda joined: _split(joined)[0]),
)


def _efficiency(alone: tuple[int, float], together: tuple[int, float], ranks: int) -> float:
    return _speedup(alone, together) / ranks


def _speedup(alone: tuple[int, float], together: tuple[int, float]) -> float:
    return (together[0] / together[1]) / (alone[0] / alone[1])


_EFFICIENCY = (
    _Mistake(
        "this is the speed-up: as a share of the ideal, it is divided by the ranks", lambda a, t, _: _speedup(a, t)
    ),
    _Mistake("this is upside down: alone was divided by together", lambda a, t, p: p / _speedup(a, t)),
    _Mistake("this is upside down: alone was divided by together", lambda a, t, p: 1 / _speedup(a, t) / p),
    _Mistake(
        "this compares seconds only, which is right for one batch that is shared (strong); when there are more "
        "samples, compare samples a second",
        lambda a, t, p: a[1] / t[1] / p,
    ),
    _Mistake(
        "this compares seconds only, which is right if every rank has the batch of one (weak); in general, compare "
        "samples a second",
        lambda a, t, _: a[1] / t[1],
    ),
    _Mistake("divided by the ranks twice", lambda a, t, p: _speedup(a, t) / p / p),
)


def _ring(p: int, n: int, alpha: float, beta: float) -> float:
    return 2 * (p - 1) * (alpha + n / p * beta)


_RING = (
    _Mistake(
        "only one half of the ring is counted: the sums go round as well", lambda p, n, a, b: _ring(p, n, a, b) / 2
    ),
    _Mistake(
        "whole tensors are sent here: a ring passes slices of size / ranks",
        lambda p, n, a, b: 2 * (p - 1) * (a + n * b),
    ),
    _Mistake(
        "the latency is paid once here: every hop is a message, and has it", lambda p, n, a, b: a + _ring(p, n, 0, b)
    ),
    _Mistake("the latency is missing: every hop is a message, and has it", lambda p, n, _, b: _ring(p, n, 0, b)),
    _Mistake("each half has ranks - 1 hops, not ranks", lambda p, n, a, b: 2 * p * (a + n / p * b)),
    _Mistake("the latency is that of one half only", lambda p, n, a, b: _ring(p, n, a / 2, b)),
    _Mistake(
        "this is what all ranks send together: they send at the same time", lambda p, n, a, b: p * _ring(p, n, a, b)
    ),
    _Mistake(
        "seconds_per_byte is a time, so it is multiplied by the bytes, not divided",
        lambda p, n, a, b: 2 * (p - 1) * (a + n / p / b),
    ),
)
_BOUND = (
    _Mistake(
        "waiting is counted as communication: a late rank is a straggler, and no network helps",
        lambda step, talk, wait: "communication" if talk + wait >= step / 5 else "compute",
    ),
    _Mistake(
        "the larger of the two is named however small it is: below a fifth of the step, it computes",
        lambda _, talk, wait: "communication" if talk > wait else "straggler",
    ),
    _Mistake(
        "communication is named although the waiting is longer: name the larger one",
        lambda step, t, w: "communication" if t >= step / 5 else "straggler" if w >= step / 5 else "compute",
    ),
    _Mistake(
        "a straggler is named although the communication is longer: name the larger one",
        lambda step, t, w: "straggler" if w >= step / 5 else "communication" if t >= step / 5 else "compute",
    ),
    _Mistake(
        "exactly a fifth is at least a fifth",
        lambda step, t, w: "compute" if max(t, w) <= step / 5 else bound(step, t, w),
    ),
    _Mistake(
        "the two are added up before they are compared with a fifth: only the larger one counts",
        lambda step, t, w: "compute" if t + w < step / 5 else "communication" if t > w else "straggler",
    ),
    _Mistake(
        "the two are swapped: to wait for a late rank is a straggler's fault",
        lambda step, t, w: bound(step, w, t),
    ),
)
