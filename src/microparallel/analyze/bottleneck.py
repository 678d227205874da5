"""What bounds a step: computing, communication, memory, a straggler, a pipeline's bubble, or what is beside it all.

The verdict does not come from a table of thresholds on shares, which cannot tell what would happen without something.
The recorded step is simulated without it, and the time saved is what it cost:

    communication   the step, less the step with messages that take no time
    straggler       the step, less the step in which the slowest rank is as fast as the others
    bubble          of a pipeline: what its schedule leaves idle even if stages are alike and messages take no time
    other           data, Python and logging: what ranks do in none of the events that were recorded

If none of them is worth a fifth of the step, and what is other takes less than computing, then computing bounds it. Or
memory does: a rank that does many operations on each byte it touches keeps its cores busy, one that does few waits for
memory. So the step's operations a byte are compared with what the machine can do (`Machine`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from microparallel.analyze.compressed import Codec
from microparallel.analyze.what_if import (
    ALL_ALIKE,
    COMPRESSED,
    DOUBLE_BUCKETS,
    HALF_BUCKETS,
    KEPT,
    NO_BUBBLE,
    NO_COMMUNICATION,
    NO_OTHER,
    OVERLAP,
    PREFETCH,
    SHARES,
    TWICE_THE_BANDWIDTH,
    TWICE_THE_BATCH,
    TWICE_THE_MICROBATCHES,
    Change,
    changes,
    slowest_rank,
)
from microparallel.bench.engine import seconds_of
from microparallel.bench.pipeline_costs import SavedBytes
from microparallel.simulator.fitted import Fitted, fit_step
from microparallel.text import show_seconds, show_size
from microparallel.topology import Link
from microparallel.trace import Difference, Trace
from microparallel.trace.parts import parts

Kind = Literal["compute", "communication", "memory", "straggler", "bubble", "other"]

WORTH = 0.2  # the share of a step from which on something is said to bound it
_HELPS = {
    "communication": (OVERLAP, HALF_BUCKETS, DOUBLE_BUCKETS, *PREFETCH, KEPT, TWICE_THE_BATCH),
    "straggler": (SHARES, ALL_ALIKE),
    "bubble": (TWICE_THE_MICROBATCHES, ALL_ALIKE),
    "memory": (TWICE_THE_BATCH,),
    "other": (NO_OTHER,),
    "compute": (TWICE_THE_BATCH, OVERLAP, HALF_BUCKETS, DOUBLE_BUCKETS, *PREFETCH, KEPT, TWICE_THE_MICROBATCHES),
}
_MAY_COMPRESS = ("communication", "compute")  # kinds that are also helped by what sends fewer bytes
_LEAST_GAIN = 1.02  # less than that is no advice


@dataclass(frozen=True)
class Verdict:
    """What bounds a step, why, and what would help most.

    Attributes:
        kind: compute, communication, memory, straggler, bubble or other.
        reasons: the numbers behind it, a line each.
        advice: the change that helps most, of those that one can make; None if none helps.
        changes: all that were simulated.
        measured: how long the recorded step took.
        simulated: how long the simulator says it takes as it is: how far the changes can be trusted.
    """

    kind: Kind
    reasons: tuple[str, ...]
    advice: Change | None
    changes: tuple[Change, ...]
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """By what share of the measured step the simulation is off."""
        return abs(Difference("step", self.simulated, self.measured).error)

    @property
    def compression(self) -> Change | None:
        """The method of compression that helps most, whatever bounds the step; None if none helps."""
        return _best([change.name for change in self.changes if change.name.startswith(COMPRESSED)], self.changes)


def find_bottleneck(
    trace: Trace,
    demand: Demand | None = None,
    machine: Machine | None = None,
    took: float = 0.0,
    codecs: Sequence[Codec] = (),
    link: Link | None = None,
) -> Verdict:
    """Say what bounds one recorded step.

    Args:
        trace: of one step alone.
        demand: how much the step computes and how many bytes it touches, if that is known.
        machine: how much of both this machine can do.
        took: how long the step took by a clock of its own. What no event tells of, such as fetching the data,
            counts as other.
        codecs: by which methods gradients could be compressed, and what that costs on this machine.
        link: what a message costs, if that was measured beside the step.
    """
    fitted = fit_step(trace)
    outside = max(0.0, took - trace.makespan)
    simulated, measured = fitted.makespan + outside, trace.makespan + outside
    found = {change.name: change for change in changes(fitted, outside, codecs, link)}
    own = _own_work(trace, outside)
    if own.other > 0:
        found[NO_OTHER] = _without_other(own.least_other, simulated)
    costs = _costs(fitted, found, simulated)
    kind, reasons = _kind(fitted, costs, simulated, trace, own)
    if kind == "compute" and demand is not None and machine is not None:
        intensity, balance = demand.intensity, machine.balance
        reasons.append(
            f"{intensity:.1f} operations on each byte it touches ({show_size(demand.bytes)} a rank); "
            f"this machine can do {balance:.1f} in the time that a byte takes"
        )
        kind = "memory" if intensity < balance else kind
    every = tuple(found.values())
    compressing = [name for name in found if name.startswith(COMPRESSED) and kind in _MAY_COMPRESS]
    advice = _best((*_HELPS[kind], *compressing), every)
    if advice is None and kind == "communication":
        advice = _best((TWICE_THE_BANDWIDTH,), every)
    return Verdict(kind, tuple(reasons), advice, every, measured, simulated)


def _without_other(seconds: float, simulated: float) -> Change:
    """Nothing is simulated here: what even the rank with the least of it spends on it is gone."""
    took = max(0.0, simulated - seconds)
    advice = "fetch data ahead of time, do less in Python in each step, log less often"
    return Change(NO_OTHER, advice, took, simulated / took if took else 1.0)


def _best(names: Sequence[str], found: Sequence[Change]) -> Change | None:
    """The change of these names that helps most, if any does."""
    helpful = [change for change in found if change.name in names and change.speed >= _LEAST_GAIN]
    return max(helpful, key=lambda change: change.speed, default=None)


def _costs(fitted: Fitted, found: dict[str, Change], simulated: float) -> dict[Kind, float]:
    """What each cause costs of the step, in seconds."""

    def gained(name: str) -> float:
        return max(0.0, simulated - found[name].seconds) if name in found else 0.0

    costs: dict[Kind, float] = {"communication": gained(NO_COMMUNICATION), "straggler": gained(ALL_ALIKE)}
    if fitted.pipeline > 1:
        costs["bubble"] = gained(NO_BUBBLE)
    return costs


@dataclass(frozen=True)
class _OwnWork:
    """What ranks do by themselves, as shares of the step: the mean over them, and the least other in seconds."""

    computing: float
    other: float
    least_other: float


def _own_work(trace: Trace, outside: float) -> _OwnWork:
    found = parts(trace)
    whole = max(one.step for one in found) + outside
    computing, other = (statistics.fmean(getattr(one, part) for one in found) for part in ("computing", "other"))
    least = max(0.0, min(one.other for one in found)) + outside
    return _OwnWork(computing / whole, (other + outside) / whole, least) if whole else _OwnWork(0.0, 0.0, 0.0)


def _kind(
    fitted: Fitted, costs: dict[Kind, float], simulated: float, trace: Trace, own: _OwnWork
) -> tuple[Kind, list[str]]:
    worst = max(costs, key=lambda kind: costs[kind])
    shares = {kind: seconds / simulated if simulated else 0.0 for kind, seconds in costs.items()}
    reasons = [_reason(kind, costs[kind], shares[kind], fitted, trace) for kind in costs if trace.ranks > 1]
    own_words = (
        f"on average, ranks compute for {own.computing:.0%} of the step; data, Python and the like take {own.other:.0%}"
    )
    if own.other > max(own.computing, shares[worst]):
        return "other", [own_words, *reasons]
    if shares[worst] >= WORTH:
        return worst, reasons
    return "compute", [*reasons, own_words]


def _reason(kind: Kind, seconds: float, share: float, fitted: Fitted, trace: Trace) -> str:
    shorter = f"the step is {show_seconds(seconds)} ({share:.0%}) shorter"
    if kind == "communication":
        sent = sum(event.bytes for event in trace.events if not event.computes and event.kind != "receive")
        return f"simulated without communication, {shorter}: {show_size(sent / trace.ranks)} a rank"
    if kind == "bubble":
        return f"simulated without its bubble, {shorter}"
    slow, work = slowest_rank(fitted), fitted.work
    others = [one for rank, one in enumerate(work) if rank != slow]
    usual = sum(others) / len(others)
    works = f"it works {show_seconds(work[slow])}, others {show_seconds(usual)}"
    return f"simulated with rank {slow} as fast as the others, {shorter}: {works}"


# ── computing or memory? operations a byte, of the step and of the machine ──────────────────────────────────────────

_WIDTH = 512  # of the matrices that are multiplied
_COPIED = 32 * 2**20  # bytes, more than caches hold
_REPEATS = 5
# Of each weight: read in forward and in backward, its gradient written; and what optimizers read and write of it.
_TOUCHED = 3
_TOUCHED_BY_OPTIMIZER = {"SGD": 3, "Adam": 7, "AdamW": 7}
_USUAL_OPTIMIZER = 5


@dataclass(frozen=True)
class Machine:
    """What one rank can do at most, measured while all ranks are at it."""

    operations_per_second: float
    bytes_per_second: float

    @property
    def balance(self) -> float:
        """How many operations it can do in the time that a byte takes."""
        return self.operations_per_second / self.bytes_per_second


@dataclass(frozen=True)
class Demand:
    """What a step asks of one rank: operations of matrix products, and bytes that go through memory at least."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations on each byte."""
        return self.operations / self.bytes if self.bytes else float("inf")


