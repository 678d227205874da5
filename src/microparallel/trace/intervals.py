"""Sets of time spans: put together what overlaps, and measure what is left of one set outside another."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that are apart and in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """How long spans that are apart are together."""
    return sum(end - start for start, end in spans)


def outside(spans: list[Span], others: list[Span]) -> list[Span]:
    """What is left of `spans` where none of `others` is; both are apart and in order."""
    left: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, index = start, first
        while index < len(others) and others[index][0] < end:
            if others[index][0] > at:
                left.append((at, others[index][0]))
            at = max(at, others[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left
