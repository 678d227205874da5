"""A group whose bytes torch.distributed moves: its own collectives, or a program over its messages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from microparallel.collectives import all_reduce_program
from microparallel.comms.interpreter import COMBINE, Memory, perform, rounds, slices_of
from microparallel.transport.base import Work
from microparallel.transport.torch_distributed import TorchTransport, TorchWork


class TorchGroup(TorchTransport):
    """A torch process group that also runs all-reduce programs."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's group."""
        return self.group

    def announce(self, call: str) -> None:
        """torch compares nothing; checked mode does."""

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = "auto") -> Work:
        """Start combining everybody's tensor, in place, on every rank; a program runs to its end first."""
        if algorithm == "auto":
            return self.native_all_reduce(tensor, op)
        program = all_reduce_program(algorithm, self.world_size)
        memory = Memory(tensor, slices_of(program))
        for work in perform(rounds(program.ranks[self.rank]), memory, self, COMBINE[op]):
            work.wait()
        return TorchWork(None)

    @property
    def has_free_cores(self) -> bool:
        """A network, or a GPU, works beside the cores."""
        return True

    def run_in_background(self) -> None:
        """torch's threads do."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Any memory will do."""
        return torch.empty(shape, dtype=dtype, device="cpu")
