"""Events as a recorder takes them down, written by hand."""

from microparallel.errors import ProgramError
from microparallel.program import Observed, lane_of, parse_op
from microparallel.trace import Event, Trace
from microparallel.trace.meetings import met


def span(rank, kind, name, start, end, step=0, **more):
    """What a rank did, and when it asked for it; a name that is an operation's is that operation."""
    sent = more.get("bytes", 0) if kind == "send" else 0
    return Event(rank, lane_of(kind), _op(kind, name), start, end, int(kind == "send"), sent, step=step, **more)


def _op(kind, name):
    try:
        return parse_op(name)
    except ProgramError:
        return Observed(name, kind)


def recorded(ranks, spans, **more):
    """All of it as a trace: communication begins when everything it needs has come."""
    return Trace(met(spans), None, ranks, **more)
