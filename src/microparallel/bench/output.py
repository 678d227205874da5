"""What a person sees while something is measured: a bar on a terminal, a line for each thing elsewhere."""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from microparallel import __version__
from microparallel.bench.settings import BenchSettings
from microparallel.errors import ConfigError
from microparallel.text import count, show_number, show_seconds, time_unit
from microparallel.topology import ALONE, Placement, find_placement

if TYPE_CHECKING:
    from microparallel.comms import Comms


@contextmanager
def progress_on_standard_error(shown: bool, unit: str) -> Iterator[Callable[[float, str, int], None]]:
    """Give a function that is told the fraction done, what is being measured, and how often so far (in `unit`)."""
    console = Console(stderr=True, highlight=False)
    if not shown:
        yield lambda *_: None
    elif not console.is_terminal:
        yield _line_for_each(console)
    else:
        whole = Column(no_wrap=True)
        columns = TextColumn("measuring {task.description}", table_column=whole), BarColumn(bar_width=None)
        left = TimeRemainingColumn(table_column=whole), TextColumn("left", table_column=whole)
        with Progress(*columns, *left, console=console, expand=True, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def move(fraction: float, measured: str, times: int) -> None:
                bar.update(task, completed=fraction, description=f"{measured:>8}, {times:>3} {unit}")

            yield move


def _line_for_each(console: Console) -> Callable[[float, str, int], None]:
    def say(fraction: float, measured: str, times: int) -> None:
        if times == 0:
            console.print(f"measuring {measured} ({fraction:.0%} done)", soft_wrap=True)

    return say


# What the tables of all benchmarks of training steps have in common.


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


# Where a benchmark runs: on ranks of our own, or on those that torchrun or Slurm started.


def choose_ranks(settings: BenchSettings) -> int:
    """How many ranks there will be: those of the world we are in, or as many as were asked for."""
    world = find_placement(os.environ)
    if world == ALONE:
        return settings.usual_ranks if settings.ranks is None else settings.ranks
    if settings.ranks not in (None, world.world_size):  # torchrun or Slurm has decided how many ranks there are
        raise ConfigError(
            f"--ranks {settings.ranks}: this process belongs to a world of {world.world_size} ranks; leave it out"
        )
    return world.world_size


def measure_on_ranks(bench: Callable[..., Any], settings: BenchSettings, quiet: bool, unit: str = "steps") -> Any:
    """What `bench(comms, settings, progress)` returns on rank 0; None on the other ranks of torchrun's world."""
    from microparallel.world import connect, launch
    from microparallel.world.connect import require_possible

    ranks, transport, device = choose_ranks(settings), settings.transport, settings.device
    if find_placement(os.environ) != ALONE:
        comms: Comms
        with connect(transport, device=device) as comms:
            measurements = _measure(comms, bench, settings, quiet, unit)
            return measurements if comms.rank == 0 else None
    require_possible(transport, device, Placement(0, ranks, local_rank=0, local_world_size=ranks))
    if not quiet:
        print(f"starting {count(ranks, 'rank')} …", file=sys.stderr)
    return launch(_measure, ranks, bench, settings, quiet, unit, transport=transport, device=device)[0]


def _measure(comms: Comms, bench: Callable[..., Any], settings: BenchSettings, quiet: bool, unit: str) -> Any:
    """What every rank does; the first one shows how it goes."""
    with progress_on_standard_error(comms.rank == 0 and not quiet, unit) as progress:
        return bench(comms, settings, progress)
