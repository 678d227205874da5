"""Which samples each rank sees: every sample exactly once per epoch, whatever the number of ranks.

```
7 samples, batch 4, 2 ranks      order of the epoch    5 0 3 6 │ 2 1 4
                                                       batch 0 │ batch 1
                                 rank 0                5 0     │ 2 1
                                 rank 1                    3 6 │     4
```
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sized
from typing import Protocol, TypeVar

import torch
from torch.utils.data import Sampler

from microparallel.errors import UsageError

Item = TypeVar("Item")


def share(batch: list[Item], rank: int, world_size: int) -> list[Item]:
    """A rank's part of a batch: contiguous, and not more than one longer than another rank's."""
    size, longer = divmod(len(batch), world_size)
    start = rank * size + min(rank, longer)
    return batch[start : start + size + (rank < longer)]


class Ranked(Protocol):
    """Anything that knows its place in a world, such as a `Comms`."""

    @property
    def rank(self) -> int:
        """Which one it is, counted from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""


class ShardedSampler(Sampler[list[int]]):
    """Deals the samples of each global batch out to the ranks.

        sampler = ShardedSampler(dataset, batch=64, comms=comms)
        loader = DataLoader(dataset, batch_sampler=sampler)

    `batch` is the global batch: all ranks together see that many samples a step, each a contiguous share of them, and
    shares differ by at most one. The order of an epoch depends on `seed` and the epoch's number and nothing else, so
    any number of ranks sees the same global batches. `comms=` stands for its `rank` and `world_size`.

    Every rank gets equally many batches, or the ranks would wait for each other forever. So when a batch has fewer
    samples than there are ranks, which the last one may, the later ranks get an empty list. torch's DataLoader cannot
    collate an empty list: pass `drop_last=True`, or a `collate_fn` that knows what an empty batch is.

    Iterating again goes on to the next epoch, and after a `break` it goes on behind the batch that came last.
    `state_dict()` says where that is. The position counts global batches, so it can be loaded into a world of another
    size. (A DataLoader with workers asks for batches ahead of time; there, count the batches you have used and load
    `{"epoch": …, "batch": …}`.)
    """

    def __init__(
        self,
        samples: int | Sized,
        batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        comms: Ranked | None = None,
    ) -> None:
        self.samples = samples if isinstance(samples, int) else len(samples)
        self.batch = batch
        self.rank = rank if comms is None else comms.rank
        self.world_size = world_size if comms is None else comms.world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._check()
        self._epoch = 0
        self._next_batch = 0

    def __len__(self) -> int:
        """Count the global batches of an epoch, which are also the batches of each rank."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's share of each global batch that is left of the epoch."""
        epoch, batches = self._epoch, len(self)
        order = self._order(epoch)
        for number in range(self._next_batch, batches):
            # Moved on before the batch is handed out: a state that is saved while the batch is used resumes behind it.
            last = number == batches - 1
            self._epoch, self._next_batch = (epoch + 1, 0) if last else (epoch, number + 1)
            start = number * self.batch
            yield share(order[start : start + self.global_batch_size(number)], self.rank, self.world_size)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; if the sampler is in that epoch already, it stays where it is."""
        if epoch < 0:
            raise UsageError(f"epoch={epoch}: epochs are counted from 0")
        if epoch != self._epoch:
            self._epoch, self._next_batch = epoch, 0

    def global_batch_size(self, number: int) -> int:
        """Count the samples that all ranks together see in the epoch's batch of that number."""
        if not 0 <= number < len(self):
            raise UsageError(f"batch {number} is outside an epoch of {len(self)} batches, 0 to {len(self) - 1}")
        return min(self.batch, self.samples - number * self.batch)

    def state_dict(self) -> dict[str, int]:
        """Return the position from which iteration goes on: the epoch, and the number of the next batch in it."""
        return {"epoch": self._epoch, "batch": self._next_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position that `state_dict` returned."""
        if missing := {"epoch", "batch"} - state.keys():
            raise UsageError(f"a sampler's state needs {' and '.join(sorted(missing))}, and has {sorted(state)}")
        epoch, batch = state["epoch"], state["batch"]
        if epoch < 0 or not 0 <= batch <= len(self):
            raise UsageError(
                f"epoch {epoch}, batch {batch} is no position in epochs of {len(self)} batches "
                f"({self.samples} samples in batches of {self.batch}): was it saved with other data or another batch?"
            )
        self._epoch, self._next_batch = (epoch + 1, 0) if batch == len(self) else (epoch, batch)

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        # A checksum mixes the two numbers. Their sum would make epoch 1 of seed 0 epoch 0 of seed 1, and packing them
        # into 64 bits would lose one: torch's CPU generator looks at the low 32 bits of its seed only.
        mixed = zlib.crc32(f"seed {self.seed}, epoch {epoch}".encode())
        order: list[int] = torch.randperm(
            self.samples, generator=torch.Generator().manual_seed(mixed), device="cpu"
        ).tolist()
        return order

    def _check(self) -> None:
        if self.samples < 1:
            raise UsageError(f"{self.samples} samples: a sampler needs at least 1 to deal out")
        if self.batch < 1:
            raise UsageError(f"batch={self.batch}: a global batch has at least 1 sample")
        if self.world_size < 1:
            raise UsageError(f"world_size={self.world_size}: a world has at least 1 rank")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank={self.rank} is outside a world of {self.world_size}: 0 to {self.world_size - 1}")
        if self.drop_last and self.samples < self.batch:
            raise UsageError(
                f"drop_last leaves nothing of {self.samples} samples in batches of {self.batch}: "
                f"use a batch of at most {self.samples}, or keep the last batch"
            )
