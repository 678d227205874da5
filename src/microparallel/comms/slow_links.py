"""Slow links on a fast machine, to see what they do to a run: the simulator's links, in real time.

Every message, and every message of every collective, goes over these links. A transfer begins when the message has been
sent, its receive has been posted and the sender's port is free; it holds the port for latency + bytes × seconds per
byte, and arrives then. Each message takes this way:

```
receiver   posts its receive, sends notice ──┐                               ┌── the message is there
sender     isend … a wire waits for that ────┴── holds the port, then sends ─┘
```

A wire is a thread that waits for the receiver, one for each peer and tag. The port belongs to the rank: its wires, and
those of its smaller groups, hold it one after another.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import cast

import torch

from microparallel.comms.calls import HEADER_TAG
from microparallel.comms.comms import Comms
from microparallel.comms.group import Group
from microparallel.comms.message_group import MessageGroup, over
from microparallel.errors import CommsError, TransportTimeout
from microparallel.topology import Link
from microparallel.transport.base import COMPLETE, Exchange, Receiving, Work
from microparallel.transport.in_process import Pollable

Links = Mapping[frozenset[int], Link]

_POSTED = 64  # added to a message's tag: the tag of its receiver's notice that the receive is posted
# Of two receives that are posted at the same time, the sender gets one notice first. So a message lets another one go
# first that was sent before it and becomes ready in this part of its own time.
_AT_ONCE = 0.1
_LINGER = 1.0  # seconds in which a receive may still be posted when the sender closes


def slow_down(comms: Comms, links: Links) -> Comms:
    """The same ranks, with slow links between some of them.

    Collectives run by the algorithms by which they would run without: only time changes. (Shared memory cuts a tensor
    of more than 4 MiB into blocks, and adds each by itself. Here it is one program, and three ranks or more may round
    differently.) Ranks that make different calls are found in checked mode only. Close either of the two to end the
    threads; what was sent arrives before.

    Args:
        comms: the ranks.
        links: by the two ranks of the world that each connects, both ways; the same on every rank. A link may become
            another one while nothing is sent; which ranks are connected stays as it is.
    """
    return over(comms, SlowGroup(comms._group, links, Port()))


def slow_network(comms: Comms, latency: float) -> Comms:
    """The same ranks, with every message taking `latency` seconds: see `slow_down`."""
    ranks = comms.world_ranks
    return slow_down(comms, {frozenset(ends): Link(latency) for ends in itertools.combinations(ranks, 2)})


class SlowGroup(MessageGroup):
    """A group whose messages go over slow links."""

    def __init__(self, group: Group, links: Links, port: Port) -> None:
        self._slow = SlowLinks(group, links, port)
        super().__init__(group, self._slow, group.transport_name)
        self._links = links
        self._port = port

    def _like(self, group: Group) -> SlowGroup:
        return SlowGroup(group, self._links, self._port)

    def stop(self) -> None:
        """Send what is left, and let all threads end; the group beneath stays."""
        self._slow.stop()
        super().stop()


class SlowLinks:
    """A group's messages as a transport, over slow links.

    A rank that has no slow link sends as it always did: nothing ever holds its port.
    """

    def __init__(self, group: Group, links: Links, port: Port) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._links = links
        self._port = port
        self._with_slow_links = frozenset(rank for ends in links for rank in ends)
        self._wires: dict[tuple[int, int], Wire] = {}
        self._starting = threading.Lock()  # held by a thread that looks for a wire
        self._stopped = False

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending; over slow links a copy is sent, so that the sender waits no longer than without them."""
        if not self._takes_time(self.rank, tag):
            return self._group.isend(tensor, to, tag)
        self._send(tensor.clone(), to, tag)
        return COMPLETE

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Post a receive."""
        if not self._takes_time(source, tag):
            return self._group.irecv(tensor, source, tag)
        return SlowReceive(self._group, tensor, source, tag, self._seconds(source, self.rank, tensor))

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange; its messages start at once, and need no copy."""
        return _SlowExchange(self, tag)

    def isend_in_place(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Start sending a tensor that its owner does not change until the send has been waited for."""
        return self._send(tensor, to, tag) if self._takes_time(self.rank, tag) else self._group.isend(tensor, to, tag)

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> SlowSend:
        with self._starting:
            if self._stopped:
                raise CommsError("the group was closed before this message could leave")
            if (to, tag) not in self._wires:
                self._wires[to, tag] = Wire(self._group, self._port, to, tag)
            wire = self._wires[to, tag]
        return wire.send(tensor, self._seconds(self.rank, to, tensor))

    def _takes_time(self, sender: int, tag: int) -> bool:
        """Whether a sender's messages wait for its port; the headers of checked mode never do."""
        return self._group.world_ranks[sender] in self._with_slow_links and tag != HEADER_TAG

    def _seconds(self, sender: int, receiver: int, tensor: torch.Tensor) -> float:
        ends = frozenset((self._group.world_ranks[sender], self._group.world_ranks[receiver]))
        return self._links[ends].seconds(tensor.nbytes) if ends in self._links else 0.0

    def stop(self) -> None:
        """Send what is left, and let the threads end."""
        with self._starting:
            self._stopped = True
            wires, self._wires = list(self._wires.values()), {}
        for wire in wires:
            wire.close()


class _SlowExchange(Receiving):
    def __init__(self, links: SlowLinks, tag: int) -> None:
        self._links = links
        self._tag = tag

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        return self._links.isend_in_place(tensor, to, self._tag)

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        return self._links.irecv(tensor, source, self._tag)

    def close(self) -> None:
        """Nothing to do: everything has started already."""


class SlowReceive:
    """A receive that is posted, and a notice of that to its sender."""

    def __init__(self, group: Group, tensor: torch.Tensor, source: int, tag: int, seconds: float) -> None:
        self._work = group.irecv(tensor, source, tag)
        self._notice = group.isend(torch.zeros(1, dtype=torch.uint8, device="cpu"), source, tag + _POSTED)
        self._seconds = seconds
        self.arrived = 0.0  # when its transfer began, by time.perf_counter: what was before is waiting

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the tensor."""
        self._work.wait(timeout)
        self._notice.wait(timeout)
        self.arrived = self.arrived or time.perf_counter() - self._seconds


class SlowSend:
    """A message on its way: complete when it has held the port for its time and has been received."""

    def __init__(self, tensor: torch.Tensor, to: int, number: int, seconds: float) -> None:
        self.tensor = tensor
        self.number = number  # among those of its rank, in the order in which they were sent
        self.seconds = seconds  # for which it holds the port
        self.ready = 0.0  # when it could begin, by time.monotonic, if the port was free
        self._to = to
        self._through = threading.Event()
        self._sent: Work = COMPLETE
        self._error: Exception | None = None

    def let_go(self, sent: Work) -> None:
        """Called by the wire's thread: the message has held the port, and the group beneath sends it."""
        self._sent = sent
        self._through.set()

    def fail(self, error: Exception) -> None:
        """Called by the wire's thread: the message will never leave."""
        self._error = error
        self._through.set()

    def poll(self) -> bool:
        """Whether it is known to be complete; one that failed never is, so that its sender waits and gets the error."""
        return self._through.is_set() and self._error is None and cast("Pollable", self._sent).poll()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is complete; without a timeout, the group's own applies."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._through.wait(timeout):
            raise TransportTimeout(f"timed out waiting for rank {self._to}")
        if self._error is not None:
            raise self._error
        self._sent.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class Port:
    """A rank's port: one message at a time holds it, in the order in which they could begin."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unposted: set[int] = set()  # the numbers of messages whose receives have not been posted
        self._waiting: list[SlowSend] = []  # messages that could begin
        self._busy = False
        self._free = 0.0  # when the last message's time was over, by time.monotonic
        self._numbers = itertools.count()

    def number(self) -> int:
        """Give the next message its number."""
        with self._changed:
            number = next(self._numbers)
            self._unposted.add(number)
        return number

    def forget(self, message: SlowSend) -> None:
        """Forget a message that will never begin."""
        with self._changed:
            self._unposted.discard(message.number)

    def let_through(self, message: SlowSend) -> None:
        """Hold the port for a message's time, and return; called by its wire's thread when the message can begin.

        Times are counted from when a message could begin, so that a thread which wakes up late adds nothing to them.
        """
        message.ready = time.monotonic()
        with self._changed:
            self._unposted.discard(message.number)
            self._waiting.append(message)
            self._changed.notify_all()
            while not self._begins(message):
                pass
            self._waiting.remove(message)
            self._busy = True
            end = max(message.ready, self._free) + message.seconds
        time.sleep(max(0.0, end - time.monotonic()))
        with self._changed:
            self._busy, self._free = False, end
            self._changed.notify_all()

    def _begins(self, message: SlowSend) -> bool:
        """Whether this message is next; otherwise wait for a change. The calling thread holds the lock."""
        if not self._busy:
            first = min(self._waiting, key=lambda other: other.ready)
            decided = first.ready + _AT_ONCE * first.seconds
            at_once = [other for other in self._waiting if other.ready <= decided]
            chosen = min(at_once, key=lambda other: other.number)
            left = decided - time.monotonic()
            if left > 0 and any(number < chosen.number for number in self._unposted):
                self._changed.wait(left)
                return False
            if chosen is message:
                return True
        self._changed.wait()
        return False


class Wire:
    """One rank's messages to another under one tag: a thread waits for the receiver of each, and then for the port."""

    def __init__(self, group: Group, port: Port, to: int, tag: int) -> None:
        self._group = group
        self._port = port
        self._to = to
        self._tag = tag
        self._notice = torch.zeros(1, dtype=torch.uint8, device="cpu")  # of the receiver; its content does not matter
        self._messages: SimpleQueue[SlowSend | None] = SimpleQueue()
        self._sending = threading.Lock()  # messages stand in the queue in the order of their numbers
        self._unwanted = False  # whether the first message waits for its receive to be posted
        self._thread = threading.Thread(target=self._run, name=f"slow link to rank {to}", daemon=True)
        self._thread.start()

    def send(self, tensor: torch.Tensor, seconds: float) -> SlowSend:
        """Queue a tensor, which its owner does not change until it has been sent."""
        with self._sending:
            message = SlowSend(tensor, self._to, self._port.number(), seconds)
            self._messages.put(message)
        return message

    def _run(self) -> None:
        failure: Exception | None = None
        while (message := self._messages.get()) is not None:
            if failure is None:
                try:
                    self._pass_on(message)
                except Exception as error:  # raised where the sender waits for this message, or for a later one
                    failure = error
            if failure is not None:
                self._port.forget(message)
                message.fail(failure)

    def _pass_on(self, message: SlowSend) -> None:
        self._unwanted = True
        self._group.irecv(self._notice, self._to, self._tag + _POSTED).wait()
        self._unwanted = False
        self._port.let_through(message)
        message.let_go(self._group.isend(message.tensor, self._to, self._tag))

    def close(self) -> None:
        """End the thread when everything has left; a message whose receive is never posted is dropped."""
        self._messages.put(None)
        self._thread.join(_LINGER)
        while self._thread.is_alive() and not self._unwanted:
            self._thread.join(_LINGER)
