"""The Comms that a learner's code is given: some calls of the real one, every one of them watched.

Two things differ from the real one. A send waits until its receiver asks for it, as every large message does: what
would hang one day with a larger model hangs here, and is explained (unless a grader makes sends eager, as those of
small messages are). And a request that nobody waits for is remembered.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from microparallel.comms import Comms
from microparallel.learn.board import Board, State
from microparallel.learn.guards import trusted
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.learn.words import shown

POINT_TO_POINT = ("send_tensor", "recv_tensor", "isend", "irecv")
_PLAIN = ("barrier", "broadcast", "scatter", "gather", "all_gather", "reduce", "reduce_scatter", "all_reduce_mean")


@dataclass(slots=True)
class Entry:
    """One call: what it was, with whom, how many bytes, and where in the learner's file."""

    call: str
    peer: int
    bytes: int
    line: int
    shape: tuple[int, ...] = ()
    waited: bool = False
    asynchronous: bool = False
    address: int = 0  # of the tensor's first number, which tells what part of what it is


class ExamComms:
    """One rank's end of the conversation in an exam."""

    def __init__(
        self, comms: Comms, board: Board, file: str, allowed: Sequence[str], happens: Callable[[str], None]
    ) -> None:
        self.rank, self.world_size, self.device = comms.rank, comms.world_size, comms.device
        self.next_rank, self.prev_rank = comms.next_rank, comms.prev_rank
        self.log: list[Entry] = []
        self.refused: list[str] = []  # calls that were made all the same
        self.line_of_ranks = False  # whether only neighbours may talk to each other, as in a pipeline
        self.eager = False  # whether a send comes back at once
        self._posted: list[ExamSend] = []  # eager sends
        self._real, self._board, self._file, self._allowed, self._happens = comms, board, file, allowed, happens

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Comms, name):
            raise AttributeError(f"comms has no {name!r}; it offers {', '.join(self._allowed)}")
        if name in self._allowed and name in _PLAIN:
            return lambda *arguments, **named: self._together(name, *arguments, **named)
        if not callable(getattr(Comms, name)):
            raise AttributeError(f"comms.{name} is not for this exercise; it offers {', '.join(self._allowed)}")
        return functools.partial(self._refuse, name)  # to look at it is no crime

    # ── from one rank to another ────────────────────────────────────────────────────────────────────────────────

    def send_tensor(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor, and come back when it has been asked for."""
        if not self.eager:
            return self._send("send_tensor", tensor, dest).wait()
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.detach().clone()  # the caller may write to its own at once
        self._posted.append(self._send("send_tensor", tensor, dest))
        self._posted[-1].entry.waited = True
        return None

    def deliver(self) -> None:
        """Wait until all eager sends have been asked for."""
        for request in self._posted:
            request.entry.waited = False
            request.wait()
        self._posted.clear()

    def isend(self, tensor: torch.Tensor, dest: int) -> ExamSend:
        """Start sending a tensor; do not change it before the request has been waited for."""
        return self._send("isend", tensor, dest)

    def recv_tensor(self, shape: int | Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Wait for the next tensor from `src` and return it."""
        return self._receive("recv_tensor", shape, src, dtype).wait()

    def irecv(self, shape: int | Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> ExamReceive:
        """Start receiving the next tensor from `src`; the request's `wait()` returns it."""
        return self._receive("irecv", shape, src, dtype)

    def _send(self, call: str, tensor: torch.Tensor, dest: int) -> ExamSend:
        self._require(call)
        self._require_neighbour("sends to", dest)
        line = self._line()
        if not isinstance(tensor, torch.Tensor):
            raise Wrong(f"line {line}: {call} sends a tensor, and was given {shown(tensor)}")
        self._require_another(call, "dest", dest)
        with trusted():
            request = self._real.isend(tensor.detach(), dest)
            number = self._board.sends(self.rank, dest)
        entry = Entry(call, dest, tensor.nbytes, line, tuple(tensor.shape), address=tensor.data_ptr())
        self.log.append(entry)
        self._happens(call)
        return ExamSend(self, request, entry, number, tensor.detach())  # a request holds numbers, and no graph

    def _receive(self, call: str, shape: int | Sequence[int], src: int, dtype: torch.dtype) -> ExamReceive:
        self._require(call)
        self._require_another(call, "src", src)
        self._require_neighbour("receives from", src)
        with trusted():
            request = self._real.irecv(shape, src, dtype)
            number = self._board.receives(self.rank, src)
        entry = Entry(call, src, 0, self._line())
        self.log.append(entry)
        return ExamReceive(self, request, entry, number)

    # ── all together ────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False) -> Any:
        """Combine everybody's tensor, in place, on every rank."""
        self._require("all_reduce")
        if not isinstance(tensor, torch.Tensor):
            raise Wrong(f"line {self._line()}: all_reduce was given {_no_tensor(tensor)}")
        if not async_op:
            return self._together("all_reduce", tensor, op, algorithm)
        with trusted():
            request = self._real.all_reduce(tensor.detach().clone(), op, algorithm, async_op=True)
            number = self._board.joins(self.rank)
        entry = self._entry("all_reduce", tensor, asynchronous=True)
        self.log.append(entry)
        self._happens("all_reduce")
        return ExamCollective(self, request, entry, number, tensor)

    def _together(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._require(name)
        entry = self._entry(name, arguments[0] if arguments else named.get("tensor"), waited=True)
        self.log.append(entry)
        self._happens(name)
        number = self._board.joins(self.rank)
        with trusted():
            return self.waits(State.TOGETHER, entry, number, lambda: getattr(self._real, name)(*arguments, **named))

    def _entry(self, name: str, tensor: Any, **more: Any) -> Entry:
        if not isinstance(tensor, torch.Tensor):
            return Entry(name, -1, 0, self._line(), **more)
        return Entry(name, -1, tensor.nbytes, self._line(), tuple(tensor.shape), address=tensor.data_ptr(), **more)

    # ── for requests, and for graders ───────────────────────────────────────────────────────────────────────────

    def waits(self, state: State, entry: Entry, number: int, what: Callable[[], Any]) -> Any:
        """Do what may take until another rank does something, and say so on the board."""
        self._board.says(self.rank, state, entry.peer, self._line() or entry.line, number)
        try:
            return what()
        finally:
            entry.waited = True
            self._board.says(self.rank, State.RUNNING)

    def until_asked_for(self, peer: int, number: int) -> None:
        """Wait until the peer has begun that many receives from this rank."""
        while self._board.received(peer, self.rank) < number:
            time.sleep(0.0005)

    def until_others_rest(self) -> None:
        """Wait until every other rank has finished or waits for what cannot come yet: a grader's way to come late."""
        looks = 0
        while looks < 3:  # a rank writes several numbers, one after another
            time.sleep(0.002)
            looks = looks + 1 if self._board.others_rest(self.rank) else 0

    def sent(self) -> list[Entry]:
        """Everything this rank has sent."""
        return [entry for entry in self.log if entry.call in ("send_tensor", "isend")]

    def received(self) -> list[Entry]:
        """Every receive that this rank has begun."""
        return [entry for entry in self.log if entry.call in ("recv_tensor", "irecv")]

    def _require(self, name: str) -> None:
        if name not in self._allowed:
            raise self._refusal(name)

    def _require_another(self, call: str, name: str, peer: int) -> None:
        if peer == self.rank:
            raise Wrong(
                f"line {self._line()}: rank {peer} calls {call} with {name}={peer}, which is itself: what a rank has, "
                "it need not send; leave yourself out"
            )

    def _require_neighbour(self, deed: str, peer: int) -> None:
        if not self.line_of_ranks or (peer in (self.rank - 1, self.rank + 1) and 0 <= peer < self.world_size):
            return
        end = "the first" if self.rank == 0 else "the last" if self.rank == self.world_size - 1 else "in the middle"
        raise Wrong(
            f"line {self._line()}: rank {self.rank} {deed} rank {peer}, which is not its neighbour: the ranks stand in "
            f"a line with two ends, and rank {self.rank} is {end}"
        )

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise self._refusal(name)

    def _refusal(self, name: str) -> NotAllowed:
        offers = ", ".join(f"comms.{one}" for one in self._allowed) or "nothing of comms"
        words = f"line {self._line()}: comms.{name} is not for this exercise; write it with {offers}"
        self.refused.append(words)
        return NotAllowed(words)

    def _line(self) -> int:
        """The line of the learner's file that called."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return int(frame.f_lineno)
            frame = frame.f_back
        return 0


class ExamSend:
    """A send that has begun."""

    def __init__(self, comms: ExamComms, request: Any, entry: Entry, number: int, tensor: torch.Tensor) -> None:
        self.entry, self._comms, self._request, self._number = entry, comms, request, number
        # Its numbers, and not its version: that is the same for all views of a tensor, and other slices may be written.
        self._tensor, self._before = tensor, tensor.clone()

    def wait(self, timeout: float | None = None) -> None:
        """Come back when the receiver has asked for it, however long that takes: deadlocks are found by the referee."""
        entry, comms = self.entry, self._comms
        if entry.waited:
            return
        if not _same_numbers(self._tensor, self._before):
            raise Wrong(
                f"the tensor that rank {comms.rank} began to send in line {entry.line} was changed before the send was "
                "waited for: the receiver may get the new numbers; wait first, or send a clone"
            )
        with trusted():
            comms.waits(State.SENDING, entry, self._number, lambda: comms.until_asked_for(entry.peer, self._number))
            self._request.wait(timeout)


class ExamReceive:
    """A receive that has begun."""

    def __init__(self, comms: ExamComms, request: Any, entry: Entry, number: int) -> None:
        self._comms, self._request, self._entry, self._number = comms, request, entry, number

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Come back with the tensor."""
        with trusted():
            found: torch.Tensor = self._comms.waits(
                State.RECEIVING, self._entry, self._number, lambda: self._request.wait(timeout)
            )
        return found


class ExamCollective:
    """An all-reduce that has begun.

    The real one works in the tensor itself. Here it works in a copy, and the tensor changes when it is waited for: so
    whoever reads too early always sees the old numbers, and whoever writes too early is always found.
    """

    def __init__(self, comms: ExamComms, request: Any, entry: Entry, number: int, tensor: torch.Tensor) -> None:
        self._comms, self._request, self._entry, self._number = comms, request, entry, number
        self._tensor, self._before = tensor, tensor.detach().clone()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Come back with the tensor, combined."""
        entry, comms = self._entry, self._comms
        if entry.waited:
            forgotten = all(one is not entry for one in comms.log)  # a grader empties the log between two steps
            comms._happens("wait for an old request" if forgotten else "wait again")
            return self._tensor
        comms._happens("wait")
        if not _same_numbers(self._tensor, self._before):
            raise Wrong(
                f"the tensor that rank {comms.rank} began to all-reduce in line {entry.line} was changed before the "
                "request was waited for: who writes into it meanwhile spoils the sum; wait first"
            )
        with trusted(), torch.no_grad():
            found = comms.waits(State.TOGETHER, entry, self._number, lambda: self._request.wait(timeout))
            return self._tensor.copy_(found)


def _no_tensor(value: object) -> str:
    return "None: a gradient is None until backward has made it" if value is None else f"{shown(value)}, and no tensor"


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether nothing has changed; what is not a number (nan) is the same as itself here."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
