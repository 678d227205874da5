"""A case: one rank's tensors of one size, on which every method has its turn."""

from __future__ import annotations

import torch
import torch.distributed as dist

from microparallel.comms import Comms

_PERIOD = 10_007  # a prime, so that no two slices of a tensor look alike
_EXACT = 256  # whole numbers up to here are exact in every dtype, bfloat16 too
_SMALL = 65_536  # bytes; calls with up to so many are timed in a row
_ROW = 10  # calls


class Case:
    """One rank's tensors of one size: whole numbers, so that their sum is exact in whatever order they are added.

    Attributes:
        contribution: what this rank adds to the sum.
        expected: the sum.
        tensors: ordinary memory, where a method finds the contribution and leaves the sum; one for each call in a row.
        shared: the same in shared memory; where ranks share none, just the tensors.
        scratch: ordinary memory that nobody reads, where ranks share memory.
    """

    def __init__(self, comms: Comms, size: int, dtype: torch.dtype) -> None:
        length = size // dtype.itemsize
        patterns = [_pattern(rank, comms.world_size) for rank in range(comms.world_size)]
        self.contribution = _repeat(patterns[comms.rank].to(comms.device, dtype), length)
        self.expected = _repeat(torch.stack(patterns).sum(0).to(comms.device, dtype), length)
        row = range(calls_in_a_row(size))
        self.tensors = [torch.empty_like(self.contribution) for _ in row]
        shares_memory = transport_of(comms) == "shm"
        self.shared = [comms.empty(length, dtype) for _ in row] if shares_memory else self.tensors
        self.scratch = torch.empty_like(self.contribution) if shares_memory else self.tensors[0]

    def refill(self, tensor: torch.Tensor) -> None:
        """Put this rank's contribution back."""
        tensor.copy_(self.contribution)

    def is_right(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds exactly the sum."""
        return torch.equal(tensor, self.expected)


def calls_in_a_row(size: int) -> int:
    """How many calls are timed together.

    What a small call takes by itself, right after the ranks have met, depends on how each of them woke up. A training
    step makes many, one after another.
    """
    return _ROW if size <= _SMALL else 1


def tensors_of_a_case(comms: Comms) -> int:
    """How many tensors of full size a rank keeps."""
    return 5 if transport_of(comms) == "shm" else 3


def transport_of(comms: Comms) -> str:
    """By which transport these ranks talk: "shm", "nccl" or "gloo"."""
    backends = str(dist.get_backend_config(comms.process_group))
    if "nccl" in backends:
        return "nccl"
    return "shm" if "microparallel" in backends else "gloo"


def _pattern(rank: int, ranks: int) -> torch.Tensor:
    """Whole numbers of one rank, so small that the sum over all ranks is exact too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, max(2, _EXACT // ranks), (_PERIOD,), generator=generator)


def _repeat(pattern: torch.Tensor, length: int) -> torch.Tensor:
    return pattern.repeat(-(-length // len(pattern)))[:length].clone()
