"""The ranks of an exam: threads of one process, whose sends wait until they are asked for.

The Comms that a learner's code is given is a real one; what carries its messages is here. A send is complete when its
receive has begun, as that of every large message is: what would hang one day with a larger model hangs here. All
waiting goes through one lock, so that it is known when nobody can go on, at once and without a clock.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch

from microparallel.comms import Comms
from microparallel.comms.group import Group
from microparallel.comms.interpreter import COMBINE
from microparallel.comms.wire import as_bytes
from microparallel.errors import Mismatch
from microparallel.flight import Flight
from microparallel.learn.guards import trusted
from microparallel.learn.log import RECEIVES, SENDS, Called, Log, Row, calls
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.learn.words import shown
from microparallel.transport.base import Work
from microparallel.verifier import Wait

POINT_TO_POINT = ("send_tensor", "recv_tensor", "isend", "irecv")
Message = tuple[Called, torch.Tensor]  # as it was when it was sent


class Over(BaseException):
    """The exam is over for this rank, since another one has failed; no `except Exception` of a learner's stops it."""


class NoTensor(Wrong):
    """A call that was given something else than a tensor."""

    def __init__(self, line: int, call: str, value: object) -> None:
        no_gradient = "None: a gradient is None until backward has made it"
        found = no_gradient if value is None else f"{shown(value)}, and no tensor"
        super().__init__(f"line {line}: {call} was given {found}")
        self.value = value


class World:
    """What the ranks share: messages, calls of all, and who waits for what. Everything is guarded by one lock."""

    def __init__(self, ranks: int) -> None:
        self.log = Log(ranks)
        self.sent: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by sender and receiver
        self.asked_for: dict[tuple[int, int], int] = defaultdict(int)  # how many receives have begun
        self.calls: dict[int, dict[int, Message]] = defaultdict(dict)  # by number of the call: every rank's tensor
        self.results: dict[int, Any] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.stuck: list[Wait] = []
        self._ranks = ranks
        self._waiting: dict[int, tuple[Called, Callable[[], int | None]]] = {}
        self._changed = threading.Condition()

    def do(self, change: Callable[[], Any]) -> Any:
        """Change something that others may wait for."""
        with self._changed:
            self._changed.notify_all()
            return change()

    def wait(self, call: Called, missing: Callable[[], int | None]) -> None:
        """Wait, in a rank's thread, until no rank is missing."""
        with self._changed:
            self._waiting[call.rank] = (call, missing)
            self._look_around()
            while missing() is not None:
                if self.failure is not None or self.stuck:
                    raise Over
                self._changed.wait()
            del self._waiting[call.rank]

    def ends(self, rank: int, result: Any) -> None:
        """A rank has come to its end."""
        with self._changed:
            self.results[rank] = result
            self._look_around()

    def fails(self, rank: int, error: BaseException) -> None:
        """A rank has raised; the first one counts."""
        with self._changed:
            self.failure = self.failure or (rank, error)
            self._changed.notify_all()

    def _look_around(self) -> None:
        """See whether everybody waits, and nobody can go on."""
        on = {rank: missing() for rank, (_, missing) in self._waiting.items()}
        if len(on) + len(self.results) == self._ranks and None not in on.values():
            self.stuck = [self._wait(rank, cast("int", on[rank])) for rank in sorted(on)]
        self._changed.notify_all()

    def _wait(self, rank: int, on: int) -> Wait:
        call = self._waiting[rank][0]
        place = next(at for at, moment in enumerate(self.log.rows[rank]) if moment.op is call)
        return Wait(rank, place, call.call, on)

    def join(self, timeout: float) -> bool:
        """Wait, in the main thread, until all have come to their end, one has failed, or nobody can go on."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self.results) == self._ranks or self.failure is not None or bool(self.stuck), timeout
            )


class _Transfer:
    """Something under way: `check` is done before it is waited for, `finish` when nobody is missing any more."""

    def __init__(
        self, world: World, call: Called, check: Callable[[], None], missing: Callable[[], int | None], finish: Any
    ) -> None:
        self._world, self._call, self._check, self._missing, self._finish = world, call, check, missing, finish

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Come back when it is complete, however long that takes: whether it ever can be is known."""
        self._check()
        self._world.log.waits(self._call, self._call.peer)
        self._world.wait(self._call, self._missing)
        self._finish()
        self._world.log.ends(self._call)


