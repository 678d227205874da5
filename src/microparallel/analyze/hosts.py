"""Which hosts there are, which of them this one is, and how they meet: `microparallel doctor --between`.

```
    doctor --between alpha,beta,gamma     on each of them: the first one serves a store, the others come to it
    torchrun … doctor --between ranks     the hosts are those of the ranks, which meet as they always do
```
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from microparallel.errors import AddressInUse, MicroparallelError, TransportError, UsageError
from microparallel.text import show_some
from microparallel.topology import Placement
from microparallel.transport.interfaces import interfaces, is_loopback
from microparallel.transport.torch_distributed import TRANSLATED
from microparallel.world.meeting import explaining_errors, open_store, report_missing_ranks
from microparallel.world.roll_call import places, roll_call
from microparallel.world.way import why

Progress = Callable[[str], None]
_TRY = 3.0  # seconds that one attempt to reach the first host may take
_PAUSE = 0.2
_SLACK = 10.0  # seconds that the first host may take to say who came, when it has waited long enough
ANSWER_TIMEOUT = 60.0  # seconds that a host may take for what it does next
_GOODBYE = 5.0  # seconds that the first host stays for the others in the end


@dataclass(frozen=True)
class Party:
    """The hosts that came, as this process sees them.

    Attributes:
        names: of those that came, in the order of their numbers.
        number: this host's; None for a rank whose host is spoken for by another one.
        placement: this process among those that speak for a host.
        store: where they leave messages for each other.
        place: where they met.
        missing: the names of those that did not come.
        waited: how many seconds were waited for those.
    """

    names: Sequence[str]
    number: int | None
    placement: Placement
    store: dist.Store
    place: str
    missing: Sequence[str] = field(default=())
    waited: float = 0.0


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_hosts(text: str, flag: str = "--between") -> list[str]:
    """The names in `alpha,beta,gamma`."""
    names = [name.strip() for name in text.split(",")]
    given = f"{flag} {text}"
    if "" in names:
        raise UsageError(f"{given}: there is a comma too many")
    if len(names) < 2:
        raise UsageError(f"{given}: a link has two ends; name at least two hosts, as in {flag} {names[0]},HOST2")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{given}: {name} is named more than once")
        if name == "localhost" or is_loopback(name):
            raise UsageError(f"{given}: {name} is every host itself; give the name by which the others reach it")
    return names


def number_of_this_host(names: Sequence[str], flag: str = "--between") -> int:
    """Which of the names is this host's: its own name, or one that stands for an address that it has."""
    itself = socket.gethostname()
    given = f"{flag} {','.join(names)}"
    mine = [number for number, name in enumerate(names) if _is_here(name, itself, given)]
    if not mine:
        addresses = [one for _, one in interfaces() if not is_loopback(one) and not one.startswith("fe80:")]
        known = f" ({show_some(addresses)})" if addresses else ""
        raise UsageError(f"{given}: this host, {itself}{known}, is none of these; run it on those, or name this one")
    if len(mine) > 1:
        first, second = (names[number] for number in mine[:2])
        raise UsageError(f"{given}: {first} and {second} are both this host, {itself}; name each host once")
    return mine[0]


def _is_here(name: str, itself: str, given: str) -> bool:
    # A short name and a long one are the same host; two long ones may not be.
    if name == itself or (("." in name) != ("." in itself) and name.partition(".")[0] == itself.partition(".")[0]):
        return True
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{given}: {itself} knows no host {name!r} ({error}); give an address, or a name that all hosts know"
        ) from None
    here = {address for _, address in interfaces()}
    return any(address in here or is_loopback(address) for address in found)


# ── meeting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def meet(names: Sequence[str], number: int, port: int, wait: float, progress: Progress) -> Iterator[Party]:
    """Meet the other hosts at the first one; those that have not come after `wait` seconds are left out."""
    placement = Placement(number, len(names), 0, 1, names[0], port, hosts_store=number == 0)
    place = f"{names[0]}:{port}"
    if number:
        _reach_first(names, number, port, wait, progress)
    try:
        with TRANSLATED:
            store = open_store(placement, wait) if number == 0 else _store_of_first(placement, wait)
            store.set(f"here/{number}", "")
            if number == 0:
                _tell_who_came(store, names, wait, progress)
            store.wait(["came"], timedelta(seconds=wait + _SLACK))
            came, waited = json.loads(store.get("came"))
    except AddressInUse:
        raise UsageError(f"--port {port}: another program on {names[0]} listens there; choose another port") from None
    except TransportError as error:
        raise MicroparallelError(f"{names[number]} met {names[0]} at port {port}, and lost it: {error}") from None
    if number not in came:
        raise MicroparallelError(
            f"{names[number]} came too late: {names[0]} had waited for {waited:g} s, and went on; start all hosts "
            "within that time, or give them longer with --wait"
        )
    missing = [name for other, name in enumerate(names) if other not in came]
    here = replace(placement, rank=came.index(number), world_size=len(came))
    inner = _store_of_hosts(store)
    yield Party([names[one] for one in came], here.rank, here, inner, place, missing, waited)
    _let_all_end(inner, here)


