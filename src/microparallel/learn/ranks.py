"""The ranks of an exam: threads of one process, whose sends wait until the receiver asks for the message.

The Comms that a learner's code is given is a real one; this file carries its messages. A send is complete when its
receive has begun, as with every large message: an answer that would hang one day with a larger model hangs here. All
waiting goes through one lock (`World`), so the last rank that begins to wait sees, at once and without a clock, that no
rank can go on.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch

from microparallel.comms import Comms
from microparallel.comms.group import Group
from microparallel.comms.interpreter import COMBINE, Algorithm
from microparallel.comms.wire import as_bytes
from microparallel.errors import Mismatch
from microparallel.learn.log import Called, Log
from microparallel.learn.requirements import shown
from microparallel.learn.sandbox import trusted
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.observe.flight import Flight
from microparallel.program.walk import Wait
from microparallel.transport.base import Work

POINT_TO_POINT = ("send_tensor", "recv_tensor", "isend", "irecv")
Message = tuple[Called, torch.Tensor]  # the tensor as it was when it was sent


class Over(BaseException):
    """The exam is over for this rank, since another one has failed; no `except Exception` of a learner's stops it."""


class NoTensor(Wrong):
    """A call that was given something else than a tensor."""

    def __init__(self, line: int, call: str, value: object) -> None:
        no_gradient = (
            "None: a gradient is None until backward has made it, and stays None where requires_grad is not set"
        )
        found = no_gradient if value is None else f"{shown(value)}, and no tensor"
        super().__init__(f"line {line}: {call} was given {found}")
        self.value = value


class World:
    """What the ranks share: messages, collectives, and which rank waits for what. One lock guards everything."""

    def __init__(self, ranks: int) -> None:
        numbers = itertools.count()
        self.logs = [Log(numbers) for _ in range(ranks)]
        self.sent: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by sender and receiver
        self.asked_for: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.collectives: dict[int, list[Message]] = defaultdict(list)  # by rank
        self.results: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}
        self.stuck: list[Wait] = []
        self.busy: list[int] = []  # ranks that had not come to their end when the time was up, and waited for no rank
        self._ranks = ranks
        self._waiting: dict[int, tuple[Called, Callable[[], int | None]]] = {}
        self._changed = threading.Condition()

    def add(self, to: list[Message], message: Message) -> int:
        """Add to a list that other ranks may wait for, and wake them; returns how long the list is now."""
        with self._changed:
            to.append(message)
            self._changed.notify_all()
            return len(to)

    def wait(self, call: Called, missing: Callable[[], int | None]) -> None:
        """Wait, in a rank's thread, until `missing` names no rank; raises `Over` when another rank has failed."""
        with self._changed:
            self._waiting[call.rank] = (call, missing)
            self._find_deadlock()
            while missing() is not None:
                if self.failures or self.stuck:
                    raise Over
                self._changed.wait()
            del self._waiting[call.rank]

    def ends(self, rank: int, result: Any) -> None:
        """Keep what a rank returned at its end."""
        with self._changed:
            self.results[rank] = result
            self._find_deadlock()

    def fails(self, rank: int, error: BaseException) -> None:
        """Keep what a rank raised, and end the waits of all others."""
        with self._changed:
            self.failures[rank] = error
            self._changed.notify_all()

    def _find_deadlock(self) -> None:
        """See whether all ranks wait, or have ended, and none can go on: then they are stuck."""
        on = {rank: missing() for rank, (_, missing) in self._waiting.items()}
        if len(on) + len(self.results) == self._ranks and None not in on.values():
            stuck = [(self._waiting[rank][0], missing) for rank, missing in sorted(on.items()) if missing is not None]
            self.stuck = [Wait(call.rank, call.place, call.call, missing) for call, missing in stuck]
        self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait, in the main thread, until all ranks have ended, one has failed, or none can go on; False if in vain."""
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: len(self.results) == self._ranks or bool(self.failures or self.stuck), timeout
            )
            if not in_time:
                waits = {rank for rank, (_, missing) in self._waiting.items() if missing() is not None}
                self.busy = [rank for rank in range(self._ranks) if rank not in waits and rank not in self.results]
            return in_time


class _Transfer:
    """A message or a collective under way; `finish` is called when no rank is missing any more."""

    def __init__(
        self, world: World, call: Called, missing: Callable[[], int | None], finish: Callable[[], Any] = lambda: None
    ) -> None:
        self._world, self._call, self._missing, self._finish = world, call, missing, finish
        self._reads: tuple[Sequence[torch.Tensor], torch.Tensor] | None = None

    def reading(self, tensors: Sequence[torch.Tensor], before: torch.Tensor) -> _Transfer:
        """Refuse, in `wait`, tensors that were changed meanwhile: in a row, they were `before`."""
        self._reads = tensors, before
        return self

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Return when it is complete, however long that takes: a wait that can never end is found by `World`."""
        if self._reads and not _same_bits(_row(self._reads[0]), self._reads[1]):
            verb = "send" if self._call.peer >= 0 else self._call.call.replace("_", "-")
            request, why = _SENT if self._call.peer >= 0 else _TOGETHER
            raise Wrong(
                f"the tensor that rank {self._call.rank} began to {verb} in line {self._call.line} was changed before "
                f"the {request} was waited for: {why}"
            )
        self._world.wait(self._call, self._missing)
        self._finish()


