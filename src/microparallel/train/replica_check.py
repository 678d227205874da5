"""Find the rank whose weights are not those of its replicas: a bit that flipped in memory is not seen otherwise.

```
            rank 0   rank 1   rank 2
layer.0     5f31     5f31     5f31
layer.1     c07a     c07a     c07b    ◀ rank 2's layer.1 differs
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.layout import Part
from microparallel.text import show_ranks, show_some

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """A number that changes with any single bit of the tensor: the sum of its bits read as whole numbers."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return int(flat.view(_INTEGERS[flat.dtype.itemsize]).sum(dtype=torch.int64))


def find_difference(held: Mapping[str, torch.Tensor | Part], comms: Comms) -> str | None:
    """Which rank has other bits than the ranks that should have the same; None if there is none; every rank calls it.

    `held` is what this rank has of the model by name; a name that one rank alone has is not compared.
    """
    mine = {}
    for name, one in held.items():
        key = f"{name}[{one.start}:{one.stop}]" if isinstance(one, Part) else name
        mine[key] = checksum(one.tensor if isinstance(one, Part) else one)
    everyone = gather_json(mine, comms)
    guilty: dict[str, list[str]] = {}  # ranks → what differs on them
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        sums = {rank: theirs[name] for rank, theirs in enumerate(everyone) if name in theirs}
        [(usual, times), *others] = Counter(sums.values()).most_common()
        if others:
            outvoted = times > others[0][1]
            ranks = [rank for rank, one in sums.items() if one != usual or not outvoted]
            guilty.setdefault(f"{show_ranks(ranks)}{'' if outvoted else ' (no majority)'}", []).append(name)
    if not guilty:
        return None
    return "; ".join(f"{ranks} in {show_some(names)}" for ranks, names in guilty.items())
