"""What bounds a data-parallel step? The same step with more and more of synchronisation in it, in turns.

    python benchmarks/data_parallel_parts.py

A step of none synchronises nothing. Copying puts every gradient into torch's buckets and sends nothing. The rest are
whole steps. Beside them stands an all-reduce of as many bytes with nothing else going on: what the whole step takes
beyond none, copying and that is what communication costs the computation, whose data it drives out of the cache.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp

GLOO = "torch's DDP on gloo"
FIRST = 3  # steps in which buckets may still be arranged anew


def measure(comms: mp.Comms, width: int, depth: int, batch: int, steps: int) -> dict[str, float]:
    """Milliseconds of each, the median."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(batch, width), torch.randint(2, (batch,))
    gradients = torch.ones(sum(parameter.numel() for parameter in mp.models.FullMLP(width, depth).parameters()))
    models = {
        "none": mp.models.FullMLP(width, depth),
        "copying into torch's buckets": torch_ddp(width, depth, None, hook=send_nothing),
        "mp.DataParallel": mp.DataParallel(mp.models.FullMLP(width, depth), comms),
        "torch's DDP on microparallel": torch_ddp(width, depth, None),
        GLOO: torch_ddp(width, depth, dist.new_group(backend="gloo")),
    }
    actions = {name: training_step(model, inputs, targets) for name, model in models.items()}
    actions["all-reduce alone"] = lambda: comms.all_reduce(gradients, op="mean")
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(FIRST + steps):
        for name, action in actions.items():
            comms.barrier()
            start = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(found[FIRST:]) for name, found in times.items()}


def torch_ddp(width: int, depth: int, group: dist.ProcessGroup | None, hook: Any = None) -> nn.Module:
    """A model that torch synchronises, or pretends to."""
    model = DistributedDataParallel(mp.models.FullMLP(width, depth), process_group=group, gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)  # type: ignore[no-untyped-call]
    return model


def send_nothing(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Tell torch that its bucket has been averaged."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


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
    steps: int = 40,
) -> None:
    """Measure the parts, and print what each adds to none."""
    found = mp.launch(measure, ranks, width, depth, batch, steps, transport="shm", device="cpu")[0]
    print(f"{depth} layers of width {width}, {batch} samples a rank, {ranks} ranks; torch {torch.__version__}\n")
    print(f"{'':<30}{'ms':>8}{'− none':>9}{'÷ gloo':>9}")
    for name, milliseconds in found.items():
        more = "" if name in ("none", "all-reduce alone") else f"{milliseconds - found['none']:.1f}"
        print(f"{name:<30}{milliseconds:>8.1f}{more:>9}{milliseconds / found[GLOO]:>9.2f}")


if __name__ == "__main__":
    typer.run(main)
