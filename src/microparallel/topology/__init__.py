"""The machine: its cores, the links between ranks, and where a process stands among them."""

from microparallel.topology.links import Cluster, Link, Port, parse_link, parse_slow_links, parse_slow_ranks, show_link
from microparallel.topology.machine import (
    BEFORE_TORCH,
    available_cores,
    available_memory,
    require_cores,
    threads_per_rank,
    total_memory,
)
from microparallel.topology.mesh import Mesh
from microparallel.topology.placement import ALONE, Placement, find_placement, ranks_of_the_world

__all__ = [
    "ALONE",
    "BEFORE_TORCH",
    "Cluster",
    "Link",
    "Mesh",
    "Placement",
    "Port",
    "available_cores",
    "available_memory",
    "find_placement",
    "parse_link",
    "parse_slow_links",
    "parse_slow_ranks",
    "ranks_of_the_world",
    "require_cores",
    "show_link",
    "threads_per_rank",
    "total_memory",
]
