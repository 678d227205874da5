"""Programs for one collective, each a short pure function of the number of ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Literal

from microparallel.collectives.all_to_all import all_to_all
from microparallel.collectives.compressed import (
    METHODS,
    PROGRAM_OF_ROUND,
    Round,
    RoundKind,
    compressed_all_reduce,
    is_compressed,
    payload,
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
from microparallel.collectives.hierarchical import hierarchical_all_reduce
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

ALL_REDUCES: dict[str, Callable[..., Program]] = {
    "naive": naive_all_reduce,
    "gather-add": gather_add_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "recursive-doubling": recursive_doubling_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
    "direct": direct_all_reduce,
    "hierarchical": hierarchical_all_reduce,
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
}

GroupKind = Literal[
    "all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter", "scatter", "gather", "all-to-all"
]
# For each collective, its algorithms, and the name by which `build` knows the program of each.
ALGORITHMS: dict[GroupKind, dict[str, str]] = {
    "all-reduce": {name: name for name in ALL_REDUCES},
    "broadcast": {"tree": "broadcast", "direct": "direct-broadcast"},
    "reduce": {"tree": "reduce", "direct": "direct-reduce"},
    "all-gather": {"ring": "all-gather", "direct": "direct-all-gather"},
    "reduce-scatter": {"ring": "reduce-scatter", "direct": "direct-reduce-scatter"},
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
# Up to this size gather-add, at which the ranks meet once, beats direct, at which they meet twice and add less.
_LITTLE_BYTES = 512 * 2**10


def build(name: str, ranks: int, **options: int) -> Program:
    """Build a collective by name, for any number of ranks.

    `ring`, `tree` and the like are all-reduces; `hierarchical` takes `ranks_per_node`. The others are
    `reduce-scatter`, `all-gather`, `broadcast`, `reduce`, `scatter`, `gather` and `all-to-all`; with `direct-` before
    the first four, those in which any two ranks exchange directly. `scatter`, `gather`, `broadcast`, `reduce`,
    `direct-broadcast` and `direct-reduce` take `root`. `topk-0.01`, `int8-256`, `powersgd-2` and the like are
    all-reduces of compressed gradients (`collectives/compressed.py`), whose program runs on the payload.
    """
    builders = ALL_REDUCES | OTHERS
    if is_compressed(name):
        builders = builders | {name: functools.partial(_compressed, name)}
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


def all_reduce_program(name: str, ranks: int) -> Program:
    """Build an all-reduce by name, once: a collective in a training loop is called again and again."""
    return program_of("all-reduce", name, ranks)


@functools.cache
def program_of(collective: GroupKind, algorithm: str, ranks: int, root: int | None = None) -> Program:
    """Build the program of a collective by its algorithm, once; some, such as a broadcast, have a root."""
    require_algorithm(collective, algorithm)
    name = ALGORITHMS[collective].get(algorithm, algorithm)
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
    algorithm = resolve(kind, op.algorithm, len(group), size, transport)
    if is_compressed(algorithm):
        return compressed_traffic(algorithm, len(group), size)
    return [(messages, part * size) for messages, part in sent_by(kind, algorithm, len(group), root)]


def compressed_traffic(algorithm: str, ranks: int, size: float) -> list[tuple[int, float]]:
    """For each rank, how many messages and bytes it sends for so many bytes of float32 numbers, compressed."""
    totals = [(0, 0.0)] * ranks
    for one in payload(algorithm, size):
        sent = sent_by("all-reduce", PROGRAM_OF_ROUND[one.kind], ranks)
        totals = [(m + more, b + part * one.bytes) for (m, b), (more, part) in zip(totals, sent, strict=True)]
    return totals


def group_kind(op: GroupOp) -> GroupKind:
    """Which collective an operation is."""
    return _KIND_OF[type(op)]


def resolve(collective: GroupKind, algorithm: str, ranks: int, size: float, transport: str) -> str:
    """Which algorithm a collective runs by: the one that is named, or the one that "auto" stands for.

    | "auto" on  | all-reduce                                  | broadcast,  | all-gather,    | scatter,   |
    |            |                                             | reduce      | reduce-scatter | gather,    |
    |            |                                             |             |                | all-to-all |
    |------------|---------------------------------------------|-------------|----------------|------------|
    | `shm`      | gather-add while there is little to add,    | direct      | direct         | direct     |
    |            | since meeting costs more than adding; then  |             |                |            |
    |            | direct                                      |             |                |            |
    | all others | ring: gloo's only one, and NCCL's for large | tree        | ring           | direct     |
    |            | values                                      |             |                |            |

    The run and the simulator both ask here, so they take the same.

    Args:
        collective: what is done.
        algorithm: a name, or "auto".
        ranks: how many ranks take part.
        size: how many bytes each of them contributes.
        transport: what carries the messages, such as "shm" or "gloo".
    """
    if algorithm != AUTO:
        require_algorithm(collective, algorithm)
        return algorithm
    if transport != "shm":
        return _ON_A_NETWORK[collective]
    little = collective == "all-reduce" and size * (ranks - 1) <= _LITTLE_BYTES
    return "gather-add" if little else "direct"


def require_algorithm(collective: GroupKind, algorithm: str) -> None:
    """Raise `UsageError` unless there is such an algorithm for a collective."""
    known = ALGORITHMS[collective]
    if collective == "all-reduce" and is_compressed(algorithm):
        payload(algorithm, 0)  # says what is wrong with its numbers
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
    "PROGRAM_OF_ROUND",
    "GroupKind",
    "Round",
    "RoundKind",
    "all_reduce_program",
    "build",
    "compressed_traffic",
    "group_kind",
    "is_compressed",
    "payload",
    "program_of",
    "require_algorithm",
    "resolve",
    "sent_by",
    "traffic",
]
