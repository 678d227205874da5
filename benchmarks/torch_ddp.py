"""What makes torch's DistributedDataParallel faster on the backend "microparallel"?

python benchmarks/torch_ddp.py --ranks 2 --rounds 30

It needs nothing but torch and this repository: where the package is not installed, set PYTHONPATH=src.

Every variant has its own replica of one model, wrapped by torch's DistributedDataParallel. In each round every variant
takes its turn of a few steps, each round in another order. A turn is compared with that of "nothing" in the same round,
so what the machine does meanwhile meets all of them. "nothing again" is the same variant a second time: its ratio (A/A)
says how far a ratio may be from 1 for no reason.

nothing         a thread runs each bucket's all-reduce while backward computes
hold            where the ranks fill the cores, the thread holds back until backward has ended (the default)
move            torch's buckets are moved into shared memory when they come again (MICROPARALLEL_MOVE=1)
hold, move      both
hook            a communication hook divides each bucket into a tensor in shared memory, and reduces it there
hook out        the same, but the peers' parts of the result are gathered into the bucket itself
hook out hold   the same, and the thread holds back
hook move       a communication hook moves buckets, and divides only this rank's part of the sum
hook end        a communication hook keeps the buckets, and reduces all of them in backward's thread when the last comes
gloo            torch's own backend
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microparallel._torch_entry import register
from microparallel.comms.interpreter import listed
from microparallel.topology import threads_per_rank

Tensors = torch.futures.Future[torch.Tensor]  # what torch wants from a hook, and as an annotation no text

_WARM_UP = 4  # steps: buckets are arranged anew after the first, and moved when they have come twice

SWITCHED = ["nothing", "nothing again", "hold", "move", "hold, move"]
NAMES = [*SWITCHED, "hook", "hook out", "hook out hold", "hook move", "hook end", "gloo"]


def mlp(width: int, depth: int) -> nn.Module:
    """An MLP without biases: `depth` layers of width² parameters."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


