"""Two levels: inside of each host, where links are fast, and between hosts, with as few bytes or hops as possible.

`hierarchical` cuts the tensor into a share for each rank of a host, so that all of them send over the network at once,
and nothing twice. `leaders` lets one rank of each host speak for it: fewer hops, for little tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from microparallel.collectives.folding import folded
from microparallel.collectives.gather_add import adds
from microparallel.collectives.recursive_doubling import exchanges
from microparallel.collectives.tree import down, up
from microparallel.errors import UsageError
from microparallel.program import Collective, Op, Part, Program, Recv, Send, Slices
from microparallel.topology import Link
from microparallel.topology.hosts import Hosts

_ALL = Slices(0, 1)
_MEMORY = Link(latency=20e-6, seconds_per_byte=0.25e-9)  # what two ranks of one host need to meet, and to add


def hierarchical_all_reduce(ranks: int, ranks_per_node: int = 2) -> Program:
    """Reduce-scatter inside each node, a ring between the nodes for each share, all-gather inside each node.

    ```
    4 ranks, 2 a node: the tensor is cut into 2 shares of 2 slices; rank 0 and 2 own the first, 1 and 3 the second
    rank 0: >C2:4@1 <+C0:2@1 | >C0@2 <+C1@2 >C1@2 <C0@2 | >C0:2@1 <C2:4@1
    rank 1: >C0:2@0 <+C2:4@0 | >C2@3 <+C3@3 >C3@3 <C2@3 | >C2:4@0 <C0:2@0
    rank 2: >C2:4@3 <+C0:2@3 | >C1@0 <+C0@0 >C0@0 <C1@0 | >C0:2@3 <C2:4@3
    rank 3: >C0:2@2 <+C2:4@2 | >C3@1 <+C2@1 >C2@1 <C3@1 | >C2:4@2 <C0:2@2
    ```

    A node may have fewer ranks than the others; then some of its ranks own more than one share.
    """
    return all_reduce_between(_nodes(ranks, ranks_per_node))


def hierarchical_reduce_scatter(ranks: int, ranks_per_node: int = 2) -> Program:
    """Sums inside each node first, so that each crosses to another node once; rank r ends with slice r.

    ```
    4 ranks, 2 a node: the first ranks of the nodes sum slices 0 and 2, the second ones 1 and 3
    rank 0: >C1@1 >C3@1 <+C0@1 <+C2@1 | >C2@2 <+C0@2
    rank 1: >C0@0 >C2@0 <+C1@0 <+C3@0 | >C3@3 <+C1@3
    rank 2: >C1@3 >C3@3 <+C0@3 <+C2@3 | >C0@0 <+C2@0
    rank 3: >C0@2 >C2@2 <+C1@2 <+C3@2 | >C1@1 <+C3@1
    ```
    """
    return reduce_scatter_between(_nodes(ranks, ranks_per_node))


def hierarchical_all_gather(ranks: int, ranks_per_node: int = 2) -> Program:
    """Each slice crosses to another node once, and is passed on inside of it.

    ```
    4 ranks, 2 a node
    rank 0: >C0@2 <C2@2 | >C0@1 >C2@1 <C1@1 <C3@1
    rank 1: >C1@3 <C3@3 | >C1@0 >C3@0 <C0@0 <C2@0
    rank 2: >C2@0 <C0@0 | >C0@3 >C2@3 <C1@3 <C3@3
    rank 3: >C3@1 <C1@1 | >C1@2 >C3@2 <C0@2 <C2@2
    ```
    """
    return all_gather_between(_nodes(ranks, ranks_per_node))


def leaders_all_reduce(ranks: int, ranks_per_node: int = 2) -> Program:
    """The first rank of each node adds up what the node has; these leaders exchange sums, and hand the result on.

    ```
    rank 0: <+C0@1 | >C0@2 <+C0@2 | >C0@1
    rank 1: >C0@0 | <C0@0
    rank 2: <+C0@3 | >C0@0 <+C0@0 | >C0@3
    rank 3: >C0@2 | <C0@2
    ```
    """
    return leaders_all_reduce_between(_nodes(ranks, ranks_per_node))


def leaders_broadcast(ranks: int, ranks_per_node: int = 2, root: int = 0) -> Program:
    """Down a tree of one rank for each node, then to all ranks of the node.

    ```
    rank 0: >C0@2 | >C0@1
    rank 1: <C0@0
    rank 2: <C0@0 | >C0@3
    rank 3: <C0@2
    ```
    """
    return leaders_broadcast_between(_nodes(ranks, ranks_per_node), root)


def leaders_reduce(ranks: int, ranks_per_node: int = 2, root: int = 0) -> Program:
    """Inside of each node to one rank, then up a tree of these.

    ```
    rank 0: <+C0@1 | <+C0@2
    rank 1: >C0@0
    rank 2: <+C0@3 | >C0@0
    rank 3: >C0@2
    ```
    """
    return leaders_reduce_between(_nodes(ranks, ranks_per_node), root)


def _nodes(ranks: int, ranks_per_node: int) -> Hosts:
    if ranks_per_node < 1:
        raise UsageError(f"ranks_per_node={ranks_per_node}: a node has at least 1 rank")
    return Hosts.alike(ranks, ranks_per_node)


# ── with a share for each rank of a host ────────────────────────────────────────────────────────────────────────────


def all_reduce_between(hosts: Hosts) -> Program:
    """The all-reduce for any hosts."""
    count = len(hosts.ranks)
    ops: list[list[Op]] = [[] for _ in range(hosts.world_size)]
    shares = [[Slices(share * count, (share + 1) * count)] for share in range(hosts.most)]
    _inside(ops, hosts, shares, reduce=True)
    for share in range(hosts.most):
        owners = [_owner(ranks, share) for ranks in hosts.ranks]
        slices = [Slices(share * count + place, share * count + place + 1) for place in range(count)]
        # Place k ends with the sum of the slice after its own, as in a ring all-reduce.
        _ring(ops, owners, [[slices[(place + 1) % count]] for place in range(count)], reduce=True)
        _ring(ops, owners, [[slices[(place + 1) % count]] for place in range(count)], reduce=False)
    _inside(ops, hosts, shares, reduce=False)
    return _program("hierarchical", Collective("all-reduce", hosts.most * count), ops)


def reduce_scatter_between(hosts: Hosts) -> Program:
    """The reduce-scatter for any hosts."""
    ops: list[list[Op]] = [[] for _ in range(hosts.world_size)]
    columns = _columns(hosts)
    _inside(ops, hosts, [[one for part in column for one in part] for column in columns], reduce=True)
    for share, column in enumerate(columns):
        _ring(ops, [_owner(ranks, share) for ranks in hosts.ranks], column, reduce=True)
    goal = Collective("reduce-scatter", hosts.world_size)
    return _program("hierarchical-reduce-scatter", goal, ops)


def all_gather_between(hosts: Hosts) -> Program:
    """The all-gather for any hosts."""
    ops: list[list[Op]] = [[] for _ in range(hosts.world_size)]
    columns = _columns(hosts)
    for share, column in enumerate(columns):
        _ring(ops, [_owner(ranks, share) for ranks in hosts.ranks], column, reduce=False)
    _inside(ops, hosts, [[one for part in column for one in part] for column in columns], reduce=False)
    return _program("hierarchical-all-gather", Collective("all-gather", hosts.world_size), ops)


def gather_add_between(hosts: Hosts) -> Program:
    """Every rank gets all contributions, which cross to each other host once, and adds them in rank order.

    ```
    hosts 0-1+2-3
    rank 0: >C0@2 <P2@2 | >C0@1 >P2@1 <P1@1 <P3@1 | C0+=P1 C0+=P2 C0+=P3
    ```
    """
    gathered = all_gather_between(hosts).ranks
    ops = [
        [*(_as_contribution(op, rank) for op in mine), *adds(rank, hosts.world_size)]
        for rank, mine in enumerate(gathered)
    ]
    return _program("gather-add", Collective("all-reduce", 1), ops)


def _as_contribution(op: Op, rank: int) -> Op:
    """A message of an all-gather, with a rank's whole tensor in place of its slice."""
    assert isinstance(op, Send | Recv) and isinstance(op.value, Slices)
    source = op.value.start
    return replace(op, value=_ALL if source == rank else Part(source))


