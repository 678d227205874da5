"""Join the world that this process belongs to: choose a transport and a device, and make the ranks' `Comms`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

# Functions of this module have the world as a default argument. Imported while there is a world (making an optimizer
# does that), they would keep it alive: its threads would outlive `close()`, and sometimes crash the process at its end.
import torch.distributed.nn.functional

from microparallel._torch_entry import register
from microparallel.comms import Comms
from microparallel.comms.group import Group
from microparallel.comms.staged_group import StagedGroup
from microparallel.comms.torch_group import TorchGroup
from microparallel.errors import UsageError
from microparallel.observe.flight import Flight, agreed_folder
from microparallel.settings import DEVICES, TRANSPORTS
from microparallel.text import count, show_ranks
from microparallel.topology import threads_per_rank
from microparallel.topology.hosts import MIXED, Hosts, hosts_of, link_of, transport_between
from microparallel.topology.placement import Placement, find_placement
from microparallel.torch_backend.base import agreed_link, using
from microparallel.torch_backend.group import MicroparallelGroup, identity_of_gpu
from microparallel.torch_private import store_of_the_world
from microparallel.transport.interfaces import take_the_way
from microparallel.transport.shared_memory import futex
from microparallel.world.meeting import explaining_errors, open_store, report_missing_ranks
from microparallel.world.roll_call import Answer, places, roll_call
from microparallel.world.way import require_reach

DEFAULT_TIMEOUT = 1800.0  # seconds

# torch's names for our transports. With NCCL, gloo stands beside it: it carries CPU tensors, and the headers of checked
# mode.
_BACKENDS = {
    "shm": "microparallel",
    "cuda": "microparallel",
    MIXED: "microparallel",
    "gloo": "gloo",
    "nccl": "cpu:gloo,cuda:nccl",
}

# The flights of worlds that other programs have made, and will end.
_flights: WeakKeyDictionary[dist.ProcessGroup, Flight] = WeakKeyDictionary()


def connect(
    transport: str = "auto", *, device: str = "auto", timeout: float = DEFAULT_TIMEOUT, check: bool = False
) -> Comms:
    """Join the world that torchrun or Slurm describes in environment variables; without them, a world of one.

    Args:
        transport: "shm" (shared memory: all ranks on one Linux machine), "cuda" (all ranks share one GPU, and read each
            other's memory there), "gloo" (TCP), "shm+gloo" (shared memory inside of each host, gloo between hosts;
            "shm+gloo:0-1+2-3" says which ranks count as being on one host), "nccl" (a GPU for every rank), or "auto":
            nccl where every rank has a GPU, cuda where all share one; else shared memory for the ranks that can share
            it, and gloo to the others.
        device: where received tensors go: "cpu", "cuda", or "auto": the GPU with nccl and cuda, else the CPU.
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
    deadline = time.monotonic() + timeout
    with explaining_errors(placement, timeout), report_missing_ranks(placement):
        store = open_store(placement, timeout)
        store.set_timeout(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        comms = join(placement, store, transport=transport, device=device, timeout=timeout, check=check)
        store.set_timeout(timedelta(seconds=timeout))
        return comms


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
    """Become a rank of the world whose ranks share this store; `require_possible` has accepted transport and device.

    Flight files go into `flight_folder`, or into a folder that the ranks agree on through the store.
    """
    answers = _call_the_roll(transport, device, placement, store)
    chosen = _choose_transport(transport, answers, agreed_link(store, placement.rank))
    address = take_the_way(answers, placement.rank)
    require_reach(store, answers, placement.rank, address, timeout)
    chosen_device = _choose_device(device, chosen, placement)
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    if _BACKENDS[chosen.partition(":")[0]] == "microparallel" and "microparallel" not in dist.Backend.backend_list:
        register()  # torch finds the backend by itself only if this package is installed
    folder = agreed_folder(store) if flight_folder is None else flight_folder
    flight = Flight.open(folder, placement.rank, placement.world_size, placement.local_world_size)
    if any(one.machine != answers[0].machine for one in answers):
        flight.spread_over([one.host for one in answers])
    try:
        with using(flight, chosen):
            dist.init_process_group(
                _BACKENDS[chosen.partition(":")[0]],
                store=store,
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timedelta(seconds=timeout),
            )
        hosts = places(answers)
        return _comms_of_the_world(placement, chosen_device, check, store, flight, hosts, owned=True)
    except BaseException:
        flight.close()
        raise


def _adopt(placement: Placement, device: str, check: bool) -> Comms:
    """Use the process group that the caller's program has already made; closing the Comms does not end it."""
    backend = "nccl" if "nccl" in str(dist.get_backend_config()) else "gloo"
    chosen_device, flight = _choose_device(device, backend, placement), _adopted_flight(placement)
    return _comms_of_the_world(placement, chosen_device, check, None, flight, owned=False)


def _adopted_flight(placement: Placement) -> Flight:
    """The flight of a world that another program has made, and will end."""
    world: Any = dist.group.WORLD
    if isinstance(world, MicroparallelGroup):
        return world.shared_memory.flight
    if world not in _flights:
        folder = agreed_folder(store_of_the_world())
        flight = Flight.open(folder, placement.rank, placement.world_size, placement.local_world_size)
        _flights[world] = flight
        finalize(world, flight.close).atexit = False  # at the end of the process the flight closes itself
    return _flights[world]


def _comms_of_the_world(
    placement: Placement,
    device: torch.device,
    check: bool,
    store: dist.Store | None,
    flight: Flight,
    hosts: Sequence[str] = (),
    *,
    owned: bool,
) -> Comms:
    world = dist.group.WORLD
    if world is None:
        raise UsageError("this process belongs to no torch process group; call mp.connect() first")
    carries = _carried_by(world)
    group: Group
    if isinstance(world, MicroparallelGroup) and carries == world.shared_memory.carries:
        group = world.shared_memory
        leave, forget = world.shared_memory.close, _nothing
    else:
        staged = device.type == "cuda" and _stages(world)
        torch_group = (
            StagedGroup(world, store, flight=flight, places=hosts)
            if staged
            else TorchGroup(world, store, carries, flight, hosts)
        )
        group = torch_group
        leave, forget = (lambda: _leave_world(torch_group)), torch_group.forget

    def leave_and_close_flight() -> None:
        try:
            leave()
        finally:
            flight.close()

    return Comms(
        group,
        device=device,
        local_rank=placement.local_rank,
        check=check,
        on_close=leave_and_close_flight if owned else forget,
    )


def _carried_by(world: dist.ProcessGroup) -> frozenset[str]:
    """The devices whose tensors a group moves without copying them to another device first."""
    backends = str(dist.get_backend_config(world)).split(",")
    able = {"cpu:gloo": "cpu", "cpu:microparallel": "cpu", "cuda:nccl": "cuda"}
    if isinstance(world, MicroparallelGroup) and "cuda" in world.shared_memory.carries:
        able["cuda:microparallel"] = "cuda"
    return frozenset(able[backend] for backend in backends if backend in able)


def _stages(world: dist.ProcessGroup) -> bool:
    """Whether gloo moves the tensors of a GPU: it takes them through the host's memory."""
    return {"cpu:gloo", "cuda:gloo"} <= set(str(dist.get_backend_config(world)).split(","))


def _nothing() -> None:
    """Do nothing: the program that made the group ends it."""


def _leave_world(transport: TorchGroup) -> None:
    dist.destroy_process_group()  # the world's, and with it every sub-group
    transport.forget()


def _use_fair_share_of_cores(placement: Placement) -> None:
    # torchrun sets OMP_NUM_THREADS=1 unless the user has set it; then the rank takes its share of the cores instead.
    chosen = os.environ.get("OMP_NUM_THREADS")
    if placement.world_size > 1 and (chosen is None or (chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ)):
        torch.set_num_threads(threads_per_rank(placement.local_world_size))


# ── choosing a transport and a device ───────────────────────────────────────────────────────────────────────────────


def require_possible(transport: str, device: str, placement: Placement) -> None:
    """Raise a `UsageError` for a transport or a device that cannot work on this machine, with the reason."""
    kind, hosts = transport.partition(":")[0], hosts_of(transport)
    if kind not in TRANSPORTS or (transport != kind and hosts is None):
        raise UsageError(f"there is no transport {transport!r}; choose one of {', '.join(TRANSPORTS)}")
    if hosts is not None and hosts.world_size != placement.world_size:
        raise UsageError(
            f"transport {transport!r} is for {count(hosts.world_size, 'rank')}, and there are {placement.world_size}; "
            f"name them all, or let {MIXED!r} find out which share a host"
        )
    link_of(transport)
    if device not in DEVICES:
        raise UsageError(f"there is no device {device!r}; choose one of {', '.join(DEVICES)}")
    if transport == "nccl" and (obstacle := _obstacle_to_nccl(placement)):
        raise UsageError(f"transport 'nccl' cannot work here: {obstacle}; choose 'gloo'")
    if kind in ("shm", MIXED) and (obstacle := futex.why_not()):
        raise UsageError(f"transport {transport!r} cannot work here: {obstacle}; choose 'gloo'")
    if kind == "cuda" and (obstacle := _obstacle_to_one_gpu()):
        raise UsageError(f"transport 'cuda' cannot work here: {obstacle}; choose 'gloo'")
    if kind == "cuda" and device == "cpu":
        raise UsageError("transport 'cuda' shares a GPU; choose device='cuda', or transport='shm'")
    if kind in ("shm", MIXED) and device == "cuda":
        raise UsageError(f"transport {transport!r} shares the CPU's memory; choose device='cpu', or transport='gloo'")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, and torch sees no GPU; choose 'cpu'")


def _call_the_roll(transport: str, device: str, placement: Placement, store: dist.Store) -> list[Answer]:
    """What every rank says of itself; this one says what it can use of the transports that the user has chosen from."""
    nccl = transport in ("auto", "nccl") and not _obstacle_to_nccl(placement)
    shm = transport.partition(":")[0] in ("auto", "shm", MIXED) and not futex.why_not() and device != "cuda"
    one_gpu = transport in ("auto", "cuda") and device != "cpu" and not nccl and not _obstacle_to_one_gpu()
    gpu = identity_of_gpu(_choose_device("cuda", "cuda", placement)) if one_gpu else ""
    return roll_call(placement, store, nccl=nccl, shm=shm, gpu=gpu)


def _choose_transport(transport: str, answers: list[Answer], link: str) -> str:
    """The transport that the user chose, or the best that every rank can use: all ranks must choose the same."""
    hosts = Hosts.of([one.machine for one in answers])
    unable = [rank for rank, one in enumerate(answers) if not one.shm]
    mixed = transport_between(hosts, link)
    if transport.startswith(MIXED):
        return _mixed(transport, mixed, hosts, unable)
    elsewhere = [*unable, *(rank for ranks in hosts.ranks[1:] for rank in ranks)]
    if transport == "shm" and elsewhere:
        raise UsageError(
            f"transport 'shm' cannot work here: rank {elsewhere[0]} is on another machine; choose {MIXED!r} or 'gloo'"
        )
    gpus = [one.gpu for one in answers]
    if transport == "cuda" and (len(set(gpus)) > 1 or len(hosts.ranks) > 1):
        other = next(rank for rank, gpu in enumerate(gpus) if gpu != gpus[0] or rank not in hosts.ranks[0])
        raise UsageError(
            f"transport 'cuda' is for ranks that share one GPU, and rank {other} has another than rank 0; choose "
            "'nccl' with a GPU for every rank, or 'gloo'"
        )
    if transport != "auto":
        return transport
    if all(one.nccl for one in answers):
        return "nccl"
    if gpus[0] and len(set(gpus)) == 1 and len(hosts.ranks) == 1:
        return "cuda"
    return "gloo" if unable or (elsewhere and hosts.most == 1) else mixed


def _mixed(transport: str, found: str, hosts: Hosts, unable: list[int]) -> str:
    """Shared memory inside of hosts: those that there are, or those that the user has named."""
    if unable:
        raise UsageError(f"transport {transport!r} cannot work here: rank {unable[0]} has no shared memory; try 'gloo'")
    named = hosts_of(transport)
    for ranks in named.ranks if named else ():
        if len(hosts.among(ranks).ranks) > 1:
            raise UsageError(
                f"transport {transport!r} cannot work here: {show_ranks(ranks)} are on different machines; {MIXED!r} "
                "finds out which ranks share one"
            )
    return transport if named else found


def _obstacle_to_nccl(placement: Placement) -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if not dist.is_nccl_available():
        return "this build of torch comes without NCCL"
    gpus, ranks = torch.cuda.device_count(), placement.local_world_size
    return f"NCCL needs a GPU for every rank, and {ranks} ranks share {gpus}" if ranks > gpus else None


def _obstacle_to_one_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return futex.why_not()


def _choose_device(device: str, backend: str, placement: Placement) -> torch.device:
    if device == "cuda" or (device == "auto" and backend in ("nccl", "cuda")):
        return torch.device("cuda", placement.local_rank % torch.cuda.device_count())
    return torch.device("cpu")