class SharedBuckets:
    """Tensors in shared memory, one for each bucket of a model."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._tensors: dict[int, torch.Tensor] = {}

    def divided(self, bucket: dist.GradBucket) -> torch.Tensor:
        """The bucket's gradients over the number of ranks, where the peers read them."""
        buffer, ranks = bucket.buffer(), dist.get_world_size()
        shared = self._tensors.get(bucket.index(), buffer[:0])
        size = -(-buffer.numel() // ranks) * ranks
        if shared.numel() != size:
            shared = self._tensors[bucket.index()] = self.group.empty((size,), buffer.dtype)
        torch.div(buffer, ranks, out=shared[: buffer.numel()])
        return shared


def hook_in_place(state: SharedBuckets, bucket: dist.GradBucket) -> Tensors:
    """All-reduce in shared memory; torch copies the result back."""
    size = bucket.buffer().numel()
    future = dist.all_reduce(state.divided(bucket), async_op=True).get_future()
    return future.then(lambda done: done.value()[0][:size])


def hook_out_of_place(state: SharedBuckets, bucket: dist.GradBucket) -> Tensors:
    """Reduce-scatter in shared memory, all-gather into the bucket."""
    group, shared, buffer = state.group, state.divided(bucket), bucket.buffer()
    pieces = list(shared.view(group.world_size, -1).unbind())
    mine, size = pieces[group.rank], pieces[0].numel()
    group.announce("reduce_scatter of a bucket")
    group.reduce_scatter(mine, pieces, "sum")
    outputs = list(pieces)
    for rank, piece in enumerate(buffer.split(size)):
        if rank != group.rank and piece.numel() == size:
            outputs[rank] = piece
    group.announce("all_gather of a bucket")
    group.all_gather(mine, outputs)

    def copy_the_rest() -> None:
        for piece, output in zip(buffer.split(size), outputs, strict=False):
            if output.data_ptr() != piece.data_ptr():
                piece.copy_(output[: piece.numel()])

    work = group.afterwards(copy_the_rest)
    done: Tensors = torch.futures.Future()
    work.then(lambda: done.set_result(buffer))
    group.run_after_backward()
    return done


def hook_moved(group: Any, bucket: dist.GradBucket) -> Tensors:
    """Move the bucket itself into shared memory; reduce-scatter, divide one's own part, all-gather."""
    buffer, ranks = bucket.buffer(), group.world_size
    group.afterwards(lambda: group.transport.move_what_comes_again(buffer))
    pieces = list(buffer.view(ranks, -1).unbind())
    mine = pieces[group.rank]
    group.announce("reduce_scatter of a bucket")
    group._run(group._program("reduce-scatter"), listed(pieces))
    group.afterwards(lambda: mine.div_(ranks))
    group.announce("all_gather of a bucket")
    work = group._run(group._program("all-gather"), listed(pieces))
    done: Tensors = torch.futures.Future()
    work.then(lambda: done.set_result(buffer))
    group.run_after_backward()
    return done


class AtTheEnd:
    """The buckets that have come, with what is to be told when they are reduced."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, Tensors]] = []


def hook_at_the_end(state: AtTheEnd, bucket: dist.GradBucket) -> Tensors:
    """All-reduce everything when the last bucket has come, in the thread that brings it."""
    future: Tensors = torch.futures.Future()
    state.kept.append((bucket.buffer().div_(dist.get_world_size()), future))
    if bucket.is_last():
        for buffer, of_this in state.kept:
            dist.all_reduce(buffer)
            of_this.set_result(buffer)
        state.kept.clear()
    return future


class Variant:
    """One way to train, with a model of its own."""

    def __init__(self, name: str, model: nn.Module, views: bool, batch: int, width: int, group: Any) -> None:
        self.name = name
        torch_group = dist.new_group(backend="gloo") if name == "gloo" else None
        self._group = group
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=views, process_group=torch_group)
        if name == "hook":
            self._model.register_comm_hook(SharedBuckets(group), hook_in_place)
        elif name.startswith("hook move"):
            self._model.register_comm_hook(group, hook_moved)
        elif name.startswith("hook out"):
            self._model.register_comm_hook(SharedBuckets(group), hook_out_of_place)
        elif name == "hook end":
            self._model.register_comm_hook(AtTheEnd(), hook_at_the_end)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._inputs = torch.randn(batch, width, generator=generator)

    def step(self) -> None:
        """One step of training."""
        self._optimizer.zero_grad()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()

    def turn(self, steps: int) -> tuple[float, float]:
        """Seconds a step until the last rank is ready, and of processor time, all ranks together."""
        with _switched(self._group, hold="hold" in self.name, move="move" in self.name):
            self.step()  # the caches still hold another variant's weights
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                self.step()
            busy = time.process_time() - busy
            dist.barrier()
            taken = time.perf_counter() - start
            used = torch.tensor([busy])
            dist.all_reduce(used)
            return taken / steps, float(used) / steps

    def weights(self) -> torch.Tensor:
        """All parameters in one tensor."""
        return torch.cat([parameter.detach().view(-1) for parameter in self._model.parameters()])


@contextmanager
def _switched(group: Any, *, hold: bool, move: bool) -> Iterator[None]:
    """Switch what the backend does by itself."""
    group.transport._regions._given_up = not move
    if not hold:
        group.run_after_backward = group.run_in_background
    try:
        yield
    finally:
        vars(group).pop("run_after_backward", None)


def measure(rank: int, settings: argparse.Namespace, names: list[str], store: str) -> None:
    """Every rank runs this; rank 0 prints."""
    torch.set_num_threads(settings.threads or threads_per_rank(settings.ranks))
    register()
    dist.init_process_group(
        "microparallel", store=dist.FileStore(store, settings.ranks), rank=rank, world_size=settings.ranks
    )
    world: Any = dist.group.WORLD
    variants = []
    for name in names:
        torch.manual_seed(0)
        model = mlp(settings.width, settings.depth)
        variants.append(Variant(name, model, settings.views, settings.batch, settings.width, world.shared_memory))
    for variant in variants:
        variant.turn(_WARM_UP)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(settings.rounds):
        first = number % len(variants)
        turned = variants[first:] + variants[:first]
        for variant in turned if number % 2 else reversed(turned):
            times[variant.name].append(variant.turn(settings.steps))
    if rank == 0:
        report(settings, times, [torch.equal(variant.weights(), variants[0].weights()) for variant in variants])
    dist.destroy_process_group()


def report(settings: argparse.Namespace, times: dict[str, list[tuple[float, float]]], equal: list[bool]) -> None:
    """Print, for each variant, milliseconds a step and its ratio to "nothing"."""
    print(
        f"torch's DDP, MLP of {settings.depth * settings.width**2 / 1e6:.1f} M parameters, batch {settings.batch}, "
        f"{settings.ranks} ranks of {torch.get_num_threads()} threads, gradient_as_bucket_view={settings.views}; "
        f"torch {torch.__version__}"
    )
    print(f"{'':14}{'ms a step':>10}   {'ratio, ± error (quartiles)':28}   {'of processor time':28}   same weights")
    for (name, of_this), same in zip(times.items(), equal, strict=True):
        clock, processor = (
            ratio([one[which] for one in of_this], [one[which] for one in times["nothing"]]) for which in (0, 1)
        )
        middle = statistics.median(one[0] for one in of_this) * 1000
        print(f"{name:14}{middle:10.2f}   {clock:28}   {processor:28}   {'yes' if same else 'no'}")


def ratio(times: list[float], base: list[float]) -> str:
    """The median of the rounds' ratios, its standard error, and the quartiles."""
    ratios = [one / other for one, other in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{middle:.3f} ±{error:.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    """Read the settings, and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 1024), ("depth", 10), ("batch", 32), ("rounds", 20), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=0, help="of each rank; a fair share of the cores if left out")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view=True")
    parser.add_argument("--variants", default="/".join(NAMES), help="some of them, with / in between")
    settings = parser.parse_args()
    names = [name for name in NAMES if name in settings.variants.split("/") or name.startswith("nothing")]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (settings, names, f"{folder}/store"), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
