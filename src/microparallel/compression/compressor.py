"""What a compressor is: it makes small parts of a bucket of gradients, and reads the sum of all ranks' parts.

```
rank 0   bucket ──encode──► parts ─┐                       ┌─► decode ──► sum of the buckets, nearly
rank 1   bucket ──encode──► parts ─┴─ round: sum or gather ┴─► decode ──► the same bits
```

`encode` and `decode` know nothing of messages. What the ranks do with the parts stands in `rounds`: in a **sum** they
add up their one tensor, in a **gather** every rank gets the parts of all. A method with two rounds encodes twice, and
the second time it is given the result of the first.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from microparallel.collectives import RoundKind, build, is_compressed, payload
from microparallel.errors import UsageError
from microparallel.program import Program

Shape = tuple[int, ...]
Parts = tuple[torch.Tensor, ...]
# What a rank has after a round: the sum of the ranks' tensors, or in rank order all ranks' parts.
Received = torch.Tensor | Sequence[Parts]
_NAME = re.compile(r"[a-z][a-z0-9.]*(?:[+-][a-z0-9.]+)*")


class Compressor:
    """How gradients are made smaller before they are sent; the base of all methods, and of your own.

    A subclass sets `name` and `rounds`, and writes `encode` and `decode`. What it keeps from pass to pass, such as a
    counter, is its own: every bucket has a copy of the object (`for_bucket`).

    Args:
        feedback: keep what was not sent, and add it to the next gradients (error feedback): so all of it is sent in
            the end. None: as the method needs.
        warmup: so many averaged passes are sent uncompressed first.
        smallest: parameters with fewer elements are left alone, in buckets of their own that are not compressed.

    Attributes:
        name: of the algorithm, in small letters: "topk-0.01".
        rounds: what the ranks do with the parts, round after round: "sum" or "gather".
        feedback: whether there is error feedback.
        sends_not_finite: whether infinite numbers, and those that are none, may be sent. If not, a rank that has such
            gradients sends zeros, and every rank raises `GradientError`.

    Example:
        ```python
        class Half(mp.compression.Compressor):
            \"\"\"Every second number, the other half in the next pass.\"\"\"

            name = "half"
            rounds = ("sum",)
            turn = 0

            def encode(self, bucket, shapes, *received):
                self.turn += 1
                return (bucket[self.turn % 2 :: 2].clone(),)

            def decode(self, shapes, received):
                bucket = torch.zeros(sum(map(math.prod, shapes)))
                bucket[self.turn % 2 :: 2] = received
                return bucket

        model = mp.DataParallel(net, comms, compress=Half())
        ```
    """

    name: str = "compressor"
    rounds: tuple[RoundKind, ...] = ("gather",)
    sends_not_finite = False
    _needs_feedback = True

    def __init__(self, *, feedback: bool | None = None, warmup: int = 0, smallest: int = 1024) -> None:
        for option, number in (("warmup", warmup), ("smallest", smallest)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise UsageError(f"{type(self).__name__}: {option}={number!r} must be a whole number, at least 0")
        self.feedback = self._needs_feedback if feedback is None else bool(feedback)
        self.warmup = warmup
        self.smallest = smallest

    # ── what a method does ──────────────────────────────────────────────────────────────────────────────────────

    def encode(self, bucket: torch.Tensor, shapes: Sequence[Shape], *received: Received) -> Parts:
        """The parts that this rank sends in the next round.

        Args:
            bucket: a flat float32 tensor, which stays as it is.
            shapes: of the gradients that lie in it side by side.
            received: the results of the rounds before.
        """
        raise NotImplementedError

    def decode(self, shapes: Sequence[Shape], *received: Received) -> torch.Tensor:
        """The sum of all ranks' buckets, as far as it was sent: a flat float32 tensor.

        It is also called with this rank's own parts as the last result: then it returns what this rank has sent. From
        the same results it must make the same bits on every rank.

        Args:
            shapes: of the gradients.
            received: the results of all rounds.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What the method keeps from pass to pass, the same on every rank: numbers, or tensors by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state that `state_dict` returned."""

    # ── what follows from it ────────────────────────────────────────────────────────────────────────────────────

    def for_bucket(self, number: int) -> Self:  # noqa: ARG002
        """A copy for one bucket, with a state of its own."""
        return copy.deepcopy(self)

    def algorithm(self, shapes: Sequence[Shape]) -> str:
        """The name in a program, which says how many bytes are sent of gradients of these shapes."""
        if _NAME.fullmatch(self.name) is None:
            raise UsageError(
                f"{type(self).__name__}: name={self.name!r}; a name of a compression has small letters, digits and "
                "single dashes: 'my-method'"
            )
        sizes = zip(self.rounds, self.payload(shapes), strict=True)
        return self.name + "".join(f"-{kind}-{size}" for kind, size in sizes)

    def payload(self, shapes: Sequence[Shape]) -> list[int]:
        """How many bytes this rank sends in each round: found by encoding zeros, as if there was one rank."""
        one = copy.deepcopy(self)
        bucket = torch.zeros(sum(map(math.prod, shapes)))
        return [sum(part.nbytes for part in parts) for parts in _alone(one, bucket, shapes)]

    def program(self, ranks: int, shapes: Sequence[Shape] = ((1024, 1024),)) -> Program:
        """The collective that carries the parts; it can be drawn, verified and simulated."""
        return build(self.algorithm(shapes), ranks)

    @property
    def description(self) -> str:
        """In words that ranks can compare."""
        feedback = "error feedback" if self.feedback else "no error feedback"
        return f"{self.name}, {feedback}, warmup={self.warmup}, smallest={self.smallest}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.description}>"


class KnownCompressor(Compressor):
    """A method whose bytes `mp.collectives` knows by its name."""

    def algorithm(self, shapes: Sequence[Shape]) -> str:  # noqa: ARG002
        """The name alone."""
        assert is_compressed(self.name)
        return self.name

    def payload(self, shapes: Sequence[Shape]) -> list[int]:
        """How many bytes this rank sends in each round, by the formula of its name."""
        return [int(one.bytes) for one in payload(self.name, 4 * sum(map(math.prod, shapes)))]


def _alone(compressor: Compressor, bucket: torch.Tensor, shapes: Sequence[Shape]) -> Iterator[Parts]:
    """The parts of each round, where there is one rank."""
    received: list[Received] = []
    for kind in compressor.rounds:
        parts = compressor.encode(bucket, shapes, *received)
        yield parts
        received.append(own_result(kind, parts))


def own_result(kind: RoundKind, parts: Parts) -> Received:
    """What a round would give if there was only this rank."""
    return parts[0] if kind == "sum" else [parts]


def require_parts(compressor: Compressor, kind: RoundKind, parts: Parts) -> None:
    """Refuse parts that the ranks cannot sum."""
    if kind == "sum" and (len(parts) != 1 or not parts[0].is_floating_point()):
        raise UsageError(
            f"{type(compressor).__name__}.encode: in a round that sums, a rank sends one tensor of real numbers"
        )


# ── several tensors as one message ──────────────────────────────────────────────────────────────────────────────────


def packed(parts: Parts) -> torch.Tensor:
    """The parts as one row of bytes: those with larger elements first, so that each begins where it may."""
    rows = [parts[index].contiguous().view(-1).view(torch.uint8) for index in _order(parts)]
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def unpacked(message: torch.Tensor, like: Parts) -> Parts:
    """The parts in a row of bytes, which have the dtypes and shapes of these."""
    found: list[torch.Tensor] = list(like)
    start = 0
    for index in _order(like):
        part = like[index]
        found[index] = message[start : start + part.nbytes].view(part.dtype).view(part.shape)
        start += part.nbytes
    return tuple(found)


def _order(parts: Parts) -> list[int]:
    return sorted(range(len(parts)), key=lambda index: -parts[index].element_size())
