"""The walk through a program: which operation can be done next, and which rank waits for which?

Every rank does its operations in order; the walk hands them over one by one, as soon as they can be done. What it
leaves open is a *policy*:

| policy                  | sends                   | a message is carried           | hands over to                   |
|-------------------------|-------------------------|--------------------------------|---------------------------------|
| verifier, order         | each of the three       | as that says                   | nothing: which rank waits?      |
| verifier, results       | buffered                | as it is sent                  | symbols (`symbols.py`)          |
| drawing, holdings       | buffered                | as it is sent                  | symbols, remembered             |
| line-up of a pipeline   | buffered; rank by rank  | as it is sent                  | a list of messages              |
| run in one process      | rendezvous              | when both sides are there      | tensors                         |
| simulator               | rendezvous; two lanes   | when its sender's port is free | a clock                         |

What a Send means decides when it holds its rank up:

- *buffered*: its message is carried at once;
- *rendezvous*: its rank goes on, but may not change the value before the message is carried, which needs a posted Recv;
- *blocking*: its rank stops until the message is carried.

A Recv is posted when its rank comes to it and may write there (`rules.py`). What a group does together, such as an
AllReduce, waits until all ranks that take part have come to it.

With two lanes, an operation waits until what it needs has been made (of what is made again, the version that its rank's
list makes last before it), and a Join until the other lane has come to it. A rank asks for what its group does together
when all that it computes before it has ended. Without lanes, a rank does one operation after another: a program that
comes to its end in that way does so on two lanes, too.

Every operation is looked at a bounded number of times: a cursor that waits is called when what it waits for has come.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from microparallel.program.ops import (
    Add,
    Free,
    GroupOp,
    Join,
    Lane,
    MeetingOp,
    Observed,
    Op,
    Recv,
    Send,
    is_meeting,
    lane,
)
from microparallel.program.program import Collective, Program
from microparallel.program.rules import OpenSends, Rules, Version, written
from microparallel.program.values import Value

Sends = Literal["buffered", "rendezvous", "blocking"]
Versions = dict[int, tuple[Value | Version, ...]]  # by place


@dataclass(slots=True, eq=False)
class Message:
    """One transfer: its two sides, and when each was ready for it."""

    sender: int
    receiver: int
    send: Send | None = None  # once its rank has come to it
    receive: Recv | None = None  # once it is posted
    offered: float | None = None
    posted: float = 0
    start: float = 0
    end: float = 0
    carried: bool = False  # whether it has left and arrived
    content: Any = ()  # whatever a policy lets it carry
    number: int = 0  # of its Send, among all Sends
    index: int = 0  # among the messages of its channel


@dataclass(slots=True, eq=False)
class Meeting:
    """Ranks that do one operation together, such as an AllReduce: when each came to it."""

    op: MeetingOp
    ranks: tuple[int, ...]
    number: int  # of the meetings at which these ranks do the same
    arrived: dict[int, float] = field(default_factory=dict)
    content: Any = None  # whatever a policy keeps here


@dataclass(slots=True, eq=False)
class Cursor:
    """Where a rank stands in its list, or one lane of it."""

    rank: int
    ops: list[Op] | tuple[Op, ...]
    place: int = 0
    op: Op = field(init=False)  # that it stands at
    message: Message | None = None  # of the Send or Recv it stands at
    meeting: Meeting | None = None  # that it has come to
    waits_for: Message | Meeting | None = None
    missing: Value | Version | None = None  # what it needs and its rank has not made
    versions: Versions = field(default_factory=dict)  # what the operations at some places need, if it was made again
    twin: Cursor | None = None  # the rank's other lane
    lane: Lane | None = None
    time: float = 0  # when its last operation ended
    ready: float = 0  # since when the operation it stands at could begin
    meetings: deque[int] = field(default_factory=deque)  # computing lane: the places before which meetings stand
    came: float = 0  # when the rank came to the meeting it stands at
    asked: deque[float] = field(default_factory=deque)  # communicating lane: when the rank asked for the next meetings


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on, where it stands, what it is about to do, and the rank it waits for."""

    rank: int
    place: int
    doing: str
    on: int

    def __str__(self) -> str:
        return f"rank {self.rank} {self.doing}"


