"""A noticeboard in memory that all ranks of an exam share: who waits for whom, and can anybody still go on?

Every rank counts, for each peer, the messages it has sent and the receives it has begun. So whether a waiting rank can
go on is not a question of patience: the third receive from rank 1 ends if rank 1 has sent three messages, and not
before. When nobody computes and nobody can go on, that is a deadlock, however short it has lasted.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass
from pathlib import Path


class State(enum.IntEnum):
    """What a rank is doing."""

    NOT_BEGUN = 0
    RUNNING = 1
    SENDING = 2  # until the receiver asks for it
    RECEIVING = 3
    TOGETHER = 4  # in a call that needs every rank
    FINISHED = 5


_WAITS = (State.SENDING, State.RECEIVING, State.TOGETHER)
_STATE, _PEER, _LINE, _NEEDS, _CALLS, _COUNTS = range(6)  # the numbers of a rank's row; counts are two for each peer


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that cannot go on."""

    rank: int
    state: State
    peer: int
    line: int  # in the learner's file; 0 when it is not known


class Board:
    """The rows of all ranks, in a file that each of them maps into its memory."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        self._width = _COUNTS + 2 * ranks
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * self._width * ranks)
        self._numbers = memoryview(self._memory).cast("q")

    @staticmethod
    def make(path: Path, ranks: int) -> Board:
        """Make the file too."""
        path.write_bytes(bytes(8 * (_COUNTS + 2 * ranks) * ranks))
        return Board(path, ranks)

    def close(self) -> None:
        """Let go of the memory."""
        self._numbers.release()
        self._memory.close()

    # ── written by a rank, in its own row ───────────────────────────────────────────────────────────────────────

    def says(self, rank: int, state: State, peer: int = -1, line: int = 0, needs: int = 0) -> None:
        """Write down what a rank does now; `needs`: how many messages, receives or calls it takes to go on."""
        self._put(rank, _PEER, peer)
        self._put(rank, _LINE, line)
        self._put(rank, _NEEDS, needs)
        self._put(rank, _STATE, state)

    def sends(self, rank: int, to: int) -> int:
        """Count one more message; returns how many that makes."""
        return self._count(rank, _COUNTS + 2 * to)

    def receives(self, rank: int, source: int) -> int:
        """Count one more receive that has begun."""
        return self._count(rank, _COUNTS + 2 * source + 1)

    def received(self, rank: int, source: int) -> int:
        """How many receives from `source` a rank has begun."""
        return self._get(rank, _COUNTS + 2 * source + 1)

    def joins(self, rank: int) -> int:
        """Count one more call that needs everybody."""
        return self._count(rank, _CALLS)

    def others_rest(self, rank: int) -> bool:
        """Whether every other rank has finished, or waits and cannot go on."""
        return all(self._rests(other) for other in range(self.ranks) if other != rank)

    def _rests(self, rank: int) -> bool:
        state = State(self._get(rank, _STATE))
        return state == State.FINISHED or (state in _WAITS and not self._can_go_on(rank, state))

    # ── read by the referee ─────────────────────────────────────────────────────────────────────────────────────

    def stuck(self) -> list[Waiting]:
        """The ranks that wait, if nobody can go on; otherwise none."""
        waiting = []
        for rank in range(self.ranks):
            state = State(self._get(rank, _STATE))
            if state == State.FINISHED:
                continue
            if state not in _WAITS or self._can_go_on(rank, state):
                return []
            waiting.append(Waiting(rank, state, self._get(rank, _PEER), self._get(rank, _LINE)))
        return waiting

    def finished(self) -> list[int]:
        """The ranks that have come to their end."""
        return [rank for rank in range(self.ranks) if self._get(rank, _STATE) == State.FINISHED]

    def _can_go_on(self, rank: int, state: State) -> bool:
        peer, needs = self._get(rank, _PEER), self._get(rank, _NEEDS)
        if state == State.SENDING:
            return self.received(peer, rank) >= needs
        if state == State.RECEIVING:
            return self._get(peer, _COUNTS + 2 * rank) >= needs
        return all(self._get(other, _CALLS) >= needs for other in range(self.ranks))

    def _get(self, rank: int, place: int) -> int:
        return self._numbers[rank * self._width + place]

    def _put(self, rank: int, place: int, value: int) -> None:
        self._numbers[rank * self._width + place] = value

    def _count(self, rank: int, place: int) -> int:
        value = self._get(rank, place) + 1
        self._put(rank, place, value)
        return value
