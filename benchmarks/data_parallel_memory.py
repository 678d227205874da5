"""How much memory does a data-parallel step take? Where gradients exist once, hardly more than a single process's.

    python benchmarks/data_parallel_memory.py
    python benchmarks/data_parallel_memory.py > benchmarks/results/data-parallel-memory.txt

What is counted is what Linux calls the proportional set size of anonymous and of shared memory (Pss_Anon and Pss_Shmem
in /proc/self/smaps_rollup). A page that several ranks have mapped is counted in parts, so that all ranks together count
it once: merely reading a peer's bucket does not make it bigger. What is left out are files, which is torch's own code.
It is read when each weight's gradient has just been made, and is not yet in its bucket, and after backward and the
optimizer's step. From the largest count, what there was before the model was built is taken off: Python, torch, the
connections between ranks, and whatever a small model's steps needed.

Every variant has processes of its own, so that none finds what another has left behind in an allocator. And each runs
twice: with malloc as it is, which keeps some of what is freed, and with a malloc that gives every block of a megabyte
back to the system as soon as it is freed, so that only what is in use is counted. Numbers are the mean over the ranks.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp

WIDTH, DEPTH, BATCH = 1024, 32, 16  # gradients of 130 MB and hardly any activations
FIRST = 3  # steps in which buckets may still be arranged anew


@dataclass(frozen=True)
class Memory:
    """Bytes that a process has a share in."""

    private: int
    shared: int

    @property
    def total(self) -> int:
        """Both."""
        return self.private + self.shared

    @classmethod
    def now(cls) -> Memory:
        """What this process takes."""
        rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        kilobytes = {name: int(rest.split()[0]) for name, rest in (row.split(":") for row in rows)}
        return cls(1024 * kilobytes["Pss_Anon"], 1024 * kilobytes["Pss_Shmem"])

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.private - other.private, self.shared - other.shared)


def measure(comms: mp.Comms, variant: str, steps: int) -> tuple[Memory, Memory, Memory]:
    """Beyond what there was before: the weights alone, and the most in the first steps and in those after them."""
    train(wrapped(mp.models.FullMLP(8, 2), comms, variant), 2, torch.randn(4, 8))
    gc.collect()
    before = Memory.now()
    torch.manual_seed(0)
    model, inputs = mp.models.FullMLP(WIDTH, DEPTH), torch.randn(BATCH, WIDTH)
    weights = Memory.now() - before
    seen: list[Memory] = []
    for layer in model.layers[::4]:  # reading takes milliseconds; before all other hooks
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(Memory.now()))
    training = wrapped(model, comms, variant)
    seen.append(Memory.now())
    first = max(train(training, FIRST, inputs, seen), key=lambda memory: memory.total)
    seen.clear()
    later = max(train(training, steps, inputs, seen), key=lambda memory: memory.total)
    return weights, first - before, later - before


def wrapped(model: nn.Module, comms: mp.Comms, variant: str) -> nn.Module:
    """The model as this variant trains it."""
    if variant.startswith("mp"):
        return mp.DataParallel(model, comms)
    if variant.startswith("torch"):
        return DistributedDataParallel(
            model, process_group=comms.process_group, gradient_as_bucket_view="with views" in variant
        )
    return model


def train(model: nn.Module, steps: int, inputs: torch.Tensor, seen: list[Memory] | None = None) -> list[Memory]:
    """So many steps as people write them; returns what was seen meanwhile."""
    seen = [] if seen is None else seen
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    targets = torch.randint(2, (len(inputs),))
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs, targets).backward()
        seen.append(Memory.now())
        optimizer.step()
        seen.append(Memory.now())
    return seen


VARIANTS = {  # and where each runs
    "single process": "gloo",
    "mp.DataParallel, shared memory": "shm",
    "mp.DataParallel, gloo": "gloo",
    "torch's DDP with views, gloo": "gloo",
    "torch's DDP without views, gloo": "gloo",
}


def main(
    ranks: int = 2, steps: Annotated[int, typer.Option(help="After the first ones, for each variant.")] = 5
) -> None:
    """Measure every variant, and compare it with a single process."""
    print(
        f"memory of a training step: {DEPTH} layers of width {WIDTH}, {BATCH} samples a rank, SGD, {ranks} ranks; "
        f"torch {torch.__version__}\n"
    )
    print(f"{'':<34}{'malloc as it is':>53}{'freed at once':>24}")
    print(
        f"{'MB a rank':<34}{'weights':>9}{'first steps':>13}{'later steps':>13}{'shared':>8}{'÷ single':>10}"
        f"{'later steps':>14}{'÷ single':>10}"
    )
    alone: list[float] = []
    for variant, transport in VARIANTS.items():
        world = 1 if variant == "single process" else ranks
        numbers = []
        for environment in ({}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}):
            with mock.patch.dict(os.environ, environment):
                found = mp.launch(measure, world, variant, steps, transport=transport, device="cpu")
            numbers += [sum(one[column].total for one in found) / world / 1e6 for column in range(3)]
            numbers.append(sum(one[2].shared for one in found) / world / 1e6)
        weights, first, later, shared, _, _, tight, _ = numbers
        alone = alone or [later, tight]
        print(
            f"{variant:<34}{weights:>9.1f}{first:>13.1f}{later:>13.1f}{shared:>8.1f}{later / alone[0]:>10.3f}"
            f"{tight:>14.1f}{tight / alone[1]:>10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
