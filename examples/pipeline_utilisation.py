"""A model cut into stages: which share of the time does each rank compute, communicate and wait?

Question   Four ranks have a quarter of the model each. What do they do while they do not compute,
           and how much of that can a schedule take away?
Look at    the dots: a rank that waits. Naive lets one rank compute at a time, so each computes
           for a quarter of the time at best. GPipe and 1F1B send micro-batches after each other
           and fill most of the gaps; what stays is the bubble, as the pipeline fills and drains.
           Of these two, which keeps fewer activations?
Try        python examples/pipeline_utilisation.py --play 5          as if each rank had a device of
                                                                     its own: layers sleep 5 ms
           python examples/pipeline_utilisation.py --microbatches 8  a smaller bubble: by how much?
           python examples/pipeline_utilisation.py --ranks 2         fewer stages
           python examples/pipeline_utilisation.py --width 32        small layers: who waits now?
           python examples/pipeline_utilisation.py --device cuda     what does the GPU's driver say?
"""

import argparse
import dataclasses
import math
import statistics
import sys
import textwrap
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import microparallel as mp
from microparallel.analyze.gpu_meter import GpuMeter
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.program import Lane, lane
from microparallel.topology import available_cores
from microparallel.trace.parts import shares, utilisation_table

SCHEDULES = ["naive", "gpipe", "1f1b"]
CLASSES = 10
METERED_SECONDS = 3.0  # the driver looks only several times a second


class TakeTime(torch.autograd.Function):
    """Sleep in forward, and twice as long in backward: a host that waits for its GPU does no more than that."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """Hand the tensor on."""
        context.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hand the gradient back."""
        time.sleep(2 * context.seconds)
        return gradient, None


class PlayedLayer(nn.Linear):
    """A small layer that takes as long as it is told to."""

    seconds = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer, and take the time."""
        return TakeTime.apply(super().forward(inputs), self.seconds)


def build_layers(ranks: int, options: argparse.Namespace) -> list[nn.Module]:
    if options.play is None:
        return list(mp.models.FullMLP(options.width, 2 * ranks, out_features=options.width).layers)
    layers = [PlayedLayer(CLASSES, CLASSES) for _ in range(ranks)]
    for layer in layers:
        layer.seconds = options.play / 1e3
    return layers


def measure(comms: mp.Comms, options: argparse.Namespace) -> list[tuple[mp.Trace, float | None, str | None]]:
    """Every rank runs this. For each schedule: the trace of a step, what the GPU's driver says, or why nothing."""
    torch.set_num_threads(1)  # a core for each rank
    torch.manual_seed(0)
    width = CLASSES if options.play else options.width
    inputs, targets = torch.randn(options.batch, width), torch.randint(CLASSES, (options.batch,))
    inputs, targets = inputs.to(comms.device), targets.to(comms.device)
    results = []
    for schedule in SCHEDULES:
        pipe = mp.Pipeline(
            build_layers(comms.world_size, options),
            comms,
            schedule=schedule,
            microbatches=options.microbatches,
            loss_fn=functional.cross_entropy,
        )
        for _ in range(2):  # the first steps allocate memory
            pipe.step(inputs, targets)
        traces = [pipe.traced_step(inputs, targets)[1] for _ in range(options.steps)]
        trace = min(traces, key=lambda trace: trace.makespan)  # the step that was disturbed least
        percent, problem = None, None
        if comms.device.type == "cuda":
            percent, problem = meter_gpu(pipe, inputs, targets, math.ceil(METERED_SECONDS / trace.makespan))
        results.append((trace, percent, problem))
    return results


def meter_gpu(
    pipe: mp.Pipeline, inputs: torch.Tensor, targets: torch.Tensor, steps: int
) -> tuple[float | None, str | None]:
    """Do that many steps on every rank, while rank 0 asks the driver."""
    pipe.comms.barrier()
    if pipe.comms.rank > 0:
        for _ in range(steps):
            pipe.step(inputs, targets)
        return None, None
    with GpuMeter(pipe.comms.device.index) as meter:
        for _ in range(steps):
            pipe.step(inputs, targets)
        torch.cuda.synchronize()
    return meter.mean, meter.problem