@contextmanager
def meet_ranks(placement: Placement, wait: float) -> Iterator[Party]:
    """Meet the hosts of the ranks that torchrun or Slurm has started; the lowest rank of each speaks for it."""
    with explaining_errors(placement, wait), report_missing_ranks(placement):
        store = open_store(placement, wait)
        answers = roll_call(placement, store, nccl=False, shm=False)
    named = places(answers)
    speakers = sorted({one.machine for one in answers})
    number = speakers.index(placement.rank) if placement.rank in speakers else None
    here = replace(placement, rank=number or 0, world_size=len(speakers), local_rank=0, local_world_size=1)
    inner = _store_of_hosts(store)
    place = f"{placement.address}:{placement.port}"
    yield Party([named[rank] for rank in speakers], number, here, inner, place)
    _let_all_end(inner, placement)


def _store_of_hosts(store: dist.Store) -> dist.Store:
    inner = dist.PrefixStore("between", store)
    inner.set_timeout(timedelta(seconds=ANSWER_TIMEOUT))
    return inner


def _reach_first(names: Sequence[str], number: int, port: int, wait: float, progress: Progress) -> None:
    """Try until the first host answers; it may be started later."""
    first, itself = names[0], names[number]
    deadline = time.monotonic() + wait
    while True:
        try:
            socket.create_connection((first, port), timeout=min(_TRY, max(0.1, wait))).close()
        except OSError as error:
            reason, refused = why(error, _TRY), isinstance(error, ConnectionRefusedError)
        else:
            return
        progress(f"{itself} waits for {first} at port {port} ({reason})")
        if time.monotonic() > deadline:
            address = socket.getaddrinfo(first, port)[0][4][0]
            known_as = "" if address == first else f" ({address})"
            help_ = (
                f"was the same command started on {first}?"
                if refused
                else f"is {first} up, and does a firewall let this port through? --port chooses another one"
            )
            raise MicroparallelError(
                f"{itself} could not reach {first}{known_as} at port {port} within {wait:g} s: {reason}; {help_}"
            )
        time.sleep(_PAUSE)


def _store_of_first(placement: Placement, wait: float) -> dist.Store:
    """Connect to the first host's store, in a thread of its own.

    torch would wait for ever for a word from a program that listens at that port, and never speaks.
    """
    opened: list[dist.Store | BaseException] = []

    def open_it() -> None:
        try:
            opened.append(open_store(placement, wait))
        except BaseException as error:  # is raised where it is waited for
            opened.append(error)

    thread = threading.Thread(target=open_it, name="microparallel store", daemon=True)
    thread.start()
    thread.join(max(_TRY, wait))
    if not opened:
        raise MicroparallelError(
            f"what listens at {placement.address}, port {placement.port}, does not answer: it may be another program; "
            "choose another port with --port"
        )
    if isinstance(opened[0], BaseException):
        raise opened[0]
    return opened[0]


def _tell_who_came(store: dist.Store, names: Sequence[str], wait: float, progress: Progress) -> None:
    """On the first host: wait until all are here or the time is up, and tell them who is."""
    deadline = time.monotonic() + wait
    while missing := [number for number in range(len(names)) if not store.check([f"here/{number}"])]:
        progress(f"{names[0]} waits for {', '.join(names[number] for number in missing)}")
        if time.monotonic() > deadline:
            break
        time.sleep(_PAUSE)
    came = [number for number in range(len(names)) if number not in missing]
    store.set("came", json.dumps([came, wait]))


def _let_all_end(store: dist.Store, here: Placement) -> None:
    """Let the one that serves the store stay until all have read what they need; but not for long."""
    try:
        with TRANSLATED:
            store.set(f"told/{here.rank}", "")
            if here.hosts_store:
                store.wait([f"told/{other}" for other in range(here.world_size)], timedelta(seconds=_GOODBYE))
    except TransportError:
        pass  # it has all it needs, and who has not says so