def measure_machine(device: torch.device) -> Machine:
    """Multiply matrices, and copy memory; all ranks do it at once, as they do in training."""
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    numbers = torch.zeros(_COPIED // 4, device=device)
    target = torch.empty_like(numbers)
    multiplying = _median(lambda: matrix @ matrix, device)
    copying = _median(lambda: target.copy_(numbers), device)
    return Machine(2 * _WIDTH**3 / multiplying, 2 * _COPIED / copying)


def demand_of(step: Callable[[], Any], parameters: list[nn.Parameter], optimizer: str) -> Demand:
    """Count what a step asks for; the step is done.

    Args:
        step: forward and backward.
        parameters: of the model, as far as this rank has it.
        optimizer: the name of its class, which says how often each weight is touched.
    """
    with FlopCounterMode(display=False) as counter, SavedBytes(parameters) as saved:
        step()
    weights = sum(parameter.nbytes for parameter in parameters)
    touched = _TOUCHED + _TOUCHED_BY_OPTIMIZER.get(optimizer, _USUAL_OPTIMIZER)
    return Demand(float(counter.get_total_flops()), float(touched * weights + 2 * saved.most))


def _median(work: Callable[[], Any], device: torch.device) -> float:
    times = [seconds_of(work, device) for _ in range(_REPEATS + 1)]
    return statistics.median(times[1:])  # the first one makes caches and memory ready
