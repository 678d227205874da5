"""Turn a transport's failure into an error that names the rank and the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from microparallel.comms.calls import Call
from microparallel.comms.group import Group
from microparallel.errors import CommsError, CommsTimeout, PeerLost


@contextlib.contextmanager
def named_failures(call: Call, transport: Group) -> Iterator[None]:
    """Within this block, whatever the transport raises becomes an error that names the call."""
    try:
        yield
    except CommsError:
        raise
    except RuntimeError as error:
        raise explain(error, call, transport) from error


def explain(error: RuntimeError, call: Call, transport: Group) -> CommsError:
    """Say which rank a failed call was waiting for, and why."""
    here = f"rank {transport.rank}"
    reason = str(error).partition("\n")[0]
    if "timed out" in reason.lower() or "timeout" in reason.lower():
        return CommsTimeout(
            f"{here} waited in vain in {call}: not every rank it needs made the matching call in time ({reason})"
        )
    lost = transport.lost_peers()
    if lost:
        return PeerLost(lost, str(call), f"{_names(lost, transport)} went away during {call} on {here}")
    return CommsError(f"{call} failed on {here}: {reason}")


def _names(ranks: list[int], transport: Group) -> str:
    def name(rank: int) -> str:
        world_rank = transport.world_ranks[rank]
        return str(rank) if rank == world_rank else f"{rank} (rank {world_rank} of the world)"

    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(name, ranks))}"
