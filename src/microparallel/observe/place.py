"""Find the line of the user's code that led to a call: the nearest one that is neither ours nor a library's."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

_PACKAGE = Path(__file__).parent.parent
# The packages through which all others communicate: their lines do not show which part of the program made a call.
_BENEATH = tuple(f"{_PACKAGE / name}/" for name in ("comms", "transport", "torch_backend", "observe", "world", "cli"))
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_PYTHON = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})

# How much a file tells the user: most if it is the user's own, then our training loop, then code without a file.
_BEST = 3
_OURS = 2
_NO_FILE = 1
_known: dict[str, tuple[int, bytes]] = {}  # of each file: its relevance, and the end of its name


class Place(NamedTuple):
    """A line of code, with the function it is in where that is known."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.short} of microparallel" if self.is_ours else self.short

    @property
    def short(self) -> str:
        """File and line: `data.py:41`."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def is_ours(self) -> bool:
        """Whether the line is in microparallel itself, so no code of the user's led there."""
        return relevance(self.file) == _OURS

    @property
    def with_function(self) -> str:
        """Function, file and line: `load (data.py:41)`."""
        return f"{self.function} ({self})" if self.function and not self.function.startswith("<") else str(self)


def relevance(file: str) -> int:
    """How much a line of this file tells the user: 3 for the user's own file, 0 for a library's."""
    if file.startswith(_BENEATH):
        return 0
    if file.startswith(f"{_PACKAGE}/"):
        return _OURS
    if file.startswith("<frozen"):
        return 0
    if file == "<string>":
        return _NO_FILE
    return 0 if file.startswith(_PYTHON) or any(part in file for part in _LIBRARIES) else _BEST


def caller(frame: FrameType | None) -> tuple[bytes, int]:
    """The file (as much of its end as a record holds) and the line of the user's code that led to this frame."""
    best, found = 0, (b"", 0)
    while frame is not None:
        file = frame.f_code.co_filename
        known = _known.get(file)
        if known is None:
            known = _known[file] = relevance(file), file.encode("utf-8", "replace")[-124:]
        if known[0] > best:
            best, found = known[0], (known[1], frame.f_lineno)
            if best == _BEST:
                break
        frame = frame.f_back
    return found


def most_relevant(places: Iterable[Place]) -> Place | None:
    """The user's innermost line among places that are given innermost first."""
    innermost_first = list(places)
    return max(innermost_first, key=lambda place: relevance(place.file), default=None)


def where_raised(traceback: TracebackType | None) -> Place | None:
    """The user's innermost line of a traceback."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append(Place(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return most_relevant(reversed(places))


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def read_stack(dump: str) -> tuple[Place, ...]:
    """The lines of a stack as `faulthandler` writes it, innermost first."""
    return tuple(Place(found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(dump))
