"""The machine: its cores, the links between ranks, and where a process stands among them."""

from microparallel.topology.cores import (
    DO_NOT_SPIN,
    MOST_RANKS_PER_CORE,
    available_cores,
    require_cores,
    threads_per_rank,
)
from microparallel.topology.links import Link
from microparallel.topology.memory import available_memory, total_memory
from microparallel.topology.mesh import Mesh
from microparallel.topology.placement import ALONE, Placement, find_placement
from microparallel.topology.slowness import parse_slow_links, parse_slow_ranks

__all__ = [
    "ALONE",
    "DO_NOT_SPIN",
    "MOST_RANKS_PER_CORE",
    "Link",
    "Mesh",
    "Placement",
    "available_cores",
    "available_memory",
    "find_placement",
    "parse_slow_links",
    "parse_slow_ranks",
    "require_cores",
    "threads_per_rank",
    "total_memory",
]
