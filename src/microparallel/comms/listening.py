"""Whoever wants to know what a Comms does: it is told when a call begins, is waited for, and has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from microparallel.comms.calls import Call


class Listener(Protocol):
    """Is told of every call, in the thread that makes it; what `begin` returns is handed to the other two."""

    def begin(self, call: Call, world_ranks: Sequence[int]) -> Any:
        """A rank begins a call in the group of these ranks."""

    def wait(self, token: Any) -> None:
        """It has nothing else to do but to wait for the call."""

    def end(self, token: Any) -> None:
        """The call has ended, well or not."""


class Heard:
    """One call, as all listeners know it."""

    __slots__ = ("_tokens",)

    def __init__(self, listeners: Sequence[Listener], call: Call, world_ranks: Sequence[int]) -> None:
        self._tokens = [(listener, listener.begin(call, world_ranks)) for listener in listeners]

    def wait(self) -> None:
        """Tell that it is waited for."""
        for listener, token in self._tokens:
            listener.wait(token)

    def end(self) -> None:
        """Tell that it has ended; telling it twice is fine."""
        for listener, token in self._tokens:
            listener.end(token)
        self._tokens = []
