"""Is what a command printed what the page says? Exactly, or with every measured number left out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

ANY = "…"  # a line of its own: any number of lines
_BARS = re.compile(r"(?:·*[\u2580-\u259f\u2800-\u28ff]+·*)+|··+")  # bars of blocks, plots of dots, waiting
_RULES = re.compile(r"([─━═╌┄-])\1+")
_AXIS = re.compile(r"(?:[├┼┤┬┴]─*)+")
_NUMBER = re.compile(r"(?<![A-Za-z_\d])[-+−]?(?:\d[\d,_]*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_FEW_CALLS = re.compile(r"! at # .* (?:was|were) called #×")
_UNIT = re.compile(r"# ?(?:(?:ns|µs|us|ms|s|min|h|[KMGT]i?B|B|bytes|[KMGT])(?:/s)?)\b")


def lines_of(output: str) -> list[str]:
    """What a reader sees: no blanks at the ends of lines, no empty lines at either end."""
    lines = [line.rstrip() for line in output.expandtabs().splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def masked(line: str) -> str:
    """A line without what a measurement changes: numbers and their units, bars, ticks, the widths of columns."""
    line = _AXIS.sub("┼", _RULES.sub(r"\1", _BARS.sub("", line)))
    line = _UNIT.sub("#", _NUMBER.sub("#", line))
    line = re.sub(r"\s+", " ", line).strip()
    return re.sub(r"#(?: #)+", "#", line)


def difference(expected: Sequence[str], real: Sequence[str], *, measured: bool) -> str:
    """Nothing where they agree; otherwise what differs, as `diff -u` shows it."""
    told, found = lines_of("\n".join(expected)), lines_of("\n".join(real))
    left, right = ([masked(line) for line in told], [masked(line) for line in found]) if measured else (told, found)
    if measured:
        left, right = _without_the_clock(left), _without_the_clock(right)
    if matches(left, right):
        return ""
    return "\n".join(difflib.unified_diff(left, right, "the page says", "it prints", lineterm="", n=2))


def _without_the_clock(lines: Sequence[str]) -> list[str]:
    """The lines that do not depend on how quick the machine was.

    Left out are empty lines, all but the first of a row of progress lines, and the warning that a benchmark had time
    for few calls only.
    """
    kept: list[str] = []
    for line in filter(None, lines):
        repeats = line.startswith("step #/# ") and kept and line == kept[-1]
        if not repeats and not _FEW_CALLS.match(line):
            kept.append(line)
    return kept


def matches(expected: Sequence[str], real: Sequence[str]) -> bool:
    """Whether these lines are those, where a line `…` stands for any number of lines."""
    pieces = _pieces(expected)
    if len(pieces) == 1:
        return list(expected) == list(real)
    first, *middle, last = pieces
    if len(first) + len(last) > len(real) or list(real[: len(first)]) != first:
        return False
    if last and list(real[-len(last) :]) != last:
        return False
    rest = list(real[len(first) : len(real) - len(last)])
    for piece in middle:
        place = next((place for place in range(len(rest) + 1) if rest[place : place + len(piece)] == piece), None)
        if place is None:
            return False
        rest = rest[place + len(piece) :]
    return True


def _pieces(lines: Sequence[str]) -> list[list[str]]:
    pieces: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == ANY:
            pieces.append([])
        else:
            pieces[-1].append(line)
    return pieces


def rewritten(expected: Sequence[str], real: Sequence[str]) -> list[str]:
    """The real lines, cut where the page cut them: as many at the start and at the end, and what it showed between."""
    pieces, found = _pieces(expected), lines_of("\n".join(real))
    first, *middle, last = pieces if len(pieces) > 1 else [[], []]
    if len(pieces) == 1 or len(first) + len(last) >= len(found):
        return found
    lines = [*found[: len(first)], ANY]
    rest = found[len(first) : len(found) - len(last)]
    for piece in filter(None, middle):
        place = next((place for place, line in enumerate(rest) if masked(line) == masked(piece[0])), None)
        if place is not None:
            lines += [*rest[place : place + len(piece)], ANY]
            rest = rest[place + len(piece) :]
    return lines + (found[-len(last) :] if last else [])
