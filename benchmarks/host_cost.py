"""What the wrappers cost the host: a step of DataParallel beside one of the bare model, in turns.

    python benchmarks/host_cost.py                    # one rank on the GPU: beside the bare model
    python benchmarks/host_cost.py --ranks 2          # two ranks over gloo on one GPU: beside torch's DDP
    python benchmarks/host_cost.py --device cpu --dim 16 --depth 12 --batch 1 --context 4

A small GPT's kernels are shorter than the Python that starts them, so the host decides how long a step takes. Each
contender trains a model of its own; in each round every contender takes its turn of a few steps, each round in another
order. A turn is compared with the first contender's in the same round, so what the machine does meanwhile meets all of
them. "again" is the first contender a second time: its ratio (A/A) says how far a ratio may be from 1 for no reason.
On a CPU, seconds of processor time stand beside those of the clock: other processes do not change them.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import microparallel as mp
from microparallel.models import GPT

VOCABULARY, WARM_UP = 256, 6
Wrap = Callable[[nn.Module, mp.Comms], nn.Module]


class Kind(NamedTuple):
    """One way to train: how the model is wrapped, whether its forward runs in autocast, and its parameters' dtype."""

    wrap: Wrap
    autocast: bool = False
    dtype: torch.dtype = torch.float32


def bare(module: nn.Module, _comms: mp.Comms) -> nn.Module:
    """The model as it is."""
    return module


def ours(**options: object) -> Wrap:
    """mp.DataParallel, with these options."""
    return lambda module, comms: mp.DataParallel(module, comms, **options)  # type: ignore[arg-type]


def torchs(**options: object) -> Wrap:
    """torch's DDP, with these options, over the same processes."""

    def wrap(module: nn.Module, comms: mp.Comms) -> nn.Module:
        return DistributedDataParallel(module, process_group=comms.process_group, **options)  # type: ignore[arg-type]

    return wrap


def sharded(**options: object) -> Wrap:
    """mp.FullyShardedDataParallel, with these options."""
    return lambda module, comms: mp.FullyShardedDataParallel(module, comms, **options)  # type: ignore[arg-type]


BF16 = torch.bfloat16
# In each group the first contender is what the others are compared with.
ONE_RANK: dict[str, dict[str, Kind]] = {
    "float32": {
        "bare": Kind(bare),
        "bare, again": Kind(bare),
        "mp.DataParallel": Kind(ours()),
        "mp.DataParallel, no unused": Kind(ours(find_unused_parameters=False)),
        "mp.FullyShardedDataParallel": Kind(sharded()),
        "torch's DDP": Kind(torchs()),
    },
    "bf16 parameters": {
        "bare": Kind(bare, dtype=BF16),
        "bare, again": Kind(bare, dtype=BF16),
        "mp.DataParallel": Kind(ours(), dtype=BF16),
        "mp.DataParallel, no unused": Kind(ours(find_unused_parameters=False), dtype=BF16),
        "torch's DDP": Kind(torchs(), dtype=BF16),
    },
    "float32 parameters, computing in bf16": {
        "bare, autocast": Kind(bare, autocast=True),
        "bare, autocast, again": Kind(bare, autocast=True),
        "mp.DataParallel, precision": Kind(ours(precision="bf16")),
        "torch's DDP, autocast": Kind(torchs(), autocast=True),
    },
}
SEVERAL_RANKS: dict[str, dict[str, Kind]] = {
    "float32": {
        "torch's DDP": Kind(torchs()),
        "torch's DDP, again": Kind(torchs()),
        "mp.DataParallel": Kind(ours()),
        "bare, no synchronisation": Kind(bare),
    },
    "bf16 parameters": {
        "torch's DDP": Kind(torchs(), dtype=BF16),
        "torch's DDP, again": Kind(torchs(), dtype=BF16),
        "mp.DataParallel": Kind(ours(), dtype=BF16),
        "bare, no synchronisation": Kind(bare, dtype=BF16),
    },
    "float32 parameters, computing in bf16": {
        "torch's DDP, autocast": Kind(torchs(), autocast=True),
        "torch's DDP, autocast, again": Kind(torchs(), autocast=True),
        "mp.DataParallel, precision": Kind(ours(precision="bf16")),
    },
}


