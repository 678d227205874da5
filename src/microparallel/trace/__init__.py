"""What happened: events, traces, everything that is measured on them, and why ranks waited."""

from microparallel.program import Kind, Observed
from microparallel.trace.event import Event, kind_of
from microparallel.trace.meetings import reasons
from microparallel.trace.memory import RankMemory, Sizes
from microparallel.trace.parts import Parts, parts
from microparallel.trace.trace import Difference, Trace, compare

__all__ = [
    "Difference",
    "Event",
    "Kind",
    "Observed",
    "Parts",
    "RankMemory",
    "Sizes",
    "Trace",
    "compare",
    "kind_of",
    "parts",
    "reasons",
]
