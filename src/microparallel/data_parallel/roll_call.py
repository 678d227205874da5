"""Who takes part in a pass, and how much each rank's gradients count."""

from __future__ import annotations

import torch

from microparallel.comms import Comms
from microparallel.program import WEIGHTS, AllReduce


class RollCall:
    """By default everybody is there, and all count alike; otherwise the ranks ask each other before every pass."""

    def __init__(self, comms: Comms) -> None:
        self.present = list(range(comms.world_size))
        self.joining = False  # ranks may run out of data
        self.weight: float | None = None  # how much this rank's gradients count, if not all alike
        self.total: float | None = None  # what all ranks' weights add up to, if that is known
        self._comms = comms

    @property
    def asks(self) -> bool:
        """Whether the ranks ask each other in the pass that begins."""
        return self.joining or (self.weight is not None and self.total is None)

    def answer(self, here: bool = True) -> float:
        """Learn who is there; returns what this rank's gradients are multiplied with before all are added up."""
        weight = 1.0 if self.weight is None else self.weight
        if not self.asks:
            self.present = list(range(self._comms.world_size))
            return weight / (self._comms.world_size if self.weight is None else self.total or 1.0)
        roll = torch.zeros(2, self._comms.world_size, dtype=torch.float64)
        roll[:, self._comms.rank] = torch.tensor([1.0, weight]) * here
        self._comms.all_reduce(roll, operation=AllReduce(WEIGHTS, "dp"))
        attendance, weights = roll.tolist()
        self.present = [rank for rank, there in enumerate(attendance) if there]
        total = sum(weights)
        return weight / total if total else 0.0
