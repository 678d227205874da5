"""The methods that compress each number, or leave most of them out; `low_rank.py` has PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from microparallel.collectives.compressed import checked, kept
from microparallel.compression.compressor import KnownCompressor, Parts, Received, Shape
from microparallel.errors import UsageError


def _count(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _gathered(received: Received) -> Sequence[Parts]:
    assert not isinstance(received, torch.Tensor)
    return received


def _summed(received: Received) -> torch.Tensor:
    assert isinstance(received, torch.Tensor)
    return received


class Cast(KnownCompressor):
    """16 bits a number. The ranks' numbers are added in float32, and the sum is rounded once.

    Half the bytes, without error feedback unless you ask for it.

    Args:
        dtype: `torch.bfloat16` or `torch.float16`.
        feedback: see `Compressor`.
        warmup: see `Compressor`.
        smallest: see `Compressor`.

    Attributes:
        factor: numbers are multiplied by it before they are rounded, and divided afterwards: float16 has no numbers
            below 6e-8. All ranks have the same; it may change between passes.
    """

    rounds = ("sum",)
    sends_not_finite = True
    _needs_feedback = False

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        feedback: bool | None = None,
        warmup: int = 0,
        smallest: int = 1024,
    ) -> None:
        super().__init__(feedback=feedback, warmup=warmup, smallest=smallest)
        if dtype not in (torch.bfloat16, torch.float16):
            raise UsageError(f"Cast: dtype={dtype!r}; choose torch.bfloat16 or torch.float16")
        self.dtype = dtype
        self.name = "bf16" if dtype is torch.bfloat16 else "fp16"
        self.factor = 1.0
        self.sends_not_finite = not self.feedback

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:  # noqa: ARG002
        """Round all numbers; with error feedback, one that is too large becomes the largest, and the rest waits."""
        scaled = bucket if self.factor == 1.0 else bucket * self.factor
        if self.feedback:
            largest = torch.finfo(self.dtype).max
            scaled = scaled.clamp(-largest, largest)
        return (scaled.to(self.dtype),)

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:  # noqa: ARG002
        """Widen the sum."""
        wide = _summed(received[0]).float()
        return wide if self.factor == 1.0 else wide.div_(self.factor)


class TopK(KnownCompressor):
    """The largest numbers of a bucket, with their places; all others wait in the residual.

    Each rank chooses its own, so what all of them send grows with the number of ranks: 8 bytes a number, gathered.

    Args:
        fraction: how many of the numbers are sent: above 0, at most 1.
        feedback: see `Compressor`.
        warmup: see `Compressor`.
        smallest: see `Compressor`.
    """

    def __init__(
        self, fraction: float = 0.01, *, feedback: bool | None = None, warmup: int = 0, smallest: int = 1024
    ) -> None:
        super().__init__(feedback=feedback, warmup=warmup, smallest=smallest)
        self.fraction = float(checked("topk", fraction, f"TopK({fraction!r})").number)
        self.name = f"topk-{self.fraction!r}"

    def count(self, size: int) -> int:
        """How many of so many numbers are sent."""
        return int(kept(self.fraction, size))

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:  # noqa: ARG002
        """The numbers, and where they stand."""
        places = largest(bucket.abs(), self.count(bucket.numel()))
        return bucket[places], places.to(torch.int32)

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:
        """Add each rank's numbers at their places."""
        rows = _gathered(received[-1])
        bucket = torch.zeros(_count(shapes), device=rows[0][0].device)
        for numbers, places in rows:
            bucket.index_add_(0, places.long(), numbers)
        return bucket