_SENT = "send", "the receiver may get the new numbers; wait first, or send a clone"
_TOGETHER = "request", "a write into it meanwhile spoils the result; wait first"


def _row(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all numbers, one after another."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(as_bytes(one), as_bytes(other))  # of bytes, since nan is not equal to itself


class ThreadGroup:
    """One rank's place among threads: a `Group`, without the calls that no exercise allows."""

    carries = frozenset({"cpu"})

    def __init__(self, rank: int, ranks: int, world: World) -> None:
        self.rank, self.world_size, self.world_ranks = rank, ranks, tuple(range(ranks))
        self.flight = Flight(None)
        self.log = self.flight.group(self.world_ranks)
        self.world, self.observer = world, world.logs[rank]

    def announce(self, call: str) -> None:
        """Remember what both ends of a message, or all ranks, must agree about."""
        self.observer.call.agreement = call

    def run_in_background(self) -> None:
        """Do nothing: a transfer here is completed by the rank that waits for it."""

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:  # noqa: ARG002
        """Start sending; the send is complete when the receiver has asked for the message."""
        call, before, channel = self.observer.call, _row([tensor]), (self.rank, to)
        number = self.world.add(self.world.sent[channel], (call, before))

        def missing() -> int | None:
            return None if len(self.world.asked_for[channel]) >= number else to

        return _Transfer(self.world, call, missing).reading([tensor], before)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:  # noqa: ARG002
        """Start receiving; the n-th receive is complete when the source has sent n messages."""
        call, channel = self.observer.call, (source, self.rank)
        number = self.world.add(self.world.asked_for[channel], (call, tensor))

        def missing() -> int | None:
            return None if len(self.world.sent[channel]) >= number else source

        def finish() -> None:
            sent, content = self.world.sent[channel][number - 1]
            _require_alike(sent, call)
            tensor.copy_(content.view(tensor.shape))
            call.content = sent.content

        return _Transfer(self.world, call, missing, finish)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying the source's tensor over those of all other ranks."""
        return self._together([tensor], lambda rows: _write(tensor, rows[source]))

    def all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor], *, together: bool = False) -> Work:  # noqa: ARG002
        """Start collecting every rank's tensor on every rank."""

        def collect(rows: list[torch.Tensor]) -> None:
            for output, row in zip(outputs, rows, strict=True):
                _write(output, row)

        return self._together([tensor], collect)

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = "auto") -> Work:  # noqa: ARG002
        """Start combining all ranks' tensors, in the order of ranks: the algorithm would only round otherwise.

        The tensor changes when the learner's code waits: so code that reads it too early always sees the old numbers,
        and code that writes to it too early is always found.
        """
        return self._together([tensor], lambda rows: _write(tensor, _combined(rows, op)))

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> Work:
        """Start combining all ranks' tensors on one rank."""
        return self._together([tensor], lambda rows: _write(tensor, _combined(rows, op)) if self.rank == to else None)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: str,
        *,
        together: bool = False,  # noqa: ARG002
    ) -> Work:
        """Start combining all ranks' inputs, position by position; rank r gets position r."""
        size = output.numel()
        mine = slice(self.rank * size, (self.rank + 1) * size)
        return self._together(inputs, lambda rows: _write(output, _combined([row[mine] for row in rows], op)))

    def _together(self, tensors: Sequence[torch.Tensor], finish: Callable[[list[torch.Tensor]], Any]) -> Work:
        """Start what all ranks do with these tensors; `finish` is given those of each rank, in a row."""
        call, before, ranks = self.observer.call, _row(tensors), self.world_ranks
        number = self.world.add(self.world.collectives[self.rank], (call, before)) - 1

        def missing() -> int | None:
            return next((rank for rank in ranks if len(self.world.collectives[rank]) <= number), None)

        def complete() -> None:
            messages = [self.world.collectives[rank][number] for rank in ranks]
            for other, _ in messages:
                if other.agreement != call.agreement:
                    raise Mismatch(f"rank {other.rank} calls {other.agreement}, and rank {self.rank} {call.agreement}")
            finish([row for _, row in messages])

        return _Transfer(self.world, call, missing, complete).reading(tensors, before)


