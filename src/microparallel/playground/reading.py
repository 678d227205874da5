"""Where in a program's text an operation stands, and what an error is about: so that an editor can underline it.

Places are counted as a browser counts them, in units of UTF-16 from the beginning of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from microparallel.errors import ProgramError, UsageError
from microparallel.playground.starts import completed_or_same
from microparallel.program import Add, Collective, Op, Program, Recv, Send, Slices, from_text, halves, parse_op
from microparallel.program.rules import written
from microparallel.text import count
from microparallel.verifier import Deadlock, Miscounted, Missing, Unmatched, Unreached

MOST_CHARACTERS, MOST_OPERATIONS, MOST_RANKS, MOST_SLICES, MOST_CELLS = 200_000, 12_000, 64, 1024, 20_000
_RANK = re.compile(r"\s*rank +([0-9]{1,9}):")
_WORD = re.compile(r"\S+")
_DOES = re.compile(r"\brank (\d+) (?:does|sends|stands at|waits for rank \d+ at) (\S+?)[,;]?(?=\s|$)")
_A_RANK = re.compile(r"\brank (\d+)\b")


@dataclass(frozen=True)
class Mark:
    """A piece of the text, from one place to another."""

    start: int
    end: int


@dataclass(frozen=True)
class Written:
    """Where everything stands in a text: the words of each rank's line, what begins that line, and the goal."""

    words: list[list[tuple[str, Mark]]]
    ranks: list[Mark]
    goal: Mark
    lines: list[Mark]


def read(text: str) -> Program:
    """Read a program that a page may ask about; raises `UsageError` for one that would take too long."""
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"this text has {len(text):,} characters; here a program may have {MOST_CHARACTERS:,}")
    program = from_text(text)
    if len(program) > MOST_OPERATIONS:
        raise UsageError(f"{count(len(program), 'operation')}: here a program may have {MOST_OPERATIONS:,}")
    if program.world_size > MOST_RANKS:
        raise UsageError(f"{program.world_size} ranks: here a program may have {MOST_RANKS}")
    goal = program.goal
    if isinstance(goal, Collective):
        cells, most, what = goal.slices, MOST_SLICES, "slices"
    else:
        cells, most, what = goal.stages * (goal.microbatches + len(goal.skipped)), MOST_CELLS, "forwards"
    if cells > most:
        raise UsageError(f"a goal of {cells:,} {what}: here a program may have {most:,}")
    return program


def written_in(text: str) -> Written:
    """Find the words of a text, read in the same way as `program.from_text` reads them."""
    words: list[list[tuple[str, Mark]]] = []
    ranks: list[Mark] = []
    lines: list[Mark] = []
    goal = Mark(0, 0)
    at = 0
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\r\n")
        lines.append(Mark(at, at + _units(bare)))
        content = bare.partition("#")[0]
        if found := _RANK.match(content):
            start = at + _units(content[: len(content) - len(content.lstrip())])
            ranks.append(Mark(start, at + _units(found[0])))
            words.append([(word[0], _mark(content, word, at)) for word in _WORD.finditer(content, found.end())])
        elif content.lstrip("\ufeff ").startswith("goal:"):
            goal = Mark(at, at + _units(content.rstrip()))
        at += _units(line)
    return Written(words, ranks, goal, lines)


def _mark(content: str, word: re.Match[str], at: int) -> Mark:
    start = at + _units(content[: word.start()])
    return Mark(start, start + _units(word[0]))


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


# ── what an error is about ──────────────────────────────────────────────────────────────────────────────────────────


def marks_of(error: Exception, text: str, program: Program | None) -> list[Mark]:
    """The pieces of the text that an error names; if it names none, the goal."""
    where = written_in(text)
    if program is None:
        found = list(_unread(error, where))
    else:
        found = [mark for mark in _found(error, where, program) if mark.end > mark.start]
    return list(dict.fromkeys(found)) or [mark for mark in (where.goal, *where.lines) if mark.end > mark.start][:1]


def _unread(error: Exception, where: Written) -> Iterator[Mark]:
    """Of a text that is no program: the first word of the line that is no operation, or the line."""
    number = error.line if isinstance(error, ProgramError) else None
    if number is None or not 0 < number <= len(where.lines):
        return
    line = where.lines[number - 1]
    for words in where.words:
        for word, mark in words:
            if line.start <= mark.start < line.end and not _is_operation(word):
                yield mark
                return
    yield line


def _is_operation(word: str) -> bool:
    try:
        parse_op(word)
    except ProgramError:
        return False
    return True


def _found(error: Exception, where: Written, program: Program) -> Iterator[Mark]:
    completed = completed_or_same(program)
    if isinstance(error, Missing):
        yield _at(where, program, completed, error.rank, error.place)
    elif isinstance(error, Deadlock):
        for wait in error.waits:
            yield _at(where, program, completed, wait.rank, wait.place)
    elif isinstance(error, Unmatched):
        for rank, kind, op in ((error.sender, Send, error.send), (error.receiver, Recv, error.recv)):
            other = error.receiver if kind is Send else error.sender
            places = [place for place, one in enumerate(completed.ranks[rank]) if _goes(one, kind, other)]
            if op is not None and error.number <= len(places):
                yield _at(where, program, completed, rank, places[error.number - 1])
    elif isinstance(error, Miscounted):
        key = (error.stage, error.microbatch)
        for words in where.words:
            for word, mark in words:
                if any((half.stage, half.microbatch) == key for half in halves(parse_op(word))):
                    yield mark
    elif isinstance(error, Unreached):
        yield _last_write(where, program, error.rank, error.index)
    else:
        yield from _named(str(error), where, getattr(error, "rank", None))


def _goes(op: Op, kind: type[Op], other: int) -> bool:
    return isinstance(op, kind) and (op.to if isinstance(op, Send) else getattr(op, "source", None)) == other


def _at(where: Written, program: Program, completed: Program, rank: int, place: int) -> Mark:
    """Where an operation of the completed program stands; of one that was added, the one that it was added for."""
    if rank >= len(where.words) or not where.words[rank]:
        return where.ranks[rank] if rank < len(where.ranks) else where.goal
    if completed is program:
        at = place
    else:
        own, at = iter(completed.ranks[rank][:place]), 0
        for op in own:
            at += at < len(program.ranks[rank]) and op == program.ranks[rank][at]
    return where.words[rank][min(at, len(where.words[rank]) - 1)][1]


def _last_write(where: Written, program: Program, rank: int, index: int) -> Mark:
    """The last operation of a rank that changes a slice; if there is none, the beginning of its line."""
    for op, (_, mark) in reversed(list(zip(program.ranks[rank], where.words[rank], strict=False))):
        value = written(op) if isinstance(op, Recv | Add) else None
        if isinstance(value, Slices) and index in value.slices:
            return mark
    return where.ranks[rank]


def _named(words: str, where: Written, rank: int | None) -> Iterator[Mark]:
    """What an error without a place says in words: `rank 2 does F1.0, …`; else the ranks it names."""
    for match in _DOES.finditer(words):
        mine = where.words[int(match[1])] if int(match[1]) < len(where.words) else []
        same = [mark for word, mark in mine if word == match[2]]
        yield from same[-1:]
    ranks = [int(number) for number in _A_RANK.findall(words)] if rank is None else [rank]
    for number in ranks[:2]:
        if number < len(where.ranks):
            yield where.ranks[number]


def finite(value: float) -> float | None:
    """A number as JSON has it: null, if it is not finite."""
    return value if math.isfinite(value) else None
