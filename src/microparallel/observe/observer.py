"""The one hook: an `Observer` is told when each operation of a rank begins, waits and ends.

A Comms tells its observers (`comms.observers`) of its calls, `DataParallel` and `Pipeline` tell them of the operations
of the program they follow, in the thread that does the operation. The recorder of `mp.record`, the hook tracker and the
log of a graded exercise are observers.

The flight recorder is not one of them: a call's entry is written first, and `ObservedCall` joins it with the observers,
if there are any. The recorder is always on, so as an observer it would need an `Activity` and three more calls for each
call. Measured for an all-reduce of 4 KiB: writing an entry takes 2.8 µs, and 4.3 µs with one observer that does
nothing. Two ranks need 75 µs for the whole call in shared memory, so that would cost 2 % of every small call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.observe.place import caller
from microparallel.program import Observed, Op


class Activity:
    """One operation of this rank that has begun. An observer gets the same object when it begins, waits and ends.

    Attributes:
        op: an operation of the program that is followed, or something `Observed`.
        bytes: of the tensor that is sent, received or reduced.
        group: of a collective, the ranks of the world that take part.
        peer: of a message, the other rank of the world; None where it may come from any.
        place: the user's file and line that led here.
        arrived: of a message that has come, when it began to arrive, on `time.perf_counter`; None if that is not known.
        ended: of a call that has ended, when it did, on `time.perf_counter`.
        tensor: of an all-reduce, the tensor that the caller handed over.
        parameters: of a forward, the parameters of each of its stages.
        shards: of a forward whose rank keeps parts of these, its parts: an optimizer updates them.
        given: of a forward, the other tensors that were there before it: buffers, and the batch.
        kept: of a computation that has ended, the tensors that the rank keeps for the backward: outputs, for example.
    """

    __slots__ = (
        *("arrived", "bytes", "ended", "given", "group", "kept", "op", "parameters", "peer", "place", "shards"),
        "tensor",
    )

    def __init__(
        self,
        op: Op,
        *,
        size: int = 0,
        group: tuple[int, ...] = (),
        peer: int | None = None,
        place: tuple[bytes, int] = (b"", 0),
        tensor: Any = None,
        parameters: Mapping[int, Sequence[Any]] | None = None,
        shards: Mapping[int, Sequence[Any]] | None = None,
        given: Sequence[Any] = (),
    ) -> None:
        self.op = op
        self.bytes = size
        self.group = group
        self.peer = peer
        self.place = place
        self.tensor = tensor
        self.parameters = parameters
        self.shards = shards
        self.given = given
        self.kept: Sequence[Any] = ()
        self.arrived: float | None = None
        self.ended: float | None = None


class Observer(Protocol):
    """Is told of every operation of one rank, in the thread that does it.

    One that also has `issued(activity, works)` gets what was started for a call, and is told that the rank waits even
    if the call has ended: on a GPU, what the host has done may still be under way.
    """

    def begins(self, activity: Activity) -> None:
        """The rank begins an operation."""

    def waits(self, activity: Activity) -> None:
        """The rank waits for the operation from now on."""

    def ends(self, activity: Activity) -> None:
        """The operation has ended, well or with an error."""


class Observation:
    """`with` this around an operation: observers are told that it begins, and that it has ended, also with an error."""

    __slots__ = ("_observers", "activity")

    def __init__(self, observers: Sequence[Observer], activity: Activity) -> None:
        self._observers = tuple(observers)
        self.activity = activity

    def __enter__(self) -> Observation:
        for observer in self._observers:
            observer.begins(self.activity)
        return self

    def waits(self) -> None:
        """Tell the observers that the rank waits for the operation from now on."""
        for observer in self._observers:
            observer.waits(self.activity)

    def __exit__(self, *_: object) -> None:
        for observer in self._observers:
            observer.ends(self.activity)


UNOBSERVED = Observation((), Activity(Observed("nothing", "other")))  # where there are no observers


class ObservedCall:
    """A call that observers are told of and the flight recorder writes down. Callers use it as they use an `Entry`."""

    __slots__ = ("_activity", "_entry", "_late", "_observers", "ended_at")

    def __init__(self, entry: Entry | NoEntry, observers: Sequence[Observer], activity: Activity) -> None:
        self.ended_at: float | None = None  # on `time.perf_counter`, if that is known before somebody tells the end
        self._entry = entry
        self._observers = tuple(observers)
        self._late: tuple[Observer, ...] = ()  # those that were told of the end, and still want to know who waits
        self._activity = activity
        for observer in self._observers:
            observer.begins(activity)

    def started(self) -> None:
        """The call has been made; only waiting for it remains."""
        self._entry.started()

    def issued(self, works: Sequence[Any]) -> None:
        """These works were started for the call."""
        for observer in self._observers:
            if (issued := getattr(observer, "issued", None)) is not None:
                issued(self._activity, works)

    def waits(self) -> None:
        """The calling thread waits for the call from now on."""
        self._entry.waits()
        late, self._late = self._late, ()
        for observer in self._observers or late:
            observer.waits(self._activity)

    def completes(self) -> None:
        """The call is complete, and no thread has waited for it yet: the thread that ran it calls this."""
        self._late = tuple(observer for observer in self._observers if hasattr(observer, "issued"))
        self._tell_end()

    def ends(self) -> None:
        """The call has ended well."""
        self._entry.ends()
        self._tell_end()

    def fails(self, timed_out: bool) -> None:
        """The call has ended with an error."""
        self._entry.fails(timed_out)
        self._tell_end()

    def _tell_end(self) -> None:
        # Two threads may come here, and one tells. The other goes on at once: so the time is taken before, and what it
        # does next is later, however long the one that tells has to wait for a core.
        now = time.perf_counter() if self.ended_at is None else self.ended_at
        observers, self._observers = self._observers, ()
        if observers:
            self._activity.ended = now
        for observer in observers:
            observer.ends(self._activity)


def observe_call(entry: Entry | NoEntry, observers: Sequence[Observer], activity: Activity) -> ObservedCall:
    """Tell observers that a call begins, which the flight recorder has written down already."""
    activity.place = entry.place or caller(sys._getframe(1))
    return ObservedCall(entry, observers, activity)
