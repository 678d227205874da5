"""Where in the user's code? The nearest line that is neither ours nor a library's."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

_PACKAGE = Path(__file__).parent.parent
# What the rest of us calls to communicate. A line of these says nothing about who wanted it.
_BENEATH = tuple(f"{_PACKAGE / name}/" for name in ("comms", "torch_backend", "transport", "observe", "world", "cli"))
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_PYTHON = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})

# How well a file answers the question: the user's best, then our own training loop, then what has no file at all.
_BEST = 3
_OURS = 2
_NO_FILE = 1
_known: dict[str, tuple[int, bytes]] = {}


class Place(NamedTuple):
    """A line of code, with the function it is in where that is known."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.short} of microparallel" if self.is_ours else self.short

    @property
    def short(self) -> str:
        """As in `data.py:41`."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def is_ours(self) -> bool:
        """Whether it is in microparallel itself: no code of the user's led there."""
        return worth(self.file) == _OURS

    @property
    def in_words(self) -> str:
        """As in `load (data.py:41)`."""
        return f"{self.function} ({self})" if self.function and not self.function.startswith("<") else str(self)


def worth(file: str) -> int:
    """How well a file tells its user where things happen: 3 is the user's own, 0 the inside of a library."""
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
    """The file, as much of its end as a record holds, and the line of the user's code that led to this frame."""
    best, found = 0, (b"", 0)
    while frame is not None:
        file = frame.f_code.co_filename
        known = _known.get(file)
        if known is None:
            known = _known[file] = worth(file), file.encode("utf-8", "replace")[-124:]
        if known[0] > best:
            best, found = known[0], (known[1], frame.f_lineno)
            if best == _BEST:
                break
        frame = frame.f_back
    return found


def best_of(places: Iterable[Place]) -> Place | None:
    """The user's innermost line among places that are given from the inside out."""
    innermost_first = list(places)
    return max(innermost_first, key=lambda place: worth(place.file), default=None)


def where_raised(traceback: TracebackType | None) -> Place | None:
    """The user's innermost line of a traceback."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append(Place(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return best_of(reversed(places))


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def read_stack(dump: str) -> tuple[Place, ...]:
    """The lines of a stack as `faulthandler` writes it, innermost first."""
    return tuple(Place(found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(dump))
