"""The state of a puzzle: the moves that were made, and the program that they are.

A move is a short text:

| move          | where                | meaning                                                                       |
|---------------|----------------------|-------------------------------------------------------------------------------|
| `1:F1.0`      | pipelines            | rank 1 does F1.0 after all that it has                                        |
| `1@2:F1.0`    | pipelines            | rank 1 does it third, before what stands there                                |
| `1@2:-`       | pipelines            | take away what rank 1 does third                                              |
| `0:*U0@dp`    | data parallelism     | the same for the one list that every rank does                                |
| `0>1:C0`      | collectives          | in this hop, rank 0 sends slice 0 to rank 1, where it replaces what is there  |
| `0>1:+C0:2`   | collectives          | slices 0 and 1, which rank 1 adds to its own                                  |
| `next`        | collectives          | the next hop begins: what is sent from here on is what ranks hold then        |

In a hop, each rank first sends what it holds at its beginning, and then receives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microparallel.errors import ProgramError, UsageError
from microparallel.playground.levels import MEASURES, Level
from microparallel.playground.words import in_words, named, slices_named, value_words
from microparallel.program import (
    Act,
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Delta,
    Forward,
    Free,
    Grad,
    Join,
    Op,
    Program,
    Recv,
    Rest,
    Rules,
    Send,
    Slices,
    Value,
    is_meeting,
    parse_op,
    parse_value,
)
from microparallel.program.symbols import Symbol
from microparallel.simulator import simulate
from microparallel.text import count, short
from microparallel.trace import Trace
from microparallel.verifier import GatheredAgain, Missing, verify, verify_beginning
from microparallel.verifier.collective import contents_after

MOST_MOVES = 200
_PLACE = re.compile(r"(\d{1,3})(?:@(\d{1,3}))?:(.+)")
_SEND = re.compile(r"(\d{1,3})>(\d{1,3}):(\+?)(C\d{1,4}(?::\d{1,4})?)")
NEXT = "next"


class Refused(UsageError):
    """A move that cannot be made, and why."""


@dataclass(frozen=True)
class Move:
    """A move, read from its text: either an operation in a list, or a message of a hop."""

    text: str

    @property
    def placing(self) -> tuple[int, int | None, str] | None:
        """The list, the place in it (None: at its end), and the operation, or `-`."""
        found = _PLACE.fullmatch(self.text)
        return None if found is None else (int(found[1]), None if found[2] is None else int(found[2]), found[3])

    @property
    def sending(self) -> tuple[int, int, bool, str] | None:
        """The sender, the receiver, whether it is added there, and the slices."""
        found = _SEND.fullmatch(self.text)
        return None if found is None else (int(found[1]), int(found[2]), bool(found[3]), found[4])


@dataclass(frozen=True)
class Score:
    """A solved level: what it takes, and its stars."""

    makespan: float
    second: float
    stars: int


class Board:
    """A level and the moves that were made; it never changes: a move makes another one."""

    def __init__(self, level: Level, moves: Sequence[str] = ()) -> None:
        self.level = level
        self.moves: tuple[str, ...] = ()
        self.lists: tuple[tuple[Op, ...], ...] = tuple(() for _ in level.trays)
        self.hops: tuple[tuple[str, ...], ...] = ((),)
        if len(moves) > MOST_MOVES:
            raise UsageError(f"{count(len(moves), 'move')}: a puzzle takes at most {MOST_MOVES}")
        for move in moves:
            self._apply(move)

    def after(self, move: str) -> Board:
        """The board with one move more; raises `Refused`, in words, if a rule is against it."""
        changed = Board.__new__(Board)
        changed.level, changed.moves, changed.lists, changed.hops = self.level, self.moves, self.lists, self.hops
        changed._apply(move)
        if len(changed.moves) > MOST_MOVES:
            raise Refused(f"{count(MOST_MOVES, 'move')} were made; undo some first")
        changed._judge(self)
        return changed

    # ── moves ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _apply(self, text: str) -> None:
        if self.level.kind == "messages":
            self._send(text)
        else:
            self._place(text)
        self.moves = (*self.moves, text)

    def _place(self, text: str) -> None:
        move = Move(text).placing
        if move is None or move[0] >= len(self.lists):
            raise Refused(f"{text!r} is no move here; it looks like 0:{self.level.trays[0][0]}")
        which, at, word = move
        mine = self.lists[which]
        at = len(mine) if at is None else at
        if at > len(mine) or (word == "-" and at == len(mine)):
            raise Refused(f"{text!r}: there are {count(len(mine), 'operation')} in this list")
        if word == "-":
            mine = (*mine[:at], *mine[at + 1 :])
        else:
            op = _parsed(word)
            if op not in self.left(which):
                home = self._home(op)
                name = named(op)
                raise Refused(f"{name} is {home}" if home else f"{name} is not among what can be placed here")
            mine = (*mine[:at], op, *mine[at:])
        self.lists = (*self.lists[:which], mine, *self.lists[which + 1 :])

    def _home(self, op: Op) -> str:
        """Where an operation is that is not in the tray."""
        for which, tray in enumerate(self.level.trays):
            if op in tray:
                return "placed already" if op not in self.left(which) else f"for rank {which}, which has its stage"
        return ""

    def _send(self, text: str) -> None:
        if text == NEXT:
            if not self.hops[-1]:
                raise Refused("nothing is sent in this hop yet")
            most = self.level.limits.get("hops")
            if most is not None and len(self.hops) >= most:
                raise Refused(f"this level has at most {count(int(most), 'hop')}, and all are used")
            self.hops = (*self.hops, ())
            return
        move = Move(text).sending
        if move is None:
            raise Refused(f"{text!r} is no move here; it looks like 0>1:+C0, or next")
        sender, receiver, _, value = move
        slices = parse_value(value)
        assert isinstance(self.level.goal, Collective)
        assert isinstance(slices, Slices)
        if max(sender, receiver) >= self.level.ranks or slices.stop > self.level.goal.slices:
            raise Refused(f"{text!r} names a rank or a slice that is not there")
        if sender == receiver:
            raise Refused(f"rank {sender} has its own slices already; choose another rank to send to")
        self.hops = (*self.hops[:-1], (*self.hops[-1], text))

    def left(self, which: int) -> list[Op]:
        """What is still to be placed in a list."""
        left = list(self.level.trays[which])
        for op in self.lists[which]:
            left.remove(op)
        return left

    # ── the program ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def program(self) -> Program:
        """What the moves up to here make every rank do."""
        level = self.level
        if level.kind == "messages":
            return Program(level.id, level.goal, tuple(map(tuple, self._messages())))
        return Program(level.id, level.goal, self._ranks(self.lists))

    def _ranks(self, lists: Sequence[Sequence[Op]]) -> tuple[tuple[Op, ...], ...]:
        if self.level.kind == "pipeline":
            return tuple(map(tuple, lists))
        each = self.level.per_rank
        return tuple(tuple(of_replica(op, rank * each) for op in lists[0]) for rank in range(self.level.ranks))

    def _messages(self) -> list[list[Op]]:
        ranks: list[list[Op]] = [[] for _ in range(self.level.ranks)]
        for hop in self.hops:
            moves = [move for move in (Move(text).sending for text in hop) if move is not None]
            for sender, receiver, _, value in moves:
                ranks[sender].append(Send(parse_value(value), receiver))
            for sender, receiver, adds, value in moves:
                ranks[receiver].append(Recv(parse_value(value), sender, adds))
        return ranks

    def trace(self) -> Trace:
        """What the moves up to here would cost."""
        return simulate(self.program, self.level.costs)

    # ── the judge ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _judge(self, before: Board) -> None:
        """Raise `Refused` unless the program up to here is the beginning of a right one, and within the limits."""
        level, program = self.level, self.program
        if self.moves[-1] == NEXT:
            return
        rest = None if level.kind == "messages" else self._ranks([self.left(which) for which in range(len(self.lists))])
        try:
            verify_beginning(program, rest, _whole(level.limits.get("activations")))
            if level.kind == "messages" and self.holdings() == before.holdings():
                raise ProgramError(self._in_vain())
        except Missing as error:
            raise Refused(self._lacking(error)) from None
        except GatheredAgain as error:
            held = value_words(level, error.parameters)
            raise Refused(f"a rank has {held} already: free them first, or keep them") from None
        except ProgramError as error:
            too_soon = self._too_soon(before) if level.kind == "messages" else ""
            raise Refused(too_soon or str(error).partition("\n")[0]) from None
        most = level.limits.get("memory")
        if most is not None and (peak := self.peak_memory()) > most:
            raise Refused(
                f"a rank would hold {short(peak)} bytes at once, and {short(most)} are allowed: free some first"
            )

    def _in_vain(self) -> str:
        _, receiver, _, value = Move(self.moves[-1]).sending or (0, 0, False, "C0")
        slices = parse_value(value)
        assert isinstance(slices, Slices)
        return f"this changes nothing: rank {receiver} would hold in {slices_named(slices)} what it holds now"

    def _too_soon(self, before: Board) -> str:
        """Why a message is refused that would be right one hop later: what it is to carry has arrived in this hop."""
        sender, _, _, value = Move(self.moves[-1]).sending or (0, 0, False, "C0")
        slices = parse_value(value)
        assert isinstance(slices, Slices)
        if not before.arrived_now(sender, slices):
            return ""
        try:
            before.after(NEXT).after(self.moves[-1])
        except UsageError:
            return ""
        what = slices_named(slices)
        return f"rank {sender} received {what} in this hop, and can send it on in the next: begin the next hop first"

    def arrived_now(self, rank: int, slices: Slices) -> bool:
        """Whether a rank has received something for these slices in the hop that is under way."""
        begun = Board(self.level, self.moves[: len(self.moves) - len(self.hops[-1])]).holdings()[rank]
        now = self.holdings()[rank]
        return any(begun[index] != now[index] for index in slices.slices)

    def _lacking(self, error: Missing) -> str:
        """What an operation lacks, in words; of replicas, as rank 0 has it."""
        op, value = error.op, error.value
        if self.level.kind == "replicas":
            back = -error.rank * self.level.per_rank
            op, value = of_replica(op, back), _shifted(value, back)
        freed = "has freed it" in str(error)
        needs = f"{in_words(self.level, op)} needs {value_words(self.level, value)}"
        return f"{needs}{', already freed' if freed else ''}. {self._help(value, freed=freed)}"

    def _help(self, value: Value, *, freed: bool) -> str:
        """What to do so that a value is there."""
        everything = [(which, op) for which, tray in enumerate(self.level.trays) for op in tray]
        rules = Rules(self.level.goal, [op for _, op in everything])
        makers = [(which, op) for which, op in everything if value in rules.makes(op)]
        if not makers:
            return "Nothing that can be placed here makes it"
        left = [(which, op) for which, op in makers if op in self.left(which)]
        which, op = (left or makers)[0]
        where = f" on rank {which}" if self.level.kind == "pipeline" else ""
        if left:
            return f"Place {named(op)}{where} first"
        if freed:
            return f"{named(op)} is used up: take {named(Free(value))} away, or put it further back"
        return f"{named(op)}{where} stands further back: it has to come first"

    def peak_memory(self) -> float:
        """The most bytes that a rank has held up to here.

        What a rank holds depends on the whole program: the state of its optimizer is whole, or a part. So the program
        is the whole one, what is left of it behind a Join, and the events are those of what has been done.
        """
        trace = self.trace()
        rest = self._ranks([self.left(which) for which in range(len(self.lists))])
        ranks = (
            (*ops, Join(), *sorted(later, key=lambda op: isinstance(op, Free)))
            for ops, later in zip(self.program.ranks, rest, strict=True)
        )
        return held(replace(trace, program=replace(self.program, ranks=tuple(ranks))))

    def holdings(self) -> list[list[Symbol]]:
        """Of a collective: what each rank holds in each slice after the moves up to here."""
        program = self.program
        assert isinstance(program.goal, Collective)
        return [contents.slices for contents in contents_after(program, program.goal)]

    def missing(self) -> str:
        """What is still to be done, in words; nothing if the level is solved."""
        if self.level.kind != "messages":
            left = sum(len(self.left(which)) for which in range(len(self.lists)))
            if left:
                return f"{count(left, 'operation')} to place"
        try:
            verify(self.program)
        except ProgramError as error:
            return str(error)
        return ""

    def score(self, best: dict[str, Any] | None = None) -> Score | None:
        """Its stars, if the level is solved: one for that, one for the time, one for what else the level counts."""
        if self.missing():
            return None
        trace = self.trace()
        makespan, second = trace.makespan, measure(trace, self.level.second) if self.level.second else 0
        stars = 1
        if best is not None:
            stars += makespan <= best["makespan"] + 1e-9
            stars += bool(self.level.second) and second <= best["second"] + 1e-9
        return Score(makespan, second, stars)


def measure(trace: Trace, name: str) -> float:
    """What a level counts beside the time: of the rank that has most of it."""
    assert name in MEASURES
    if name == "activations":
        return max(trace.peak_activations)
    return held(trace) if name == "memory" else max(trace.bytes_sent)


def held(trace: Trace) -> float:
    """The most bytes that a rank holds, which takes memory for what it gathers and sums as soon as it asks for that.

    So a move that is added at the end never makes this less: what it frees was held before it.
    """
    events = [event._replace(start=event.asked) if is_meeting(event.operation) else event for event in trace.events]
    return max(replace(trace, events=events).peak_memory)


def _shifted(value: Value, by: int) -> Value:
    return replace(value, microbatch=value.microbatch + by) if isinstance(value, Act | Grad | Rest | Delta) else value


def of_replica(op: Op, by: int) -> Op:
    """The same operation on the micro-batches of another replica."""
    if isinstance(op, Forward | Backward | BackwardInput | BackwardWeight):
        return replace(op, microbatch=op.microbatch + by)
    return Free(_shifted(op.value, by)) if isinstance(op, Free) else op


def _parsed(word: str) -> Op:
    try:
        return parse_op(word)
    except ProgramError as error:
        raise Refused(str(error)) from None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
