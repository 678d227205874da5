"""Whoever wants to know what a Comms does: it is told when a call begins, is waited for, and has ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from microparallel.comms.calls import Call
from microparallel.flight import Entry, NoEntry
from microparallel.flight.place import caller


class Listener(Protocol):
    """Is told of every call, in the thread that makes it; what `begin` returns is handed to the others."""

    def begin(self, call: Call, world_ranks: Sequence[int], place: tuple[bytes, int]) -> Any:
        """A rank begins a call in the group of these ranks, at this file and line of the user's."""

    def wait(self, token: Any) -> None:
        """It has nothing else to do but to wait for the call."""

    def leave(self, token: Any) -> None:
        """Its end was left to a future, and whoever waits for that will not say so."""

    def end(self, token: Any) -> None:
        """The call has ended, well or not."""


class Heard:
    """One call, as all listeners know it."""

    __slots__ = ("_tokens",)

    def __init__(
        self, listeners: Sequence[Listener], call: Call, world_ranks: Sequence[int], entry: Entry | NoEntry
    ) -> None:
        place = entry.place or caller(sys._getframe(1))
        self._tokens = [(listener, listener.begin(call, world_ranks, place)) for listener in listeners]

    def wait(self) -> None:
        """Tell that it is waited for."""
        for listener, token in self._tokens:
            listener.wait(token)

    def leave(self) -> None:
        """Tell that it was left to a future."""
        for listener, token in self._tokens:
            listener.leave(token)

    def end(self) -> None:
        """Tell that it has ended; telling it twice is fine."""
        for listener, token in self._tokens:
            listener.end(token)
        self._tokens = []
