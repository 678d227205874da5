"""Fold any number of ranks into a power of two, and out again.

With p ranks and 2^k ≤ p, the first p − 2^k pairs of neighbours fold: the even one hands its contribution to the odd
one, waits, and gets the result back at the end.

```
6 ranks   0 → 1   2 → 3   4   5        four ranks are left: 1, 3, 4, 5
```
"""

from __future__ import annotations

from collections.abc import Callable

from microparallel.program import Op, Recv, Send, Slices


def folded(ranks: int, everything: Slices, inner: Callable[[int, list[int]], list[Op]]) -> tuple[tuple[Op, ...], ...]:
    """The operations of all ranks, where `inner(position, ranks that are left)` gives those of a rank that is left."""
    power = 1 << (ranks.bit_length() - 1)
    pairs = ranks - power
    left = [2 * pair + 1 for pair in range(pairs)] + list(range(2 * pairs, ranks))
    ops: list[tuple[Op, ...]] = []
    for rank in range(ranks):
        if rank < 2 * pairs and rank % 2 == 0:
            ops.append((Send(everything, rank + 1), Recv(everything, rank + 1)))
            continue
        mine = inner(left.index(rank), left)
        if rank < 2 * pairs:
            mine = [Recv(everything, rank - 1, reduce=True), *mine, Send(everything, rank - 1)]
        ops.append(tuple(mine))
    return tuple(ops)
