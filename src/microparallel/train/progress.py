"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from microparallel.data_parallel import LossScale
from microparallel.text import count
from microparallel.train.metrics import Validation

_SECONDS_BETWEEN_LINES = 5.0


class Display:
    """Shows how training goes. This one shows nothing: it is for all ranks but 0."""

    def start(self, description: str, done: int, total: int) -> None:
        """Show that the run begins (or goes on)."""

    def step(self, done: int, loss: float, samples_per_second: float, scale: LossScale | None = None) -> None:
        """Show a step; and in float16, the scale of the loss."""

    def validation(self, result: Validation) -> None:
        """Show a measurement on held-back data."""

    def note(self, text: str) -> None:
        """Show a remark."""

    def warn(self, text: str) -> None:
        """Show a warning, in any case."""
        self.note(f"warning: {text}")

    def close(self) -> None:
        """Leave the terminal tidy."""


class Bar(Display):
    """A live bar with loss, accuracy, speed and the time that is left; a narrow terminal gets fewer of them."""

    def __init__(self, console: Console) -> None:
        columns: list[ProgressColumn] = [BarColumn(bar_width=None), _text("{task.completed}/{task.total}")]
        columns += [_text("loss [bold]{task.fields[loss]}[/]")]
        columns += [_text("{task.fields[accuracy]}")] if console.width >= 90 else []
        columns += [_text("{task.fields[speed]} samples/s")] if console.width >= 70 else []
        columns += [TimeRemainingColumn(table_column=Column(no_wrap=True)), _text("left")]
        self._progress = Progress(*columns, console=console, expand=True)
        self._task = self._progress.add_task("training", total=None, visible=False, loss="…", accuracy="", speed="…")

    def start(self, description: str, done: int, total: int) -> None:
        """Draw the empty bar."""
        self._progress.console.print(description, highlight=False, markup=False)
        self._progress.update(self._task, total=total, completed=done, visible=True)
        self._progress.start()

    def step(self, done: int, loss: float, samples_per_second: float, scale: LossScale | None = None) -> None:
        """Move the bar on."""
        shown = f"{loss:.4f}{_scaled(scale)}"
        self._progress.update(self._task, completed=done, loss=shown, speed=f"{samples_per_second:,.0f}")

    def validation(self, result: Validation) -> None:
        """Put the measurement beside the loss."""
        loss = "…" if result.loss is None else f"{result.loss:.4f}"
        measured = loss if result.accuracy is None else f"{result.accuracy:.1%}"
        self._progress.update(self._task, accuracy=f"validation {measured}")

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class Lines(Display):
    """A plain line every few seconds, for log files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = time.monotonic()
        self._total = 0

    def start(self, description: str, done: int, total: int) -> None:
        """Print what is trained, and after which step it goes on."""
        self._total = total
        self.note(description)
        if done:
            self.note(f"going on after step {done}")

    def step(self, done: int, loss: float, samples_per_second: float, scale: LossScale | None = None) -> None:
        """Print step, loss and speed, but not at every step."""
        now = time.monotonic()
        if now - self._printed > _SECONDS_BETWEEN_LINES or done == self._total:
            self._printed = now
            shown = f"{loss:.4f}{_scaled(scale)}"
            self.note(f"step {done}/{self._total}  loss {shown}  {samples_per_second:,.0f} samples/s")

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class Quiet(Display):
    """Shows warnings alone, for scripts."""

    def warn(self, text: str) -> None:
        """Print a warning."""
        Console(stderr=True).print(f"warning: {text}", highlight=False, markup=False, soft_wrap=True)


def display_for(rank: int, quiet: bool = False) -> Display:
    """The display that suits this rank and where its standard error goes."""
    if rank != 0 or quiet:
        return Display() if rank else Quiet()
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines(console)


def _scaled(scale: LossScale | None) -> str:
    """What is shown beside the loss of a run in float16."""
    if scale is None:
        return ""
    skipped = f", {count(scale.skipped, 'step')} skipped" if scale.skipped else ""
    return f", scale {scale.value:,.0f}{skipped}"


def _text(content: str) -> TextColumn:
    return TextColumn(content, table_column=Column(no_wrap=True))
