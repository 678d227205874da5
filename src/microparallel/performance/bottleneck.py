"""What bounds a step: computing, communication, memory, a straggler, or a pipeline's bubble; and what would help.

The verdict does not come from a table of thresholds on shares, which cannot tell what would happen without something.
The recorded step is simulated without it, and what the step gains is what it costs:

    communication   the step, less the step with messages that take no time
    straggler       the step, less the step in which the slowest rank is as fast as the others
    bubble          of a pipeline: the step, less the busiest rank's computations, where neither of the others helps

If none of them is worth a fifth of the step, it computes most of the time. Then memory may be what computing waits for:
if it does fewer operations on each byte that it touches than the machine needs to be kept busy (`Machine`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from microparallel.performance.fitted_pipeline import FittedPipeline
from microparallel.performance.fitted_step import Fitted, fit_step
from microparallel.performance.roofline import Demand, Machine
from microparallel.performance.units import show_seconds, show_size
from microparallel.performance.what_if import (
    ALL_ALIKE,
    DOUBLE_BUCKETS,
    HALF_BUCKETS,
    NO_BUBBLE,
    NO_COMMUNICATION,
    OVERLAP,
    SHARES,
    TWICE_THE_BANDWIDTH,
    TWICE_THE_BATCH,
    TWICE_THE_MICROBATCHES,
    Change,
    busiest,
    changes,
    slowest_rank,
    work_of,
)
from microparallel.trace.parts import parts
from microparallel.trace.recording import Recording

Kind = Literal["compute", "communication", "memory", "straggler", "bubble"]

WORTH = 0.2  # the share of a step from which on something is said to bound it
_HELPS = {
    "communication": (OVERLAP, HALF_BUCKETS, DOUBLE_BUCKETS, TWICE_THE_BATCH),
    "straggler": (SHARES, ALL_ALIKE),
    "bubble": (TWICE_THE_MICROBATCHES, ALL_ALIKE),
    "memory": (TWICE_THE_BATCH,),
    "compute": (TWICE_THE_BATCH, OVERLAP, HALF_BUCKETS, DOUBLE_BUCKETS, TWICE_THE_MICROBATCHES),
}
_LEAST_GAIN = 1.02  # less than that is no advice


@dataclass(frozen=True)
class Verdict:
    """What bounds a step, why, and what would help most.

    Attributes:
        kind: compute, communication, memory, straggler or bubble.
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
        return abs(self.simulated - self.measured) / self.measured if self.measured else 0.0


def find_bottleneck(recording: Recording, demand: Demand | None = None, machine: Machine | None = None) -> Verdict:
    """Say what bounds one recorded step.

    Args:
        recording: of one step alone.
        demand: how much the step computes and how many bytes it touches, if that is known.
        machine: how much of both this machine can do.
    """
    fitted = fit_step(recording)
    simulated = fitted.makespan
    found = {change.name: change for change in changes(fitted)}
    costs = _costs(fitted, found, simulated)
    kind, reasons = _kind(fitted, costs, simulated, recording)
    if kind == "compute" and demand is not None and machine is not None:
        intensity, balance = demand.intensity, machine.balance
        reasons.append(
            f"{intensity:.1f} operations on each byte it touches ({show_size(demand.bytes)} a rank); "
            f"this machine can do {balance:.1f} in the time that a byte takes"
        )
        kind = "memory" if intensity < balance else kind
    advice = _best(_HELPS[kind], found) or (_best((TWICE_THE_BANDWIDTH,), found) if kind == "communication" else None)
    return Verdict(kind, tuple(reasons), advice, tuple(found.values()), recording.makespan, simulated)


def _best(names: Sequence[str], found: dict[str, Change]) -> Change | None:
    """The change that helps most, if any does."""
    helpful = [found[name] for name in names if name in found and found[name].speed >= _LEAST_GAIN]
    return max(helpful, key=lambda change: change.speed, default=None)


def _costs(fitted: Fitted, found: dict[str, Change], simulated: float) -> dict[Kind, float]:
    """What each cause costs of the step, in seconds."""

    def gained(name: str) -> float:
        return max(0.0, simulated - found[name].seconds) if name in found else 0.0

    costs: dict[Kind, float] = {"communication": gained(NO_COMMUNICATION), "straggler": gained(ALL_ALIKE)}
    if isinstance(fitted, FittedPipeline):
        costs["bubble"] = max(0.0, gained(NO_BUBBLE) - costs["communication"] - costs["straggler"])
    return costs


def _kind(fitted: Fitted, costs: dict[Kind, float], simulated: float, recording: Recording) -> tuple[Kind, list[str]]:
    worst = max(costs, key=lambda kind: costs[kind])
    shares = {kind: seconds / simulated if simulated else 0.0 for kind, seconds in costs.items()}
    reasons = [_reason(kind, costs[kind], shares[kind], fitted, recording) for kind in costs if recording.ranks > 1]
    if shares[worst] >= WORTH:
        return worst, reasons
    if reasons:
        reasons.append(f"without these, {max(0.0, 1 - sum(shares.values())):.0%} of the step would be left")
    return "compute", [*reasons, _own_work(recording)]


def _own_work(recording: Recording) -> str:
    """What ranks do by themselves, as the mean over them."""
    found = parts(recording)
    computing, other = (
        statistics.fmean(getattr(one, part) / one.step if one.step else 0.0 for one in found)
        for part in ("computing", "other")
    )
    return f"ranks compute for {computing:.0%} of the step; data, Python and the like take {other:.0%}"


def _reason(kind: Kind, seconds: float, share: float, fitted: Fitted, recording: Recording) -> str:
    text = f"{show_seconds(seconds)} of the step ({share:.0%})"
    if kind == "communication":
        sent = sum(span.bytes for span in recording.spans if not span.computes and span.kind != "receive")
        return f"communication costs {text}: {show_size(sent / recording.ranks)} a rank"
    if kind == "bubble":
        return f"the bubble costs {text}"
    if isinstance(fitted, FittedPipeline):
        slow, work = busiest(fitted), work_of(fitted)
    else:
        slow, work = slowest_rank(fitted), [one.total for one in fitted.work]
    others = [one for rank, one in enumerate(work) if rank != slow]
    usual = sum(others) / len(others)
    return f"waiting for rank {slow} costs {text}: it works {show_seconds(work[slow])}, others {show_seconds(usual)}"
