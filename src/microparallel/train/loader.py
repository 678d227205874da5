"""Loaders: what each rank computes on in each step, whatever the data is, with workers or without.

```
global batch      5 0 3 6 9 7        6 samples, the same for any number of ranks
rank 0            5 0 3              its share
                  5 0 │ 3            cut into micro-batches (--accumulate 2), each put together on its own
```

A worker is a process that loads batches ahead of time (torch's DataLoader starts it). What a loader's state says counts
the batches that were used, not those that are loaded already; and what a worker draws at random depends on the number
of the batch alone. So a run that goes on sees what it would have seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from microparallel.errors import ConfigError, DataError, UsageError
from microparallel.train import user_code
from microparallel.train.data import Dataset, Stream
from microparallel.train.random_state import own_randomness, seed_generators
from microparallel.train.sampler import ShardedSampler
from microparallel.train.shares import Shares

_NO_STATE = (
    "note: the data has no state_dict and load_state_dict, so {} batches are read again to get to where the run stood; "
    "the run is the same only if every pass yields the same samples"
)


@dataclass(frozen=True)
class Loaded:
    """A rank's part of one global batch.

    Attributes:
        parts: its micro-batches, each put together, with the number of its samples; none where the rank has none.
        samples: how many samples all ranks have together.
        shares: for each micro-batch, the number of the share it is cut from.
    """

    parts: list[tuple[Any, int]]
    samples: int
    shares: Sequence[int] = ()


class Loader(Protocol):
    """Where a rank's batches come from.

    Attributes:
        epoch: the pass over the data that the last batch belongs to.
    """

    epoch: int

    @property
    def length(self) -> int | None:
        """How many global batches a pass has; None where the data does not say."""

    def next(self) -> Loaded:
        """Load the next batch; after the last of a pass comes the first of the next."""

    def one_pass(self) -> Iterator[Loaded]:
        """All batches of one pass, from its beginning."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, in values that JSON holds; the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go to a position that `state_dict` returned, in a world of any size; returns a remark for the user."""

    def close(self) -> None:
        """End the workers."""


@dataclass(frozen=True)
class Loading:
    """How batches are loaded: by how many workers, in how many micro-batches, into pinned memory or not."""

    workers: int = 0
    microbatches: int = 1
    pinned: bool = False
    seed: int = 0


# ── data with a length ──────────────────────────────────────────────────────────────────────────────────────────────


