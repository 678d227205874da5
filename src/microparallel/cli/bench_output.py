"""What the tables of all benchmarks of training steps have in common."""

from __future__ import annotations

import platform
import textwrap
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from microparallel import __version__
from microparallel.text import show_number, show_seconds, time_unit


def console_for_results(width_of_files: int = 96) -> Console:
    """Where results are printed: as wide as the terminal, or as a file shall be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width_of_files)


def say(console: Console, text: str, *, heading: str = "", indent: int = 0, style: str = "") -> None:
    """Print a sentence, its further lines as far in as its first words; in a file it is as long as it comes.

    Args:
        console: where.
        text: plain words.
        heading: what stands before them, in bold, or a sign of warning.
        indent: at which column they begin.
        style: of the words.
    """
    line = f"{heading:<{indent}}{text}"
    if console.is_terminal:
        width = max(console.width, indent + 20)
        line = textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    shown = Text(line, style)
    shown.stylize("yellow" if heading == "!" else "bold", 0, len(heading))
    console.print(shown, soft_wrap=True)


def machine(cores: int) -> dict[str, Any]:
    """What it was measured on, for scripts."""
    return {
        "cores": cores,
        "system": f"{platform.system()}, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "microparallel": __version__,
    }


def show_step(median: float, lower_quartile: float, upper_quartile: float, counted: int) -> list[str]:
    """Two cells: the median with its unit, and the quartiles in the same one."""
    length, _ = time_unit(median)
    quartiles = "–".join(show_number(quartile / length) for quartile in (lower_quartile, upper_quartile))
    return [show_seconds(median), quartiles if counted > 1 else "one step"]
