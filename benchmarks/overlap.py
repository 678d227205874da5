"""Is overlap real? Every message takes 2 ms, and a model has ten buckets: what does a step take?

    python benchmarks/overlap.py
    python benchmarks/overlap.py > benchmarks/results/overlap-2-cores.txt

The network is slowed down by `slow_network`: a rank sends one message at a time, and each takes 2 ms, whatever the
cores do meanwhile. So ten buckets take 20 ms at least. As far as backward computes for longer than that, overlap hides
all of them but the last; with each bucket waited for before the next (overlap=False), none of them is hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

import microparallel as mp
from microparallel.comms.slow_links import slow_network
from microparallel.topology import available_cores

WIDTH, LAYERS, BATCH = 256, 10, 512  # a bucket for each layer
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
WARM_UP = 3


def measure(comms: mp.Comms, delay: float, steps: int) -> tuple[dict[str, float], dict[str, mp.Trace], int]:
    """The median seconds of a step of each kind, a trace of those that can be watched, and the number of buckets."""
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))
    torch.manual_seed(0)
    models = {kind: mp.models.FullMLP(WIDTH, LAYERS, out_features=WIDTH) for kind in ("none", "ddp", "naive", "turns")}
    trackers = {kind: mp.course.HookTracker(models[kind], comms, delay) for kind in ("ddp", "naive")}
    bucket_cap_mb = LAYER_BYTES / 2**20
    ddp = mp.DataParallel(models["ddp"], trackers["ddp"].comms, bucket_cap_mb)
    turns = mp.DataParallel(models["turns"], slow_network(comms, delay), bucket_cap_mb, overlap=False)
    samples = BATCH * comms.world_size
    kinds: dict[str, Callable[[], object]] = {
        "none": lambda: models["none"](inputs, targets).backward(),
        "ddp": lambda: ddp(inputs, targets).backward(),
        "naive": lambda: mp.course.naive_data_parallel_step(
            models["naive"], trackers["naive"].comms, inputs, targets, samples=samples
        ),
        "turns": lambda: turns(inputs, targets).backward(),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    traces: dict[str, list[mp.Trace]] = {kind: [] for kind in trackers}
    for number in range(WARM_UP + steps):
        for kind, step in kinds.items():
            models[kind].zero_grad()
            comms.barrier()
            took = timed(step, trackers.get(kind))
            [slowest] = comms.all_reduce(torch.tensor([took], dtype=torch.float64), op="max").tolist()
            if number >= WARM_UP:
                seconds[kind].append(slowest)
                traces.get(kind, []).extend([trackers[kind].trace(kind)] if kind in trackers else [])
    for tracker in trackers.values():
        tracker.remove()
    # The trace of a typical step: all ranks have the same traces, and choose alike.
    typical = {kind: sorted(many, key=lambda trace: trace.makespan)[steps // 2] for kind, many in traces.items()}
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    return medians, typical, len(ddp.program().goal.buckets)  # type: ignore[union-attr]


def timed(step: Callable[[], object], tracker: mp.course.HookTracker | None) -> float:
    """The seconds of one step, which the tracker writes down if there is one."""
    if tracker is None:
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
    with tracker.step():
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun


def main(
    ranks: int = 2,
    steps: Annotated[int, typer.Option(help="How many of each kind, in turns.")] = 20,
    milliseconds: Annotated[float, typer.Option(help="The latency of every message.")] = 2.0,
    transport: str = "auto",
) -> None:
    """Measure, draw a typical step, and say what latency costs."""
    delay = milliseconds / 1e3
    medians, traces, buckets = mp.launch(measure, ranks, delay, steps, transport=transport)[0]
    print(
        f"forward and backward of {LAYERS} layers of width {WIDTH}, {BATCH} samples a rank, {ranks} ranks on "
        f"{available_cores()} cores, torch {torch.__version__};\n"
        f"{buckets} buckets, {milliseconds:g} ms of latency for every message; median of {steps} steps\n"
    )
    print(mp.course.draw_overlap(traces["ddp"], rank=0, seconds=True))
    print(f"\n{'':<44}{'step':>9}{'− compute':>12}{'exposed':>11}{'hidden':>9}")
    for kind, name in {
        "none": "compute alone",
        "ddp": "mp.DataParallel",
        "naive": "naive: all started after backward",
        "turns": "mp.DataParallel, overlap=False: one by one",
    }.items():
        over = "" if kind == "none" else f"{(medians[kind] - medians['none']) * 1e3:.1f} ms"
        hidden = exposed = ""
        if kind in traces:
            hidden = f"{100 * traces[kind].hidden_share:.0f} %"
            exposed = f"{max(traces[kind].exposed_communication) * 1e3:.1f} ms"
        print(f"{name:<44}{medians[kind] * 1e3:>6.1f} ms{over:>12}{exposed:>11}{hidden:>9}".rstrip())
    print(
        "\nexposed  from the trace: the time with an all-reduce under way in which a rank computed nothing\n"
        "hidden   from the trace: the share of the time with an all-reduce under way in which ranks computed\n"
        "naive    one more all-reduce, which says who has which gradient, goes before those of the gradients"
    )


if __name__ == "__main__":
    typer.run(main)