class Queue(Protocol):
    """Cursors that may go on, in the order in which they are to do so."""

    def append(self, cursor: Cursor, /) -> None:
        """Let a cursor go on after those that wait here already."""

    def popleft(self) -> Cursor:
        """Take the cursor that goes on next."""

    def __len__(self) -> int: ...


class Policy:
    """What a walk leaves open. This policy lets each rank go on for as long as it can; time does not pass."""

    lanes = False  # whether a rank's operations run on two lanes

    def __init__(self, sends: Sends = "buffered") -> None:
        self.sends = sends

    def queue(self) -> Queue:
        """A new, empty queue for the cursors that may go on."""
        return deque()

    def pauses_after(self, op: Op) -> bool:  # noqa: ARG002
        """Whether a rank lets the others go on after this operation."""
        return False

    def carry(self, message: Message) -> bool:  # noqa: ARG002
        """Both sides of a message are ready: whether it is carried now. If not, `idle` hands it over later."""
        return True

    def idle(self) -> Message | None:
        """No rank can go on: the next message that is carried, if there is one."""
        return None


class Walk:
    """One walk through a program: iterating over it gives, for each operation, the cursor that stands at it.

    The caller does the operation; if time passes, it sets `cursor.time` to when the operation ended. Then the walk
    goes on.
    """

    def __init__(self, program: Program, policy: Policy | None = None) -> None:
        self._policy = policy = Policy() if policy is None else policy
        self._queue = policy.queue()
        self._open_sends: list[OpenSends[Message]] = [OpenSends() for _ in program.ranks]
        self._channels: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)  # one side is there
        self._opened: Counter[tuple[int, int]] = Counter()  # how many messages each channel has had
        # In a collective every value is there from the beginning, and is written again and again. In a training step
        # each is made once.
        self._overwrites = isinstance(program.goal, Collective)
        self._groups = program.groups()
        self._meetings: dict[tuple[MeetingOp, int, int], Meeting] = {}
        self._met: Counter[tuple[int, MeetingOp]] = Counter()  # how often each rank has done what a group does
        self._before: dict[type, Callable[[Cursor, Any], bool]] = {
            Send: self._begin_blocking_send if policy.sends == "blocking" else self._begin_send,
            Recv: self._receive,
            Add: self._may_write,
            Observed: self._meet_if_together,
            **dict.fromkeys(get_args(GroupOp), self._meet),
        }
        self._after: dict[type, Callable[[Cursor, Any], None]] = {
            Send: self._sent,
            Recv: self._received,
            Observed: self._have_met_if_together,
            **dict.fromkeys(get_args(GroupOp), self._have_met),
        }
        self._made: list[dict[Value | Version, float]] = []  # with lanes: when each rank made what
        self._made_again: list[Counter[Value]] = []  # with lanes: how often each rank made what it had made before
        self._unmade: list[dict[Value, list[Message]]] = []  # to be sent as soon as it is made
        if policy.lanes:
            self._unmade = [{} for _ in program.ranks]
            self._rules = [Rules(program.goal, ops) for ops in program.ranks]
            self._made = [dict.fromkeys(rules.at_first(), 0.0) for rules in self._rules]
            self._made_again = [Counter() for _ in program.ranks]
            self._cursors = [
                cursor for rank, ops in enumerate(program.ranks) for cursor in _lanes(rank, ops, self._rules[rank])
            ]
            self._communicating = self._cursors[1::2]
            self._before[Join] = self._join
            self._after[Join] = self._joined
        else:
            self._cursors = self._communicating = [Cursor(rank, ops) for rank, ops in enumerate(program.ranks)]

    def __iter__(self) -> Iterator[Cursor]:
        """Each operation as soon as it can be done."""
        queue, before, after = self._queue, self._before, self._after
        lanes, pauses_after = self._policy.lanes, self._policy.pauses_after
        may_pause = type(self._policy).pauses_after is not Policy.pauses_after
        otherwise = self._needs if lanes else None
        make = self._make if lanes else None
        for cursor in self._cursors:
            queue.append(cursor)
        while True:
            while queue:
                cursor = queue.popleft()
                ops = cursor.ops
                while cursor.place < len(ops):
                    op = cursor.op = ops[cursor.place]
                    kind = type(op)
                    may_begin = before.get(kind, otherwise)
                    if may_begin is not None and not may_begin(cursor, op):
                        break
                    yield cursor
                    cursor.place += 1
                    finish = after.get(kind, make)
                    if finish is not None:
                        finish(cursor, op)
                    if may_pause and pauses_after(op):
                        queue.append(cursor)
                        break
            message = self._policy.idle()
            if message is None:
                return
            self._carried(message)

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_send(self, cursor: Cursor, op: Send) -> bool:
        cursor.message = self._outgoing(cursor.rank, op.to)
        return True

    def _begin_blocking_send(self, cursor: Cursor, op: Send) -> bool:
        if cursor.message is None:
            cursor.message = self._outgoing(cursor.rank, op.to)
            self._offer(cursor.message, op, cursor.time)
        return self._is_carried(cursor, cursor.message)

    def _sent(self, cursor: Cursor, op: Send) -> None:
        message, cursor.message = cursor.message, None
        assert message is not None
        if self._policy.sends == "blocking":
            return
        if self._policy.sends == "buffered":
            message.send = op
            self._carried(message)
            return
        offered = cursor.time
        if self._overwrites:
            self._open_sends[cursor.rank].add(op.value, message)
        elif self._made:
            made = self._made[cursor.rank].get(op.value)
            if made is None:
                message.send, message.offered = op, None
                message.start = offered  # not before its rank has come to it
                self._unmade[cursor.rank].setdefault(op.value, []).append(message)
                return
            offered = max(offered, made)
        self._offer(message, op, offered)

    def _offer(self, message: Message, op: Send, time: float) -> None:
        message.send, message.offered = op, time
        if message.receive is not None and self._policy.carry(message):
            self._carried(message)

    def _receive(self, cursor: Cursor, op: Recv) -> bool:
        """Post a receive; whether its message is there and may be written to its place."""
        message = cursor.message
        if message is None:
            cursor.ready = cursor.time
            if not op.reduce and not self._may_overwrite(cursor, op):
                return False
            message = cursor.message = self._incoming(op.source, cursor.rank)
            message.receive, message.posted = op, cursor.ready
            if not message.carried and message.offered is not None and self._policy.carry(message):
                self._carried(message)
        if not self._is_carried(cursor, message):
            return False
        cursor.ready = max(cursor.ready, message.end)
        return not op.reduce or self._may_overwrite(cursor, op)

    def _received(self, cursor: Cursor, op: Recv) -> None:
        cursor.message = None
        if self._made and not self._overwrites:
            self._have_made(cursor, op.value)

    def _may_write(self, cursor: Cursor, op: Add) -> bool:
        cursor.ready = cursor.time
        return self._may_overwrite(cursor, op)

    def _may_overwrite(self, cursor: Cursor, op: Recv | Add) -> bool:
        """Whether no open send of this rank reads what the operation writes; `cursor.ready` is when the last left."""
        open_sends = self._open_sends[cursor.rank]
        conflicts = open_sends.conflicts(op)
        for message in conflicts:
            if not self._is_carried(cursor, message):
                return False
        for message, value in conflicts.items():
            cursor.ready = max(cursor.ready, message.end)
            open_sends.close(value, message)
        return True

    def _is_carried(self, cursor: Cursor, message: Message) -> bool:
        cursor.waits_for = None if message.carried else message
        return message.carried

    def _carried(self, message: Message) -> None:
        message.carried = True
        for rank in (message.receiver, message.sender):
            if self._communicating[rank].waits_for is message:
                self._call(self._communicating[rank])

    def _outgoing(self, sender: int, receiver: int) -> Message:
        """The next message that a rank sends to another: one that is awaited, or a new one."""
        channel = self._channels[sender, receiver]
        if channel and channel[0].send is None:
            return channel.popleft()
        return self._new(sender, receiver)

    def _incoming(self, sender: int, receiver: int) -> Message:
        """The next message that a rank receives from another: one that was sent, or a new one."""
        channel = self._channels[sender, receiver]
        if channel and channel[0].send is not None:
            return channel.popleft()
        return self._new(sender, receiver)

    def _new(self, sender: int, receiver: int) -> Message:
        channel = sender, receiver
        message = Message(sender, receiver, index=self._opened[channel])
        self._opened[channel] += 1
        self._channels[channel].append(message)
        return message

    # ── what a group does together ──────────────────────────────────────────────────────────────────────────────

    def _meet(self, cursor: Cursor, op: MeetingOp) -> bool:
        meeting = cursor.meeting
        if meeting is None:
            if self._made and not self._is_asked_for(cursor, op):
                return False
            group = self._groups[cursor.rank, op]
            times = self._met[cursor.rank, op]
            meeting = self._meetings.setdefault((op, group[0], times), Meeting(op, group, times))
            cursor.meeting = meeting
            meeting.arrived[cursor.rank] = cursor.ready
            if len(meeting.arrived) == len(group):
                for rank in group:
                    if self._communicating[rank].waits_for is meeting:
                        self._call(self._communicating[rank])
        if len(meeting.arrived) < len(meeting.ranks):
            cursor.waits_for = meeting
            return False
        return True

    def _is_asked_for(self, cursor: Cursor, op: MeetingOp) -> bool:
        """Whether its rank has asked for it: the rank has made what it needs and computed all that stands before it."""
        if not cursor.asked:
            return False
        if not self._needs(cursor, op):
            return False
        cursor.came = cursor.asked.popleft()
        cursor.ready = max(cursor.ready, cursor.came)
        return True

    def _have_met(self, cursor: Cursor, op: MeetingOp) -> None:
        self._met[cursor.rank, op] += 1
        cursor.meeting = None
        if self._made and not isinstance(op, Observed):
            for value in self._rules[cursor.rank].makes(op):
                self._have_made(cursor, value)

    def _meet_if_together(self, cursor: Cursor, op: Observed) -> bool:
        if op.kind == "collective":
            return self._meet(cursor, op)
        return not self._made or self._needs(cursor, op)

    def _have_met_if_together(self, cursor: Cursor, op: Observed) -> None:
        if op.kind == "collective":
            self._have_met(cursor, op)
        elif self._made:
            self._make(cursor, op)

    # ── two lanes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _needs(self, cursor: Cursor, op: Op) -> bool:
        """Whether what an operation needs has been made."""
        made, ready = self._made[cursor.rank], cursor.time
        again = cursor.versions.get(cursor.place) if cursor.versions else None
        for value in self._rules[cursor.rank].needs(op) if again is None else again:
            time = made.get(value)
            if time is None:
                cursor.missing = value
                return False
            ready = max(ready, time)
        cursor.ready = ready
        return True

    def _make(self, cursor: Cursor, op: Op) -> None:
        for value in self._rules[cursor.rank].makes(op):
            self._have_made(cursor, value)
        if cursor.meetings:
            self._come_to_meetings(cursor)

    def _come_to_meetings(self, cursor: Cursor) -> None:
        """The computing lane has ended an operation: its rank now asks for the meetings that stand behind it."""
        asks = False
        while cursor.meetings and cursor.meetings[0] <= cursor.place:
            cursor.meetings.popleft()
            assert cursor.twin is not None
            cursor.twin.asked.append(cursor.time)
            asks = True
        if asks and cursor.twin is not None:
            self._call(cursor.twin)

    def _have_made(self, cursor: Cursor, value: Value) -> None:
        made, time = self._made[cursor.rank], cursor.time
        version: Value | Version = value
        if value in made:
            again = self._made_again[cursor.rank]
            again[value] += 1
            version = Version(value, 1 + again[value])
        made[version] = time
        for message in self._unmade[cursor.rank].pop(value, ()):
            assert message.send is not None
            self._offer(message, message.send, max(time, message.start))
        twin = cursor.twin
        if twin is not None and twin.missing is not None and twin.missing == version:
            self._call(twin)

    def _join(self, cursor: Cursor, op: Join) -> bool:  # noqa: ARG002
        twin = cursor.twin
        return twin is not None and twin.place < len(twin.ops) and isinstance(twin.ops[twin.place], Join)

    def _joined(self, cursor: Cursor, op: Join) -> None:  # noqa: ARG002
        twin = cursor.twin
        assert twin is not None
        cursor.time = twin.time = max(cursor.time, twin.time)
        twin.place += 1
        self._call(twin)
        self._come_to_meetings(cursor if cursor.lane is Lane.COMPUTE else twin)

    def _call(self, cursor: Cursor) -> None:
        """Let a cursor go on: what it waited for has come."""
        cursor.waits_for = cursor.missing = None
        self._queue.append(cursor)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def stuck(self) -> list[Cursor]:
        """The cursors that have not come to the end of their list."""
        return [cursor for cursor in self._cursors if cursor.place < len(cursor.ops)]

    def lost(self) -> Message | None:
        """A message that was sent and that no rank has come to receive."""
        left = (message for channel in self._channels.values() for message in channel)
        return next((message for message in left if message.send is not None), None)

    def waits(self) -> list[Wait]:
        """The ranks that have not come to their end, and what each waits for."""
        return [self._wait(cursor) for cursor in self.stuck()]

    def _wait(self, cursor: Cursor) -> Wait:
        op, held_by = cursor.op, cursor.waits_for
        doing, on = f"stands at {op}", cursor.rank
        if isinstance(held_by, Meeting):
            on = next(rank for rank in held_by.ranks if rank not in held_by.arrived)
            doing = f"waits for rank {on} at {op}"
        elif isinstance(op, Send):
            doing, on = f"sends {op.value} to rank {op.to}", op.to
        elif isinstance(op, Recv) and held_by is cursor.message:
            doing, on = f"waits for {op.value} from rank {op.source}", op.source
        elif held_by is not None and held_by.send is not None and isinstance(op, Recv | Add):
            on = held_by.receiver
            doing = f"must not overwrite {written(op)} while it sends {held_by.send.value} to rank {on}"
        return Wait(cursor.rank, cursor.place, doing, on)


def _lanes(rank: int, ops: tuple[Op, ...], rules: Rules) -> tuple[Cursor, Cursor]:
    """Deal a rank's operations to its two lanes. A Free takes no time, and a Join stands on both."""
    dealt: dict[Lane, list[Op]] = {Lane.COMPUTE: [], Lane.COMM: []}
    versions: dict[Lane, Versions] = {Lane.COMPUTE: {}, Lane.COMM: {}}
    again = rules.versions()
    meetings: deque[int] = deque()
    for place, op in enumerate(ops):
        if isinstance(op, Join):
            dealt[Lane.COMPUTE].append(op)
            dealt[Lane.COMM].append(op)
        elif not isinstance(op, Free):
            which = lane(op)
            if place in again:
                versions[which][len(dealt[which])] = again[place]
            dealt[which].append(op)
            if is_meeting(op):
                meetings.append(len(dealt[Lane.COMPUTE]))
    computing, communicating = (
        Cursor(rank, mine, lane=which, versions=versions[which]) for which, mine in dealt.items()
    )
    computing.twin, communicating.twin = communicating, computing
    computing.meetings = meetings
    while meetings and not meetings[0]:  # nothing is computed before
        communicating.asked.append(meetings.popleft())
    return computing, communicating
