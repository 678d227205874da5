"""Two traces beside each other: the predicted and the measured, say."""

from __future__ import annotations

from dataclasses import dataclass

from microparallel.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Difference:
    """One number in both traces: first what was predicted, then what was measured."""

    name: str
    one: float
    other: float

    @property
    def ratio(self) -> float:
        """How many times larger the other is."""
        return self.other / self.one if self.one else float("nan" if not self.other else "inf")

    @property
    def error(self) -> float:
        """How much too large the first is, as a share of the other; negative if it is too small."""
        return self.one / self.other - 1 if self.other else 0.0


def compare(one: Trace, other: Trace) -> list[Difference]:
    """The numbers that matter, from both traces."""
    pairs = {
        "makespan": (one.makespan, other.makespan),
        "work of the busiest rank": (max(one.work), max(other.work)),
        "bubble": (one.bubble, other.bubble),
        "bubble fraction": (one.bubble_fraction, other.bubble_fraction),
        "exposed communication": (max(one.exposed_communication), max(other.exposed_communication)),
        "peak activations": (max(one.peak_activations), max(other.peak_activations)),
        "messages sent": (sum(one.messages_sent), sum(other.messages_sent)),
        "bytes sent": (sum(one.bytes_sent), sum(other.bytes_sent)),
    }
    return [Difference(name, first, second) for name, (first, second) in pairs.items()]
