"""Collectives that need each other's results, as one call: a generator says what is next.

```
rounds   yields ("sum", tensor)      is sent the tensor, with the sum over all ranks
         yields ("gather", tensor)   is sent a list: every rank's tensor, in rank order
         returns its result
```

All ranks must yield the same kinds and sizes. A group whose collectives are programs runs all of it as one work of its
queue, so that other calls come before it or after it on every rank. Each round is a program that
`collectives/compressed.py` names: "direct" for a sum, the messages of "gather-add" for a gather.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import torch

from microparallel.collectives import RoundKind, program_of, program_of_round
from microparallel.comms.interpreter import COMBINE, Pieces, RankProgram, perform, rank_program, whole
from microparallel.errors import ProgramError
from microparallel.program import Add, Part, Slices, Value
from microparallel.transport.base import Transport, Work

Result = TypeVar("Result")
Exchanged = torch.Tensor | Sequence[torch.Tensor]
Rounds = Generator[tuple[RoundKind, torch.Tensor], Exchanged, Result]
WireRounds = Generator[tuple[RoundKind, torch.Tensor], Exchanged, None]


@functools.lru_cache(maxsize=256)
def gather_program(ranks: int, rank: int, transport: str) -> RankProgram:
    """The messages of "gather-add", without its additions: what is gathered must be decoded before it can be added."""
    ops = program_of("all-reduce", program_of_round("gather", transport), ranks).ranks[rank]
    return RankProgram("gather", 1, [op for op in ops if not isinstance(op, Add)], all_receive_from_all=True)


class _Gathered(Pieces):
    """One rank's own tensor, and room for those of the others."""

    def __init__(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        self._tensors = tensors
        self._rank = rank

    def __getitem__(self, value: Value) -> torch.Tensor:
        if isinstance(value, Part):
            return self._tensors[value.rank]
        if isinstance(value, Slices):
            return self._tensors[self._rank]
        raise ProgramError(f"{value} has no place in a gather")


def room(tensor: torch.Tensor, ranks: int, rank: int) -> list[torch.Tensor]:
    """A list of every rank's tensor: this rank's own, and places for those of the others."""
    return [tensor if other == rank else torch.empty_like(tensor) for other in range(ranks)]


def perform_rounds(
    rounds: WireRounds,
    ranks: int,
    rank: int,
    transport: Transport,
    transport_name: str,
    block_bytes: int | None = None,
    in_blocks: Callable[[], bool] = lambda: False,
) -> Iterator[Work]:
    """Do all rounds, one after another; yields what must be waited for.

    Args:
        rounds: says what is next.
        ranks: how many there are.
        rank: this one.
        transport: carries the messages.
        transport_name: by which the program of each round is chosen.
        block_bytes: how much of a tensor is summed at a time; None: the whole of it.
        in_blocks: whether to go on in blocks after the first.
    """
    answer: Exchanged | None = None
    while True:
        try:
            kind, tensor = next(rounds) if answer is None else rounds.send(answer)
        except StopIteration:
            return
        if kind == "sum":
            program, answer = rank_program("all-reduce", program_of_round("sum", transport_name), ranks, rank), tensor
            for pieces in whole(tensor, block_bytes)(program.slices, in_blocks):
                yield from perform(program.rounds, pieces, transport, COMBINE["sum"])
        else:
            answer = room(tensor, ranks, rank)
            program = gather_program(ranks, rank, transport_name)
            yield from perform(program.rounds, _Gathered(answer, rank), transport, COMBINE["sum"])
