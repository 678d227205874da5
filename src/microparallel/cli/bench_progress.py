"""What a person sees while something is measured: a bar on a terminal, a line for each size elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from microparallel.performance.units import show_size


@contextmanager
def progress_on_standard_error(shown: bool) -> Iterator[Callable[[float, int, int], None]]:
    """Give a function that is told the fraction done, the size that is being measured and its repeats so far."""
    console = Console(stderr=True, highlight=False)
    if not shown:
        yield lambda *_: None
    elif not console.is_terminal:
        yield _line_for_each_size(console)
    else:
        whole = Column(no_wrap=True)
        columns = TextColumn("measuring {task.description}", table_column=whole), BarColumn(bar_width=None)
        left = TimeRemainingColumn(table_column=whole), TextColumn("left", table_column=whole)
        with Progress(*columns, *left, console=console, expand=True, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def move(fraction: float, size: int, repeats: int) -> None:
                bar.update(task, completed=fraction, description=f"{show_size(size):>7}, {repeats:>3} repeats")

            yield move


def _line_for_each_size(console: Console) -> Callable[[float, int, int], None]:
    def say(fraction: float, size: int, repeats: int) -> None:
        if repeats == 0:
            console.print(f"measuring {show_size(size)} ({fraction:.0%} done)", soft_wrap=True)

    return say
