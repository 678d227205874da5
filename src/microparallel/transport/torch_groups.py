"""Make a torch process group of some ranks, which nobody else needs to know about.

torch, too, can make a group with its members alone. But it names the group after how many groups each member is already
in, and members that are in different numbers of groups then wait for each other for ever. Here a group is named after
its members, and after how many groups of the same members its parent has made before: all members come to that name by
themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from microparallel.torch_private import next_group_is_called


class _Family:
    """The name of a group, and how many groups were made inside it, by their members."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: Counter[tuple[int, ...]] = Counter()


_families: WeakKeyDictionary[dist.ProcessGroup, _Family] = WeakKeyDictionary()


def make_group(parent: dist.ProcessGroup, world_ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of some of the parent's ranks, who all call this; ranks are numbered as in the world."""
    members = tuple(world_ranks)
    family = _families.setdefault(parent, _Family("microparallel"))
    family.made[members] += 1
    name = f"{family.name}/{'-'.join(map(str, members))}#{family.made[members]}"
    with next_group_is_called(name):
        group: dist.ProcessGroup = dist.new_group(list(members), backend=backend, use_local_synchronization=True)
    _families[group] = _Family(name)
    return group
