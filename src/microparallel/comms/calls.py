"""A call that every rank of a group is expected to make, in words that ranks can compare."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a Comms primitive, as its caller wrote it.

    Ranks whose calls belong together have the same `agreement`: for a collective that is the whole call, for a message
    only what the sender and the receiver both state.
    """

    text: str
    agreement: str
    collective: bool = True
    size: int = 0  # bytes of this rank's tensor
    peer: int | None = None  # of a message: the other rank of the group
    sends: bool = False  # of a message: whether it leaves this rank

    def __str__(self) -> str:
        return self.text

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # training makes the same few again and again
    def of_all(name: str, *details: str, size: int = 0) -> Call:
        """A collective: every rank must make it with the same details."""
        text = f"{name}({', '.join(details)})"
        return Call(text, text, size=size)

    @staticmethod
    def of_two(name: str, content: str, peer: int, *, sends: bool, size: int = 0) -> Call:
        """One end of a message: the content must agree, the name and the peer differ."""
        text = f"{name}({content}, {'dest' if sends else 'src'}={peer})"
        return Call(text, content, collective=False, size=size, peer=peer, sends=sends)

    def as_message(self, peer: int | None, *, sends: bool, size: int) -> Call:
        """The same words for one end of a message; its peer is None where it may come from anybody."""
        return replace(self, collective=False, peer=peer, sends=sends, size=size)

    def to_bytes(self) -> bytes:
        """The call as JSON of a fixed size, so that a receiver knows how many bytes to expect."""
        header = json.dumps([_shortened(self.text), _shortened(self.agreement), self.collective]).encode()
        return header.ljust(HEADER_BYTES)

    @staticmethod
    def from_bytes(header: bytes) -> Call:
        """Read a call back from the bytes a peer sent."""
        text, agreement, collective = json.loads(header)
        return Call(text, agreement, collective)


def describe(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, as in `float32[4, 128]`."""
    return describe_content(tensor.dtype, tensor.shape)


@functools.lru_cache(maxsize=4096)
def describe_content(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """A dtype and a shape, as in `float32[4, 128]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_list(tensors: Iterable[torch.Tensor]) -> str:
    """The dtypes and shapes of several tensors, counted where they are all alike."""
    texts = [describe(tensor) for tensor in tensors]
    if len(set(texts)) == 1:
        return f"{len(texts)} times {texts[0]}"
    return f"[{', '.join(texts)}]"


def _shortened(text: str, limit: int = 400) -> str:
    # A list of many shapes may outgrow the header. The digest keeps different texts different.
    if len(text) <= limit:
        return text
    return f"{text[: limit - 20]}… #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def content_bytes(content: str) -> int:
    """How many bytes a tensor described by `describe` takes."""
    name, _, shape = content.partition("[")
    dtype: torch.dtype = getattr(torch, name)
    sizes: list[int] = json.loads(f"[{shape.partition(']')[0]}]")
    return math.prod(sizes) * dtype.itemsize
