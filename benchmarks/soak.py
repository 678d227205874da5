"""A soak: random collectives of random sizes on shared memory, each compared with what it must give.

    python benchmarks/soak.py                  # 100,000 collectives, 4 ranks
    python benchmarks/soak.py 5000 --ranks 3 --seed 7

Every rank draws the same calls from the same seed, and knows what each of the others contributes, so it can work out
every result by itself. Numbers are whole, so that sums are exact in any order.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

import microparallel as mp

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16)
# A tensor has up to one of these numbers of elements: mostly few, so that many calls are made.
_SIZES = (0, 1, 3, 64, 64, 1000, 1000, 4096, 4096, 4096, 20_000, 20_000, 100_000, 1_000_000)
_UNDER_WAY = 4
_POOL = 2_000_003  # numbers that contributions are cut from

Check = Callable[[], bool]  # finishes a call, and tells whether its result is right


class Soaker:
    """One rank, its random calls, and what they must give."""

    def __init__(self, comms: mp.Comms, seed: int) -> None:
        self.comms = comms
        self.random = random.Random(seed)
        self.calls: Counter[str] = Counter()
        generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.randint(0, 8, (_POOL,), generator=generator, dtype=torch.uint8)
        self._groups = [comms] if comms.world_size < 3 else [comms, *self._smaller_groups()]
        self._kinds: list[Callable[..., Check]] = [
            self._all_reduce, self._all_reduce, self._broadcast, self._all_gather, self._reduce,
            self._reduce_scatter, self._gather, self._scatter, self._ring_of_messages,
        ]  # fmt: skip

    def _smaller_groups(self) -> list[mp.Comms | None]:
        size = self.comms.world_size
        return [self.comms.group(range(size - 1)), self.comms.group(range(1, size))]

    def call(self) -> Check | None:
        """Make the next call; None on a rank that is not part of its group."""
        group = self.random.choice(self._groups)
        kind = self.random.choice(self._kinds)
        length = self.random.randint(0, self.random.choice(_SIZES))
        dtype = self.random.choice(_DTYPES)
        start = self.random.randrange(_POOL - length)
        root, other = self.random.random(), self.random.random()
        self.calls[kind.__name__.strip("_")] += 1
        if group is None:
            return None

        def contribution(rank: int) -> torch.Tensor:
            return (self._numbers[start : start + length] + rank).to(dtype)

        return kind(group, contribution, int(root * group.world_size), other)

    def _tensor(self, group: mp.Comms, content: torch.Tensor, choice: float) -> torch.Tensor:
        """An ordinary tensor, one in shared memory, or one with gaps."""
        if choice < 0.4 or not content.numel():
            return content
        if choice < 0.8:
            shared = group.empty(content.shape, content.dtype)
            return shared.copy_(content)
        return torch.stack([content, content], dim=1)[:, 0]

    def _all_reduce(self, group: mp.Comms, contribution: Any, _: int, choice: float) -> Check:
        tensor = self._tensor(group, contribution(group.rank), choice)
        op = ("sum", "max", "min")[int(choice * 1000) % 3]
        together = torch.stack([contribution(rank) for rank in range(group.world_size)])
        wanted = {"sum": together.sum(0), "max": together.amax(0), "min": together.amin(0)}[op].to(tensor.dtype)
        request = group.all_reduce(tensor, op, async_op=True)
        return lambda: torch.equal(request.wait(), wanted)

    def _broadcast(self, group: mp.Comms, contribution: Any, root: int, choice: float) -> Check:
        result = group.broadcast(self._tensor(group, contribution(group.rank), choice), src=root)
        return lambda: torch.equal(result, contribution(root))

    def _all_gather(self, group: mp.Comms, contribution: Any, _: int, choice: float) -> Check:
        results = group.all_gather(self._tensor(group, contribution(group.rank), choice))
        return lambda: all(torch.equal(result, contribution(rank)) for rank, result in enumerate(results))

    def _reduce(self, group: mp.Comms, contribution: Any, root: int, choice: float) -> Check:
        result = group.reduce(self._tensor(group, contribution(group.rank), choice), dst=root)
        wanted = contribution(group.rank)
        if group.rank == root:
            wanted = sum((contribution(rank) for rank in range(1, group.world_size)), contribution(0))
        return lambda: torch.equal(result, wanted)

    def _reduce_scatter(self, group: mp.Comms, contribution: Any, _: int, choice: float) -> Check:
        mine = [self._tensor(group, contribution(group.rank), choice) for _ in range(group.world_size)]
        result = group.reduce_scatter(mine)
        wanted = sum((contribution(rank) for rank in range(1, group.world_size)), contribution(0))
        return lambda: torch.equal(result, wanted)

    def _gather(self, group: mp.Comms, contribution: Any, root: int, choice: float) -> Check:
        results = group.gather(self._tensor(group, contribution(group.rank), choice), dst=root)
        if group.rank != root or results is None:
            return lambda: results is None
        return lambda: all(torch.equal(result, contribution(rank)) for rank, result in enumerate(results))

    def _scatter(self, group: mp.Comms, contribution: Any, root: int, _: float) -> Check:
        given = [contribution(rank) for rank in range(group.world_size)] if group.rank == root else None
        result = group.scatter(given, src=root)
        return lambda: torch.equal(result, contribution(group.rank))

    def _ring_of_messages(self, group: mp.Comms, contribution: Any, _: int, choice: float) -> Check:
        if group.world_size == 1:
            return lambda: True
        content = self._tensor(group, contribution(group.rank), choice)
        after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        sent = group.isend(content, after)
        received = group.recv_tensor(content.shape, before, content.dtype)
        sent.wait()
        return lambda: torch.equal(received, contribution(before))


def soak(comms: mp.Comms, times: int, seed: int, quiet: bool = False) -> dict[str, int]:
    """Make so many calls, a few of them under way at once; returns how often each kind was called."""
    soaker = Soaker(comms, seed)
    under_way: deque[tuple[int, Check]] = deque()
    with Progress(disable=quiet or comms.rank > 0, transient=True) as progress:
        task = progress.add_task("soaking", total=times)
        for number in range(times):
            if (check := soaker.call()) is not None:
                under_way.append((number, check))
            while len(under_way) > (_UNDER_WAY if number < times - 1 else 0):
                called, check = under_way.popleft()
                if not check():
                    raise mp.errors.CommsError(f"call {called} of seed {seed} gave a wrong result on rank {comms.rank}")
            if number % 100 == 0:
                progress.update(task, completed=number)
    return dict(soaker.calls)


def main(
    times: Annotated[int, typer.Argument(help="How many collectives.")] = 100_000,
    ranks: int = 4,
    seed: int = 0,
    transport: str = "shm",
) -> None:
    """Soak, and say what was done."""
    begun = time.perf_counter()
    calls = mp.launch(soak, ranks, times, seed, transport=transport)[0]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(calls.items()))
    print(
        f"{times:,} calls by {ranks} ranks over {transport} in {time.perf_counter() - begun:.0f} s, all right: {kinds}"
    )


if __name__ == "__main__":
    typer.run(main)
