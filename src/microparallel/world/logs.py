"""The parent's logging holds in its ranks: what `logging.basicConfig` and `setLevel` set up before `launch`.

    parent   logging.basicConfig(level="INFO", filename="run.log")  →  describe()  →  bytes in the job
    rank     logging.info("step 3")   →  run.log                    ←  RankLogging.apply(bytes)

The levels of all loggers are carried, and the root's handlers: those to stderr and stdout write to the rank's own,
those to a file append to it (also one that the parent rotates: ranks do not), with their formatters, levels and
filters. A handler that holds something of its own process (a socket, a rich console) stays behind, and a line says so.
Handlers of other loggers stay behind as well: libraries add theirs when a rank imports them, and would have them twice.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle

_said: set[str] = set()  # kinds of handlers about which a line was logged


@dataclass(frozen=True, slots=True)
class _Handler:
    """One handler: where it writes, and the rest of it, pickled."""

    target: str  # "stdout", "stderr", or the path of a file
    encoding: str | None
    level: int
    rest: bytes  # its formatter and its filters


# ── in the parent ───────────────────────────────────────────────────────────────────────────────────────────────────


def describe() -> bytes:
    """The state of this process's logging, for its ranks."""
    named = [logger for logger in list(logging.root.manager.loggerDict.values()) if isinstance(logger, logging.Logger)]
    levels = {logger.name: logger.level for logger in named if logger.level != logging.NOTSET}
    handlers = [told for handler in logging.root.handlers if (told := _describe(handler)) is not None]
    return pickle.dumps((logging.root.manager.disable, {"root": logging.root.level} | levels, handlers))


def _describe(handler: logging.Handler) -> _Handler | None:
    target = _target(handler)
    if target is None:
        return None
    try:
        rest = cloudpickle.dumps((handler.formatter, handler.filters))
    except Exception as error:
        _say_it_stays(handler, f"its formatter or a filter cannot be pickled: {error}")
        return None
    return _Handler(target, getattr(handler, "encoding", None), handler.level, rest)


def _target(handler: logging.Handler) -> str | None:
    if isinstance(handler, logging.NullHandler):
        return None
    if isinstance(handler, logging.FileHandler):
        _append(handler)
        return str(handler.baseFilename)
    if not isinstance(handler, logging.StreamHandler):
        _say_it_stays(handler, "only those to stderr, stdout or a file are carried")
        return None
    number = _number(handler.stream)
    for name, own in (("stderr", 2), ("stdout", 1)):
        if number == own or handler.stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    if number is not None:  # otherwise it is memory of this process, as what a test captures
        _say_it_stays(handler, "it writes to an open file; a FileHandler has a name, and is carried")
    return None


def _append(handler: logging.FileHandler) -> None:
    """Let this process append, also to a file that it opened with "w": otherwise it would write over ranks' lines."""
    number = _number(handler.stream)
    if number is not None:
        fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)


def _number(stream: Any) -> int | None:
    try:
        number: int = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return number


def _say_it_stays(handler: logging.Handler, why: str) -> None:
    kind = type(handler).__name__
    if kind not in _said:
        _said.add(kind)
        logging.getLogger("microparallel").warning("what ranks log does not go to this process's %s: %s", kind, why)


# ── in a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RankLogging:
    """The parent's logging in a rank, whose process may run several jobs one after another."""

    def __init__(self) -> None:
        self._handlers: list[logging.Handler] = []
        self._levels: dict[str, int] = {}  # of loggers, before a job changed them

    def apply(self, described: bytes) -> None:
        """Set this process up as the parent is; what the job before has brought along goes away."""
        for handler in self._handlers:
            logging.root.removeHandler(handler)
            handler.close()
        disabled, levels, handlers = pickle.loads(described)
        logging.disable(disabled)
        before = self._levels
        self._levels = {name: before.get(name, logging.getLogger(name).level) for name in levels}
        for name, level in (before | levels).items():
            logging.getLogger(name).setLevel(level)
        self._handlers = [_make(handler) for handler in handlers]
        for handler in self._handlers:
            logging.root.addHandler(handler)


def _make(told: _Handler) -> logging.Handler:
    handler: logging.Handler
    if told.target in ("stdout", "stderr"):
        handler = logging.StreamHandler(getattr(sys, told.target))
    else:
        handler = logging.FileHandler(told.target, "a", told.encoding, delay=True)
    handler.setLevel(told.level)
    formatter, handler.filters = pickle.loads(told.rest)
    handler.setFormatter(formatter)
    return handler
