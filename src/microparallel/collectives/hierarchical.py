"""Two levels: first within each node, where links are fast, then between nodes, with as few bytes as possible."""

from __future__ import annotations

from microparallel.errors import UsageError
from microparallel.program import Collective, Op, Program, Recv, Send, Slices


def hierarchical_all_reduce(ranks: int, ranks_per_node: int = 2) -> Program:
    """Reduce-scatter inside each node, a ring between the nodes for each share, all-gather inside each node.

    ```
    4 ranks, 2 a node: the tensor is cut into 2 shares of 2 slices; rank 0 and 2 own the first, 1 and 3 the second
    rank 0: >C2:4@1 <+C0:2@1 | >C0@2 <+C1@2 >C1@2 <C0@2 | >C0:2@1 <C2:4@1
    rank 1: >C0:2@0 <+C2:4@0 | >C2@3 <+C3@3 >C3@3 <C2@3 | >C2:4@0 <C0:2@0
    rank 2: >C2:4@3 <+C0:2@3 | >C1@0 <+C0@0 >C0@0 <C1@0 | >C0:2@3 <C2:4@3
    rank 3: >C0:2@2 <+C2:4@2 | >C3@1 <+C2@1 >C2@1 <C3@1 | >C2:4@2 <C0:2@2
    ```

    The last node may have fewer ranks than the others; then some of its ranks own more than one share.
    """
    if ranks_per_node < 1:
        raise UsageError(f"ranks_per_node={ranks_per_node}: a node has at least 1 rank")
    nodes = [list(range(first, min(first + ranks_per_node, ranks))) for first in range(0, ranks, ranks_per_node)]
    shares = len(nodes[0])
    ops: list[list[Op]] = [[] for _ in range(ranks)]
    _inside(ops, nodes, shares, reduce=True)
    for share in range(shares):
        _ring_between_nodes(ops, [_owner(node, share) for node in nodes], share)
    _inside(ops, nodes, shares, reduce=False)
    goal = Collective("all-reduce", shares * len(nodes))
    return Program("hierarchical", goal, tuple(tuple(mine) for mine in ops))


def _owner(node: list[int], share: int) -> int:
    return node[share % len(node)]


def _inside(ops: list[list[Op]], nodes: list[list[int]], shares: int, *, reduce: bool) -> None:
    """Bring each share to its owner in the node, added up; or, on the way back, from its owner to the others.

    At step k a rank sends to the rank k places further on, so no rank receives from two at once.
    """
    for node in nodes:
        for distance in range(1, len(node)):
            for place, rank in enumerate(node):
                ahead, behind = node[(place + distance) % len(node)], node[(place - distance) % len(node)]
                mine = [_share(share, len(nodes)) for share in range(shares) if _owner(node, share) == rank]
                if reduce:
                    theirs = [_share(share, len(nodes)) for share in range(shares) if _owner(node, share) == ahead]
                    ops[rank] += [Send(slices, ahead) for slices in theirs]
                    ops[rank] += [Recv(slices, behind, reduce=True) for slices in mine]
                else:
                    theirs = [_share(share, len(nodes)) for share in range(shares) if _owner(node, share) == behind]
                    ops[rank] += [Send(slices, ahead) for slices in mine]
                    ops[rank] += [Recv(slices, behind) for slices in theirs]


def _share(share: int, nodes: int) -> Slices:
    return Slices(share * nodes, (share + 1) * nodes)


def _ring_between_nodes(ops: list[list[Op]], owners: list[int], share: int) -> None:
    count = len(owners)
    for half in (0, 1):  # scatter-reduce, then all-gather
        for step in range(count - 1):
            for place, rank in enumerate(owners):
                sent, received = (share * count + (place + half - step - back) % count for back in (0, 1))
                ops[rank].append(Send(Slices(sent, sent + 1), owners[(place + 1) % count]))
                ops[rank].append(Recv(Slices(received, received + 1), owners[(place - 1) % count], reduce=half == 0))
