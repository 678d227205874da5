"""What happened: events, traces, everything that is measured on them, and why ranks waited."""

from microparallel.trace.compare import Difference, compare
from microparallel.trace.event import Event
from microparallel.trace.reasons import reasons
from microparallel.trace.trace import Trace

__all__ = ["Difference", "Event", "Trace", "compare", "reasons"]
