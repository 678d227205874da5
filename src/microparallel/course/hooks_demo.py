"""Three demonstrations of hooks: in which order they run, how much communication they hide, what time that saves.

Every rank calls a demonstration together. It works on a copy of the model, and rank 0 prints the result. Any model will
do; a model that does not begin with a linear layer needs `inputs`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.slow_links import slow_network
from microparallel.course.ddp import ddp_step, register_ddp_hooks
from microparallel.course.hook_tracker import HookTracker
from microparallel.course.naive import naive_data_parallel_step
from microparallel.drawing.overlap import draw_overlap
from microparallel.errors import UsageError
from microparallel.models.loss import LossFunction, mean_loss
from microparallel.text import count, show_size
from microparallel.trace import Trace

Way = Literal["manual", "hooks", "buckets"]
Step = Callable[[], torch.Tensor]
Batch = tuple[Any, torch.Tensor, LossFunction | None]

_SAMPLES = 32
_MOST_LINES = 40


def demonstrate_hook_order(
    model: nn.Module,
    comms: Comms,
    inputs: Any = None,
    targets: torch.Tensor | None = None,
    loss_fn: LossFunction | None = None,
    *,
    show: bool = True,
) -> list[str]:
    """Show in which order, and when, backward makes the gradients: the last layer's come first.

    Args:
        model: any model; it is not changed.
        comms: every rank calls this together.
        inputs: this rank's; without them, random numbers for a model that begins with a linear layer.
        targets: this rank's; without them, the loss is the mean square of the outputs.
        loss_fn: the mean loss of outputs and targets; without it, `model(inputs, targets)` is the loss.
        show: rank 0 prints a line for each gradient.

    Returns:
        The parameters' names in the order in which their gradients were ready on this rank.
    """
    model = copy.deepcopy(model)
    inputs, targets, loss_fn = _batch(model, inputs, targets, loss_fn)
    tracker = HookTracker(model, comms)
    for _ in range(2):  # the first warms up
        model.zero_grad()
        with tracker.step():
            mean_loss(model, inputs, targets, loss_fn).backward()  # type: ignore[no-untyped-call]
    tracker.remove()
    agreed = _all_agree(tracker.order, model, comms)
    if show and comms.rank == 0:
        print(_order_table(tracker.seconds, model, comms.world_size, agreed=agreed))
    return tracker.order


def demonstrate_overlap(
    model: nn.Module,
    comms: Comms,
    inputs: Any = None,
    targets: torch.Tensor | None = None,
    loss_fn: LossFunction | None = None,
    *,
    bucket_size_mb: float = 25.0,
    link_seconds: float = 0.0,
    steps: int = 5,
    show: bool = True,
) -> dict[Way, Trace]:
    """Show how much of the communication computation hides: by hand, with a hook for each gradient, and in buckets.

    Args:
        model: any model; it is not changed.
        comms: every rank calls this together.
        inputs: this rank's; see `demonstrate_hook_order`.
        targets: this rank's.
        loss_fn: the mean loss of outputs and targets.
        bucket_size_mb: a bucket that has so many MiB of gradients takes no more.
        link_seconds: imitate a slower network: each message takes so much longer.
        steps: how many steps of each kind are measured; the one of median length is kept.
        show: rank 0 prints a drawing of each.

    Returns:
        What happened in a step of each kind, on all ranks.
    """
    _require_steps(steps)
    traces: dict[Way, Trace] = {}
    for way in get_args(Way):
        mine = copy.deepcopy(model)
        batch = _batch(mine, inputs, targets, loss_fn)
        tracker = HookTracker(mine, comms, link_seconds)
        with _prepared(way, mine, tracker.comms, batch, bucket_size_mb) as step:
            traces[way] = _typical(way, mine, tracker, step, steps)
        tracker.remove()
        if show and comms.rank == 0:
            print(draw_overlap(traces[way], rank=0, seconds=True))
    if show and comms.rank == 0:
        print("\n".join(_overlap_table(traces)))
    return traces


def compare_hook_timing(
    model: nn.Module,
    comms: Comms,
    inputs: Any = None,
    targets: torch.Tensor | None = None,
    loss_fn: LossFunction | None = None,
    *,
    bucket_size_mb: float = 25.0,
    link_seconds: float = 0.0,
    steps: int = 20,
    show: bool = True,
) -> dict[str, float]:
    """Time whole steps, without a tracker: by hand, with hooks, in buckets, and with no synchronisation at all.

    One step of each kind, then the next of each, so that a busy moment of the machine hits all kinds. A step takes as
    long as its slowest rank.

    Args:
        model: any model; it is not changed.
        comms: every rank calls this together.
        inputs: this rank's; see `demonstrate_hook_order`.
        targets: this rank's.
        loss_fn: the mean loss of outputs and targets.
        bucket_size_mb: a bucket that has so many MiB of gradients takes no more.
        link_seconds: imitate a slower network: each message takes so much longer.
        steps: how many steps of each kind are timed, after two that warm up.
        show: rank 0 prints a table.

    Returns:
        The median seconds a step takes, of each kind; the same on every rank.
    """
    _require_steps(steps)
    slowed = slow_network(comms, link_seconds) if link_seconds else comms
    seconds: dict[str, list[float]] = {"none": [], **{way: [] for way in get_args(Way)}}
    models = {kind: copy.deepcopy(model) for kind in seconds}
    batch = _batch(model, inputs, targets, loss_fn)
    with ExitStack() as hooked:
        kinds = {
            kind: hooked.enter_context(_prepared(kind, mine, slowed, batch, bucket_size_mb))
            for kind, mine in models.items()
        }
        for _ in range(steps + 2):
            for kind, step in kinds.items():
                models[kind].zero_grad()
                comms.barrier()
                begun = time.perf_counter()
                step()
                seconds[kind].append(time.perf_counter() - begun)
    if slowed is not comms:
        slowed.close()
    slowest = comms.all_reduce(torch.tensor(list(seconds.values()), dtype=torch.float64), op="max")
    medians = {kind: statistics.median(times[2:]) for kind, times in zip(seconds, slowest.tolist(), strict=True)}
    if show and comms.rank == 0:
        print("\n".join(_timing_table(medians, comms.world_size, steps)))
    return medians


# ── steps of every kind ─────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _prepared(kind: str, model: nn.Module, comms: Comms, batch: Batch, bucket_size_mb: float) -> Iterator[Step]:
    """A function that does a step of one kind; inside the `with`, the model has the hooks for it."""
    inputs, targets, loss_fn = batch
    samples = int(comms.all_reduce(torch.tensor(len(targets))).item())

    def alone() -> torch.Tensor:
        loss = mean_loss(model, inputs, targets, loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if kind == "none":
        yield alone
    elif kind == "manual":
        yield lambda: naive_data_parallel_step(model, comms, inputs, targets, loss_fn, samples=samples)
    else:
        hooks = register_ddp_hooks(model, comms, kind == "buckets", bucket_size_mb)
        yield lambda: ddp_step(model, comms, inputs, targets, loss_fn, samples=samples)
        hooks.remove()


def _typical(way: str, model: nn.Module, tracker: HookTracker, step: Step, steps: int) -> Trace:
    """The trace of the step of median length, after two that warm up; the same on every rank."""
    traces = []
    for _ in range(steps + 2):
        model.zero_grad()
        tracker.comms.barrier()
        with tracker.step():
            step()
        traces.append(tracker.trace(way))
    return sorted(traces[2:], key=lambda trace: trace.makespan)[steps // 2]


def _batch(model: nn.Module, inputs: Any, targets: torch.Tensor | None, loss_fn: LossFunction | None) -> Batch:
    """The batch and loss that the caller passed, with random inputs and a loss of our own where it passed none."""
    if inputs is None:
        owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
        first = owners[0] if owners else model
        if not isinstance(first, nn.Linear):
            raise UsageError(
                f"inputs=None is for a model that begins with Linear, not {type(first).__name__}; pass them"
            )
        inputs = torch.randn(_SAMPLES, first.in_features, dtype=first.weight.dtype, device=first.weight.device)
    if targets is not None:
        return inputs, targets, loss_fn
    return inputs, torch.zeros(len(inputs)), lambda outputs, _: outputs.square().mean()


def _require_steps(steps: int) -> None:
    if steps < 1:
        raise UsageError(f"steps={steps}: at least 1 step must be measured")


def _all_agree(order: list[str], model: nn.Module, comms: Comms) -> bool:
    """Whether every rank's gradients were ready in the same order."""
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    mine = torch.full((len(places),), -1)
    mine[: len(order)] = torch.tensor([places[name] for name in order], dtype=torch.int64)
    return all(torch.equal(mine, other) for other in comms.all_gather(mine))