class SampleLoader:
    """Batches of a dataset whose samples have numbers: of each global batch, this rank's shares.

    Args:
        data: the samples.
        sampler: of the global batches.
        shares: this rank's.
        loading: by whom.
    """

    def __init__(self, data: Dataset, sampler: ShardedSampler, shares: Shares, loading: Loading) -> None:
        self.epoch = 0
        self.sampler = sampler
        self._shares = shares
        self._data = data
        self._loading = loading
        self._indices: Iterator[list[int]] = iter(())
        self._from_workers: Iterator[Any] | None = None

    @property
    def length(self) -> int | None:
        """How many global batches a pass has."""
        return len(self.sampler)

    def next(self) -> Loaded:
        """Load this rank's share of the next global batch, or take it from the workers."""
        self.epoch = self.sampler.epoch
        if self._loading.workers and self._from_workers is None:
            self._from_workers = self._start_workers(_without_end(copy.copy(self.sampler)))
        indices = next(self._indices, None)
        if indices is None:  # an epoch is over, or nothing has begun
            self._indices = iter(self.sampler)
            indices = next(self._indices)
        if self._from_workers is None:
            return self._load(indices)
        return _unless_failed(next(self._from_workers))  # type: ignore[no-any-return]

    def one_pass(self) -> Iterator[Loaded]:
        """All batches of one pass, by workers if there are any."""
        sampler = copy.copy(self.sampler)
        sampler.load_state_dict({"epoch": 0, "batch": 0})
        plan = [*_numbered(sampler)]
        loaded: Iterator[Any] = self._start_workers(iter(plan)) if self._loading.workers else iter(())
        for _, _, indices in plan:
            yield _unless_failed(next(loaded)) if self._loading.workers else self._load(indices)

    def _load(self, indices: Sequence[int]) -> Loaded:
        """Load this rank's shares of a global batch here; what the data draws at random is of each share."""
        return _load(self._data, self._shares, indices, self._loading.microbatches, self._shares.draw_as)

    def _start_workers(self, plan: Iterator[tuple[int, int, list[int]]]) -> Iterator[Any]:
        fetch = _Fetch(self._data, self._loading, self._shares)
        return iter(
            DataLoader(
                fetch,  # type: ignore[arg-type]
                batch_size=None,
                sampler=plan,
                num_workers=self._loading.workers,
                pin_memory=self._loading.pinned,
                generator=torch.Generator(),  # of its own: the run's must not depend on workers
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the number of the next batch in it."""
        return dict(self.sampler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go to a position that `state_dict` returned."""
        self.sampler.load_state_dict(state)
        self._indices = iter(())
        self._from_workers = None
        return None

    def close(self) -> None:
        """End the workers."""
        self._from_workers = None


def _numbered(sampler: ShardedSampler) -> Iterator[tuple[int, int, list[int]]]:
    """What is left of the epoch: its number, the batch's number, and the samples of the batch."""
    epoch, first = sampler.epoch, sampler.state_dict()["batch"]
    for number, indices in enumerate(sampler, start=first):
        yield epoch, number, indices


def _without_end(sampler: ShardedSampler) -> Iterator[tuple[int, int, list[int]]]:
    while True:
        yield from _numbered(sampler)


class _Fetch:
    """A dataset for torch's DataLoader, whose items are a rank's whole batches."""

    def __init__(self, data: Dataset, loading: Loading, shares: Shares) -> None:
        self._data, self._loading, self._shares = data, loading, shares

    def __getitem__(self, planned: tuple[int, int, list[int]]) -> Any:
        epoch, number, indices = planned

        def seed(share: int) -> None:
            seed_generators(f"seed {self._loading.seed}, epoch {epoch}, batch {number}, rank {share}")

        try:
            return _load(self._data, self._shares, indices, self._loading.microbatches, seed)
        except UsageError as error:
            return _Failed(str(error))


@dataclass(frozen=True)
class _Failed:
    """What went wrong in a worker: DataLoader would put a traceback before it."""

    reason: str


def _unless_failed(item: Any) -> Any:
    if isinstance(item, _Failed):
        raise DataError(item.reason)
    return item


def _load(data: Dataset, shares: Shares, indices: Sequence[int], count: int, begin: Callable[[int], None]) -> Loaded:
    """Load one share after another; `begin` is called before each, with its number."""
    parts, numbers = [], []
    for number, mine in shares.cut(indices):
        begin(number)
        for part in cut(mine, count):
            parts.append((data.batch(part), len(part)))
            numbers.append(number)
    return Loaded(parts, len(indices), numbers)


def cut(samples: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Cut a rank's share of a batch into micro-batches; sizes differ by at most one, and there are no empty ones."""
    bounds = [index * len(samples) // count for index in range(count + 1)]
    return [samples[start:stop] for start, stop in pairwise(bounds) if start < stop]


# ── data that comes as a stream ─────────────────────────────────────────────────────────────────────────────────────


class StreamLoader:
    """Batches of an IterableDataset: every rank reads the whole stream, and keeps its share of each global batch.

    So all ranks know where a pass ends without asking each other, and any number of ranks sees the same batches. What
    the dataset draws at random is seeded by the number of the batch, the same on every rank.
    """

    def __init__(self, stream: Stream, batch: int, shares: Shares, loading: Loading) -> None:
        self.epoch = 0
        self._stream = stream
        self._batch = batch
        self._shares = shares
        self._loading = loading
        self._state: dict[str, Any] = {"epoch": 0, "batch": 0}
        self._batches: Iterator[Any] | None = None
        if loading.workers > 1:
            raise ConfigError(
                f"--workers {loading.workers}: a stream is read by one worker, or each would read all of it; "
                "try --workers 1"
            )

    @property
    def length(self) -> int | None:
        """How many global batches a pass has, if the dataset has a length."""
        return None if self._stream.length is None else -(-self._stream.length // self._batch)

    def next(self) -> Loaded:
        """Read the next global batch."""
        if self._batches is None:
            self._batches = self._start(self._state, passes=None)
        self.epoch, self._state, loaded = _unless_failed(next(self._batches))
        return loaded  # type: ignore[no-any-return]

    def one_pass(self) -> Iterator[Loaded]:
        """All batches of one pass."""
        for item in self._start({"epoch": 0, "batch": 0}, passes=1):
            _, _, loaded = _unless_failed(item)
            yield loaded

    def _start(self, state: Mapping[str, Any], passes: int | None) -> Iterator[Any]:
        reading = _Reading(self._stream, self._batch, self._shares, self._loading, state, passes)
        if not self._loading.workers:
            return iter(reading)
        workers = {"num_workers": 1, "pin_memory": self._loading.pinned, "generator": torch.Generator()}
        return iter(DataLoader(reading, batch_size=None, **workers))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The pass, the batches read of it, and the dataset's own state if it has one."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go to a position; a dataset without a state reads up to it again."""
        self._state = dict(state)
        self._batches = None
        return None if self._stream.has_state or not state["batch"] else _NO_STATE.format(state["batch"])

    def close(self) -> None:
        """End the worker."""
        self._batches = None


class _Reading(IterableDataset[Any]):
    """Reads a stream from some position on, in this process or in a worker; yields (epoch, the state behind, batch)."""

    def __init__(
        self, stream: Stream, batch: int, shares: Shares, loading: Loading, state: Mapping[str, Any], passes: int | None
    ) -> None:
        self._stream, self._batch = stream, batch
        self._shares = shares
        self._loading = loading
        self._state = state
        self._passes = passes

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._from_there()
        except UsageError as error:
            yield _Failed(str(error))

    def _from_there(self) -> Iterator[tuple[int, dict[str, Any], Loaded]]:
        epoch, used = self._state["epoch"], self._state["batch"]
        keeps_state = self._passes is None and self._stream.has_state
        state = self._state.get("data") if keeps_state else None
        while self._passes is None or epoch < self._passes:
            number = 0 if state is None else used  # without a state, the pass is read from its beginning
            for samples in self._read(epoch, number, state):
                if number >= used:
                    # Fewer samples than a batch: this pass is over, and the next batch is the first of another.
                    over = len(samples) < self._batch
                    behind: dict[str, Any] = {"epoch": epoch + over, "batch": 0 if over else number + 1}
                    if keeps_state:
                        behind["data"] = user_code.call(self._stream.dataset.state_dict, "state_dict of the data")
                    yield epoch, behind, self._loaded(samples, number)
                number += 1
            if number:
                epoch, used = epoch + 1, 0
            elif state is None:
                raise DataError(f"the stream of samples yielded none in pass {epoch}: yield at least one")
            state = None  # if that was the end of a pass, the next iter() is the beginning of one

    def _read(self, epoch: int, number: int, state: Any) -> Iterator[list[Any]]:
        """The global batches of a pass, from this number on; the last may have fewer samples."""
        dataset = self._stream.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if state is not None:
            user_code.call(dataset.load_state_dict, "load_state_dict of the data", state)
        with own_randomness(f"seed {self._loading.seed}, epoch {epoch}"):
            stream = user_code.call(iter, "iter() of the data", dataset)
        while True:
            with own_randomness(f"seed {self._loading.seed}, epoch {epoch}, batch {number}"):
                samples = user_code.call(list, "the data", islice(stream, self._batch))
            if samples:
                yield samples
            if len(samples) < self._batch:
                return
            number += 1

    def _loaded(self, samples: list[Any], number: int) -> Loaded:
        place = f"samples of batch {number} of the stream"
        parts, numbers = [], []
        for share, mine in self._shares.cut(samples):
            for part in cut(mine, self._loading.microbatches):
                parts.append((self._stream.collate(list(part), place), len(part)))
                numbers.append(share)
        return Loaded(parts, len(samples), numbers)
