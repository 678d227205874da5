"""Programs for one collective, each a short pure function of the number of ranks."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Literal

from microparallel.collectives.all_to_all import all_to_all
from microparallel.collectives.compressed import (
    METHODS,
    Round,
    RoundKind,
    compressed_all_reduce,
    is_compressed,
    payload,
    program_of_round,
)
from microparallel.collectives.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_broadcast,
    direct_reduce,
    direct_reduce_scatter,
)
from microparallel.collectives.gather_add import gather_add_all_reduce
from microparallel.collectives.halving_doubling import halving_doubling_all_reduce
from microparallel.collectives.hierarchical import (
    all_gather_between,
    all_reduce_between,
    best_all_reduce,
    gather_add_between,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    leaders_all_reduce,
    leaders_all_reduce_between,
    leaders_broadcast,
    leaders_broadcast_between,
    leaders_reduce,
    leaders_reduce_between,
    reduce_scatter_between,
)
from microparallel.collectives.naive import naive_all_reduce
from microparallel.collectives.recursive_doubling import recursive_doubling_all_reduce
from microparallel.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from microparallel.collectives.rooted import gather, scatter
from microparallel.collectives.tree import tree_all_reduce, tree_broadcast, tree_reduce
from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    GroupOp,
    Program,
    ReduceScatter,
    Send,
    Slices,
)
from microparallel.text import did_you_mean
from microparallel.topology.hosts import Hosts, among, hosts_of, link_of

ALL_REDUCES: dict[str, Callable[..., Program]] = {
    "naive": naive_all_reduce,
    "gather-add": gather_add_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "recursive-doubling": recursive_doubling_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
    "direct": direct_all_reduce,
    "hierarchical": hierarchical_all_reduce,
    "leaders": leaders_all_reduce,
}
OTHERS: dict[str, Callable[..., Program]] = {
    "reduce-scatter": ring_reduce_scatter,
    "all-gather": ring_all_gather,
    "broadcast": tree_broadcast,
    "reduce": tree_reduce,
    "scatter": scatter,
    "gather": gather,
    "all-to-all": all_to_all,
    "direct-reduce-scatter": direct_reduce_scatter,
    "direct-all-gather": direct_all_gather,
    "direct-broadcast": direct_broadcast,
    "direct-reduce": direct_reduce,
    "hierarchical-reduce-scatter": hierarchical_reduce_scatter,
    "hierarchical-all-gather": hierarchical_all_gather,
    "leaders-broadcast": leaders_broadcast,
    "leaders-reduce": leaders_reduce,
}

GroupKind = Literal[
    "all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter", "scatter", "gather", "all-to-all"
]
# For each collective, its algorithms, and the name by which `build` knows the program of each.
ALGORITHMS: dict[GroupKind, dict[str, str]] = {
    "all-reduce": {name: name for name in ALL_REDUCES},
    "broadcast": {"tree": "broadcast", "direct": "direct-broadcast", "leaders": "leaders-broadcast"},
    "reduce": {"tree": "reduce", "direct": "direct-reduce", "leaders": "leaders-reduce"},
    "all-gather": {"ring": "all-gather", "direct": "direct-all-gather", "hierarchical": "hierarchical-all-gather"},
    "reduce-scatter": {
        "ring": "reduce-scatter",
        "direct": "direct-reduce-scatter",
        "hierarchical": "hierarchical-reduce-scatter",
    },
    "scatter": {"direct": "scatter"},
    "gather": {"direct": "gather"},
    "all-to-all": {"direct": "all-to-all"},
}
_KIND_OF: dict[type, GroupKind] = {
    AllReduce: "all-reduce",
    Broadcast: "broadcast",
    ReduceScatter: "reduce-scatter",
    AllGather: "all-gather",
}
# What "auto" stands for where messages cross a network.
_ON_A_NETWORK: dict[GroupKind, str] = {
    "all-reduce": "ring",
    "broadcast": "tree",
    "reduce": "tree",
    "all-gather": "ring",
    "reduce-scatter": "ring",
    "scatter": "direct",
    "gather": "direct",
    "all-to-all": "direct",
}
# What it stands for where ranks share memory inside of hosts, and the algorithms that know hosts: their names may end
# with them (`leaders-0-1+2-3`).
_BETWEEN_HOSTS: dict[GroupKind, str] = {
    "broadcast": "leaders",
    "reduce": "leaders",
    "all-gather": "hierarchical",
    "reduce-scatter": "hierarchical",
}
_OVER_HOSTS: dict[str, Callable[..., Program]] = {
    "gather-add": gather_add_between,
    "hierarchical": all_reduce_between,
    "leaders": leaders_all_reduce_between,
    "hierarchical-reduce-scatter": reduce_scatter_between,
    "hierarchical-all-gather": all_gather_between,
    "leaders-broadcast": leaders_broadcast_between,
    "leaders-reduce": leaders_reduce_between,
}
_WITH_HOSTS = re.compile(r"((?:gather-add|hierarchical|leaders)[a-z-]*?)-([0-9][0-9.+-]*)")
# Up to this size gather-add, at which the ranks meet once, beats direct, at which they meet twice and add less.
_LITTLE_BYTES = 512 * 2**10


def build(name: str, ranks: int, **options: int) -> Program:
    """Build a collective by name, for any number of ranks.

    `ring`, `tree` and the like are all-reduces. The others are `reduce-scatter`, `all-gather`, `broadcast`, `reduce`,
    `scatter`, `gather` and `all-to-all`; with `direct-` before the first four, those in which any two ranks exchange
    directly. Those over two levels take `ranks_per_node`, or their name says which ranks share a host
    (`hierarchical-0-1+2-3`): the all-reduces `hierarchical` and `leaders`, `hierarchical-reduce-scatter`,
    `hierarchical-all-gather`, `leaders-broadcast` and `leaders-reduce`. All that have a root take `root`. `topk-0.01`,
    `int8-256`, `powersgd-2` and the like are all-reduces of compressed gradients (`collectives/compressed.py`), whose
    program runs on the payload.
    """
    builders = ALL_REDUCES | OTHERS
    if is_compressed(name):
        builders = builders | {name: functools.partial(_compressed, name)}
    elif (found := _over_hosts(name, ranks)) is not None:
        builders = builders | {name: found}
    if name not in builders:
        raise UsageError(f"there is no collective {name!r}; {did_you_mean(name, (*builders, *METHODS))}")
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a collective needs at least 1 rank")
    if not 0 <= options.get("root", 0) < ranks:
        raise UsageError(f"root={options['root']}: the ranks are 0 to {ranks - 1}")
    known = [option for option in inspect.signature(builders[name]).parameters if option != "ranks"]
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise UsageError(f"collective {name!r} does not take {option}; {takes}")
    return builders[name](ranks, **options)


def _compressed(name: str, ranks: int) -> Program:
    return compressed_all_reduce(name, ranks)


def hosts_named(name: str) -> Hosts | None:
    """The hosts with which the name of a collective's algorithm ends; None if it does not."""
    match = _WITH_HOSTS.fullmatch(name)
    return None if match is None or match[1] not in _OVER_HOSTS else Hosts.parse(match[2])


