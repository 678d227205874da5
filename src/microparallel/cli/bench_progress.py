"""What a person sees while something is measured: a bar on a terminal, a line for each thing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


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
