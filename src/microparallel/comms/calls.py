"""A call that every rank of a group is expected to make, in words that ranks can compare."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from microparallel.comms.group import Group
from microparallel.errors import CommsError, CommsTimeout, PeerGone, PeerLost, TransportError, TransportTimeout
from microparallel.observe import ObservedCall
from microparallel.observe.flight_recorder import Entry, NoEntry

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


# Turn a transport's failure into an error that names the rank and the call.


class named_failures:  # used as a block, as those of contextlib are
    """Within this block, whatever the transport raises becomes an error that names the call, and says why it failed.

    A class, because one made by `contextlib` takes two microseconds, twice in every call.
    """

    __slots__ = ("_call", "_entry", "_transport")

    def __init__(self, call: Call, transport: Group, entry: Entry | NoEntry | ObservedCall) -> None:
        self._call = call
        self._transport = transport
        self._entry = entry

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        if not isinstance(error, RuntimeError):
            self._entry.fails(timed_out=False)
            return
        named = explain(error, self._call, self._transport)
        self._entry.fails(timed_out=isinstance(named, CommsTimeout))
        if named is not error:
            raise named from error


def explain(error: RuntimeError, call: Call, transport: Group) -> CommsError:
    """Say which rank a failed call was waiting for, and why; what the flight recorders say comes beneath.

    An error that names its call already is returned as it is.
    """
    here = f"rank {transport.rank}"
    reason = str(error).partition("\n")[0]
    if isinstance(error, TransportTimeout):
        who = f"{_names(error.ranks, transport)} did not make" if error.ranks else "not every rank it needs made"
        headline = f"{here} waited in vain in {call}: {who} the matching call in time ({reason})"
        return CommsTimeout(headline + _beneath(transport.flight.why()), error.ranks)
    if isinstance(error, PeerGone):
        why = transport.flight.why([transport.world_ranks[rank] for rank in error.ranks])
        headline = f"{_names(error.ranks, transport)} went away during {call} on {here}"
        return PeerLost(error.ranks, str(call), headline + _beneath(why))
    if not isinstance(error, CommsError) or isinstance(error, TransportError):
        return CommsError(f"{call} failed on {here}: {reason}")
    explained = isinstance(error, CommsTimeout | PeerLost) or hasattr(error, "__notes__")
    if not explained and (why := transport.flight.why()):
        error.add_note(why)
    return error


def _beneath(why: str) -> str:
    return "".join(f"\n  {line}" for line in why.splitlines())


def _names(ranks: Sequence[int], transport: Group) -> str:
    def name(rank: int) -> str:
        world_rank = transport.world_ranks[rank]
        return str(rank) if rank == world_rank else f"{rank} (rank {world_rank} of the world)"

    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(name, ranks))}"
