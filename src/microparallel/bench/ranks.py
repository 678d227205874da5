"""Run a benchmark on ranks of our own, or on those that torchrun or Slurm started, and show its progress.

Torch is imported only when ranks are started, so that `--help` and a mistyped value are answered at once.
"""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from microparallel.bench.settings import BenchSettings
from microparallel.errors import MicroparallelError
from microparallel.text import count
from microparallel.topology import ALONE, Placement, find_placement, ranks_of_the_world

if TYPE_CHECKING:
    from microparallel.bench.report import Report
    from microparallel.comms import Comms


def run_benchmark(
    settings: BenchSettings,
    measure: Callable[..., Any],
    report_on: Callable[[Any], Report[Any]],
    *,
    quiet: bool,
    json: bool,
    unit: str = "steps",
) -> Report[Any] | None:
    """Measure on all ranks, and print the report on rank 0; a wrong result is an error instead.

    Args:
        settings: of the benchmark.
        measure: `measure(comms, settings, progress)` is called on every rank, and returns what was `Measured`.
        report_on: makes the report of that.
        quiet: show no progress.
        json: print the report as JSON.
        unit: what progress counts.

    Returns:
        The report; None on the other ranks of torchrun's world, which print nothing.
    """
    measured = measure_on_ranks(measure, settings, quiet, unit)
    if measured is None:
        return None
    report = require_right(measured, report_on)
    if json:
        print(json_format.dumps(report.as_json(), indent=2))
    else:
        report.show()
    return report


def require_right(measured: Any, report_on: Callable[[Any], Report[Any]]) -> Report[Any]:
    """The report on what was measured; raises `MicroparallelError` where a method's result was wrong."""
    if measured.wrong is not None:
        raise MicroparallelError(str(measured.wrong))
    return report_on(measured)


def choose_ranks(settings: BenchSettings) -> int:
    """How many ranks there will be: those of torchrun's or Slurm's world, or as many as `--ranks` says."""
    there = ranks_of_the_world(os.environ, settings.ranks)
    if there is not None:
        return there
    return settings.usual_ranks if settings.ranks is None else settings.ranks


def measure_on_ranks(measure: Callable[..., Any], settings: BenchSettings, quiet: bool, unit: str = "steps") -> Any:
    """What `measure(comms, settings, progress)` returns on rank 0; None on the other ranks of torchrun's world."""
    from microparallel.world import connect, launch
    from microparallel.world.connect import require_possible
    from microparallel.world.mps.choice import require_as_given

    ranks, transport, device = choose_ranks(settings), settings.transport, settings.device
    if find_placement(os.environ) != ALONE:
        require_as_given(settings.mps)
        comms: Comms
        with connect(transport, device=device) as comms:
            measured = _measure(comms, measure, settings, quiet, unit)
            return measured if comms.rank == 0 else None
    require_possible(transport, device, Placement(0, ranks, local_rank=0, local_world_size=ranks))
    if not quiet:
        print(f"starting {count(ranks, 'rank')} …", file=sys.stderr)
    how: dict[str, Any] = {"transport": transport, "device": device, "mps": settings.mps}
    return launch(_measure, ranks, measure, settings, quiet, unit, **how)[0]


def _measure(comms: Comms, measure: Callable[..., Any], settings: BenchSettings, quiet: bool, unit: str) -> Any:
    """What every rank does; rank 0 shows the progress."""
    with progress_on_standard_error(comms.rank == 0 and not quiet, unit) as progress:
        return measure(comms, settings, progress)


# ── progress ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def progress_on_standard_error(shown: bool, unit: str) -> Iterator[Callable[[float, str, int], None]]:
    """Show progress: a bar on a terminal; elsewhere a line when the measurement of each thing begins.

    Yields a function that is told the fraction done, what is being measured, and how often so far (in `unit`).
    """
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
