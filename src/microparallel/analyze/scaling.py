"""Scaling efficiency, measured by really running 1, 2, 4, … ranks.

    strong   the same batch, shared by more ranks: how much sooner is a step done?
    weak     the same batch for each rank, so more samples in all: how many more are done in the same time?

Either way the speed-up is the ratio of samples a second, and the efficiency is the speed-up for each rank. Every rank
computes with equally many threads, however many ranks there are: those that the largest world leaves it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from microparallel.bench.chart import COLOURS, GREY, GRID, svg_head, svg_text
from microparallel.bench.engine import largest, seconds_of, wait_for_gpu
from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.text import count
from microparallel.topology import available_cores, threads_per_rank
from microparallel.world import Pool

Kind = Literal["strong", "weak"]
StepMaker = Callable[[Comms, int], Callable[[], Any]]  # (the ranks, samples of all of them) → what does a step

_WARM_UP = 2
_BAR = 32  # columns


@dataclass(frozen=True)
class ScalingPoint:
    """One world: how many ranks, how many samples they have together, and how long their steps took."""

    ranks: int
    batch: int
    seconds: tuple[float, ...]  # of each step, on the slowest rank

    @property
    def median(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together."""
        return self.batch / self.median


@dataclass(frozen=True)
class Scaling:
    """Worlds of several sizes, the smallest first; the others are compared with that."""

    kind: Kind
    points: tuple[ScalingPoint, ...]
    cores: int
    device: str
    threads: int  # of each rank

    def speedup(self, point: ScalingPoint) -> float:
        """How many times as many samples a second as the smallest world."""
        return point.samples_per_second / self.points[0].samples_per_second

    def efficiency(self, point: ScalingPoint) -> float:
        """The speed-up as a share of the ideal."""
        return self.speedup(point) / self.ideal(point)

    def ideal(self, point: ScalingPoint) -> float:
        """The speed-up if ranks did not disturb each other at all."""
        return point.ranks / self.points[0].ranks

    @property
    def remark(self) -> str | None:
        """A warning where ranks outnumber the cores."""
        most = self.points[-1].ranks
        if self.device != "cpu" or most <= self.cores:
            return None
        first = next(point.ranks for point in self.points if point.ranks > self.cores)
        cores = count(self.cores, "core")
        return (
            f"this machine has {cores}: from {first} ranks on they take turns, so no speed-up beyond {self.cores} is "
            "possible here, and what is lost is not the fault of communication alone"
        )


def rank_counts(most: int) -> list[int]:
    """1, 2, 4, … up to so many, which is always among them."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def measure_scaling(
    pool: Pool,
    make_step: StepMaker,
    kind: Kind,
    counts: Sequence[int],
    batch: int,
    *,
    steps: int = 10,
    transport: str = "auto",
    device: str = "auto",
    mps: str = "auto",
    progress: Callable[[int], None] = lambda _: None,
) -> Scaling:
    """Run worlds of several sizes, one after another.

    Args:
        pool: warm ranks.
        make_step: is called on every rank, with its Comms and the samples of all ranks together; what it returns does
            one step. It is sent to other processes, so it must not hold on to tensors of this one.
        kind: strong or weak.
        counts: how many ranks, from few to many.
        batch: samples a step in the smallest world; with weak scaling, larger worlds have more of them.
        steps: that are timed in each world.
        transport: how ranks talk.
        device: where they compute.
        mps: whether ranks that share a GPU use MPS; see `mp.launch`.
        progress: is told how many ranks come next.
    """
    if not counts or list(counts) != sorted(set(counts)) or counts[0] < 1:
        raise UsageError(f"counts={list(counts)}: name numbers of ranks, from few to many, as in [1, 2, 4]")
    threads = threads_per_rank(counts[-1])
    how: dict[str, Any] = {"transport": transport, "device": device, "mps": mps}
    points = []
    where = device
    for ranks in counts:
        progress(ranks)
        samples = batch if kind == "strong" else batch * ranks // counts[0]
        found = pool.run(_time_steps, ranks, make_step, samples, steps, threads, **how)
        seconds, where = found[0]
        points.append(ScalingPoint(ranks, samples, tuple(seconds)))
    return Scaling(kind, tuple(points), available_cores(), where, threads)


def _time_steps(comms: Comms, make_step: StepMaker, batch: int, steps: int, threads: int) -> tuple[list[float], str]:
    """What every rank does: the seconds of each step, of the slowest rank; and on what device."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = make_step(comms, batch)
        for _ in range(_WARM_UP):
            step()
        mine = []
        for _ in range(steps):
            wait_for_gpu(comms.device)
            comms.barrier()  # a step begins when all have ended the last: otherwise ranks would drift apart
            mine.append(seconds_of(step, comms.device))
        return largest(comms, mine), comms.device.type
    finally:
        torch.set_num_threads(before)


def scaling_bars(scaling: Scaling) -> str:
    """The speed-up as bars, each beside the ideal.

    ```
    1 rank   ████████████████                  1.00 of 1
    2 ranks  ██████████████████████████████··  1.88 of 2
    ```
    """
    most = scaling.ideal(scaling.points[-1])
    lines = []
    for point in scaling.points:
        ideal = max(1, round(_BAR * scaling.ideal(point) / most))
        reached = max(0, min(_BAR, round(_BAR * scaling.speedup(point) / most)))
        bar = "█" * reached + "·" * max(0, ideal - reached)
        name = count(point.ranks, "rank")
        lines.append(f"{name:<9}{bar:<{_BAR}}  {scaling.speedup(point):.2f} of {scaling.ideal(point):g}")
    return "\n".join(lines)


