"""Say who is missing, while a rank waits for its world to be complete."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from microparallel._torch_entry import register
from microparallel.comms import Comms
from microparallel.comms.group import Group
from microparallel.comms.torch_group import TorchGroup
from microparallel.errors import AddressInUse, CommsTimeout, TransportTimeout, UsageError
from microparallel.observe.flight import Flight, agreed_folder
from microparallel.observe.flight_recorder import in_ranges
from microparallel.text import count
from microparallel.topology import threads_per_rank
from microparallel.topology.placement import Placement, find_placement
from microparallel.torch_backend.base import using
from microparallel.torch_backend.group import MicroparallelGroup
from microparallel.torch_private import store_of_the_world
from microparallel.transport.shared_memory import futex, this_machine
from microparallel.transport.torch_distributed import TRANSLATED

_SOON = 10.0  # seconds of waiting that are worth a word; then twice as many, and so on
_LOOK = 5.0  # seconds that finding out may take


@contextlib.contextmanager
def saying_who_is_missing(placement: Placement, after: float = _SOON) -> Iterator[None]:
    """Within this block, this rank meets the others; if it takes long, a line on stderr says for whom it waits."""
    if placement.world_size == 1:
        yield
        return
    met = threading.Event()
    thread = threading.Thread(
        target=_say_now_and_then, args=(placement, after, met), name="microparallel roll call", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        met.set()
        thread.join(_LOOK)


def _say_now_and_then(placement: Placement, pause: float, met: threading.Event) -> None:
    begun = time.monotonic()
    while not met.wait(pause):
        pause *= 2
        with contextlib.suppress(Exception):  # a word that cannot be said must not hurt the rank
            found = who_is_missing(placement)
            if found and not met.is_set():
                waited = f"rank {placement.rank} has been waiting for {time.monotonic() - begun:.0f} s"
                print(f"microparallel: {waited}: {found}", file=sys.stderr, flush=True)


def who_is_missing(placement: Placement) -> str:
    """In words, whom the world lacks; empty if nobody, or if a lower rank is there to say so."""
    place = f"{placement.address}:{placement.port}"
    try:
        socket.create_connection((placement.address, placement.port), timeout=_LOOK).close()
    except OSError:
        return f"nobody answers at {place}, where rank 0 opens the meeting" if placement.local_rank == 0 else ""
    store = notes_of(placement, _LOOK, is_master=False)
    missing = [rank for rank in range(placement.world_size) if not store.check([f"can/{rank}"])]
    if not missing or any(rank not in missing for rank in range(placement.rank)):
        return ""
    ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {in_ranges(missing)}"
    return f"{ranks} of {count(placement.world_size, 'rank')} did not come to {place} yet"


def notes_of(placement: Placement, timeout: float, *, is_master: bool) -> dist.Store:
    """The notes that the ranks of a world leave for each other where they meet."""
    store = dist.TCPStore(
        placement.address,
        placement.port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore(f"microparallel/{placement.attempt}", store)


# Join the world this process belongs to.


# Its functions have the world as a default argument. Imported while there is a world (making an optimizer does that),
# they would hold it for ever: its threads would outlive `close()`, and now and then crash the process as Python ends.


TRANSPORTS = ("auto", "shm", "gloo", "nccl")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_TIMEOUT = 1800.0

# Of worlds that other people's programs have made, and end.
_flights: WeakKeyDictionary[dist.ProcessGroup, Flight] = WeakKeyDictionary()

# What torch calls them. With NCCL, gloo stands beside it: it carries CPU tensors, and the headers of checked mode.
_BACKENDS = {"shm": "microparallel", "gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}


def connect(
    transport: str = "auto", *, device: str = "auto", timeout: float = DEFAULT_TIMEOUT, check: bool = False
) -> Comms:
    """Join the world that torchrun or Slurm describes in environment variables; without them, a world of one.

    Args:
        transport: "shm" (shared memory: all ranks on one Linux machine), "gloo" (TCP), "nccl" (a GPU for every rank),
            or "auto": nccl where it can work, else shared memory where it can, else gloo.
        device: where received tensors go: "cpu", "cuda", or "auto": the GPU with nccl, else the CPU.
        timeout: seconds a rank waits for the others, when joining and in each call.
        check: compare calls between ranks before each one, so that a mismatch is an error and not a hang.

    Example:
        ```python
        with mp.connect() as comms:  # torchrun --nproc-per-node=4 script.py
            print(comms.all_reduce(torch.ones(3)))
        ```
    """
    placement = find_placement(os.environ)
    require_possible(transport, device, placement)
    if dist.is_initialized():
        return _adopt(placement, device, check)
    _use_fair_share_of_cores(placement)
    with _meeting_errors(placement, timeout), saying_who_is_missing(placement):
        store = _meet(placement, timeout)
        return join(placement, store, transport=transport, device=device, timeout=timeout, check=check)


def join(
    placement: Placement,
    store: dist.Store,
    *,
    transport: str = "auto",
    device: str = "auto",
    timeout: float = DEFAULT_TIMEOUT,
    check: bool = False,
    flight_folder: Path | None = None,
) -> Comms:
    """Become a rank of the world whose ranks meet in this store; the request is known to be possible.

    Flight files go into the folder that the ranks agree on, unless whoever started them has chosen one.
    """
    chosen = _choose_transport(transport, device, placement, store)
    chosen_device = _choose_device(device, chosen, placement)
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    if chosen == "shm" and "microparallel" not in dist.Backend.backend_list:
        register()  # a package that is merely on the path was not announced to torch
    folder = agreed_folder(store) if flight_folder is None else flight_folder
    flight = Flight.open(folder, placement.rank, placement.world_size, placement.local_world_size)
    try:
        with using(flight):
            dist.init_process_group(
                _BACKENDS[chosen],
                store=store,
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timedelta(seconds=timeout),
            )
        return _comms_of_the_world(placement, chosen_device, check, store, flight, owned=True)
    except BaseException:
        flight.close()
        raise


def _adopt(placement: Placement, device: str, check: bool) -> Comms:
    """Talk through the process group that the caller's program has already made, and leave it to its owner."""
    backend = "nccl" if "nccl" in str(dist.get_backend_config()) else "gloo"
    chosen_device, flight = _choose_device(device, backend, placement), _adopted_flight(placement)
    return _comms_of_the_world(placement, chosen_device, check, None, flight, owned=False)


