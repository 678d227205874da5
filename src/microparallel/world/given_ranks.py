"""The ranks that torchrun or Slurm has started, for what else starts ranks of its own with a `Pool`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microparallel.comms import Comms
from microparallel.errors import UsageError


class GivenRanks:
    """All ranks of a world make one of these, and then the same calls in the same order.

    Args:
        comms: all of them.
    """

    def __init__(self, comms: Comms) -> None:
        self._comms = comms

    @property
    def leads(self) -> bool:
        """Whether this is the rank that has the results."""
        return self._comms.rank == 0

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *arguments: Any,
        transport: str = "auto",
        device: str = "auto",
        mps: str = "auto",
    ) -> list[Any]:
        """Run `function(comms, *arguments)` on all ranks, or on rank 0 alone while the others wait.

        Which transport and device they use was decided when they met, and MPS before, so these are not looked at.

        Returns:
            What the function returned here; None on a rank that waited. One value, where a Pool returns each rank's.
        """
        del transport, device, mps
        if ranks not in (1, self._comms.world_size):
            raise UsageError(f"ranks={ranks}: this world has {self._comms.world_size}; run on all of them, or on one")
        members = self._comms.group(range(ranks))
        result = None if members is None else function(members, *arguments)
        self._comms.barrier()
        return [result]
