"""What it costs to send a message from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: every message takes `latency` seconds, and `seconds_per_byte` for each byte.

    What is None is as on all other connections.
    """

    latency: float | None = None
    seconds_per_byte: float | None = None

    def or_else(self, other: Link) -> Link:
        """The same link, with what it does not say taken from another."""
        latency = other.latency if self.latency is None else self.latency
        return Link(latency, other.seconds_per_byte if self.seconds_per_byte is None else self.seconds_per_byte)

    def seconds(self, size: float) -> float:
        """How long a message of this many bytes is under way."""
        return (self.latency or 0) + size * (self.seconds_per_byte or 0)