def _write(tensor: torch.Tensor, row: torch.Tensor) -> None:
    tensor.copy_(row.view(tensor.shape))


def _combined(rows: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    total = rows[0].clone()
    for other in rows[1:]:
        COMBINE[op](total, other)
    return total


def _require_alike(sent: Called, received: Called) -> None:
    if sent.agreement != received.agreement:
        dtype, other = (end.agreement.partition("[")[0] for end in (sent, received))
        advice = (
            "expects float32 unless it is told the dtype"
            if dtype != other
            else "must be told the shape of what was sent"
        )
        raise Mismatch(
            f"rank {sent.rank} sent {sent.agreement} in line {sent.line}, and rank {received.rank} asks for "
            f"{received.agreement}\n  a receive {advice}"
        )


class ExamComms(Comms):
    """The Comms that a learner's code is given: a real one that refuses what is not for the exercise, with the line.

    Attributes:
        refused: calls that the learner's code made all the same.
        line_of_ranks: whether only neighbours may talk to each other, as in a pipeline.
        row: what this rank has done.
    """

    def __init__(self, group: ThreadGroup, file: str, allowed: Sequence[str]) -> None:
        super().__init__(cast("Group", group), device=torch.device("cpu"), local_rank=group.rank)
        self.refused: list[str] = []
        self.line_of_ranks = False
        self.log, self.row = group.observer, group.observer.row
        self.observers.append(self.log)
        self._file, self._allowed = file, allowed
        self._inside = False  # whether a call has been begun: it may make others, which are not the learner's

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"comms has no {name!r}; it offers {', '.join(self._allowed)}")

    def begin(self, name: str, arguments: dict[str, Any]) -> Called:
        """Refuse a call, or describe it for the log."""
        line = self._line()
        if name not in self._allowed:
            offers = ", ".join(f"comms.{one}" for one in self._allowed) or "nothing of comms"
            self.refused.append(f"line {line}: comms.{name} is not for this exercise; write it with {offers}")
            raise NotAllowed(self.refused[-1])
        call = Called(name, self.rank, line, len(self.row), asynchronous=arguments.get("async_op", False))
        if "tensor" in arguments:
            tensor = arguments["tensor"]
            if not isinstance(tensor, torch.Tensor):
                raise NoTensor(line, name, tensor)
            call.address, call.content = tensor.data_ptr(), tensor.detach().clone()
        if "tensors" in arguments:
            call.content = _row([one.detach() for one in _list_of_tensors(line, name, arguments["tensors"])])
        for argument in ("dest", "src"):
            if name in POINT_TO_POINT and argument in arguments:
                call.peer = arguments[argument]
                self._require_other(call, argument)
        self.log.call = call
        return call

    def _require_other(self, call: Called, argument: str) -> None:
        peer, rank = call.peer, self.rank
        if peer == rank:
            raise Wrong(
                f"line {call.line}: rank {peer} calls {call.call} with {argument}={peer}, which is itself: what a rank "
                "has, it need not send; leave this rank out"
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


def _list_of_tensors(line: int, call: str, value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):  # a flat one, which Comms cuts into equal parts
        return [value]
    if not isinstance(value, Sequence):
        raise Wrong(f"line {line}: {call} was given {shown(value)}, and takes a list with a tensor for each rank")
    for one in value:
        if not isinstance(one, torch.Tensor):
            raise NoTensor(line, call, one)
    return list(value)


class _Request:
    """A request that also tells the log when it is waited for again, which the real one does not."""

    def __init__(self, comms: ExamComms, request: Any, call: Called) -> None:
        self._comms, self._request, self._call = comms, request, call

    def wait(self, timeout: float | None = None) -> Any:
        """Wait in the learner's line, and return what the request brings."""
        self._call.waits_in = self._comms._line()
        if self._call.ended:
            self._comms.log.waits_again(self._call)
        with trusted():
            return self._request.wait(timeout)


def _of_exam(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Comms for a learner: it may be refused, and the log writes it down."""
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
        return _Request(self, found, call) if name in ("isend", "irecv") or call.asynchronous else found

    return method


for _name, _method in inspect.getmembers(Comms, inspect.isfunction):
    if not _name.startswith("_"):
        # `send` is `send_tensor` by another name: both are allowed, or neither is.
        setattr(ExamComms, _name, _of_exam(_method.__name__, _method))