def _adopted_flight(placement: Placement) -> Flight:
    """The recorder for a world that somebody else has made, and ends."""
    world: Any = dist.group.WORLD
    if isinstance(world, MicroparallelGroup):
        return world.shared_memory.flight
    if world not in _flights:
        folder = agreed_folder(store_of_the_world())
        flight = Flight.open(folder, placement.rank, placement.world_size, placement.local_world_size)
        _flights[world] = flight
        finalize(world, flight.close).atexit = False  # it ends with the process by itself
    return _flights[world]


def _comms_of_the_world(
    placement: Placement,
    device: torch.device,
    check: bool,
    store: dist.Store | None,
    flight: Flight,
    *,
    owned: bool,
) -> Comms:
    world = dist.group.WORLD
    if world is None:
        raise UsageError("this process belongs to no torch process group; call mp.connect() first")
    carries = _carried_by(world)
    group: Group
    if isinstance(world, MicroparallelGroup) and carries == {"cpu"}:
        group = world.shared_memory
        leave, forget = world.shared_memory.close, _nothing
    else:
        group = torch_group = TorchGroup(world, store, carries, flight)
        leave, forget = (lambda: _leave_world(torch_group)), torch_group.forget

    def leave_and_land() -> None:
        try:
            leave()
        finally:
            flight.close()

    return Comms(
        group,
        device=device,
        local_rank=placement.local_rank,
        check=check,
        on_close=leave_and_land if owned else forget,
    )


def _carried_by(world: dist.ProcessGroup) -> frozenset[str]:
    """The devices whose tensors a group takes as they are."""
    backends = str(dist.get_backend_config(world)).split(",")
    able = {"cpu:gloo": "cpu", "cpu:microparallel": "cpu", "cuda:nccl": "cuda"}
    return frozenset(able[backend] for backend in backends if backend in able)


