"""Move tensors with torch.distributed: gloo (TCP) for the CPU, NCCL for GPUs.

`TorchTransport` takes contiguous tensors on a device that the backend carries; `Comms` sees to both. What torch raises
becomes an error of ours here (`translate`), and nowhere else. `make_group` makes torch's groups of some ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from microparallel.errors import (
    AddressInUse,
    CommsError,
    LinkLost,
    MicroparallelError,
    PeerGone,
    TransportError,
    TransportTimeout,
)
from microparallel.torch_private import next_group_is_called
from microparallel.transport.base import Receiving, Work

ReduceOpName = Literal["sum", "min", "max", "product"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_PROBE_TAG = 3
# NCCL runs the messages of a rank one after another, so an exchange must reach it as one batch.
_BATCHED = frozenset({"cuda"})
# What the system says of a connection whose other end has not answered for long: 15 minutes, unless it is set up
# otherwise. gloo's own timeouts are worded in another way.
_LINK_IS_DOWN = ("connection timed out", "no route to host", "network is unreachable", "host is unreachable")
_PLACE = re.compile(r"^\[\S+\.(cc|cpp|h):\d+\] ")  # in gloo's own code, where it found what it says
_STORE_PATIENCE = 1.0  # seconds that a store may take to say who was lost first: it may be behind the same link
_FIRST_LOSS = "microparallel/first-loss"


# ── torch's errors ──────────────────────────────────────────────────────────────────────────────────────────────────


def translate(error: RuntimeError) -> TransportError:
    """torch's error as one of ours.

    torch's type says which part failed: DistNetworkError a socket of the store, DistStoreError a key that no rank has
    set, DistBackendError NCCL, and a bare RuntimeError gloo. Only the first can be about an address. How it failed
    stands in the text alone: a socket that cannot listen and one that cannot connect have the same type, and so have
    gloo's timeouts and its lost connections. No other function reads an error's text.
    """
    reason = _PLACE.sub("", str(error).partition("\n")[0])
    said = reason.lower()
    if type(error) is RuntimeError and (broke := next((words for words in _LINK_IS_DOWN if words in said), None)):
        return LinkLost((), broke)
    if isinstance(error, dist.DistNetworkError) and ("eaddrinuse" in said or "address already in use" in said):
        return AddressInUse(reason)
    if "timed out" in said or "timeout" in said:
        return TransportTimeout(reason)
    return TransportError(reason)


class Translated:
    """`with` this around calls into torch.distributed: what torch raises there becomes a TransportError."""

    def __init__(self, translation: Callable[[RuntimeError], TransportError] = translate) -> None:
        self._translation = translation

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An error with a type of ours was raised by our own backend beneath torch.
        if isinstance(error, RuntimeError) and not isinstance(error, MicroparallelError):
            raise self._translation(error) from error


TRANSLATED = Translated()


# ── transfers ───────────────────────────────────────────────────────────────────────────────────────────────────────


class TorchWork:
    """A torch.distributed transfer, with the tensors it reads or writes kept alive."""

    def __init__(self, work: dist.Work | None, translated: Translated, *tensors: torch.Tensor) -> None:
        self._work = work
        self._translated = translated
        self._tensors = tensors

    def poll(self) -> bool:
        """Whether the transfer is known to be complete."""
        return self._work is None or self._work.is_completed()

    def then(self, callback: Callable[[], None]) -> None:
        """Let a thread of torch's call this when the transfer is complete; never, where torch has no such thread."""
        if self._work is not None and all(tensor.device.type == "cpu" for tensor in self._tensors):
            with contextlib.suppress(RuntimeError):  # not every backend has futures
                self._work.get_future().then(lambda _: callback())

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete (on CUDA: when the current stream may rely on it)."""
        if self._work is None:
            return
        with self._translated:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        self._work = None


class DelayedSend:
    """A send that starts when its exchange is closed."""

    def __init__(self, start: Callable[[], TorchWork]) -> None:
        self._start = start
        self._work: TorchWork | None = None

    def start(self) -> None:
        """Start it."""
        self._work = self._start()

    def poll(self) -> bool:
        """Whether it is known to be complete."""
        return self._work is not None and self._work.poll()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is complete."""
        if self._work is None:
            raise CommsError("a message of an exchange was waited for before the exchange was closed")
        self._work.wait(timeout)


