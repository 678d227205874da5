"""PowerSGD: two thin factors of each gradient matrix, which the ranks sum one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from microparallel.collectives.compressed import checked, factor_sizes, is_factored, matrix
from microparallel.compression.compressor import Compressor, Parts, Received, Shape


class PowerSGD(Compressor):
    """Two factors of a few columns for each matrix of gradients, by one step of a power iteration.

    ```
    M (a × b)  ≈  P (a × r) · Qᵀ (r × b)          on each rank, M is its own gradient
    1. P = M Q, summed over the ranks, and made orthonormal       Q is that of the last pass
    2. Q = Mᵀ P, summed over the ranks                            then P Qᵀ is the sum of all M, nearly
    ```

    4r(a + b) bytes instead of 4ab, in two all-reduces, of which the second needs the result of the first. A tensor of
    more dimensions is the matrix of its first and all its others. What is no matrix, or too small a one, is sent as it
    is, beside Q.

    Args:
        rank: how many columns the factors have.
        seed: of the first Q, the same on every rank.
        feedback: see `Compressor`.
        warmup: see `Compressor`.
        smallest: see `Compressor`.
    """

    rounds = ("sum", "sum")

    def __init__(
        self, rank: int = 2, *, seed: int = 0, feedback: bool | None = None, warmup: int = 0, smallest: int = 1024
    ) -> None:
        super().__init__(feedback=feedback, warmup=warmup, smallest=smallest)
        self.rank = int(checked("powersgd", rank, f"PowerSGD({rank!r})").number)
        self.name = f"powersgd-{self.rank}"
        self.seed = seed
        self._columns: dict[int, torch.Tensor] = {}  # for each matrix, by its place in the bucket: Q of the last pass
        self._bases: dict[int, torch.Tensor] = {}  # for each matrix: this pass's P, orthonormal

    def payload(self, shapes: Sequence[Shape]) -> list[int]:
        """How many bytes each of the two rounds sums."""
        return [4 * count for count in factor_sizes(self.rank, shapes)]

    @property
    def description(self) -> str:
        """In words that ranks can compare."""
        return f"{super().description}, seed={self.seed}"

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:
        """First P of each matrix; then, with the sum of these, Q of each matrix, and all that is no matrix."""
        if not received:
            return (
                _flat((piece @ self._last(index, piece) for index, piece in self._matrices(bucket, shapes)), bucket),
            )
        self._make_bases(received[0], shapes)
        pieces = dict(self._matrices(bucket, shapes))
        rest = (piece for index, piece in enumerate(_cut(bucket, shapes)) if index not in pieces)
        columns = ((self._bases[index].T @ piece).T for index, piece in pieces.items())
        return (_flat((*columns, *rest), bucket),)

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:
        """Multiply the factors; what was sent as it is comes from behind them."""
        last = received[-1]
        assert isinstance(last, torch.Tensor)
        sizes = [self.rank * matrix(shape)[1] for shape in shapes if is_factored(self.rank, shape)]
        columns = iter(torch.split(last[: sum(sizes)], sizes) if sizes else ())
        start = sum(sizes)
        found = []
        for index, shape in enumerate(shapes):
            if is_factored(self.rank, shape):
                self._columns[index] = next(columns).view(-1, self.rank)
                found.append((self._bases[index] @ self._columns[index].T).view(-1))
            else:
                found.append(last[start : start + math.prod(shape)])
                start += math.prod(shape)
        return torch.cat(found)

    def _matrices(self, bucket: torch.Tensor, shapes: Sequence[Shape]) -> Iterator[tuple[int, torch.Tensor]]:
        for index, (piece, shape) in enumerate(zip(_cut(bucket, shapes), shapes, strict=True)):
            if is_factored(self.rank, shape):
                yield index, piece.view(matrix(shape))

    def _last(self, index: int, piece: torch.Tensor) -> torch.Tensor:
        """Q of the last pass; in the first pass random numbers, the same on every rank."""
        if index not in self._columns:
            generator = torch.Generator().manual_seed(self.seed + index)
            self._columns[index] = torch.randn(piece.shape[1], self.rank, generator=generator, device="cpu")
        return self._columns[index].to(piece.device)

    def _make_bases(self, received: Received, shapes: Sequence[Shape]) -> None:
        """Make each summed P orthonormal: in float64, so that ranks with other numbers of threads round alike."""
        assert isinstance(received, torch.Tensor)
        start = 0
        for index, shape in enumerate(shapes):
            if is_factored(self.rank, shape):
                rows = matrix(shape)[0]
                piece = received[start : start + rows * self.rank].view(rows, self.rank)
                self._bases[index] = torch.linalg.qr(piece.double()).Q.float()
                start += rows * self.rank

    def state_dict(self) -> dict[str, Any]:
        """Q of each matrix, by its place in the bucket."""
        return {str(index): columns.clone() for index, columns in self._columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these."""
        self._columns = {int(index): columns.clone() for index, columns in state.items()}


def _cut(bucket: torch.Tensor, shapes: Sequence[Shape]) -> tuple[torch.Tensor, ...]:
    return torch.split(bucket, [math.prod(shape) for shape in shapes])


def _flat(pieces: Any, like: torch.Tensor) -> torch.Tensor:
    rows = [piece.reshape(-1) for piece in pieces]
    return torch.cat(rows) if rows else like.new_empty(0)