class Contender:
    """A model that trains in one of these ways."""

    def __init__(self, kind: Kind, comms: mp.Comms, settings: argparse.Namespace) -> None:
        torch.manual_seed(0)
        module = GPT(VOCABULARY, settings.context, dim=settings.dim, heads=4, depth=settings.depth)
        self._comms, self._kind = comms, kind
        self._model = kind.wrap(module.to(comms.device, kind.dtype), comms)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        tokens = torch.arange(settings.batch * (settings.context + 1)) * (7 + comms.rank) % VOCABULARY
        self._tokens = tokens.view(settings.batch, -1).to(comms.device)

    def step(self) -> None:
        """One step of training."""
        self._optimizer.zero_grad()
        around = torch.autocast(self._comms.device.type, BF16) if self._kind.autocast else contextlib.nullcontext()
        with around:
            logits = self._model(self._tokens[:, :-1])
        nn.functional.cross_entropy(logits.float().flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        self._optimizer.step()

    def turn(self, steps: int) -> tuple[float, float]:
        """Seconds a step, of the clock and of processor time."""
        self.step()  # the caches still hold another contender's weights
        self._all_done()
        begun, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        busy = time.process_time() - busy
        self._all_done()
        return (time.perf_counter() - begun) / steps, busy / steps

    def _all_done(self) -> None:
        if self._comms.device.type == "cuda":
            torch.cuda.synchronize()
        self._comms.barrier()


def measure(comms: mp.Comms, settings: argparse.Namespace) -> list[str]:
    """Every rank runs this; returns the lines of the tables."""
    torch.set_num_threads(settings.threads)
    lines = []
    groups = ONE_RANK if comms.world_size == 1 else SEVERAL_RANKS
    for title, kinds in groups.items():
        chosen = {name: kind for name, kind in kinds.items() if settings.only in name or name == next(iter(kinds))}
        contenders = {name: Contender(kind, comms, settings) for name, kind in chosen.items()}
        for contender in contenders.values():
            contender.turn(WARM_UP)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        names = list(contenders)
        for number in range(settings.rounds):
            first = number % len(names)
            turned = names[first:] + names[:first]
            for name in turned if number % 2 else reversed(turned):
                times[name].append(contenders[name].turn(settings.steps))
        lines += ["", f"{title:40}{'ms a step':>10}   {'ratio (quartiles)':22}   of processor time"]
        base = times[names[0]]
        for name, found in times.items():
            clock, processor = (ratio([one[which] for one in found], [one[which] for one in base]) for which in (0, 1))
            lines.append(f"{name:40}{statistics.median(one[0] for one in found) * 1e3:10.3f}   {clock}   {processor}")
    return lines


def ratio(times: list[float], base: list[float]) -> str:
    """The median of the rounds' ratios, and the quartiles."""
    low, middle, high = statistics.quantiles((one / other for one, other in zip(times, base, strict=True)), n=4)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    """Read the settings, start the ranks, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"ranks": 1, "dim": 256, "depth": 4, "batch": 8, "context": 64, "rounds": 30, "steps": 10, "threads": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--transport", default="gloo")
    parser.add_argument("--only", default="", help="contenders whose name has this in it, beside the first of each")
    settings = parser.parse_args()
    print(
        f"GPT dim {settings.dim}, depth {settings.depth}, batch {settings.batch} × {settings.context}; "
        f"{settings.ranks} rank{'s' * (settings.ranks > 1)} over {settings.transport} on one {settings.device}; "
        f"torch {torch.__version__}; {settings.rounds} rounds of {settings.steps} steps"
    )
    found = mp.launch(
        measure, settings.ranks, settings, transport=settings.transport, device=settings.device, timeout=550
    )
    print("\n".join(found[0]))


if __name__ == "__main__":
    main()
