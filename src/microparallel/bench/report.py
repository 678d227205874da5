"""How benchmarks show their results: a headline, tables whose columns are declared once, a legend, warnings, JSON.

A benchmark's report has rows (dataclasses) and columns. A column says how its cell is written, what it means, and when
it may be left out; the table, its widths and the legend follow from that. A row's fields are its JSON.
"""

from __future__ import annotations

import platform
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any, ClassVar, Generic, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from microparallel import __version__
from microparallel.bench.engine import FEWEST_REPEATS, Measured
from microparallel.bench.gpu_use import Gpu, WithUse, show_busy, show_bytes
from microparallel.text import count, show_number, show_size, time_unit

M = TypeVar("M", bound=Measured)
R = TypeVar("R")

# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Report(Generic[M]):
    """What follows from the measurements of one benchmark; the benchmark says how its rows are shown.

    Attributes:
        measurements: what was measured.
        notes: warnings that a reader of the numbers must know.
    """

    title: ClassVar[str]  # what was measured, as in "pipeline step"
    width_of_files: ClassVar[int] = 96  # columns, where the output is no terminal

    measurements: M
    notes: list[str]

    @property
    def dtype(self) -> str:
        """Of the tensors that were sent."""
        return self.measurements.dtype_of_model

    def details(self) -> dict[str, Any]:
        """What this benchmark adds to the JSON."""
        raise NotImplementedError

    def show_body(self, console: Console) -> None:
        """Print what stands between the headline and the warnings."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured and worked out, in plain types."""
        measured = self.measurements
        return {
            "machine": machine(measured.cores),
            "ranks": measured.ranks,
            "transport": measured.transport,
            "device": measured.device,
            "gpu": None if measured.gpu is None else asdict(measured.gpu),
            **self.details(),
            "notes": self.notes,
        }

    def show(self) -> None:
        """Print all of it for people."""
        console = console_for_results(self.width_of_files)
        measured = self.measurements
        where = f"{count(measured.ranks, 'rank')} on {count(measured.cores, 'core')}: {measured.transport}"
        say(
            console,
            f", {where}, {self.dtype} on {measured.device}, torch {torch.__version__}",
            heading=self.title,
        )
        for line in _gpu_lines(measured.gpu):
            say(console, line)
        console.print()
        self.show_body(console)
        for note in self.notes:
            say(console, note, heading="!", indent=2)


def _gpu_lines(gpu: Gpu | None) -> list[str]:
    """Which GPU the ranks used, how they shared it, and what their processes have there."""
    if gpu is None:
        return []
    shared = "it is not known whether with MPS" if gpu.mps is None else "with MPS" if gpu.mps else "without MPS"
    known = ["–" if size is None else show_size(float(f"{size:.3g}")) for size in gpu.process_bytes]
    memory = f"; by NVML, at the end the ranks' processes had {', '.join(known)}" if set(known) != {"–"} else ""
    return [f"{gpu.name}, {shared}{memory}", *([f"({gpu.problem})"] if gpu.problem else [])]


def machine(cores: int) -> dict[str, Any]:
    """What the numbers depend on, without a name that says whose machine it was."""
    return {
        "cores": cores,
        "system": f"{platform.system()}, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "microparallel": __version__,
    }


def few_steps(model: str, counted: int) -> list[str]:
    """A warning where a median is of few steps."""
    if counted >= FEWEST_REPEATS:
        return []
    steps = count(counted, "step")
    return [f"{model}: {steps} of each method, so chance speaks loudly; more --seconds or --steps would help"]


def compared_in_float64(model: str, methods: Sequence[str], dtype: str = "float32") -> list[str]:
    """A remark where rounding led methods to other weights than the one they are compared with."""
    if not methods:
        return []
    return [f"{model}: rounding led {', '.join(methods)} elsewhere in {dtype}, so they were compared in float64"]


def cores_are_shared(measured: Measured, methods: str = "the methods") -> list[str]:
    """A warning where ranks outnumber the cores: then the times say little about `methods`."""
    if measured.ranks_here <= measured.cores or measured.device != "cpu":
        return []
    ranks, cores = measured.ranks_here, count(measured.cores, "core")
    return [f"{ranks} ranks share {cores} and take turns: times say more about that than about {methods}"]


# ── the spread of a row's times ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Times:
    """What the rows of training steps have in common: the steps that counted, and their spread, in seconds."""

    steps: tuple[float, ...]
    counted: int
    seconds: float  # the median
    lower_quartile: float
    upper_quartile: float
    fastest: float
    slowest: float

    def show_quartiles(self) -> str:
        """Both quartiles, in the unit of the median."""
        one = self.counted == 1
        return "one step" if one else show_quartiles(self.lower_quartile, self.seconds, self.upper_quartile)