def largest(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest numbers; exact, and quicker than `torch.topk` of all of them.

    A sample tells from which size on there are about half as many again as are wanted; only those are sorted. Where
    there turn out to be fewer than wanted, all are.
    """
    if sizes.numel() > _SAMPLE * 4:
        sample = sizes[:: sizes.numel() // _SAMPLE]
        wanted = math.ceil(1.5 * count / sizes.numel() * len(sample)) + 8
        if wanted < len(sample) // 4:
            candidates = (sizes >= torch.topk(sample, wanted).values[-1]).nonzero().view(-1)
            if len(candidates) >= count:
                return candidates[torch.topk(sizes[candidates], count, sorted=False).indices]
    return torch.topk(sizes, count, sorted=False).indices


_SAMPLE = 8192


class RandomK(KnownCompressor):
    """Numbers at random places, the same on every rank: so they can be summed, and no place is sent.

    Of every n/k neighbours one is chosen. All ranks draw from the same seed.

    Args:
        fraction: how many of the numbers are sent: above 0, at most 1.
        seed: the same on every rank.
        feedback: see `Compressor`.
        warmup: see `Compressor`.
        smallest: see `Compressor`.
    """

    rounds = ("sum",)

    def __init__(
        self,
        fraction: float = 0.01,
        *,
        seed: int = 0,
        feedback: bool | None = None,
        warmup: int = 0,
        smallest: int = 1024,
    ) -> None:
        super().__init__(feedback=feedback, warmup=warmup, smallest=smallest)
        self.fraction = float(checked("randomk", fraction, f"RandomK({fraction!r})").number)
        self.name = f"randomk-{self.fraction!r}"
        self.seed = seed
        self._bucket = 0
        self._drawn = 0  # how many times places were drawn
        self._places = torch.empty(0, dtype=torch.int64, device="cpu")

    def count(self, size: int) -> int:
        """How many of so many numbers are sent."""
        return int(kept(self.fraction, size))

    def for_bucket(self, number: int) -> Self:
        """A copy that draws other places than those of the other buckets."""
        copied = super().for_bucket(number)
        copied._bucket = number
        return copied

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:  # noqa: ARG002
        """Draw places, and take the numbers that stand there."""
        self._drawn += 1
        self._places = self._draw(bucket.numel()).to(bucket.device)
        return (bucket[self._places],)

    def _draw(self, size: int) -> torch.Tensor:
        count = self.count(size)
        seed = hash((self.seed, self._bucket, self._drawn)) % 2**63  # of whole numbers: the same in every process
        generator = torch.Generator().manual_seed(seed)
        bounds = torch.arange(count + 1, device="cpu") * size // count
        widths = bounds[1:] - bounds[:-1]
        return bounds[:-1] + (torch.rand(count, generator=generator, dtype=torch.float64, device="cpu") * widths).long()

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:
        """Put the sums at the places that were drawn last."""
        sums = _summed(received[-1])
        bucket = torch.zeros(_count(shapes), device=sums.device)
        bucket[self._places] = sums
        return bucket

    @property
    def description(self) -> str:
        """In words that ranks can compare."""
        return f"{super().description}, seed={self.seed}"

    def state_dict(self) -> dict[str, Any]:
        """How many times places were drawn."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on drawing from there."""
        self._drawn = int(state["drawn"])


class Sign(KnownCompressor):
    """One bit a number, its sign; and for the bucket one size, the mean of the numbers' sizes."""

    name = "sign"

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:  # noqa: ARG002
        """The size, and eight signs in a byte."""
        bits = torch.nn.functional.pad(bucket >= 0, (0, -bucket.numel() % 8)).view(-1, 8)
        return bucket.abs().mean().view(1), (bits * _POWERS.to(bucket.device)).sum(1, dtype=torch.uint8)

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:
        """Add each rank's size, up or down."""
        rows = _gathered(received[-1])
        count = _count(shapes)
        bucket = torch.zeros(count, device=rows[0][0].device)
        for size, packed in rows:
            signs = _SIGNS.to(packed.device).index_select(0, packed.int()).view(-1)[:count]
            bucket += signs.mul_(size)
        return bucket


_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
_SIGNS = torch.tensor([[1.0 if byte & 2**bit else -1.0 for bit in range(8)] for byte in range(256)])


class Int8(KnownCompressor):
    """8 bits a number, and a scale for each block: the largest number of a block is 127.

    Args:
        block: how many numbers share a scale.
        feedback: see `Compressor`.
        warmup: see `Compressor`.
        smallest: see `Compressor`.
    """

    def __init__(
        self, block: int = 256, *, feedback: bool | None = None, warmup: int = 0, smallest: int = 1024
    ) -> None:
        super().__init__(feedback=feedback, warmup=warmup, smallest=smallest)
        self.block = int(checked("int8", block, f"Int8({block!r})").number)
        self.name = f"int8-{self.block}"

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:  # noqa: ARG002
        """The scales, and the numbers in them."""
        blocks = torch.nn.functional.pad(bucket, (0, -bucket.numel() % self.block)).view(-1, self.block)
        scales = blocks.abs().amax(1) / 127
        whole = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).round_().clamp_(-127, 127)
        return scales, whole.to(torch.int8).view(-1)[: bucket.numel()]

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:  # noqa: ARG002
        """Add each rank's numbers, times their scales."""
        rows = _gathered(received[-1])
        bucket: torch.Tensor | None = None
        for scales, whole in rows:
            numbers = whole.float()
            numbers.mul_(scales.repeat_interleave(self.block)[: whole.numel()])
            bucket = numbers if bucket is None else bucket.add_(numbers)
        assert bucket is not None
        return bucket