class ThreadGroup:
    """One rank's place among threads: a `Group`, without the calls that no exercise allows."""

    carries = frozenset({"cpu"})

    def __init__(self, rank: int, ranks: int, world: World) -> None:
        self.rank, self.world_size, self.world_ranks = rank, ranks, tuple(range(ranks))
        self.flight = Flight(None)
        self.log = self.flight.group(self.world_ranks)
        self.world = world
        self.call: Called  # the one that is being made
        self._joined = 0

    def announce(self, call: str) -> None:
        """Remember what both ends of a message, or all ranks, must agree about."""
        self.call.agreement = call

    def run_in_background(self) -> None:
        """Nothing needs help: what is under way is complete when it is waited for."""

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:  # noqa: ARG002
        """Start sending; complete when the receiver has asked for it."""
        call, before, channel = self.call, tensor.clone(), self.world.sent[self.rank, to]
        number = self.world.do(lambda: channel.append((call, before)) or len(channel))

        def check() -> None:
            if not torch.equal(tensor, before):
                raise Wrong(
                    f"the tensor that rank {self.rank} began to send in line {call.line} was changed before the send "
                    "was waited for: the receiver may get the new numbers; wait first, or send a clone"
                )

        def missing() -> int | None:
            return None if self.world.asked_for[self.rank, to] >= number else to

        return _Transfer(self.world, call, check, missing, lambda: None)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:  # noqa: ARG002
        """Start receiving; complete when that many have been sent."""
        call, channel = self.call, (source, self.rank)

        def ask() -> int:
            self.world.asked_for[channel] += 1
            return self.world.asked_for[channel]

        number = self.world.do(ask)

        def missing() -> int | None:
            return None if len(self.world.sent[channel]) >= number else source

        def finish() -> None:
            sent, content = self.world.sent[channel][number - 1]
            _require_alike(sent, call)
            tensor.copy_(content)
            call.content = sent.content

        return _Transfer(self.world, call, lambda: None, missing, finish)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying the source's tensor over everybody else's."""
        return self._together(tensor, lambda everybody: tensor.copy_(everybody[source]))

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = "auto") -> Work:  # noqa: ARG002
        """Start combining everybody's tensor, in the order of ranks: the algorithm would only round otherwise.

        The tensor changes when it is waited for: so whoever reads too early always sees the old numbers, and whoever
        writes too early is always found.
        """

        def combine(everybody: list[torch.Tensor]) -> None:
            tensor.copy_(everybody[0])
            for other in everybody[1:]:
                COMBINE[op](tensor, other)

        return self._together(tensor, combine)

    def _together(self, tensor: torch.Tensor, finish: Callable[[list[torch.Tensor]], Any]) -> Work:
        call, before, present = self.call, tensor.clone(), self.world.calls[self._joined]
        self._joined += 1
        self.world.do(lambda: present.setdefault(self.rank, (call, before)))

        def check() -> None:
            if not torch.equal(as_bytes(tensor), as_bytes(before)):  # what is not a number (nan) is the same as itself
                raise Wrong(
                    f"the tensor that rank {self.rank} began to all-reduce in line {call.line} was changed before the "
                    "request was waited for: who writes into it meanwhile spoils the sum; wait first"
                )

        def missing() -> int | None:
            return next((rank for rank in self.world_ranks if rank not in present), None)

        def complete() -> None:
            for rank, (other, _) in present.items():
                if other.agreement != call.agreement:
                    raise Mismatch(f"rank {rank} calls {other.agreement}, and rank {self.rank} {call.agreement}")
            finish([present[rank][1] for rank in self.world_ranks])

        return _Transfer(self.world, call, check, missing, complete)


def _require_alike(sent: Called, received: Called) -> None:
    if sent.agreement == received.agreement:
        return
    advice = (
        "a receive expects float32 unless it is told the dtype"
        if sent.agreement.partition("[")[0] != received.agreement.partition("[")[0]
        else "a receive must be told the shape of what was sent"
    )
    raise Mismatch(
        f"rank {sent.rank} sent {sent.agreement} in line {sent.line}, and rank {received.rank} asks for "
        f"{received.agreement}\n  {advice}"
    )


class ExamComms(Comms):
    """The Comms that a learner's code is given: a real one that refuses what is not for the exercise, and says where.

    Attributes:
        refused: calls that were made all the same.
        line_of_ranks: whether only neighbours may talk to each other, as in a pipeline.
        row: what this rank has done.
    """

    def __init__(self, group: ThreadGroup, file: str, allowed: Sequence[str]) -> None:
        super().__init__(cast("Group", group), device=torch.device("cpu"), local_rank=group.rank)
        self.refused: list[str] = []
        self.line_of_ranks = False
        self.log: Log = group.world.log
        self.row: Row = self.log.rows[group.rank]
        self._group, self._file, self._allowed = group, file, allowed
        self._inside = False  # a call that was begun makes others

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"comms has no {name!r}; it offers {', '.join(self._allowed)}")

    def sent(self) -> list[Called]:
        """Everything this rank has sent."""
        return calls(self.row, *SENDS)

    def received(self) -> list[Called]:
        """Every receive that this rank has begun."""
        return calls(self.row, *RECEIVES)

    def begin(self, name: str, arguments: dict[str, Any]) -> Called:
        """Refuse a call, or write it down."""
        line = self._line()
        if name not in self._allowed:
            offers = ", ".join(f"comms.{one}" for one in self._allowed) or "nothing of comms"
            self.refused.append(f"line {line}: comms.{name} is not for this exercise; write it with {offers}")
            raise NotAllowed(self.refused[-1])
        call = Called(name, self.rank, line, asynchronous=arguments.get("async_op", False))
        if "tensor" in arguments:
            tensor = arguments["tensor"]
            if not isinstance(tensor, torch.Tensor):
                raise NoTensor(line, name, tensor)
            call.bytes, call.shape, call.address = tensor.nbytes, tuple(tensor.shape), tensor.data_ptr()
            call.content = tensor.detach().clone()
        for argument in ("dest", "src"):
            if name in POINT_TO_POINT and argument in arguments:
                call.peer = arguments[argument]
                self._require_other(call, argument)
        self._group.call = call
        self.log.begins(call, self.rank)
        return call

    def _require_other(self, call: Called, argument: str) -> None:
        peer, rank = call.peer, self.rank
        if peer == rank:
            raise Wrong(
                f"line {call.line}: rank {peer} calls {call.call} with {argument}={peer}, which is itself: what a rank "
                "has, it need not send; leave yourself out"
            )
        if self.line_of_ranks and not (peer in (rank - 1, rank + 1) and 0 <= peer < self.world_size):
            end = "the first" if rank == 0 else "the last" if rank == self.world_size - 1 else "in the middle"
            does = "sends to" if argument == "dest" else "receives from"
            raise Wrong(
                f"line {call.line}: rank {rank} {does} rank {peer}, which is not its neighbour: the ranks stand in a "
                f"line with two ends, and rank {rank} is {end}"
            )

    def _line(self) -> int:
        """The line of the learner's file that called."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return int(frame.f_lineno)
            frame = frame.f_back
        return 0


class _Watched:
    """A request that also tells of being waited for again, which the real one tells nobody."""

    def __init__(self, comms: ExamComms, request: Any, call: Called) -> None:
        self._comms, self._request, self._call = comms, request, call

    def wait(self, timeout: float | None = None) -> Any:
        """Come back with what the request brings."""
        self._call.waits_in = self._comms._line()
        if self._call.ended:
            self._comms.log.waits(self._call, None)
        with trusted():
            return self._request.wait(timeout)


def _of_exam(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Comms, for a learner: it may be refused, and is written down."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: ExamComms, *arguments: Any, **named: Any) -> Any:
        if self._inside:
            return original(self, *arguments, **named)
        call = self.begin(name, signature.bind(self, *arguments, **named).arguments)
        self._inside = True
        try:
            with trusted():
                found = original(self, *arguments, **named)
        finally:
            self._inside = False
        return _Watched(self, found, call) if name in ("isend", "irecv") or call.asynchronous else found

    return method


for _name, _method in inspect.getmembers(Comms, inspect.isfunction):
    if not _name.startswith("_"):
        setattr(ExamComms, _name, _of_exam(_name, _method))