def _columns(hosts: Hosts) -> list[list[list[Slices]]]:
    """For each share and each host: the slices of its ranks that belong to this share; rank r has slice r."""
    return [
        [[Slices(rank, rank + 1) for rank in ranks[share : share + 1]] for ranks in hosts.ranks]
        for share in range(hosts.most)
    ]


def _owner(ranks: Sequence[int], share: int) -> int:
    """The rank of a host that sends and receives a share over the network."""
    return ranks[share % len(ranks)]


def _inside(ops: list[list[Op]], hosts: Hosts, shares: Sequence[Sequence[Slices]], *, reduce: bool) -> None:
    """Bring each share to its owner in the host, added up; or, on the way back, from its owner to the others.

    At hop k a rank sends to the rank k places further on, so no rank receives from two at once.
    """
    for ranks in hosts.ranks:
        owned = {rank: _owned(ranks, rank, shares) for rank in ranks}
        for distance in range(1, len(ranks)):
            for place, rank in enumerate(ranks):
                ahead, behind = ranks[(place + distance) % len(ranks)], ranks[(place - distance) % len(ranks)]
                if reduce:
                    ops[rank] += [Send(slices, ahead) for slices in owned[ahead]]
                    ops[rank] += [Recv(slices, behind, reduce=True) for slices in owned[rank]]
                else:
                    ops[rank] += [Send(slices, ahead) for slices in owned[rank]]
                    ops[rank] += [Recv(slices, behind) for slices in owned[behind]]


