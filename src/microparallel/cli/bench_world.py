"""Where a benchmark runs: on ranks of our own, or on those that torchrun or Slurm started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from microparallel.errors import ConfigError
from microparallel.text import count
from microparallel.topology import ALONE, MOST_RANKS_PER_CORE, Placement, available_cores, find_placement

if TYPE_CHECKING:
    from microparallel.comms import Comms


def choose_ranks(given: int | None, default: int) -> int:
    """How many ranks there will be: those of the world we are in, or as many as were asked for."""
    world, cores = find_placement(os.environ), available_cores()
    if world != ALONE:  # torchrun or Slurm has decided how many ranks there are
        if given not in (None, world.world_size):
            raise ConfigError(
                f"--ranks {given}: this process belongs to a world of {world.world_size} ranks; leave it out"
            )
        return world.world_size
    ranks = default if given is None else given
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1; try 2")
    if ranks > MOST_RANKS_PER_CORE * cores:
        raise ConfigError(
            f"--ranks {ranks}: this machine has {count(cores, 'core')}, "
            f"and more than {MOST_RANKS_PER_CORE} ranks a core cannot work; try {max(2, cores)}"
        )
    return ranks


def measure_on_ranks(
    measure: Callable[..., Any], ranks: int, *arguments: Any, transport: str, device: str, quiet: bool
) -> Any:
    """What `measure(comms, *arguments, quiet)` returns on rank 0; None on the other ranks of torchrun's world."""
    from microparallel.world import connect, launch
    from microparallel.world.connect import require_possible

    if find_placement(os.environ) != ALONE:
        comms: Comms
        with connect(transport, device=device) as comms:
            measurements = measure(comms, *arguments, quiet)
            return measurements if comms.rank == 0 else None
    require_possible(transport, device, Placement(0, ranks, local_rank=0, local_world_size=ranks))
    if not quiet:
        print(f"starting {count(ranks, 'rank')} …", file=sys.stderr)
    return launch(measure, ranks, *arguments, quiet, transport=transport, device=device)[0]
