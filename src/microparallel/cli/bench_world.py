"""Where a benchmark runs: on ranks of our own, or on those that torchrun or Slurm started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from microparallel.cli.bench_progress import progress_on_standard_error
from microparallel.errors import ConfigError
from microparallel.performance.bench_settings import BenchSettings
from microparallel.text import count
from microparallel.topology import ALONE, Placement, find_placement

if TYPE_CHECKING:
    from microparallel.comms import Comms


def choose_ranks(settings: BenchSettings) -> int:
    """How many ranks there will be: those of the world we are in, or as many as were asked for."""
    world = find_placement(os.environ)
    if world == ALONE:
        return settings.usual_ranks if settings.ranks is None else settings.ranks
    if settings.ranks not in (None, world.world_size):  # torchrun or Slurm has decided how many ranks there are
        raise ConfigError(
            f"--ranks {settings.ranks}: this process belongs to a world of {world.world_size} ranks; leave it out"
        )
    return world.world_size


def measure_on_ranks(bench: Callable[..., Any], settings: BenchSettings, quiet: bool, unit: str = "steps") -> Any:
    """What `bench(comms, settings, progress)` returns on rank 0; None on the other ranks of torchrun's world."""
    from microparallel.world import connect, launch
    from microparallel.world.connect import require_possible

    ranks, transport, device = choose_ranks(settings), settings.transport, settings.device
    if find_placement(os.environ) != ALONE:
        comms: Comms
        with connect(transport, device=device) as comms:
            measurements = _measure(comms, bench, settings, quiet, unit)
            return measurements if comms.rank == 0 else None
    require_possible(transport, device, Placement(0, ranks, local_rank=0, local_world_size=ranks))
    if not quiet:
        print(f"starting {count(ranks, 'rank')} …", file=sys.stderr)
    return launch(_measure, ranks, bench, settings, quiet, unit, transport=transport, device=device)[0]


def _measure(comms: Comms, bench: Callable[..., Any], settings: BenchSettings, quiet: bool, unit: str) -> Any:
    """What every rank does; the first one shows how it goes."""
    with progress_on_standard_error(comms.rank == 0 and not quiet, unit) as progress:
        return bench(comms, settings, progress)