def _over_hosts(name: str, ranks: int) -> Callable[..., Program] | None:
    """The builder of an algorithm whose name ends with the hosts of its ranks; None if it does not."""
    match, hosts = _WITH_HOSTS.fullmatch(name), hosts_named(name)
    if match is None or hosts is None:
        return None
    if hosts.world_size != ranks:
        raise UsageError(f"collective {name!r} is for {hosts.world_size} ranks, and there are {ranks}")
    if match[1] in ("leaders-broadcast", "leaders-reduce"):
        return lambda ranks, root=0: _OVER_HOSTS[match[1]](hosts, root)  # noqa: ARG005
    return lambda ranks: _OVER_HOSTS[match[1]](hosts)  # noqa: ARG005


def all_reduce_program(name: str, ranks: int) -> Program:
    """Build an all-reduce by name, once: a collective in a training loop is called again and again."""
    return program_of("all-reduce", name, ranks)


@functools.cache
def program_of(collective: GroupKind, algorithm: str, ranks: int, root: int | None = None) -> Program:
    """Build the program of a collective by its algorithm, once; some, such as a broadcast, have a root."""
    require_algorithm(collective, algorithm)
    name = ALGORITHMS[collective].get(algorithm, algorithm)
    if (match := _WITH_HOSTS.fullmatch(algorithm)) is not None:
        name = f"{ALGORITHMS[collective][match[1]]}-{match[2]}"
    return build(name, ranks) if root is None else build(name, ranks, root=root)


@functools.cache
def sent_by(
    collective: GroupKind, algorithm: str, ranks: int, root: int | None = None
) -> tuple[tuple[int, float], ...]:
    """For each rank, how many messages it sends, and how many times the whole tensor, or its payload, that is."""
    program = program_of(collective, algorithm, ranks, root)
    assert isinstance(program.goal, Collective)
    slices = program.goal.slices
    sends = [[op for op in ops if isinstance(op, Send)] for ops in program.ranks]
    held = [sum(len(op.value) if isinstance(op.value, Slices) else slices for op in mine) for mine in sends]
    return tuple((len(mine), count / slices) for mine, count in zip(sends, held, strict=True))