class TorchExchange(Receiving):
    """Messages that NCCL runs side by side, as one batch; gloo starts each by itself, receives before sends.

    A batch completes as a whole, so it is itself the Work of each of its messages, and keeps their tensors alive.

    Over gloo two ranks have one connection. What tells a peer that it may send goes over it, too, and would wait behind
    a large message that has begun: then the two would send one after the other. So sends wait until all receives of
    the exchange are posted.
    """

    def __init__(self, transport: TorchTransport, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self._batch: list[dist.P2POp] = []
        self._works: list[TorchWork] = []
        self._sends: list[DelayedSend] = []

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Send a contiguous tensor."""
        if tensor.device.type not in self._transport.batched:
            self._sends.append(DelayedSend(functools.partial(self._transport.isend, tensor, to, self._tag)))
            return self._sends[-1]
        self._batch.append(dist.P2POp(dist.isend, tensor, group=self._transport.group, tag=self._tag, group_peer=to))
        return self

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Receive into a contiguous tensor."""
        if tensor.device.type not in self._transport.batched:
            return self._transport.irecv(tensor, source, self._tag)
        group = self._transport.group
        self._batch.append(dist.P2POp(dist.irecv, tensor, group=group, tag=self._tag, group_peer=source))
        return self

    def close(self) -> None:
        """Start the messages that have not started."""
        for send in self._sends:
            send.start()
        if self._batch:
            self._works = self._transport.start_batch(self._batch)

    def poll(self) -> bool:
        """Whether the whole batch is known to be complete."""
        return bool(self._works) and all(work.poll() for work in self._works)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the whole batch is complete (on CUDA: when the current stream may rely on it)."""
        for work in self._works:
            work.wait(timeout)


class TorchTransport:
    """One torch process group as a transport, which has collectives of its own, too.

    Ranks are numbered within the group. `carries` names the device types whose tensors need not be copied to another
    device first, `batched` those on which the messages of an exchange must start together. `places` are the hosts of
    the world's ranks, where these are known. torch knows the `world_ranks` of the groups that it has made itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | None,
        carries: frozenset[str],
        places: Mapping[int, str] | Sequence[str] = (),
        world_ranks: Sequence[int] = (),
    ) -> None:
        self.group = group
        self.carries = carries
        self.batched = _BATCHED
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.world_ranks: tuple[int, ...] = tuple(world_ranks or dist.get_process_group_ranks(group))
        self._store = store
        self._places = places
        self._subgroups: list[TorchTransport] = []

    @property
    def _translated(self) -> Translated:
        return Translated(self._failure)  # new each time: kept, it would keep the group alive

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> TorchWork:
        """Start sending a contiguous tensor."""
        with self._translated:
            work = dist.isend(tensor, group=self.group, group_dst=to, tag=tag)
        return self._started(work, tensor)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> TorchWork:
        """Start receiving into a contiguous tensor."""
        with self._translated:
            work = dist.irecv(tensor, group=self.group, group_src=source, tag=tag)
        return self._started(work, tensor)

    def _started(self, work: dist.Work | None, tensor: torch.Tensor) -> TorchWork:
        """A message that torch has started."""
        return TorchWork(work, self._translated, tensor)

    def exchange(self, tag: int = 0) -> TorchExchange:
        """Open an exchange, to which messages are added."""
        return TorchExchange(self, tag)

    def start_batch(self, batch: list[dist.P2POp]) -> list[TorchWork]:
        """Start messages together."""
        tensors = [message.tensor for message in batch]
        with self._translated:
            works = dist.batch_isend_irecv(batch)
        return [TorchWork(work, self._translated, *tensors) for work in works]

    def broadcast(self, tensor: torch.Tensor, source: int) -> TorchWork:
        """Start copying the source's tensor over the tensor of every other rank."""
        with self._translated:
            work = dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)
        return TorchWork(work, self._translated, tensor)

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, source: int) -> TorchWork:
        """Start sending the source's inputs, one to each rank, all of one size."""
        with self._translated:
            work = dist.scatter(output, inputs, group=self.group, group_src=source, async_op=True)
        return TorchWork(work, self._translated, output, *(inputs or ()))

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, to: int) -> TorchWork:
        """Start collecting every rank's tensor on one rank."""
        with self._translated:
            work = dist.gather(tensor, outputs, group=self.group, group_dst=to, async_op=True)
        return TorchWork(work, self._translated, tensor, *(outputs or ()))

    def all_gather(
        self,
        tensor: torch.Tensor,
        outputs: list[torch.Tensor],
        *,
        together: bool = False,  # noqa: ARG002
    ) -> TorchWork:
        """Start collecting every rank's tensor on every rank; torch finds out itself whether outputs lie together."""
        with self._translated:
            work = dist.all_gather(outputs, tensor, group=self.group, async_op=True)
        return TorchWork(work, self._translated, tensor, *outputs)

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> TorchWork:
        """Start combining every rank's tensor on one rank; what the others' tensors hold afterwards is undefined."""
        with self._translated:
            work = dist.reduce(tensor, op=_REDUCE_OPS[op], group=self.group, group_dst=to, async_op=True)
        return TorchWork(work, self._translated, tensor)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: str,
        *,
        together: bool = False,  # noqa: ARG002
    ) -> TorchWork:
        """Start combining the ranks' inputs position by position; rank r gets position r."""
        with self._translated:
            work = dist.reduce_scatter(output, inputs, op=_REDUCE_OPS[op], group=self.group, async_op=True)
        return TorchWork(work, self._translated, output, *inputs)

    def native_all_reduce(self, tensor: torch.Tensor, op: str) -> TorchWork:
        """Start combining every rank's tensor, in place, on every rank."""
        with self._translated:
            work = dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=self.group, async_op=True)
        return TorchWork(work, self._translated, tensor)

    def subgroup(self, ranks: list[int]) -> Self | None:
        """Make a group of some of these ranks; only they need to call this. None on a rank that is not among them."""
        if self.rank not in ranks:
            return None
        world_ranks = [self.world_ranks[rank] for rank in ranks]
        group = make_group(self.group, world_ranks)
        subgroup = type(self)(group, self._store, self.carries, places=self._places)
        self._subgroups.append(subgroup)
        return subgroup

    def _failure(self, error: RuntimeError) -> TransportError:
        """torch's error as one of ours. Whether a peer is gone is read from its connection, not from the text."""
        failure = translate(error)
        if isinstance(failure, LinkLost):
            lost = self._first_loss(self._out_of_reach())
            return LinkLost(lost, f"{self._where(lost)}{failure}") if lost else TransportError(str(failure))
        if type(failure) is TransportError and (lost := self._lost_peers()):
            return PeerGone(lost)
        return failure

    def _lost_peers(self) -> list[int]:
        """Find the ranks whose connection is closed, after a call has failed.

        The first rank to notice a loss writes the lost ranks into the store. Later ones also see connections that were
        closed by ranks which merely gave up after that loss, so they believe the store rather than their own probe.
        """
        return self._first_loss([peer for peer in range(self.world_size) if not self._answers(peer)])

    def _out_of_reach(self) -> list[int]:
        """The ranks of the hosts to which a connection broke; a rank of this host that has closed its own is none."""
        silent = [peer for peer in range(self.world_size) if not self._answers(peer)]
        here = self._place(self.rank)
        gone = {self._place(peer) for peer in silent} - {here, ""}
        return [peer for peer in range(self.world_size) if self._place(peer) in gone] or silent

    def _place(self, rank: int) -> str:
        return self._places[self.world_ranks[rank]] if self._places else ""

    def _where(self, ranks: Sequence[int]) -> str:
        places = dict.fromkeys(place for rank in ranks if (place := self._place(rank)))
        return f"on {', '.join(places)}: " if places else ""

    def _first_loss(self, lost: list[int]) -> list[int]:
        """The ranks that were lost first, as the store says, given those that this rank finds lost."""
        store = self._store
        if not lost or store is None:
            return lost
        mine = json.dumps([self.world_ranks[peer] for peer in lost])
        # The store may have died with its rank, or be out of reach; then our own probe is the best there is.
        with contextlib.suppress(RuntimeError, ValueError):
            answer = _within(_STORE_PATIENCE, lambda: store.compare_set(_FIRST_LOSS, "", mine))
            first = json.loads(answer) if answer else []
            known = [self.world_ranks.index(rank) for rank in first if rank in self.world_ranks]
            return known or lost
        return lost

    def _answers(self, peer: int) -> bool:
        if peer == self.rank:
            return True
        # gloo refuses at once to send on a connection that has been closed. No rank receives the probe: after a failed
        # call the group is not used again.
        try:
            dist.isend(torch.zeros(1, device="cpu"), group=self.group, group_dst=peer, tag=_PROBE_TAG)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self.group)
        self.forget()

    def forget(self) -> None:
        """Drop the references to the group, and to the groups made from it.

        A group's threads end with the last reference to it. One that is still held when Python ends is torn down too
        late, and may take the process with it.
        """
        for subgroup in self._subgroups:
            subgroup.forget()
        self._subgroups.clear()
        self._store = None
        self.__dict__.pop("group", None)


