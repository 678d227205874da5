"""In which order ranks use their units: announced while it is not known, shared after the first forward.

```
registered         a b c       the program before the first backward
rank 0 has used    c a b
rank 1 has used    c b         it skipped one
learnt             c a b       the program from then on
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from microparallel.comms import Comms
from microparallel.data_parallel.units import Unit
from microparallel.errors import UsageError
from microparallel.program import ORDER, AllReduce, announced

DIFFERENT_ORDERS = (
    "FullyShardedDataParallel: the ranks have used units in different orders, so each gathered others than its peers; "
    "let all ranks call the layers in one order (a rank may skip some), or choose larger units"
)
_FORWARD_ENDS = -1  # what a rank announces instead of a unit
_NO_SAMPLES = 0


class Announcements:
    """Tell a rank without samples what the others gather, in a forward whose order of units it cannot know.

    Args:
        comms: all ranks.
        axis: of these ranks in the program's mesh.

    Attributes:
        are_made: whether each gather of the forward that is under way is announced: some rank has no samples.
    """

    def __init__(self, comms: Comms, axis: str) -> None:
        self.are_made = False
        self._made = 0  # in this forward
        self._comms = comms
        self._axis = axis

    def begin(self, has_samples: bool) -> None:
        """A forward begins before the order of units is known: find out whether all ranks have samples."""
        having = torch.tensor([float(has_samples)], device="cpu")
        self._comms.all_reduce(having, operation=AllReduce(announced(), self._axis))
        self._made = 0
        self.are_made = int(having) < self._comms.world_size

    def announce(self, place: int) -> None:
        """Say that the unit at this place is gathered next."""
        self._exchange(place + 1)

    def end(self) -> None:
        """Say that nothing more is gathered in this forward, if announcements are made."""
        if self.are_made:
            self._exchange(_FORWARD_ENDS)
            self.are_made = False

    def next(self) -> int | None:
        """On a rank without samples: the place of the unit that the others gather next, or None."""
        place = self._exchange(_NO_SAMPLES)
        if place == _FORWARD_ENDS:
            self.are_made = False
            return None
        return place - 1

    def _exchange(self, mine: int) -> int:
        self._made += 1
        table = torch.zeros(self._comms.world_size, device="cpu")
        table[self._comms.rank] = mine
        self._comms.all_reduce(table, operation=AllReduce(announced(self._made), self._axis))
        found = {int(one) for one in table.tolist() if one != _NO_SAMPLES}
        if len(found) > 1:
            raise UsageError(DIFFERENT_ORDERS)
        return found.pop() if found else _FORWARD_ENDS


def share_order(
    units: Sequence[Unit], first_uses: Sequence[Unit], last_uses: Mapping[Unit, int], comms: Comms, axis: str
) -> tuple[list[Unit], dict[Unit, list[Unit]]]:
    """Share in which order the ranks have used their units; every rank calls this.

    Args:
        units: in the order of their stages.
        first_uses: those that this rank has used, in order.
        last_uses: for each of these, how many units had been used when it was used last.
        comms: all ranks.
        axis: of these ranks in the program's mesh.

    Returns:
        All units in one order; and for each, the units whose stages used it last, on each rank that did.
    """
    table = torch.zeros(comms.world_size, 2, len(units), dtype=torch.float64, device="cpu")
    for place, unit in enumerate(first_uses, start=1):
        table[comms.rank, 0, unit.stage] = place
        table[comms.rank, 1, unit.stage] = last_uses[unit]
    comms.all_reduce(table, operation=AllReduce(ORDER, axis))
    order: list[Unit] = []
    last_users: dict[Unit, list[Unit]] = {unit: [] for unit in units}
    for first, last in table.tolist():
        mine = sorted((stage for stage, place in enumerate(first) if place), key=first.__getitem__)
        used = [units[stage] for stage in mine]
        for stage in mine:
            last_users[units[stage]].append(used[int(last[stage]) - 1])
        _merge(order, used)
    _merge(order, units)  # those that no rank has used
    return order, last_users


def _merge(order: list[Unit], others: Sequence[Unit]) -> None:
    """Put units that are missing in an order behind those that stand before them in another one."""
    place = 0
    for unit in others:
        if unit in order:
            place = order.index(unit) + 1
        else:
            order.insert(place, unit)
            place += 1
