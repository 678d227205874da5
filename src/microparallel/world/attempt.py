"""Which attempt is this? torchrun starts ranks again and again, and all of them meet at the store of its agent.

```
attempt       3f9a              a new name, chosen by rank 0 of every attempt
3f9a/came/1   beta 4711 …       the process that is rank 1; it may have read the name of an attempt that is over
3f9a/go       [alpha 42 …, …]   rank 0 has seen these: a rank that finds itself here has not read an old name
```

The agents' count of restarts would not do: each counts those of its own host, and none where a host joins or leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from microparallel.errors import TransportTimeout
from microparallel.observe.processes import start_ticks
from microparallel.topology.placement import Placement

_NAME = "attempt"
_LOOK_AGAIN = 0.5  # seconds after which a rank looks whether there is a new name
_PAUSE = 0.05  # seconds, where the name is known to be an old one


def agree_on_attempt(placement: Placement, store: dist.Store, timeout: float) -> str:
    """A name that all ranks of this attempt have, and none of another; they wait until all of them have come."""
    if placement.rank == 0:
        return _begin(placement, store)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        store.wait([_NAME], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        name = store.get(_NAME).decode()
        store.set(f"{name}/came/{placement.rank}", _me())
        with contextlib.suppress(RuntimeError):  # it is not there yet
            store.wait([f"{name}/go"], timedelta(seconds=_LOOK_AGAIN))
            if json.loads(store.get(f"{name}/go"))[placement.rank : placement.rank + 1] == [_me()]:
                return name
            time.sleep(_PAUSE)
    raise TransportTimeout(f"rank 0 of this attempt was not there within {timeout:g} s")


def _begin(placement: Placement, store: dist.Store) -> str:
    """On rank 0: begin an attempt, and wait for the others."""
    name = secrets.token_hex(8)
    store.set(f"{name}/came/0", _me())
    store.set(_NAME, name)
    came = [store.get(f"{name}/came/{rank}").decode() for rank in range(placement.world_size)]
    store.set(f"{name}/go", json.dumps(came))
    return name


def _me() -> str:
    """Name this process as no other is named, now or later."""
    return f"{socket.gethostname()} {os.getpid()} {start_ticks(os.getpid())}"


def missing_from_attempt(placement: Placement, store: dist.Store) -> list[int]:
    """Which ranks have not come, as far as this process can know: without rank 0, nobody knows of the others."""
    if not store.check([_NAME]):
        return [0]
    name = store.get(_NAME).decode()
    if store.check([f"{name}/go"]):
        is_over = json.loads(store.get(f"{name}/go"))[placement.rank : placement.rank + 1] != [_me()]
        return [0] if is_over else []
    return [rank for rank in range(placement.world_size) if not store.check([f"{name}/came/{rank}"])]