def times_of(steps: tuple[float, ...]) -> dict[str, Any]:
    """The fields of `Times`, from the steps that counted."""
    return {"steps": steps, "counted": len(steps), **spread(steps)}


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and extremes of some times, by the names of the fields."""
    lower, median, upper = quartiles(times)
    return {
        "seconds": median,
        "lower_quartile": lower,
        "upper_quartile": upper,
        "fastest": min(times),
        "slowest": max(times),
    }


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    median = statistics.median(times)
    if len(times) == 1:
        return median, median, median
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    return lower, median, upper


def show_quartiles(lower: float, median: float, upper: float) -> str:
    """Both quartiles in the unit of the median, which stands beside them."""
    length, _ = time_unit(median)
    return "–".join(show_number(quartile / length) for quartile in (lower, upper))


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_NOTHING = ("–", "")


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table.

    Attributes:
        heading: its name.
        cell: how it shows a row.
        meaning: for the legend; what has none is not explained.
        also: other words for the legend, with their meaning.
        width: it is at least so wide, so that the tables of one report align.
        left_out: where the terminal is too narrow: 1 for the column that goes first, 2 for the next; 0 always stays.
        on_the_left: its cells begin at the left, as names do.
    """

    heading: str
    cell: Callable[[R], str]
    meaning: str = ""
    also: Mapping[str, str] = field(default_factory=dict)
    width: int = 0
    left_out: int = 0
    on_the_left: bool = False


def fitting(columns: Sequence[Column[R]], rows: Sequence[R], width: int, gap: int = 2) -> list[Column[R]]:
    """The columns that have something to say, without the least important ones where they do not fit.

    Args:
        columns: all of them.
        rows: of the table.
        width: of the terminal.
        gap: blanks between two columns.
    """
    cells = {one.heading: [one.cell(row) for row in rows] for one in columns}
    shown = [one for one in columns if any(cell not in _NOTHING for cell in cells[one.heading])]
    widths = {one.heading: max(len(one.heading), one.width, *map(len, cells[one.heading])) for one in shown}
    for candidate in sorted((one for one in shown if one.left_out), key=lambda one: one.left_out):
        if sum(widths[one.heading] for one in shown) + gap * (len(shown) - 1) > width:
            shown.remove(candidate)
    return shown


def make_table(
    columns: Sequence[Column[R]],
    rows: Iterable[R] = (),
    style: Callable[[R], str | None] = lambda _: None,
    gap: int = 2,
) -> Table:
    """A table of these columns and rows; `style` says how a row looks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0), show_edge=False)
    for one in columns:
        justify: Any = "left" if one.on_the_left else "right"
        table.add_column(one.heading, min_width=one.width or None, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(one.cell(row) for one in columns), style=style(row))
    return table


def gpu_columns(rows: Sequence[WithUse]) -> list[Column[Any]]:
    """What each method takes of the GPU; nothing where ranks are on the CPU."""
    if all(row.use is None for row in rows):
        return []
    return [
        Column(
            "memory",
            show_bytes,
            "the most that torch's tensors take in a step, on the rank that takes most; alone on the GPU",
            width=8,
        ),
        Column("busy", show_busy, "the share of the time in which some kernel of some rank ran, by NVML", width=6),
    ]


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose cells are already text; what stands in its first column begins at the left."""
    return make_table(
        [Column(heading, itemgetter(place), on_the_left=place == 0) for place, heading in enumerate(headings)], rows
    )


def legend(columns: Sequence[Column[R]], **words: str) -> str:
    """What the columns mean, a line or more each; `words` are put into the meanings, as into a format string."""
    entries: dict[str, str] = {}
    for one in columns:
        entries |= {one.heading: one.meaning} if one.meaning else {}
        entries |= one.also
    indent = max(map(len, entries), default=0) + 2
    lines = []
    for word, meaning in entries.items():
        first, *others = meaning.format(**words).splitlines()
        lines += [f"{word:<{indent}}{first}", *(f"{'':<{indent}}{line}" for line in others)]
    return "\n".join(lines)


# ── printing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def console_for_results(width_of_files: int = 96) -> Console:
    """Where results are printed: as wide as the terminal; a file gets `width_of_files` columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width_of_files)


def say(console: Console, text: str, *, heading: str = "", indent: int = 0, style: str = "") -> None:
    """Print a sentence, its further lines as far in as its first words; in a file it is one line, however long.

    Args:
        console: where.
        text: plain words.
        heading: what stands before them: words in bold, or `!` for a warning.
        indent: at which column the words begin.
        style: of the words.
    """
    line = f"{heading:<{indent}}{text}"
    if console.is_terminal:
        width = max(console.width, indent + 20)
        line = textwrap.fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    shown = Text(line, style)
    shown.stylize("yellow" if heading == "!" else "bold", 0, len(heading))
    console.print(shown, soft_wrap=True)
