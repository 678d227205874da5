"""Two methods in a chain: the second compresses the numbers that the first one sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from microparallel.collectives.compressed import payload, require_chain
from microparallel.compression.compressor import Compressor, KnownCompressor, Parts, Received, Shape
from microparallel.compression.low_rank import PowerSGD
from microparallel.compression.methods import RandomK, TopK
from microparallel.errors import UsageError


class Chain(Compressor):
    """`Chain(TopK(0.01), Cast(torch.bfloat16))`: the largest numbers, each in 16 bits.

    Args:
        first: `TopK`, `RandomK` or `PowerSGD`.
        second: what compresses their numbers: `Cast`, or but for PowerSGD, `Int8` or `Sign`.
        feedback: of the chain; what the two say of it does not matter. None: True.
        warmup: see `Compressor`; None: that of the first.
        smallest: see `Compressor`; None: that of the first.
    """

    def __init__(
        self,
        first: Compressor,
        second: Compressor,
        *,
        feedback: bool | None = None,
        warmup: int | None = None,
        smallest: int | None = None,
    ) -> None:
        for given in (first, second):
            if not isinstance(given, KnownCompressor | PowerSGD):
                raise UsageError(f"Chain: {given!r}; a chain is made of two of this package's methods")
        require_chain([one.name.partition("-")[0] for one in (first, second)], f"{first.name}+{second.name}")
        super().__init__(
            feedback=feedback,
            warmup=first.warmup if warmup is None else warmup,
            smallest=first.smallest if smallest is None else smallest,
        )
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"
        gathers = "gather" in (*first.rounds, *second.rounds)
        self.rounds = ("gather",) if gathers else first.rounds

    def for_bucket(self, number: int) -> Self:
        """A copy whose methods have copies of their own."""
        copied = super().for_bucket(number)
        copied.first = self.first.for_bucket(number)
        return copied

    def algorithm(self, shapes: Sequence[Shape]) -> str:
        """The name; PowerSGD's with its bytes."""
        return super().algorithm(shapes) if isinstance(self.first, PowerSGD) else self.name

    def payload(self, shapes: Sequence[Shape]) -> list[int]:
        """How many bytes this rank sends in each round, by the formula of its name."""
        return [int(one.bytes) for one in payload(self.name, 4 * sum(map(math.prod, shapes)), shapes)]

    @property
    def description(self) -> str:
        """In words that ranks can compare."""
        return f"{super().description}, {self.first.description}"

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:
        """What the first sends, with its numbers compressed by the second."""
        numbers, *others = self.first.encode(bucket, shapes, *map(self._widened, received))
        return (*self.second.encode(numbers, [tuple(numbers.shape)]), *others)

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:
        """Let the second read the numbers, and the first the rest."""
        if self.rounds != ("gather",):
            return self.first.decode(shapes, *map(self._widened, received))
        rows = received[-1]
        assert not isinstance(rows, torch.Tensor)
        others = 1 if isinstance(self.first, TopK) else 0  # the places
        found = [(self._read(row[: len(row) - others], shapes), *row[len(row) - others :]) for row in rows]
        if isinstance(self.first, RandomK):
            return self.first.decode(shapes, sum((row[0] for row in found[1:]), start=found[0][0]))
        return self.first.decode(shapes, found)

    def _widened(self, received: Received) -> torch.Tensor:
        """The sum of the ranks' numbers, as the first knows it."""
        assert isinstance(received, torch.Tensor)
        return self.second.decode([tuple(received.shape)], received)

    def _read(self, parts: Parts, shapes: Sequence[Shape]) -> torch.Tensor:
        """One rank's numbers."""
        assert isinstance(self.first, TopK | RandomK)
        count = self.first.count(sum(map(math.prod, shapes)))
        result: Received = parts[0] if self.second.rounds == ("sum",) else [parts]
        return self.second.decode([(count,)], result)

    def state_dict(self) -> dict[str, Any]:
        """The first's: the second keeps nothing."""
        return self.first.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give it to the first."""
        self.first.load_state_dict(state)
