"""What it costs to send a message from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: every message takes `latency` seconds, and `seconds_per_byte` for each byte."""

    latency: float = 0
    seconds_per_byte: float = 0

    def seconds(self, size: float) -> float:
        """How long a message of this many bytes is under way."""
        return self.latency + size * self.seconds_per_byte
