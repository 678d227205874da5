"""A tensor with a header: does whatever is sent arrive, and does the line have two ends?"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.errors import Mismatch
from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import require_all_waited
from microparallel.learn.log import RECEIVES, SENDS, calls
from microparallel.learn.requirements import require_equal, require_tensor, require_type, shown
from microparallel.learn.verdict import Wrong

# fmt: off
_TENSORS = [
    torch.arange(4, dtype=torch.float32),
    torch.arange(6, dtype=torch.float64).reshape(2, 3) / 3,
    torch.tensor(5, dtype=torch.int64),
    torch.zeros(0, 3, dtype=torch.float32),
    torch.tensor([True, False, True]),
    torch.arange(12, dtype=torch.bfloat16).reshape(2, 1, 3, 2),
    torch.arange(6, dtype=torch.int32).reshape(2, 3).T,  # not laid out as it reads
    torch.ones([1] * 8, dtype=torch.float16),
]
# fmt: on


def check(exam: Exam) -> None:
    """The ends of the line; the header; one message; all shapes and dtypes; down the line."""
    with exam.step("the line has two ends"):
        exam.run(_neighbours, 1, allowed=())
    with exam.step("a header has one size, and says all there is to know"):
        exam.run(_headers, 1, allowed=())
    with exam.step("a tensor arrives at a rank that did not know its shape"):
        exam.run(_one_after_another, 2, _TENSORS[:2])
    with exam.step("tensors of every shape and dtype arrive, one after another") as notes:
        exam.run(_one_after_another, 2, _TENSORS)
        notes.append(f"{len(_TENSORS)} tensors")
    with exam.step("from neighbour to neighbour, down a line of four"):
        exam.run(_down_the_line, 4)
        exam.run(_down_the_line, 1)


def _neighbours(learner: Any, _: Any) -> None:
    for world_size in (3, 2, 1):
        for rank in range(world_size):
            found = _pair(learner.neighbours(rank, world_size), f"neighbours({rank}, {world_size})")
            before = rank - 1 if rank else None
            after = rank + 1 if rank + 1 < world_size else None
            if found == (before, after):
                continue
            if found == ((rank - 1) % world_size, (rank + 1) % world_size):
                end = "no rank before it" if before is None else "no rank after it"
                raise Wrong(
                    f"that is a ring: rank {rank} of {world_size} has {end}, and neighbours returned {found}; the "
                    "ends of a line have None there"
                )
            if found == (after, before):
                raise Wrong(
                    f"neighbours({rank}, {world_size}) is the wrong way round: first the rank before it, then after"
                )
            strangers = [one for one in found if one is not None and not 0 <= one < world_size]
            if strangers:
                raise Wrong(
                    f"neighbours({rank}, {world_size}) names rank {strangers[0]}, and there is none: the ranks of a "
                    f"world of {world_size} end with {world_size - 1}"
                )
            raise Wrong(f"neighbours({rank}, {world_size}) is {found}, and should be {(before, after)}")


def _pair(found: Any, call: str) -> tuple[int | None, int | None]:
    """Two ranks, or None in the place of one."""
    pair = require_type(found, (tuple, list), call, "a pair")
    if len(pair) != 2 or not all(one is None or isinstance(one, int) for one in pair):
        raise Wrong(f"{call} should be a pair, each of them a rank or None, and is {shown(found)}")
    return pair[0], pair[1]


def _headers(learner: Any, _: Any) -> None:
    sizes: dict[int, tuple[int, ...]] = {}
    for tensor in _TENSORS:
        header = require_tensor(learner.write_header(tensor), "a header")
        sizes[tensor.dim()] = tuple(header.shape)
        _require_one_size(sizes)
        if header.dtype != torch.int64:
            raise Wrong(
                f"the header is {str(header.dtype).removeprefix('torch.')}, and the receiver expects int64: whole "
                "numbers, which no size is too large for"
            )
        _require_read(learner, header, tensor)


def _require_one_size(sizes: dict[int, tuple[int, ...]]) -> None:
    if len(set(sizes.values())) > 1:
        (few, short), *_, (many, long) = sorted(sizes.items())
        raise Wrong(
            f"the header of a tensor with {few} dimension{'s' * (few != 1)} has {short[0] if short else 1} numbers, "
            f"and with {many} dimensions {long[0] if long else 1}: a receiver must know the size of a header before it "
            "has seen anything, so give all of them HEADER numbers"
        )


def _require_read(learner: Any, header: torch.Tensor, tensor: torch.Tensor) -> None:
    described = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"
    found = learner.read_header(header)
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(f"read_header should return a shape and a dtype, and returned {shown(found)}")
    if not isinstance(found[0], list | tuple) or not all(isinstance(size, int) for size in found[0]):
        raise Wrong(f"the shape that read_header returns should be a list of whole numbers, and is {shown(found[0])}")
    shape = list(found[0])
    dtype = require_type(found[1], torch.dtype, "the dtype that read_header returns", "a dtype such as torch.float32")
    if len(shape) > tensor.dim() and shape[: tensor.dim()] == list(tensor.shape):
        raise Wrong(
            f"the header of {described} is read as shape {shape}: how many of the numbers are sizes? The header must "
            "also say how many dimensions there are"
        )
    if 0 in tensor.shape and 0 not in shape:
        raise Wrong(
            f"the header of {described} is read as shape {shape}: a size of 0 is a size, not the end of the shape"
        )
    if shape != list(tensor.shape):
        raise Wrong(f"the header of {described} is read as shape {shape}")
    if dtype != tensor.dtype:
        raise Wrong(
            f"the header of {described} is read as dtype {str(dtype).removeprefix('torch.')}: the dtype must be in the "
            "header too, or the receiver makes other numbers of the same bytes"
        )


_HEADER = "int64[10]"
_NO_HEADER = "is not the header that the receiver expects: header first, then the tensor"


def _one_after_another(learner: Any, comms: Any, tensors: list[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        what = f"tensor {number} ({str(tensor.dtype).removeprefix('torch.')}, shape {list(tensor.shape)})"
        if comms.rank == 0:
            before = len(calls(comms.row, *SENDS))
            learner.send(tensor, 1, comms)
            _require_two_messages(calls(comms.row, *SENDS)[before:], number, tensor)
        else:
            try:
                found = learner.receive(0, comms)
            except Mismatch:
                raise _mismatch(comms, number, what) from None
            require_equal(require_tensor(found, what), tensor, what)
    require_all_waited(comms)


def _require_two_messages(sent: list[Any], number: int, tensor: torch.Tensor) -> None:
    shapes = [tuple(call.content.shape) for call in sent]
    if len(shapes) == 2 and shapes[1] != tuple(tensor.shape):
        raise Wrong(f"tensor {number} has shape {list(tensor.shape)}, and was sent as {list(shapes[1])}")
    if len(shapes) > 2:
        raise Wrong(f"{len(shapes)} messages were sent for tensor {number}, and two are enough: header and tensor")
    if shapes == [tuple(tensor.shape)]:
        raise Wrong(f"the first message of tensor {number} {_NO_HEADER}")
    if len(shapes) < 2 and tensor.numel():  # without any numbers, the header says it all
        was = "message was" if len(shapes) == 1 else "messages were"
        raise Wrong(f"{len(shapes)} {was} sent for tensor {number}, and it takes two: header and tensor")


def _mismatch(comms: Any, number: int, what: str) -> Wrong:
    """What arrived is not what was asked for: which of the two messages was it?"""
    receives = calls(comms.row, *RECEIVES)
    if len(receives) == 2 * number + 1:
        if (asked := receives[-1].agreement) != _HEADER:
            return Wrong(
                f"the receiver asks for {asked} in line {receives[-1].line}, and a header is {_HEADER} "
                "(recv_tensor expects float32 unless it is told a dtype)"
            )
        return Wrong(f"the first message of {what} {_NO_HEADER} (received in line {receives[-1].line})")
    return Wrong(
        f"the header of {what} arrived, but then the receiver did not ask for what it says, shape and dtype "
        f"(line {receives[-1].line})"
    )


def _down_the_line(learner: Any, comms: Any) -> None:
    tensor = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    comms.line_of_ranks = True
    found = learner.pass_down_the_line(tensor if comms.rank == 0 else None, comms)
    require_equal(found, tensor, f"what rank {comms.rank} of the line has")
    expected = [comms.rank + 1] * 2 if comms.rank + 1 < comms.world_size else []
    if (sent := [call.peer for call in calls(comms.row, *SENDS)]) != expected:
        raise Wrong(
            f"down the line rank {comms.rank} sends {len(sent)} messages, and should send {len(expected)}: a header "
            "and a tensor to the rank after it, if there is one"
        )
    require_all_waited(comms)