def _nothing() -> None:
    """The group is its owner's to leave."""


def _leave_world(transport: TorchGroup) -> None:
    dist.destroy_process_group()  # the world's, and with it every sub-group
    transport.forget()


def _meet(placement: Placement, timeout: float) -> dist.Store:
    if placement.world_size == 1 and placement.port == 0:
        return dist.HashStore()
    return notes_of(placement, timeout, is_master=placement.hosts_store)


@contextmanager
def _meeting_errors(placement: Placement, timeout: float) -> Iterator[None]:
    place = f"{placement.address}:{placement.port}"
    try:
        with TRANSLATED:
            yield
    except AddressInUse as error:
        raise UsageError(
            f"port {placement.port} on {placement.address} is in use by another program; "
            "choose a free one with MASTER_PORT (or torchrun's --master-port)"
        ) from error
    except TransportTimeout as error:
        raise CommsTimeout(
            f"rank {placement.rank} waited {timeout:g} s at {place} "
            f"for the other {count(placement.world_size - 1, 'rank')}; "
            "were all of them started, and can they reach that address?"
        ) from error


def require_possible(transport: str, device: str, placement: Placement) -> None:
    """Refuse a transport or a device that this machine cannot offer, with the reason."""
    if transport not in TRANSPORTS:
        raise UsageError(f"there is no transport {transport!r}; choose one of {', '.join(TRANSPORTS)}")
    if device not in DEVICES:
        raise UsageError(f"there is no device {device!r}; choose one of {', '.join(DEVICES)}")
    if transport == "nccl" and (obstacle := _obstacle_to_nccl(placement)):
        raise UsageError(f"transport 'nccl' cannot work here: {obstacle}; choose 'gloo'")
    if transport == "shm" and (obstacle := futex.why_not()):
        raise UsageError(f"transport 'shm' cannot work here: {obstacle}; choose 'gloo'")
    if transport == "shm" and device == "cuda":
        raise UsageError("transport 'shm' shares the CPU's memory; choose device='cpu', or transport='gloo'")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, and torch sees no GPU; choose 'cpu'")


def _choose_transport(transport: str, device: str, placement: Placement, store: dist.Store) -> str:
    """What the user chose, or what every rank can do: machines may differ, and all ranks must choose alike."""
    nccl = transport in ("auto", "nccl") and not _obstacle_to_nccl(placement)
    shm = transport in ("auto", "shm") and not futex.why_not() and device != "cuda"
    store.set(f"can/{placement.rank}", f"{'nccl' if nccl else ''},{this_machine() if shm else ''}")
    answers = [store.get(f"can/{rank}").decode().split(",") for rank in range(placement.world_size)]
    machines = [machine for _, machine in answers]
    elsewhere = [rank for rank, machine in enumerate(machines) if not machine or machine != machines[0]]
    if transport == "shm" and elsewhere:
        raise UsageError(f"transport 'shm' cannot work here: rank {elsewhere[0]} is on another machine; choose 'gloo'")
    if transport != "auto":
        return transport
    if all(can == "nccl" for can, _ in answers):
        return "nccl"
    return "gloo" if elsewhere else "shm"


def _obstacle_to_nccl(placement: Placement) -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if not dist.is_nccl_available():
        return "this build of torch comes without NCCL"
    gpus, ranks = torch.cuda.device_count(), placement.local_world_size
    return f"NCCL needs a GPU for every rank, and {ranks} ranks share {gpus}" if ranks > gpus else None


def _choose_device(device: str, backend: str, placement: Placement) -> torch.device:
    if device == "cuda" or (device == "auto" and backend == "nccl"):
        return torch.device("cuda", placement.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _use_fair_share_of_cores(placement: Placement) -> None:
    # torchrun sets OMP_NUM_THREADS=1 unless its user has set it; a share of the cores is what a user would want.
    chosen = os.environ.get("OMP_NUM_THREADS")
    if placement.world_size > 1 and (chosen is None or (chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ)):
        torch.set_num_threads(threads_per_rank(placement.local_world_size))
