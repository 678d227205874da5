"""The store at which the ranks of a world meet, and who is missing there.

Rank 0 serves the store at MASTER_ADDR:MASTER_PORT, unless torchrun does. Whoever can connect to it can read and change
what is in it, so it listens on no more interfaces than it must.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from microparallel.errors import AddressInUse, CommsError, CommsTimeout, TransportError, TransportTimeout, UsageError
from microparallel.text import count, show_ranges
from microparallel.topology.placement import Placement
from microparallel.transport.interfaces import is_loopback
from microparallel.transport.torch_distributed import TRANSLATED
from microparallel.world.attempt import agree_on_attempt, missing_from_attempt

_REPORT_AFTER = 10.0  # seconds of waiting for other ranks after which they are named; then twice as many, and so on
_CONNECT_TIMEOUT = 5.0  # seconds that finding out which ranks are missing may take
_LAST_LOOK = 1.0  # the same, when there is an error to be raised
_FAREWELL = 0.3  # seconds for the thread to end that looks for missing ranks: it may wait for a host that is not there
_ONE_TRY = 10.0  # seconds until a rank tries anew to reach the store: a lost packet is sent again after 1, 3 and 7
_PAUSE = 0.05  # seconds between two tries
_EVERYWHERE = ""  # as an address to listen at
_OURS = "microparallel"  # in front of all our keys


def open_store(placement: Placement, timeout: float) -> dist.Store:
    """The store of a world: this rank serves it, or connects to it; a world of one needs no other process."""
    if placement.world_size == 1 and placement.port == 0:
        return dist.HashStore()
    _require_known(placement)
    if not placement.hosts_store:
        _await_listener(placement, timeout)
    store = _serve(placement, timeout) if placement.hosts_store else _connect(placement, timeout)
    if placement.shared_store:
        return dist.PrefixStore(agree_on_attempt(placement, store, timeout), store)
    return store


def _await_listener(placement: Placement, timeout: float) -> None:
    """Wait until a process listens where the store should be.

    torch would try for up to twice the time, and print where in its own code it gave up.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.001, deadline - time.monotonic())
        try:
            socket.create_connection((placement.address, placement.port), timeout=min(left, _ONE_TRY)).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() + _PAUSE > deadline:
                raise TransportTimeout(str(error)) from None
        time.sleep(_PAUSE)


def _connect(placement: Placement, timeout: float) -> dist.Store:
    store = dist.TCPStore(
        placement.address,
        placement.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore(_OURS, store)


def _serve(placement: Placement, timeout: float) -> dist.Store:
    store = dist.TCPStore(
        placement.address,
        placement.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=_listener(placement).detach(),
    )
    return dist.PrefixStore(_OURS, store)


# ── where the store listens ─────────────────────────────────────────────────────────────────────────────────────────


def _listener(placement: Placement) -> socket.socket:
    """A socket that listens at MASTER_ADDR alone, if that is an address of this machine that the others have, too."""
    refused: OSError | None = None
    for address in (_address_for_all(placement.address), _EVERYWHERE):
        try:
            return _listener_at(address, placement.port)
        except OSError as error:
            refused = error
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(str(error)) from error
            if error.errno != errno.EADDRNOTAVAIL:
                break
            # MASTER_ADDR is no address of this machine; a router's may lead here all the same.
    raise UsageError(
        f"rank {placement.rank} cannot listen at {_place(placement)} ({refused}); choose another port with MASTER_PORT"
    )


def _listener_at(address: str, port: int) -> socket.socket:
    if address == _EVERYWHERE and socket.has_dualstack_ipv6():
        both = socket.AF_INET6
        return socket.create_server(("", port), family=both, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)


def _address_for_all(name: str) -> str:
    """The address that a name stands for on all machines.

    A machine's own name may stand for its loopback interface there, and for an address that others reach elsewhere.
    """
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):  # it may have a name later
        return _EVERYWHERE
    return _EVERYWHERE if is_loopback(address) and not is_loopback(name) and name != "localhost" else address


# ── what went wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


def _require_known(placement: Placement) -> None:
    """Say at once that no host has the name of MASTER_ADDR; it may have it later, so this rank tries on."""
    if reason := _unknown(placement):
        print(f"microparallel: rank {placement.rank}: {reason}; still trying", file=sys.stderr, flush=True)


