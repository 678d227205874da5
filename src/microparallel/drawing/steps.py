"""A collective's hops as plain data, for the page that steps through them."""

from __future__ import annotations

from typing import Any

from microparallel.drawing.holdings import Held, Symbol, complete
from microparallel.drawing.hops import Hop, Message, hops_of
from microparallel.errors import UsageError
from microparallel.program import Add, Chunk, Program, Value
from microparallel.text import count

_MOST_RANKS = 64
_MOST_CELLS = 2_000_000  # moments × ranks × slices: some megabytes


def steps_of(program: Program) -> dict[str, Any]:
    """What happens in each hop, and what everybody holds before the first and after each.

    | key        | what it is                                                                                   |
    |------------|----------------------------------------------------------------------------------------------|
    | `sets`     | every set of contributions that occurs, as a list of ranks; a rank twice was added twice     |
    | `holds`    | for each moment, rank and slice: the place of its set in `sets`                              |
    | `parts`    | for each moment and rank: whose whole contributions it keeps apart                           |
    | `complete` | for each slice: the sets (by place) that are right at the end                                |
    | `hops`     | for each hop: its messages, and the same in words                                            |
    """
    if program.world_size > _MOST_RANKS:
        raise UsageError(f"{program.world_size} ranks do not fit on a page; draw at most {_MOST_RANKS}")
    walkthrough = hops_of(program)
    moments = [walkthrough.start, *(hop.held for hop in walkthrough.hops)]
    cells = len(moments) * program.world_size * walkthrough.goal.slices
    if cells > _MOST_CELLS:
        raise UsageError(
            f"{program.name} among {program.world_size} ranks does not fit on a page: {len(moments)} moments × "
            f"{program.world_size} ranks × {walkthrough.goal.slices} slices; draw fewer ranks"
        )
    sets = _Sets()
    holds = [[[sets.place(symbol) for symbol in held.slices] for held in ranks] for ranks in moments]
    ranks, goal = program.world_size, walkthrough.goal
    right = [
        [place for place, symbol in enumerate(sets.symbols) if complete(goal, ranks, index, symbol)]
        for index in range(goal.slices)
    ]
    return {
        "ranks": ranks,
        "slices": goal.slices,
        "sets": [_as_list(symbol) for symbol in sets.symbols],
        "holds": holds,
        "parts": [[_parts(held) for held in each] for each in moments],
        "complete": right,
        "start": f"{program.name}: {goal}, {count(ranks, 'rank')}"
        + (f", {len(walkthrough.hops)} hops" if walkthrough.hops else ", nothing to send"),
        "hops": [
            {"messages": [_message(message) for message in hop.messages], "words": _words(hop)}
            for hop in walkthrough.hops
        ],
    }


class _Sets:
    """Every set of contributions that occurs, once: a ring of 64 has half a million slices, and few different ones."""

    def __init__(self) -> None:
        self.symbols: list[Symbol] = []
        self._places: dict[tuple[tuple[int, int], ...], int] = {}
        self._known: dict[int, int] = {}  # by identity, since most slices are the very same object as a hop before

    def place(self, symbol: Symbol) -> int:
        if id(symbol) not in self._known:
            key = tuple(sorted(symbol.items()))
            if key not in self._places:
                self._places[key] = len(self.symbols)
                self.symbols.append(symbol)
            self._known[id(symbol)] = self._places[key]
        return self._known[id(symbol)]


def _as_list(symbol: Symbol) -> list[int]:
    return [rank for rank, times in sorted(symbol.items()) for _ in range(times)]


def _parts(held: Held) -> list[int]:
    return sorted(held.parts)


def _message(message: Message) -> dict[str, Any]:
    adds = message.receive.reduce
    value = f"{'+' if adds else ''}{message.send.value}"
    return {"from": message.sender, "to": message.receiver, "value": value, "adds": adds}


def _words(hop: Hop) -> list[str]:
    said = []
    for message in hop.messages:
        deed = "adds it" if message.receive.reduce else "keeps it"
        what = _name(message.send.value)
        said.append(f"rank {message.sender} sends {what} to rank {message.receiver}, which {deed}")
    for rank, ops in enumerate(hop.ops):
        added = [f"{op.value} to {op.into}" for op in ops if isinstance(op, Add)]
        if added:
            said.append(f"rank {rank} adds {', '.join(added)}")
    return said


def _name(value: Value) -> str:
    if not isinstance(value, Chunk):
        return str(value)
    if len(value) == 1:
        return f"slice {value.start}"
    return f"slices {value.start} to {value.stop - 1}"
