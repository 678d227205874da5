"""Send a tensor to a neighbour that does not know its shape.

In ping-pong both ranks knew the shape of the ball. A message is bytes and nothing else, so `comms.recv_tensor` must be
told the shape and the dtype before it can receive. But in a pipeline only the sender knows what its part of the model
returns. So it sends a *header* first: a tensor whose size and dtype all ranks know beforehand, and which says what
comes next.

    rank 0                                        rank 1
    header  [dtype, dimensions, sizes …, 0, 0] ─▶  always 10 whole numbers: every rank knows that
    tensor  ███████████████████████████████████ ─▶  now its shape and dtype are known

The ranks stand in a line, not in a ring: no rank comes before the first, and none behind the last.

Lesson: docs/pipeline/03_ping_pong.md            Check it: microparallel learn check pipeline-comms
"""

import torch

import microparallel as mp

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
MOST_DIMENSIONS = 8
HEADER = 2 + MOST_DIMENSIONS  # whole numbers (torch.int64) in every header


def neighbours(rank: int, world_size: int) -> tuple[int | None, int | None]:
    """The rank before this one and the rank after it; None where there is none."""
    # ┌ hole
    #: raise NotImplementedError("which rank comes before this one, and which after it?")
    before = rank - 1 if rank > 0 else None
    after = rank + 1 if rank < world_size - 1 else None
    return before, after
    # └


def write_header(tensor: torch.Tensor) -> torch.Tensor:
    """Describe a tensor in HEADER whole numbers: its dtype (its place in DTYPES), how many dimensions, each size."""
    header = torch.zeros(HEADER, dtype=torch.int64)
    # ┌ hole
    #: raise NotImplementedError("write down what the receiver must know")
    header[0] = DTYPES.index(tensor.dtype)
    header[1] = tensor.dim()
    for dimension, size in enumerate(tensor.shape):
        header[2 + dimension] = size
    return header
    # └


def read_header(header: torch.Tensor) -> tuple[list[int], torch.dtype]:
    """The shape and the dtype that a header describes."""
    # ┌ hole
    #: # A size may be 0, and so may the number of dimensions.
    #: raise NotImplementedError("read what write_header wrote")
    numbers = header.tolist()
    dtype, dimensions = DTYPES[numbers[0]], numbers[1]
    return numbers[2 : 2 + dimensions], dtype
    # └


def send(tensor: torch.Tensor, dest: int, comms: mp.Comms) -> None:
    """Send a tensor to a rank that does not know what is coming.

    You have comms.send_tensor(tensor, dest) and comms.recv_tensor(shape, src, dtype).
    """
    # ┌ hole
    #: raise NotImplementedError("send the header, then the tensor")
    comms.send_tensor(write_header(tensor), dest)
    comms.send_tensor(tensor, dest)
    # └


def receive(src: int, comms: mp.Comms) -> torch.Tensor:
    """Receive whatever `send` sends."""
    # ┌ hole
    #: raise NotImplementedError("receive the header, then what it describes")
    header = comms.recv_tensor([HEADER], src, torch.int64)
    shape, dtype = read_header(header)
    return comms.recv_tensor(shape, src, dtype)
    # └


def pass_down_the_line(tensor: torch.Tensor | None, comms: mp.Comms) -> torch.Tensor:
    """Give every rank the first rank's tensor, from neighbour to neighbour."""
    before, after = neighbours(comms.rank, comms.world_size)
    if before is not None:
        tensor = receive(before, comms)
    assert tensor is not None
    if after is not None:
        send(tensor, after, comms)
    return tensor


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> str:
        tensor = pass_down_the_line(torch.ones(2, 3, dtype=torch.float64) if comms.rank == 0 else None, comms)
        return f"rank {comms.rank} has {tuple(tensor.shape)} of {tensor.dtype}"

    print(*mp.launch(try_it, ranks=3), sep="\n")