def _unknown(placement: Placement) -> str:
    try:
        socket.getaddrinfo(placement.address, placement.port)
    except (OSError, UnicodeError):
        return f"{socket.gethostname()} knows no host {placement.address!r} (MASTER_ADDR)"
    return ""


@contextlib.contextmanager
def explaining_errors(placement: Placement, timeout: float) -> Iterator[None]:
    """Within this block, errors of torch's while ranks meet are raised as ours, which say who waits for whom, where."""
    begun = time.monotonic()
    try:
        with TRANSLATED:
            yield
    except AddressInUse as error:
        raise UsageError(
            f"port {placement.port} on {placement.address} is in use by another program; "
            "choose a free one with MASTER_PORT (or torchrun's --master-port)"
        ) from error
    except TransportError as error:
        waited = time.monotonic() - begun
        if waited > 0.9 * timeout:
            raise CommsTimeout(f"{_who_waited(placement, timeout)}; {_why_in_vain(placement)}") from error
        raise CommsError(f"{_who_failed(placement, waited)}: {error}") from error


def _who_waited(placement: Placement, seconds: float) -> str:
    others = count(placement.world_size - 1, "rank")
    return f"rank {placement.rank} waited {seconds:g} s at {_place(placement)} for the other {others}"


def _why_in_vain(placement: Placement) -> str:
    with contextlib.suppress(Exception):  # what is known of the others is no more than a help
        if found := show_missing_ranks(placement, _LAST_LOOK):
            return found
    return "were all of them started, and can they reach that address?"


def _who_failed(placement: Placement, seconds: float) -> str:
    return (
        f"rank {placement.rank} on {socket.gethostname()} could not join the others, whom it met at "
        f"{_place(placement)}, and gave up after {seconds:.0f} s"
    )


def _place(placement: Placement) -> str:
    return f"{placement.address}:{placement.port}"


# ── who is missing ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def report_missing_ranks(placement: Placement, after: float = _REPORT_AFTER) -> Iterator[None]:
    """While this rank waits in this block for the others to join, a thread prints on stderr which are missing."""
    if placement.world_size == 1:
        yield
        return
    joined = threading.Event()
    thread = threading.Thread(
        target=_report_repeatedly, args=(placement, after, joined), name="microparallel missing ranks", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        joined.set()
        thread.join(_FAREWELL)


def _report_repeatedly(placement: Placement, pause: float, joined: threading.Event) -> None:
    begun = time.monotonic()
    while not joined.wait(pause):
        pause *= 2
        with contextlib.suppress(Exception):  # an error in here must not end the rank
            found = show_missing_ranks(placement)
            if found and not joined.is_set():
                waited = f"rank {placement.rank} has been waiting for {time.monotonic() - begun:.0f} s"
                print(f"microparallel: {waited}: {found}", file=sys.stderr, flush=True)


def show_missing_ranks(placement: Placement, patience: float = _CONNECT_TIMEOUT) -> str:
    """Which ranks have not joined yet, as a sentence; empty if none, or if a lower rank is there to say so."""
    if reason := _unknown(placement):
        return reason
    try:
        socket.create_connection((placement.address, placement.port), timeout=patience).close()
    except OSError as error:
        return _no_answer(placement, error) if placement.local_rank == 0 else ""
    store = _connect(placement, patience)
    if placement.shared_store:
        missing = missing_from_attempt(placement, store)
    else:
        missing = [rank for rank in range(placement.world_size) if not store.check([f"can/{rank}"])]
    if not missing or any(rank not in missing for rank in range(placement.rank)):
        return ""
    ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {show_ranges(missing)}"
    return f"{ranks} of {count(placement.world_size, 'rank')} did not come to {_place(placement)} yet"


def _no_answer(placement: Placement, error: OSError) -> str:
    """Whom this machine cannot reach, at which address, and how it noticed."""
    address = str(socket.getaddrinfo(placement.address, placement.port)[0][4][0])
    known_as = "" if address == placement.address else f" ({address})"
    itself = f"; {address} is {socket.gethostname()} itself" if is_loopback(address) else ""
    how = "" if isinstance(error, ConnectionRefusedError) else f" ({(error.strerror or str(error)).lower()})"
    return f"no process answers at {_place(placement)}{known_as}, where rank 0 listens{how}{itself}"
