"""Who wants to know what a rank does: an `Observer` is told when each operation begins, waits and ends.

Three tell: a Comms of its calls, `DataParallel` and `Pipeline` of the operations of the program they follow. All of
them tell the observers of their world (`comms.observers`), in the thread that does the operation. Nothing else watches:
the recorder of `mp.record`, the hook tracker and the log of a graded exercise are observers.

The flight recorder is not one of them: a call's entry is written first, and `Watched` joins it with the observers, if
there are any. It is always there, so every call would need an `Activity` to hand to it, and three more calls. Measured
for an all-reduce of 4 KiB: to write an entry takes 2.8 µs, and 4.3 µs with one observer that does nothing. Two ranks
need 75 µs for the whole call in shared memory, so as an observer the recorder would cost 2 % of every small call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.observe.place import caller
from microparallel.program import Observed, Op


class Activity:
    """One operation of this rank that has begun. Observers are handed the same object each time.

    Attributes:
        op: an operation of the program that is followed, or something `Observed`.
        bytes: of the tensor that is sent, received or reduced.
        group: of a collective, the ranks of the world that take part.
        peer: of a message, the other rank of the world; None where it may come from any.
        place: the user's file and line that led here.
        arrived: of a message that has come, when it began to arrive, on `time.perf_counter`; None if nobody knows.
        tensor: of an all-reduce, the tensor that was handed over.
    """

    __slots__ = ("arrived", "bytes", "group", "op", "peer", "place", "tensor")

    def __init__(
        self,
        op: Op,
        *,
        size: int = 0,
        group: tuple[int, ...] = (),
        peer: int | None = None,
        place: tuple[bytes, int] = (b"", 0),
        tensor: Any = None,
    ) -> None:
        self.op = op
        self.bytes = size
        self.group = group
        self.peer = peer
        self.place = place
        self.tensor = tensor
        self.arrived: float | None = None


class Observer(Protocol):
    """Is told of every operation of one rank, in the thread that does it."""

    def begins(self, activity: Activity) -> None:
        """The rank begins an operation."""

    def waits(self, activity: Activity) -> None:
        """The rank has nothing left to do but to wait for it."""

    def ends(self, activity: Activity) -> None:
        """It has ended, well or not."""


class Told:
    """`with` this around an operation: observers are told that it begins, and that it has ended, whatever happens."""

    __slots__ = ("_observers", "activity")

    def __init__(self, observers: Sequence[Observer], activity: Activity) -> None:
        self._observers = tuple(observers)
        self.activity = activity

    def __enter__(self) -> Told:
        for observer in self._observers:
            observer.begins(self.activity)
        return self

    def waits(self) -> None:
        """The rank has nothing left to do but to wait for it."""
        for observer in self._observers:
            observer.waits(self.activity)

    def __exit__(self, *_: object) -> None:
        for observer in self._observers:
            observer.ends(self.activity)


NOBODY = Told((), Activity(Observed("nothing", "other")))  # where there are no observers


class Watched:
    """A call that observers are told of and the flight recorder writes down; to its callers it is the entry."""

    __slots__ = ("_activity", "_entry", "_observers")

    def __init__(self, entry: Entry | NoEntry, observers: Sequence[Observer], activity: Activity) -> None:
        self._entry = entry
        self._observers = tuple(observers)
        self._activity = activity
        for observer in self._observers:
            observer.begins(activity)

    def started(self) -> None:
        """The call has been made; what remains is to wait for it."""
        self._entry.started()

    def waits(self) -> None:
        """A thread has nothing else to do but to wait for it."""
        self._entry.waits()
        for observer in self._observers:
            observer.waits(self._activity)

    def completes(self) -> None:
        """It is complete, before anybody has waited for it: the thread that ran it says so."""
        self._tell_end()

    def ends(self) -> None:
        """It has ended well."""
        self._entry.ends()
        self._tell_end()

    def fails(self, timed_out: bool) -> None:
        """It has ended with an error."""
        self._entry.fails(timed_out)
        self._tell_end()

    def _tell_end(self) -> None:
        observers, self._observers = self._observers, ()  # told once
        for observer in observers:
            observer.ends(self._activity)


def watch(entry: Entry | NoEntry, observers: Sequence[Observer], activity: Activity) -> Watched:
    """Tell observers that a call begins, which the flight recorder has written down already."""
    activity.place = entry.place or caller(sys._getframe(1))
    return Watched(entry, observers, activity)