def traffic(op: GroupOp, group: Sequence[int], size: float, transport: str) -> list[tuple[int, float]]:
    """For each rank of a group, how many messages and bytes it sends for what the group does together.

    Args:
        op: what the group does.
        group: its ranks.
        size: how many bytes the value has, whole.
        transport: what carries the messages, which decides what "auto" stands for.
    """
    kind, root = group_kind(op), group.index(op.root) if isinstance(op, Broadcast) else None
    algorithm = resolve(kind, op.algorithm, len(group), size, among(transport, group))
    if is_compressed(algorithm):
        return compressed_traffic(algorithm, len(group), size, among(transport, group))
    return [(messages, part * size) for messages, part in sent_by(kind, algorithm, len(group), root)]


def compressed_traffic(algorithm: str, ranks: int, size: float, transport: str) -> list[tuple[int, float]]:
    """For each rank, how many messages and bytes it sends for so many bytes of float32 numbers, compressed."""
    totals = [(0, 0.0)] * ranks
    for one in payload(algorithm, size):
        sent = sent_by("all-reduce", program_of_round(one.kind, transport), ranks)
        totals = [(m + more, b + part * one.bytes) for (m, b), (more, part) in zip(totals, sent, strict=True)]
    return totals


def group_kind(op: GroupOp) -> GroupKind:
    """Which collective an operation is."""
    return _KIND_OF[type(op)]


def resolve(collective: GroupKind, algorithm: str, ranks: int, size: float, transport: str) -> str:
    """Which algorithm a collective runs by: the one that is named, or the one that "auto" stands for.

    ```
    "auto" on    all-reduce                            broadcast,  all-gather,     scatter,
                                                       reduce      reduce-scatter  gather,
                                                                                   all-to-all

    shm          gather-add while there is little to   direct      direct          direct
                 add, since meeting costs more than
                 adding; then direct
    cuda         direct, at which the hosts meet once  direct      direct          direct
    shm+gloo     leaders for few bytes, hierarchical   leaders     hierarchical    direct
                 for many (best_all_reduce)
    all others   ring: gloo's only one, and NCCL's     tree        ring            direct
                 for large values
    ```

    Where the transport tells which ranks share a host, so do the names of the algorithms that know hosts:
    `hierarchical-0-1+2-3`.

    The run and the simulator both ask here, so they take the same.

    Args:
        collective: what is done.
        algorithm: a name, or "auto".
        ranks: how many ranks take part.
        size: how many bytes each of them contributes.
        transport: what carries the messages, such as "shm" or "gloo".
    """
    hosts = hosts_of(transport)
    if algorithm != AUTO:
        require_algorithm(collective, algorithm)
        return f"{algorithm}-{hosts}" if hosts is not None and algorithm in ("hierarchical", "leaders") else algorithm
    if hosts is not None and collective == "all-reduce":
        return f"{best_all_reduce(hosts, link_of(transport), size)}-{hosts}"
    if hosts is not None and collective in _BETWEEN_HOSTS:
        return f"{_BETWEEN_HOSTS[collective]}-{hosts}"
    if transport not in ("shm", "cuda"):
        return _ON_A_NETWORK[collective]
    little = collective == "all-reduce" and transport == "shm" and size * (ranks - 1) <= _LITTLE_BYTES
    return "gather-add" if little else "direct"


def require_algorithm(collective: GroupKind, algorithm: str) -> None:
    """Raise `UsageError` unless there is such an algorithm for a collective."""
    known = ALGORITHMS[collective]
    if collective == "all-reduce" and is_compressed(algorithm):
        payload(algorithm, 0)  # says what is wrong with its numbers
    elif (match := _WITH_HOSTS.fullmatch(algorithm)) is not None and match[1] in known:
        Hosts.parse(match[2])
    elif algorithm not in known:
        hint = did_you_mean(algorithm, (AUTO, *known, *(METHODS if collective == "all-reduce" else ())))
        if "\n" in algorithm:
            algorithm, hint = algorithm.split("\n", 1)[0] + " …", "a program's text is read by mp.program.from_text"
        raise UsageError(f"there is no {collective} algorithm {algorithm!r}; {hint}")


__all__ = [
    "ALGORITHMS",
    "ALL_REDUCES",
    "METHODS",
    "OTHERS",
    "GroupKind",
    "Round",
    "RoundKind",
    "all_reduce_program",
    "build",
    "compressed_traffic",
    "group_kind",
    "hosts_named",
    "is_compressed",
    "payload",
    "program_of",
    "program_of_round",
    "require_algorithm",
    "resolve",
    "sent_by",
    "traffic",
]