def _within(seconds: float, ask: Callable[[], bytes]) -> bytes | None:
    """The answer to a question, if it comes in time; the thread that asks is left behind otherwise."""
    answers: list[bytes] = []

    def keep_answer() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=keep_answer, name="microparallel first loss", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


# ── groups of some ranks ────────────────────────────────────────────────────────────────────────────────────────────


class _Family:
    """The name of a group, and how many groups of the same members were made inside it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: Counter[tuple[int, ...]] = Counter()


_families: WeakKeyDictionary[dist.ProcessGroup, _Family] = WeakKeyDictionary()


def make_group(parent: dist.ProcessGroup, world_ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of some of the parent's ranks. All of these ranks call this, and no others; numbers are the world's.

    torch, too, can make a group with its members alone. But torch names the group after how many groups each member is
    in, and members that are in different numbers of groups then wait for each other for ever. Here a group is named
    after its members, and after how many groups of the same members its parent has made before: every member computes
    that name by itself.
    """
    members = tuple(world_ranks)
    family = _families.setdefault(parent, _Family("microparallel"))
    family.made[members] += 1
    name = f"{family.name}/{'-'.join(map(str, members))}#{family.made[members]}"
    with next_group_is_called(name):
        group: dist.ProcessGroup = dist.new_group(list(members), backend=backend, use_local_synchronization=True)
    _families[group] = _Family(name)
    return group
