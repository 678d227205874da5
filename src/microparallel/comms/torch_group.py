"""A group whose bytes torch.distributed moves: by torch's own collectives, or by a program over torch's messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Self

import torch
import torch.distributed as dist

from microparallel.collectives import RoundKind, program_of_round
from microparallel.comms.interpreter import (
    COMBINE,
    PROGRAM_TAG,
    Algorithm,
    Memory,
    Personal,
    Pieces,
    RankProgram,
    perform,
    rank_program,
)
from microparallel.comms.rounds import Exchanged, WireRounds, room
from microparallel.observe.flight import Flight
from microparallel.program import AUTO
from microparallel.transport.base import Work
from microparallel.transport.torch_distributed import TorchTransport

# Programs that are under way at the same time have different tags; those of other messages are below `_TAGS`.
_TAGS, _PROGRAMS = 128, 1024


class TorchGroup(TorchTransport):
    """A torch process group that also runs all-reduce programs."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | None,
        carries: frozenset[str],
        flight: Flight | None = None,
        places: Sequence[str] = (),
    ) -> None:
        super().__init__(group, store, carries, places)
        self.transport_name = "nccl" if "cuda" in carries else "gloo"
        self.flight = Flight(None) if flight is None else flight
        self.log = self.flight.group(self.world_ranks)
        self._programs = 0  # how many all-reduce programs were started

    def subgroup(self, ranks: list[int]) -> Self | None:
        """Make a group of some of these ranks; its calls are recorded where this one's are."""
        subgroup = super().subgroup(ranks)
        if subgroup is not None:
            subgroup.flight = self.flight
            subgroup.log = self.flight.group(subgroup.world_ranks)
        return subgroup

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's group."""
        return self.group

    def announce(self, call: str) -> None:
        """Nothing to do: torch does not compare calls. Checked mode does."""

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = AUTO) -> Work:
        """Start combining the ranks' tensors, in place, on every rank.

        With an `algorithm`, a program of ours runs over messages: its first messages start now, and the thread that
        waits does the rest. So where ranks make other calls before they wait, all must wait at the same place among
        them. NCCL matches messages by their order alone: there the whole program starts now.
        """
        if algorithm == AUTO:
            return self.native_all_reduce(tensor, op)
        if not isinstance(algorithm, RankProgram):
            algorithm = rank_program("all-reduce", algorithm, self.world_size, self.rank)
        return self.start_program(algorithm, Memory(tensor, algorithm.slices), op, tensor.device)

    def start_program(self, program: RankProgram, memory: Pieces, op: str, device: torch.device) -> Work:
        """Start a program over messages, with a tag of their own: they mix with no other program's."""
        performed = Performed(perform(program.rounds, memory, self, COMBINE[op], self._next_tag()))
        if device.type in self.batched:
            performed.wait()
        return performed

    def _next_tag(self) -> int:
        """The tag of the next program's messages: the same on all ranks, since all make the same calls."""
        self._programs += 1
        return PROGRAM_TAG + _TAGS * (1 + self._programs % _PROGRAMS)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """Start handing input r to rank r, and getting one from each, by messages that are all under way at once."""
        outputs[self.rank].copy_(inputs[self.rank])
        program = rank_program("all-to-all", "direct", self.world_size, self.rank)
        return Performed(perform(program.rounds, Personal(inputs, outputs, self.rank), self, COMBINE["sum"]))

    def exchange_rounds(self, rounds: WireRounds) -> Work:
        """Start sums and gathers that need each other's results; the thread that waits does all but the first.

        So where ranks make other calls before they wait, all must wait at the same place among them. torch adds float32
        numbers itself; 16-bit numbers are added in float32, by a program.
        """
        return _Following(self, rounds)

    def start_round(self, kind: RoundKind, tensor: torch.Tensor) -> tuple[Work, Exchanged]:
        """Start a sum or a gather; returns where its result will be."""
        if kind == "sum":
            summed_wide = tensor.dtype in (torch.float16, torch.bfloat16)
            name = program_of_round("sum", self.transport_name) if summed_wide else AUTO
            return self.all_reduce(tensor, "sum", name), tensor
        tensors = room(tensor, self.world_size, self.rank)
        return self.all_gather(tensor, tensors), tensors

    @property
    def has_free_cores(self) -> bool:
        """True: the network, or the GPU, works beside the cores."""
        return True

    def run_in_background(self) -> None:
        """Nothing to do: torch's threads run what was started."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor in ordinary memory, which is as good as any here."""
        return torch.empty(shape, dtype=dtype, device="cpu")


class _Following:
    """Rounds under way: the first has started, and the thread that waits starts the others."""

    def __init__(self, group: TorchGroup, rounds: WireRounds) -> None:
        self._group = group
        self._rounds = rounds
        self._under_way: tuple[Work, Exchanged] | None = group.start_round(*next(rounds))

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last round has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._under_way is not None:
            work, result = self._under_way
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._under_way = None
            with contextlib.suppress(StopIteration):
                self._under_way = self._group.start_round(*self._rounds.send(result))


class Performed:
    """A program under way: its first messages have started, and the thread that waits does the rest."""

    def __init__(self, works: Iterator[Work]) -> None:
        self._works = works
        self._next = next(works, None)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the program has come to its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._next is not None:
            self._next.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._next = next(self._works, None)
