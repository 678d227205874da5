"""Who cannot reach whom: found out before gloo connects every rank to every other.

One rank of each machine tries to reach one of each other, at the address where the way to the store begins
(`transport/interfaces.py`). All ranks are told what came of it, so that all of them can say who cannot reach whom, and
end.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from microparallel.errors import CommsError
from microparallel.transport.interfaces import GLOO

if TYPE_CHECKING:
    from torch.distributed import Store

    from microparallel.world.roll_call import Answer

_PATIENCE = 10.0  # seconds until a machine counts as out of reach: a lost packet is sent again after 1, 3 and 7
_GOODBYE = 2.0  # seconds that rank 0 stays for the others, when all of them end


def require_reach(store: Store, answers: Sequence[Answer], rank: int, address: str, timeout: float) -> None:
    """Let one rank of each machine try to reach one of each other; all ranks raise if any of them cannot.

    Raises:
        CommsError: who cannot reach whom, at which address, and why.
    """
    firsts = [other for other, one in enumerate(answers) if one.machine == other]
    if len(firsts) == 1:
        return
    with contextlib.ExitStack() as listening:
        if rank in firsts:
            listener = listening.enter_context(_listener(address))
            store.set(f"way/{rank}", json.dumps([address, listener.getsockname()[1]]))
            others = {other: json.loads(store.get(f"way/{other}")) for other in firsts if other != rank}
            tried = {other: _why_not_reached(place, min(timeout, _PATIENCE)) for other, place in others.items()}
            failures = [
                f"rank {rank} on {answers[rank].host} ({address}) cannot reach rank {other} on {answers[other].host} "
                f"at {others[other][0]}: {reason}"
                for other, reason in tried.items()
                if reason
            ]
            store.set(f"reached/{rank}", json.dumps(failures))
        found = [failure for other in firsts for failure in json.loads(store.get(f"reached/{other}"))]
    if found:
        _let_all_read(store, rank, len(answers))
        raise CommsError(
            "\n".join(found) + f"\n  each rank uses the interface by which it reaches MASTER_ADDR; {GLOO}=NAME chooses "
            "another one; a firewall must let the ranks connect to any port of each other's"
        )


def _let_all_read(store: Store, rank: int, ranks: int) -> None:
    """Let rank 0, which may serve the store, stay until all ranks have read why they end; but not for long."""
    store.set(f"told/{rank}", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"told/{other}" for other in range(ranks)], timedelta(seconds=_GOODBYE))


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)


def _why_not_reached(place: Sequence[object], patience: float) -> str:
    address, port = str(place[0]), int(str(place[1]))
    try:
        socket.create_connection((address, port), timeout=patience).close()
    except OSError as error:
        return why(error, patience)
    return ""


def why(error: OSError, patience: float) -> str:
    """Why nobody was reached, in a few words; `patience` is for how many seconds it was tried."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no answer within {patience:g} s"
    return (error.strerror or str(error)).lower()
