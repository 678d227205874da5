"""What the benchmarks of training steps take alike: lists of names, and for how long to measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from microparallel.errors import ConfigError
from microparallel.text import did_you_mean

Trace = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Record one more step of each, as Chrome traces (for Perfetto)."),
]


def parse_names(text: str, flag: str) -> tuple[str, ...]:
    """Names with commas between them, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} {text!r}: there is a name missing; write them as in a,b,c")
    return tuple(dict.fromkeys(parts))


def require_known(name: str, choices: Sequence[str], problem: str) -> None:
    """Refuse a name that is none of these, with the nearest or all of them."""
    if name not in choices:
        words = name.split()
        if len(words) > 1 and all(word in choices for word in words):
            raise ConfigError(f"{problem}; write commas between the names: {','.join(words)}")
        raise ConfigError(f"{problem}; {did_you_mean(name, choices)}")


def require_time(seconds: float, steps: int | None, usual: float) -> None:
    """Refuse what is no time, and no number of steps."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--seconds {seconds}: must be above 0; try {usual:g}")
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: must be at least 1; try 20, or leave it out")
