"""How fast could an all-reduce over shared memory be? As fast as memory: the bytes it must touch, and nothing else.

Of p ranks with n bytes each, every one sums up a p-th of the tensor, its piece, and then gets the other pieces, which
the others have summed up. So it reads each byte of the others that it needs exactly once, and waits for nobody:

    add     its piece, with those of the p−1 others       (p−1)/p × n bytes are added
    copy    the p−1 other pieces, when they are sums      (p−1)/p × n bytes are copied

That is all where the tensor lives in shared memory ("in place"). An ordinary tensor is seen by its own rank alone, so
whatever the others need is copied to where they see it as well, another n bytes:

    copy    the others' pieces, before they add them      (p−1)/p × n bytes
    copy    its own piece, when it is the sum                 1/p × n bytes

Here each rank does that in its own ordinary memory, all ranks at once, since they share the memory's bandwidth, and
perhaps cores. No all-reduce that adds and copies in this way is faster, as long as the bytes come from memory. Caches
are the exception. The real one works on a large tensor block by block: what a rank has just written, the next one finds
in the cache, while here the whole tensor has gone by before its first byte is read again. So an all-reduce of tensors
that outgrow the cache can beat the bound, and reach more than 100 % of it. Tensors that fit into the cache are another
matter: here every rank stays in its own core's cache, where an all-reduce must get the bytes out of another's, and has
to wait for it as well.
"""

from __future__ import annotations

import torch

from microparallel.performance.case import Case


def touch_in_place(rank: int, ranks: int, tensor: torch.Tensor, case: Case) -> None:
    """Add and copy what an all-reduce of a tensor in shared memory must."""
    pieces, contributions, sums = (_pieces(whole, ranks) for whole in (tensor, case.contribution, case.expected))
    for other in _others(rank, ranks):
        pieces[rank].add_(contributions[other])
    for other in _others(rank, ranks):
        pieces[other].copy_(sums[other])


def touch_ordinary(rank: int, ranks: int, tensor: torch.Tensor, case: Case) -> None:
    """Add and copy what an all-reduce of an ordinary tensor must."""
    pieces, seen_by_others = _pieces(tensor, ranks), _pieces(case.scratch, ranks)
    for other in _others(rank, ranks):
        seen_by_others[other].copy_(pieces[other])
    touch_in_place(rank, ranks, tensor, case)
    seen_by_others[rank].copy_(pieces[rank])


def _pieces(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """Equal pieces, one for each rank; the few numbers that are left over do not matter to the time."""
    length = tensor.numel() // ranks
    return tensor[: ranks * length].view(ranks, length).unbind()


def _others(rank: int, ranks: int) -> list[int]:
    return [other for other in range(ranks) if other != rank]
