"""What Comms asks of a group of ranks, whatever moves its bytes."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from microparallel.observe.flight import Flight
from microparallel.observe.flight_recorder import GroupLog, NoLog
from microparallel.transport.base import Exchange, Work


class Group(Protocol):
    """One rank's place in a group: messages, collectives, and what is known of the others.

    Tensors are contiguous, and on a device that the group carries.
    """

    rank: int
    world_size: int
    world_ranks: tuple[int, ...]
    carries: frozenset[str]
    transport_name: str  # what "auto" is resolved for
    flight: Flight
    log: GroupLog | NoLog  # the flight recorder's, of this group's calls

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group that this is."""

    def announce(self, call: str) -> None:
        """Say what this thread calls next, where ranks compare that."""

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending."""

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving."""

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange, to which messages are added."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying the source's tensor over everybody else's."""

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, source: int) -> Work:
        """Start handing the source's inputs out, one to each rank, all of one size."""

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, to: int) -> Work:
        """Start collecting everybody's tensor on one rank."""

    def all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor]) -> Work:
        """Start collecting everybody's tensor on every rank."""

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> Work:
        """Start combining everybody's tensor on one rank; what the others' tensors hold afterwards is undefined."""

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: str) -> Work:
        """Start combining the ranks' inputs position by position; rank r gets position r."""

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """Start handing input r to rank r, and getting one from each; sizes may differ from pair to pair."""

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = "auto") -> Work:
        """Start combining everybody's tensor, in place, on every rank."""

    @property
    def has_free_cores(self) -> bool:
        """Whether communication can go on beside computation, without taking a core from it."""

    def run_in_background(self) -> None:
        """See to it that what has been started makes progress while this thread does something else."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor where this group's transfers like it best."""

    def subgroup(self, ranks: list[int]) -> Group | None:
        """Make a group of some of these ranks; only they need to call this. None on a rank that is not among them."""

    def close(self) -> None:
        """Leave the group."""
