"""Make a torch process group of some ranks, which nobody else needs to know about.

torch, too, can make a group with its members alone. But it names the group after how many groups each member is already
in, and members that are in different numbers of groups then wait for each other for ever. Here a group is named after
its members, and after how many groups of the same members its parent has made before: all members come to that name by
themselves.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _Family:
    """The name of a group, and how many groups were made inside it, by their members."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: Counter[tuple[int, ...]] = Counter()


_families: WeakKeyDictionary[dist.ProcessGroup, _Family] = WeakKeyDictionary()
_naming = threading.Lock()


def make_group(parent: dist.ProcessGroup, world_ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of some of the parent's ranks, who all call this; ranks are numbered as in the world."""
    members = tuple(world_ranks)
    family = _families.setdefault(parent, _Family("microparallel"))
    family.made[members] += 1
    name = f"{family.name}/{'-'.join(map(str, members))}#{family.made[members]}"
    with _named(name):
        group: dist.ProcessGroup = dist.new_group(list(members), backend=backend, use_local_synchronization=True)
    _families[group] = _Family(name)
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let the next group have this name: torch has no argument for it."""
    with _naming:
        before = distributed_c10d._process_group_name
        distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed_c10d._process_group_name = before
