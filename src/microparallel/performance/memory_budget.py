"""How much memory is there, and how much would a collective need?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.performance.rounds import largest
from microparallel.program import Add, Op, Part, Program, Recv, Send
from microparallel.text import show_size


@dataclass(frozen=True)
class MemoryBudget:
    """What the ranks of one machine may take together; None where nobody says how much there is."""

    available: float | None
    ranks: int
    tensors_held: int  # what each rank keeps anyway, in tensors of full size

    def require(self, size: int) -> None:
        """Refuse a size that not even the leanest method has room for."""
        need = self._need(size, 1)
        if self.available is not None and need > self.available:
            raise UsageError(
                f"tensors of {size:,} bytes: {self.ranks} ranks need {show_size(need)} for them, "
                f"and {show_size(self.available)} are free; choose smaller --sizes or fewer --ranks"
            )

    def too_large(self, programs: Iterable[Program], size: int) -> dict[str, str]:
        """Name the programs that need more memory than there is at this size, each with the reason."""
        needs = {program.name: self._need(size, tensors_needed(program)) for program in programs}
        available = self.available
        if available is None:
            return {}
        return {
            name: f"it needs {show_size(need)} of memory, and {show_size(available)} are free"
            for name, need in needs.items()
            if need > available
        }

    def _need(self, size: int, tensors: int) -> float:
        return self.ranks * size * (self.tensors_held + tensors)


def tensors_needed(program: Program) -> int:
    """How many tensors of full size a rank needs beside its own, at most: the parts of others, and one arrival."""
    return 1 + max(len({part for op in ops for part in _parts(op)}) for ops in program.ranks)


def _parts(op: Op) -> list[Part]:
    return [op.value] if isinstance(op, Add | Recv | Send) and isinstance(op.value, Part) else []


def require_memory(comms: Comms, free: float | None, need: float, what: str, advice: str) -> None:
    """Refuse, on all ranks alike, what would not fit into this machine's memory; all ranks call this.

    Args:
        comms: the ranks.
        free: as many bytes as this rank finds free; None where nobody says.
        need: of all ranks of a machine together.
        what: takes so much.
        advice: what to do then.
    """
    [shortage] = largest(comms, [-math.inf if free is None else -free])
    if comms.device.type == "cpu" and need > -shortage:
        raise UsageError(f"{what} need {show_size(need)} of memory, and {show_size(-shortage)} are free; {advice}")