def computation(trace: mp.Trace) -> mp.Trace:
    """What the ranks compute, in milliseconds: messages are much shorter, and the table counts them."""
    ranks = tuple(tuple(op for op in ops if lane(op) is Lane.COMPUTE) for ops in trace.program.ranks)
    events = [event for event in trace.events if event.lane is Lane.COMPUTE and event.duration > 0]
    in_milliseconds = [event._replace(start=1e3 * event.start, end=1e3 * event.end) for event in events]
    return mp.Trace(in_milliseconds, dataclasses.replace(trace.program, ranks=ranks))


def mean_computing(trace: mp.Trace) -> float:
    return statistics.fmean(share.computing for share in shares(trace))


def in_percent(trace: mp.Trace) -> str:
    return f"{100 * mean_computing(trace):.0f} %"


def show(trace: mp.Trace, percent: float | None, problem: str | None) -> None:
    print(mp.draw(computation(trace), width=80))
    print(utilisation_table(trace))
    if percent is not None:
        print(f"GPU 0   {percent:.0f} % busy, says its driver; a rank computes {in_percent(trace)} of the time")
    elif problem is not None:
        print(f"GPU 0   {problem}")
    print()


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="stages, one on each rank (default 4)")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches of a step (default 4)")
    parser.add_argument("--width", type=int, default=512, help="of each layer; a rank has two (default 512)")
    parser.add_argument("--batch", type=int, default=512, help="samples of a step (default 512)")
    parser.add_argument("--steps", type=int, default=5, help="traced steps; the shortest is shown (default 5)")
    parser.add_argument("--play", type=float, metavar="MS", help="let layers sleep so long instead of computing")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    options = parser.parse_args()
    if min(options.ranks, options.microbatches, options.steps) < 1 or options.width < CLASSES:
        parser.error(f"--ranks, --microbatches and --steps must be at least 1, and --width at least {CLASSES}")
    if options.batch < options.microbatches:
        parser.error(f"--batch {options.batch}: {options.microbatches} micro-batches need a sample each")
    if options.play is not None and not 0 < options.play < 1000:
        parser.error("--play must be above 0 ms, and below 1000")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and options.play is None else "cpu"

    try:
        results = mp.launch(measure, options.ranks, options, device=device, timeout=300)[0]
    except (mp.errors.UsageError, mp.errors.LaunchError) as failure:
        sys.exit(getattr(failure, "refusal", None) or str(failure))
    print("a step with each schedule; times in milliseconds\n")
    for result in results:
        show(*result)
    if any(percent is not None for _, percent, _ in results):
        print(textwrap.fill(f"Why the driver's number flatters: {GpuMeter.explain()}", 80) + "\n")

    print(f"{'ranks compute':<14}{'measured':>10}{'at best':>10}")
    for trace, _, _ in results:
        best = mp.simulate(trace.program)  # stages of equal length, and messages that take no time
        print(f"{trace.program.name:<14}{in_percent(trace):>10}{in_percent(best):>10}")
    naive, gpipe, one_f_one_b = (trace for trace, _, _ in results)
    if device == "cpu" and options.play is None and options.ranks > available_cores():
        print(f"\n{options.ranks} ranks share {available_cores()} cores here: a rank that computes may be waiting for")
        print("a core. With --play 5 each behaves as if it had a device of its own.")
    print(f"\nconclusion: with naive a rank computes {in_percent(naive)} of the time,", end=" ")
    print(f"with 1f1b {in_percent(one_f_one_b)};")
    print(f"            1f1b keeps {sum(one_f_one_b.peak_activations)} activations on all ranks", end=" ")
    print(f"together, gpipe {sum(gpipe.peak_activations)}")
    if mean_computing(one_f_one_b) < 1.1 * mean_computing(naive):
        print("            1f1b gains next to nothing: one rank or micro-batch, or layers so small")
        print("            that messages take longer than what they could overlap with")


if __name__ == "__main__":
    main()
