"""An all-reduce program of the caller's own (`comms.all_reduce(tensor, algorithm=program)`): verified before it runs.

Each rank verifies it by itself, when it meets the program for the first time.
"""

from __future__ import annotations

import functools
import hashlib

from microparallel.comms.interpreter import RankProgram
from microparallel.errors import ProgramError, UsageError
from microparallel.program import Collective, Program, to_text
from microparallel.verifier import verify


class OwnProgram:
    """A program that was verified to be an all-reduce.

    Attributes:
        program: what all ranks do.
        words: its name and a digest of its text: ranks whose words differ run different programs.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.words = f"{program.name!r} #{hashlib.sha256(to_text(program).encode()).hexdigest()[:12]}"
        self._of_rank: dict[int, RankProgram] = {}

    def of_rank(self, rank: int) -> RankProgram:
        """What one rank does, cut into rounds."""
        if rank not in self._of_rank:
            self._of_rank[rank] = RankProgram.of(self.program, rank)
        return self._of_rank[rank]


def verified_all_reduce(program: Program, ranks: int) -> OwnProgram:
    """Verify that a program is an all-reduce of this many ranks; the same object is verified once.

    Raises:
        UsageError: if it is a right program for something else.
        ProgramError: the verifier's, with its fields, if the program is wrong.
    """
    if not isinstance(program.goal, Collective) or program.goal.kind != "all-reduce":
        raise UsageError(f"all_reduce: program {program.name!r} is a {program.goal}; all_reduce runs an all-reduce")
    if program.world_size != ranks:
        raise UsageError(
            f"all_reduce: program {program.name!r} is for {program.world_size} ranks, and there are {ranks} here; "
            f"write or build it for {ranks}"
        )
    return _verified(_Same(program))


class _Same:
    """A program as a key, by identity: to hash all its operations would take longer than a small all-reduce."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.program is other.program


@functools.lru_cache(maxsize=256)
def _verified(same: _Same) -> OwnProgram:
    program = same.program
    try:
        verify(program)
    except ProgramError as error:
        error.args = (f"all_reduce: program {program.name!r} is not run, because it is wrong: {error}",)
        raise
    return OwnProgram(program)