def _owned(ranks: Sequence[int], rank: int, shares: Sequence[Sequence[Slices]]) -> list[Slices]:
    return [slices for share, parts in enumerate(shares) if _owner(ranks, share) == rank for slices in parts]


def _ring(ops: list[list[Op]], owners: Sequence[int], parts: Sequence[Sequence[Slices]], *, reduce: bool) -> None:
    """Half of a ring: every place gets the sum of its part (`reduce`), or each place's part goes to all others."""
    count = len(owners)
    for hop in range(count - 1):
        for place, rank in enumerate(owners):
            sent, received = (place - hop - reduce) % count, (place - hop - 1 - reduce) % count
            ops[rank] += [Send(slices, owners[(place + 1) % count]) for slices in parts[sent]]
            ops[rank] += [Recv(slices, owners[(place - 1) % count], reduce=reduce) for slices in parts[received]]


# ── with one rank that speaks for its host ──────────────────────────────────────────────────────────────────────────


def leaders_all_reduce_between(hosts: Hosts) -> Program:
    """The all-reduce by leaders, for any hosts."""
    groups = [list(ranks) for ranks in hosts.ranks]
    leaders = [ranks[0] for ranks in groups]
    ops = _to_leaders(groups)
    for place, mine in enumerate(folded(len(leaders), _ALL, exchanges)):
        ops[leaders[place]] += _renumbered(mine, leaders)
    _from_leaders(ops, groups)
    return _program("leaders", Collective("all-reduce", 1), ops)


def leaders_broadcast_between(hosts: Hosts, root: int) -> Program:
    """The broadcast by leaders, for any hosts."""
    groups = hosts.with_root(root)
    ops: list[list[Op]] = [[] for _ in range(hosts.world_size)]
    _tree(ops, groups, down)
    _from_leaders(ops, groups)
    return _program("leaders-broadcast", Collective("broadcast", 1, root=root), ops)


def leaders_reduce_between(hosts: Hosts, root: int) -> Program:
    """The reduce by leaders, for any hosts."""
    groups = hosts.with_root(root)
    ops = _to_leaders(groups)
    _tree(ops, groups, up)
    return _program("leaders-reduce", Collective("reduce", 1, root=root), ops)


def _to_leaders(groups: Sequence[Sequence[int]]) -> list[list[Op]]:
    ops: list[list[Op]] = [[] for _ in range(sum(map(len, groups)))]
    for leader, *others in groups:
        ops[leader] += [Recv(_ALL, rank, reduce=True) for rank in others]
        for rank in others:
            ops[rank].append(Send(_ALL, leader))
    return ops


def _from_leaders(ops: list[list[Op]], groups: Sequence[Sequence[int]]) -> None:
    for leader, *others in groups:
        ops[leader] += [Send(_ALL, rank) for rank in others]
        for rank in others:
            ops[rank].append(Recv(_ALL, leader))


def _tree(ops: list[list[Op]], groups: Sequence[Sequence[int]], walk: Callable[[int, int], list[Send | Recv]]) -> None:
    leaders = [ranks[0] for ranks in groups]
    for place, leader in enumerate(leaders):
        ops[leader] += _renumbered(walk(place, len(leaders)), leaders)


def _renumbered(ops: Sequence[Op], ranks: Sequence[int]) -> Iterator[Op]:
    """The same messages between these ranks."""
    for op in ops:
        if isinstance(op, Send):
            yield Send(op.value, ranks[op.to])
        elif isinstance(op, Recv):
            yield Recv(op.value, ranks[op.source], reduce=op.reduce)


def _program(name: str, goal: Collective, ops: list[list[Op]]) -> Program:
    return Program(name, goal, tuple(tuple(mine) for mine in ops))


# ── which of the two ────────────────────────────────────────────────────────────────────────────────────────────────


def best_all_reduce(hosts: Hosts, link: Link, size: float) -> str:
    """Which all-reduce takes less time over so many bytes, by a link between hosts that all ranks of a host share.

    With h hosts of k ranks, α and β of the network, a and b of memory:

    ```
    leaders       r(α + nβ)            + 2a + k·nb            r hops: lg h, or ⌊lg h⌋ + 2 where leaders must fold
    hierarchical  2(h−1)(kα + nβ/h)    + 4a + 2(k−1)/k·nb     k messages, one after another at the host's port
    ```
    """
    count, most = len(hosts.ranks), hosts.most
    hops = (count - 1).bit_length() if count & (count - 1) == 0 else count.bit_length() + 1
    by_leaders = hops * link.seconds(size) + _MEMORY.seconds(0) * 2 + _MEMORY.seconds(most * size)
    in_shares = 2 * (count - 1) * most * link.seconds(size / count / most) + 4 * _MEMORY.seconds(0)
    in_shares += _MEMORY.seconds(2 * (most - 1) / most * size)
    return "leaders" if by_leaders < in_shares else "hierarchical"
