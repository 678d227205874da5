"""What does it cost that gradients which somebody keeps are left alone? The same step both ways, in turns.

    python benchmarks/kept_gradients.py

By default `mp.DataParallel` begins a buffer for every pass whose gradients begin anew; with
gradient_as_bucket_view=True it overwrites the last one. "again" is a second model with the same settings: its ratio
says how much chance there is in the others. torch's DDP, with its default (averages are copied out of the buckets) and
with that option, is beside them.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp

FIRST = 3  # steps in which buckets may still be arranged anew


def measure(comms: mp.Comms, width: int, depth: int, batch: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step of each, on this rank."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(batch, width), torch.randint(2, (batch,))

    def ours(views: bool) -> nn.Module:
        return mp.DataParallel(mp.models.FullMLP(width, depth), comms, gradient_as_bucket_view=views)

    def torchs(views: bool) -> nn.Module:
        return DistributedDataParallel(
            mp.models.FullMLP(width, depth), process_group=comms.process_group, gradient_as_bucket_view=views
        )

    models = {
        "views": ours(True),
        "views again": ours(True),
        "kept (the default)": ours(False),
        "torch, views": torchs(True),
        "torch, its default": torchs(False),
    }
    actions = {name: training_step(model, inputs, targets) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(FIRST + steps):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            comms.barrier()
            start = time.perf_counter()
            actions[name]()
            times[name].append(time.perf_counter() - start)
    return {name: found[FIRST:] for name, found in times.items()}


def training_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    """A step as people write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()

    return step


def main(
    ranks: int = 2,
    width: int = 1024,
    depth: int = 16,
    batch: Annotated[int, typer.Option(help="Samples a rank.")] = 32,
    steps: int = 60,
) -> None:
    """Measure, and print each step's time and the median of its ratios to views in the same turn."""
    found = mp.launch(measure, ranks, width, depth, batch, steps, transport="shm", device="cpu")[0]
    print(f"{depth} layers of width {width}, {batch} samples a rank, {ranks} ranks; torch {torch.__version__}\n")
    print(f"{'':<22}{'ms':>8}{'÷ views':>9}")
    for name, seconds in found.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(seconds, found["views"], strict=True))
        print(f"{name:<22}{1e3 * statistics.median(seconds):>8.2f}{ratio:>9.3f}")


if __name__ == "__main__":
    typer.run(main)