# ── what rank 0 prints ──────────────────────────────────────────────────────────────────────────────────────────────


def _order_table(seconds: dict[str, float], model: nn.Module, ranks: int, *, agreed: bool) -> str:
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    width = max(map(len, seconds), default=0)
    others = "" if ranks == 1 else f"; {'the same order' if agreed else 'another order'} on the other ranks"
    lines = [
        f"{place:>5}  {at * 1e3:>8.2f} ms  {name:<{width}}  {show_size(sizes[name]):>9}"
        for place, (name, at) in enumerate(seconds.items(), start=1)
    ]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines[half:-half] = [f"    …  {len(lines) - 2 * half} more"]
    return "\n".join([f"gradients of rank 0 in the order in which they are ready{others}", *lines])


def _overlap_table(traces: dict[Way, Trace]) -> Iterator[str]:
    yield f"{'':<10}{'step':>10}{'exposed communication':>24}{'hidden':>10}"
    for way, trace in traces.items():
        exposed = max(trace.exposed_communication)
        yield f"{way:<10}{trace.makespan * 1e3:>7.1f} ms{exposed * 1e3:>21.1f} ms{100 * trace.hidden_share:>8.0f} %"


def _timing_table(medians: dict[str, float], ranks: int, steps: int) -> Iterator[str]:
    yield f"a step of {count(ranks, 'rank')}, median of {steps}"
    for kind, seconds in medians.items():
        name = "no synchronisation" if kind == "none" else kind
        yield f"  {name:<20}{seconds * 1e3:>8.1f} ms{seconds / medians['none']:>9.2f} ×"
