"""Cases for the functions about a step's time: edges first, then many others; and plain ways to what is right."""

from __future__ import annotations

import random

Span = tuple[float, float]
Spans = list[Span]


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
