"""What torch hands to a collective, in the form that ours take: tensors, reductions, sparse tensors, options.

A tensor becomes plain, contiguous memory that may be written to. A collective writes without telling autograd, as
those of torch's own backends do: into leaves that require a gradient, and without marking saved tensors as changed.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from microparallel.comms.calls import Call, content_bytes, describe
from microparallel.errors import UsageError

_ONE_TENSOR = re.compile(r"\w+\[[\d, ]*\]")  # as `describe` writes it


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a contiguous tensor that autograd does not watch; where that cannot be, room for a copy."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"backend 'microparallel' moves dense tensors, not {tensor.layout}; call .to_dense() first")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return room_for(tensor)
    return _same_memory(tensor) if tensor.is_inference() else tensor.data


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape and dtype, into which the thread that runs a collective may write."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as `plain` gives it, or a copy: for a message, which leaves at once."""
    wire = plain(tensor)
    if is_copy(wire, tensor):
        copy_over(tensor, wire)
    return wire


def copy_over(tensor: torch.Tensor, wire: torch.Tensor) -> None:
    """Copy a caller's tensor to the room that `plain` has made for it."""
    wire.copy_(tensor.detach())


def _same_memory(tensor: torch.Tensor) -> torch.Tensor:
    # Tensors made in inference mode may be changed only inside it, and the thread that runs a collective is not.
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_copy(wire: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a result in `wire` still has to be brought back to the caller's tensor."""
    return wire.numel() > 0 and wire.data_ptr() != tensor.data_ptr()


def bring_back(wires: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy results to where the caller wants them, as far as they are not there already."""
    for wire, tensor in zip(wires, tensors, strict=True):
        if is_copy(wire, tensor):
            (_same_memory(tensor) if tensor.is_inference() else tensor.data).copy_(wire)


def pieces(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """One tensor cut along its first dimension, a piece for each rank: equal pieces unless sizes are given."""
    if sizes:
        return list(torch.split(tensor, list(sizes)))
    if tensor.dim() == 0 or tensor.shape[0] % ranks:
        raise UsageError(f"{describe(tensor)} cannot be cut into {ranks} equal pieces along its first dimension")
    return list(torch.split(tensor, tensor.shape[0] // ranks)) if tensor.shape[0] else [tensor] * ranks


def flat_pieces(tensor: torch.Tensor, like: torch.Tensor, ranks: int, call: str) -> list[torch.Tensor]:
    """A contiguous tensor as one piece for each rank, each the size of `like`, whatever its shape."""
    if tensor.numel() != like.numel() * ranks:
        raise UsageError(f"{call}: {describe(tensor)} is not {ranks} times {describe(like)}")
    if tensor.dtype != like.dtype:
        raise UsageError(f"{call}: {describe(tensor)} and {describe(like)} have different dtypes")
    return list(tensor.view(ranks, -1).unbind()) if like.numel() else [tensor.view(-1)] * ranks


def device_of(arguments: Iterable[Any]) -> torch.device | None:
    """The device of the tensors among a call's arguments, which may be lists of lists; None if there are none."""
    found: torch.device | None = None
    for tensor in tensors_of(arguments):
        if found is not None and tensor.device != found:
            raise UsageError(f"backend 'microparallel' was given tensors on {found} and on {tensor.device} in one call")
        found = tensor.device
    return found


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among a call's arguments, or in its result, which may be lists of lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)


@functools.lru_cache(maxsize=4096)
def in_words(name: str, content: str, *details: str) -> Call:
    """A call as every rank must make it; training makes the same few again and again.

    As with torch's own backends, ranks agree on the dtype and the number of elements; each may have a shape of its own.
    """
    size = content_bytes(content) if _ONE_TENSOR.fullmatch(content) else 0
    call = Call.of_all(name, content, *details, size=size)
    return replace(call, agreement=call.text.replace(content, _ONE_TENSOR.sub(_without_shape, content)))


def _without_shape(content: re.Match[str]) -> str:
    dtype, _, shape = content[0].partition("[")
    return f"{dtype} times {math.prod(json.loads(f'[{shape}'))}"


# ── reductions ──────────────────────────────────────────────────────────────────────────────────────────────────────

_TOGETHER = {
    "SUM": "sum",
    "AVG": "sum",
    "PREMUL_SUM": "sum",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_BITWISE = {"BAND", "BOR", "BXOR"}
_CANNOT_ADD = {torch.uint16, torch.uint32, torch.uint64}


class TorchReduction:
    """One of torch's reductions, for tensors of one dtype.

    It is one of ours, which the ranks perform `together`, and what each rank does alone `before` and `after`.
    """

    def __init__(self, op: Any, dtype: torch.dtype, ranks: int) -> None:
        self.name: str = getattr(op, "op", op).name  # a ReduceOp, or only its kind
        self._factor = op.__getstate__()[1] if self.name == "PREMUL_SUM" else None  # op.factor, from 2.13 on
        self._ranks = ranks
        _require_possible(self.name, dtype)
        self.together = _TOGETHER[self.name]

    def before(self, wire: torch.Tensor) -> None:
        """What a rank does to its own contribution."""
        if self._factor is not None:
            wire.mul_(self._factor)

    @property
    def changes_input(self) -> bool:
        """Whether `before` does anything."""
        return self._factor is not None

    def after(self, wire: torch.Tensor) -> None:
        """What a rank does to the result; all do the same, so that they stay bit-identical."""
        if self.name == "AVG":
            wire.div_(self._ranks, rounding_mode=None if wire.is_floating_point() or wire.is_complex() else "trunc")

    @property
    def changes_output(self) -> bool:
        """Whether `after` does anything."""
        return self.name == "AVG"


def _require_possible(name: str, dtype: torch.dtype) -> None:
    integral = not (dtype.is_floating_point or dtype.is_complex)
    if name not in _TOGETHER:
        raise UsageError(f"backend 'microparallel' knows no reduction {name}; choose one of {', '.join(_TOGETHER)}")
    if name in _BITWISE and not integral:
        raise UsageError(f"ReduceOp.{name} works on the bits of integers and bool, not on {dtype}")
    if dtype in _CANNOT_ADD or (dtype.itemsize == 1 and dtype.is_floating_point):
        raise UsageError(f"{dtype} cannot be reduced: torch computes nothing in it; convert the tensor first")
    if dtype == torch.bool and name in ("AVG", "PREMUL_SUM"):
        raise UsageError(f"ReduceOp.{name} of torch.bool is not a bool; convert the tensor first: tensor.float()")


# ── sparse tensors ──────────────────────────────────────────────────────────────────────────────────────────────────


def require_sum(tensor: torch.Tensor, op: Any) -> None:
    """Refuse reductions other than the sum, and lists of which only some tensors are sparse."""
    if tensor.layout is not torch.sparse_coo:
        raise UsageError("all_reduce: some tensors of the list are sparse and some are not; make two calls")
    name = TorchReduction(op, tensor.dtype, 1).name
    if name != "SUM":
        raise UsageError(f"all_reduce: of sparse tensors there is only the SUM, not {name}; call .to_dense() first")


class Contribution:
    """One rank's sparse tensor: its indices and values go to all ranks, and the sum of all comes back into it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        coalesced = tensor.detach().coalesce()
        self._indices, self._values = coalesced.indices().contiguous(), coalesced.values().contiguous()
        self.count = torch.tensor([len(self._values)], device="cpu")
        self.wires = (self._indices.view(-1), self._values.view(-1))

    def room(self, counts: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors for all ranks' indices and values to arrive in, flat, given how many each rank has."""
        dimensions, width = self._indices.shape[0], math.prod(self._values.shape[1:])
        indices = [self._indices.new_empty(dimensions * count) for count in counts]
        return indices, [self._values.new_empty(width * count) for count in counts]

    def add_up(self, counts: Sequence[int], indices: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Put the sum into the caller's tensor, coalesced; all ranks add in the same order."""
        dimensions, dense = self._indices.shape[0], self._values.shape[1:]
        rows = [one.view(dimensions, count) for one, count in zip(indices, counts, strict=True)]
        blocks = [one.view(count, *dense) for one, count in zip(values, counts, strict=True)]
        everything = torch.sparse_coo_tensor(
            torch.cat(rows, dim=1),
            torch.cat(blocks),
            self._tensor.shape,
            check_invariants=True,  # what comes from a peer must not reach beyond this rank's memory
        )
        with torch.no_grad():
            self._tensor.copy_(everything.coalesce())


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Options:
    """What torch's options objects say, and its shorter forms such as `group.broadcast(tensor, 0)`."""

    op: Any
    root: int
    timeout: float | None
    waits: bool

    @staticmethod
    def of(opts: Any = None, *, op: Any = dist.ReduceOp.SUM, root: int = 0, timeout: Any = None) -> Options:
        """Read them from what a method of the group was called with."""
        if isinstance(opts, int):
            return Options(op, opts, seconds(timeout), False)
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return Options(opts, root, seconds(timeout), False)
        if opts is None or isinstance(opts, timedelta):
            return Options(op, root, seconds(timeout or opts), False)
        return Options(
            getattr(opts, "reduceOp", op),
            getattr(opts, "rootRank", root),
            seconds(opts.timeout),
            not getattr(opts, "asyncOp", True),
        )


def seconds(timeout: timedelta | None) -> float | None:
    """A timeout as torch passes it; None where it passes none (zero, or a negative one)."""
    return None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
