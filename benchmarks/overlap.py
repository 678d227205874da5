"""Is overlap real? Every all-reduce gets 20 ms of latency, and a model has ten buckets: what does a step take?

    python benchmarks/overlap.py
    python benchmarks/overlap.py > benchmarks/results/overlap-2-cores.txt

Latency is played by a Comms that gives a result back no earlier than 20 ms after its all-reduce was started. Latencies
of several run at the same time, as they do on a network. Hidden behind backward, all but the last one vanish, so a
step takes the computation and 20 ms. With each bucket waited for before the next (overlap=False), it is ten times 20.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, cast

import torch
import typer

import microparallel as mp
from microparallel.topology import available_cores

WIDTH, LAYERS, BATCH = 256, 10, 512  # a bucket for each layer
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
WARM_UP = 3


class DelayedRequest:
    """An all-reduce under way whose result is there no earlier than at a given time."""

    def __init__(self, request: mp.Request[torch.Tensor], ready: float) -> None:
        self._request = request
        self._ready = ready

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Return the result when it is there, and its time has come."""
        result = self._request.wait(timeout)
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return result


class DelayedComms:
    """Stands before a Comms and passes everything on; every all-reduce takes at least `delay` seconds.

    Args:
        comms: the one that does the work.
        delay: seconds from the start of an all-reduce to its result; those of several run at the same time.
    """

    can_overlap = True  # as on a network, where the delay keeps no core busy

    def __init__(self, comms: mp.Comms, delay: float) -> None:
        self._comms = comms
        self._delay = delay

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> torch.Tensor | DelayedRequest:
        """Combine everybody's tensor, late: see `Comms.all_reduce`."""
        ready = time.perf_counter() + self._delay
        request = DelayedRequest(self._comms.all_reduce(tensor, op, algorithm, async_op=True), ready)
        return request if async_op else request.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comms, name)


def measure(comms: mp.Comms, delay: float, steps: int) -> tuple[dict[str, float], dict[str, mp.Trace], int]:
    """The median seconds of a step of each kind, a trace of those that can be watched, and the number of buckets."""
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))
    torch.manual_seed(0)
    models = {kind: mp.models.FullMLP(WIDTH, LAYERS, out_features=WIDTH) for kind in ("none", "ddp", "naive", "turns")}
    trackers = {
        kind: mp.HookTracker(models[kind], cast(mp.Comms, DelayedComms(comms, delay))) for kind in ("ddp", "naive")
    }
    bucket_mb = LAYER_BYTES / 2**20
    ddp = mp.DataParallel(models["ddp"], trackers["ddp"].comms, bucket_mb)
    turns = mp.DataParallel(models["turns"], cast(mp.Comms, DelayedComms(comms, delay)), bucket_mb, overlap=False)
    samples = BATCH * comms.world_size
    kinds: dict[str, Callable[[], object]] = {
        "none": lambda: models["none"](inputs, targets).backward(),
        "ddp": lambda: ddp(inputs, targets).backward(),
        "naive": lambda: mp.naive_data_parallel_step(
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


def timed(step: Callable[[], object], tracker: mp.HookTracker | None) -> float:
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
    milliseconds: Annotated[float, typer.Option(help="The latency of every all-reduce.")] = 20.0,
    transport: str = "auto",
) -> None:
    """Measure, draw a typical step, and say what latency costs."""
    delay = milliseconds / 1e3
    medians, traces, buckets = mp.launch(measure, ranks, delay, steps, transport=transport)[0]
    print(
        f"forward and backward of {LAYERS} layers of width {WIDTH}, {BATCH} samples a rank, {ranks} ranks on "
        f"{available_cores()} cores, torch {torch.__version__};\n"
        f"{buckets} buckets, {milliseconds:g} ms of latency for every all-reduce; median of {steps} steps\n"
    )
    print(mp.draw_overlap(traces["ddp"], rank=0, seconds=True))
    print("(one all-reduce is drawn after the other; their latencies run side by side)")
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
