"""What a person sees while models are measured: a bar on a terminal, a line for each model elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


@contextmanager
def progress_by_model(shown: bool) -> Iterator[Callable[[float, str, int], None]]:
    """Give a function that is told the fraction done, the model that is being measured and its steps so far."""
    console = Console(stderr=True, highlight=False)
    if not shown:
        yield lambda *_: None
    elif not console.is_terminal:
        yield _line_for_each_model(console)
    else:
        whole = Column(no_wrap=True)
        columns = TextColumn("measuring {task.description}", table_column=whole), BarColumn(bar_width=None)
        left = TimeRemainingColumn(table_column=whole), TextColumn("left", table_column=whole)
        with Progress(*columns, *left, console=console, expand=True, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def move(fraction: float, model: str, steps: int) -> None:
                bar.update(task, completed=fraction, description=f"{model:>8}, {steps:>3} steps")

            yield move


def _line_for_each_model(console: Console) -> Callable[[float, str, int], None]:
    def say(fraction: float, model: str, steps: int) -> None:
        if steps == 0:
            console.print(f"measuring {model} ({fraction:.0%} done)", soft_wrap=True)

    return say
