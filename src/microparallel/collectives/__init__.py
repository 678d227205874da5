"""Programs for one collective, each a short pure function of the number of ranks."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable

from microparallel.collectives.all_to_all import all_to_all
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
from microparallel.program import Program

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


def build(name: str, ranks: int, **options: int) -> Program:
    """Build a collective by name, for any number of ranks.

    `ring`, `tree` and the like are all-reduces; `hierarchical` takes `ranks_per_node`. The others are
    `reduce-scatter`, `all-gather`, `broadcast`, `reduce`, `scatter`, `gather` and `all-to-all`; with `direct-` before
    the first four, those that read straight from each other. `scatter`, `gather`, `direct-broadcast` and
    `direct-reduce` take `root`.
    """
    builders = ALL_REDUCES | OTHERS
    if name not in builders:
        near = difflib.get_close_matches(name, builders, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(builders)}"
        raise UsageError(f"there is no collective {name!r}; {hint}")
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


@functools.cache
def all_reduce_program(name: str, ranks: int) -> Program:
    """Build an all-reduce by name, once: a collective in a training loop is called again and again."""
    if name not in ALL_REDUCES:
        near = difflib.get_close_matches(name, ALL_REDUCES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of auto, {', '.join(ALL_REDUCES)}"
        raise UsageError(f"there is no all-reduce algorithm {name!r}; {hint}")
    return build(name, ranks)


__all__ = ["ALL_REDUCES", "OTHERS", "all_reduce_program", "build"]