# ── the picture: speed-up and efficiency over the number of ranks, each beside the ideal ────────────────────────────

_WIDTH, _HEIGHT = 880, 400
_TOP, _BOTTOM = 96, 340
_PANELS = ((56, 400), (500, 844))  # from where to where, in pixels
_SHADE = "#f3f4f6"
_COLOURS = {"strong": COLOURS[0], "weak": COLOURS[1]}


@dataclass(frozen=True)
class _Panel:
    title: str
    left: float
    right: float
    counts: list[int]
    highest: float
    show: Callable[[float], str]

    def x(self, ranks: int) -> float:
        """Worlds stand at equal distances, as each is twice the one before."""
        share = (self.counts.index(ranks) + 0.5) / len(self.counts)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value / self.highest


def plot_scaling(scalings: Sequence[Scaling], subtitle: str = "") -> str:
    """Draw a line for each kind of scaling; the ideal is dotted, and worlds with more ranks than cores are shaded."""
    counts = sorted({point.ranks for scaling in scalings for point in scaling.points})
    most = max([1.0, *(_most(scaling) for scaling in scalings)])
    best = max([1.0, *(scaling.efficiency(point) for scaling in scalings for point in scaling.points)])
    speed = _Panel("speed-up", *_PANELS[0], counts, most * 1.08, lambda value: f"{value:g}×")
    share = _Panel("efficiency", *_PANELS[1], counts, best * 1.08, lambda value: f"{value:.0%}")
    parts = svg_head(_WIDTH, _HEIGHT, _PANELS[0][0], "Scaling", subtitle)
    steps = [step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step <= most]
    parts += _axes(speed, steps[-5:], scalings)
    parts += _axes(share, [0.25, 0.5, 0.75, 1.0], scalings)
    for scaling in scalings:
        parts += _line(speed, scaling, scaling.speedup)
        parts += _line(share, scaling, scaling.efficiency)
    ideals = scalings[0]
    parts.append(_path([(speed.x(point.ranks), speed.y(ideals.ideal(point))) for point in ideals.points], GREY, True))
    parts.append(_path([(share.x(point.ranks), share.y(1.0)) for point in ideals.points], GREY, True))
    return "\n".join([*parts, *_legend(scalings), "</svg>", ""])


def _most(scaling: Scaling) -> float:
    return max(max(scaling.speedup(point), scaling.ideal(point)) for point in scaling.points)


def _axes(panel: _Panel, marks: Sequence[float], scalings: Sequence[Scaling]) -> list[str]:
    parts = [svg_text(panel.left, _TOP - 14, panel.title, bold=True)]
    crowded = [ranks for ranks in panel.counts if any(_outnumbered(scaling, ranks) for scaling in scalings)]
    if crowded:
        edge = panel.x(crowded[0]) - (panel.right - panel.left) / len(panel.counts) / 2
        place = f'x="{edge:g}" y="{_TOP}" width="{panel.right - edge:g}" height="{_BOTTOM - _TOP}"'
        parts.append(f'<rect {place} fill="{_SHADE}"/>')
        parts.append(svg_text(panel.right, _TOP - 14, "more ranks than cores", colour=GREY, anchor="end"))
    for mark in marks:
        height = panel.y(mark)
        ends = f'x1="{panel.left}" y1="{height:g}" x2="{panel.right}" y2="{height:g}"'
        parts.append(f'<line {ends} stroke="{GRID}"/>')
        parts.append(svg_text(panel.left - 7, height + 4, panel.show(mark), colour=GREY, anchor="end"))
    for ranks in panel.counts:
        name = count(ranks, "rank")
        parts.append(svg_text(panel.x(ranks), _BOTTOM + 20, name, colour=GREY, anchor="middle"))
    ends = f'x1="{panel.left}" y1="{_BOTTOM}" x2="{panel.right}" y2="{_BOTTOM}"'
    return [*parts, f'<line {ends} stroke="{GREY}"/>']


def _outnumbered(scaling: Scaling, ranks: int) -> bool:
    return scaling.device == "cpu" and ranks > scaling.cores


def _line(panel: _Panel, scaling: Scaling, height: Callable[[ScalingPoint], float]) -> list[str]:
    colour = _COLOURS[scaling.kind]
    places = [(panel.x(point.ranks), panel.y(height(point))) for point in scaling.points]
    circles = [f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}" stroke="white"/>' for x, y in places]
    return [_path(places, colour), *circles]


def _legend(scalings: Sequence[Scaling]) -> list[str]:
    parts, left = [], float(_PANELS[0][0])
    names = [(f"{scaling.kind} scaling", _COLOURS[scaling.kind], False) for scaling in scalings]
    for name, colour, dotted in [*names, ("ideal", GREY, True)]:
        parts.append(_path([(left, _HEIGHT - 16), (left + 26, _HEIGHT - 16)], colour, dotted))
        parts.append(svg_text(left + 34, _HEIGHT - 12, name))
        left += 140
    return parts


def _path(places: Sequence[tuple[float, float]], colour: str, dotted: bool = False) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    look = 'stroke-width="1.6" stroke-dasharray="0.1 4.5" stroke-linecap="round"' if dotted else 'stroke-width="2.4"'
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-linejoin="round" {look}/>'
