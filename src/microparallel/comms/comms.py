"""Comms: how one rank talks to the others. Its collectives are in `collectives.py`; the rest is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from microparallel.comms.calls import Call
from microparallel.comms.collectives import Collectives
from microparallel.comms.group import Group
from microparallel.comms.messages import Messages
from microparallel.comms.request import Request, explain
from microparallel.comms.wire import as_bytes, empty_on_wire, to_wire
from microparallel.errors import CommsError, TransportError, UsageError
from microparallel.files.state_memory import HeldStates
from microparallel.observe.flight import Flight
from microparallel.transport.base import Work


class Comms(Collectives):
    """One rank's place in a group: how it talks to the other ranks.

    Get one from `mp.launch` or `mp.connect`. Collectives must be called by every rank of the group, in the same order;
    messages between two ranks arrive in the order they were sent. Any strided tensor will do: any shape, contiguous or
    not, empty, on the CPU or on a GPU.

    Attributes:
        rank: the number of this rank, from 0.
        world_size: how many ranks there are.
        local_rank: the number of this rank on its own machine.
        device: where received tensors are put: this rank's GPU when it has one to itself, else the CPU.
        process_group: the torch process group beneath, for torch's own wrappers.
    """

    def __init__(
        self,
        group: Group,
        *,
        device: torch.device,
        local_rank: int,
        check: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group, device=device, check=check)
        self.local_rank = local_rank
        self._on_close = on_close
        self.before_finishing: list[Callable[[], None]] = []  # what belongs to this rank's work, such as a last save
        self.before_closing: list[Callable[[], None]] = []  # what must end while the ranks can still communicate
        self.held_states: HeldStates | None = None  # memory of the launcher, for one who copies states into it

    # ── who is where ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def next_rank(self) -> int | None:
        """The rank after this one; None on the last."""
        return self.rank + 1 if self.rank + 1 < self.world_size else None

    @property
    def prev_rank(self) -> int | None:
        """The rank before this one; None on the first."""
        return self.rank - 1 if self.rank > 0 else None

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The numbers that the ranks of this group have in the world."""
        return self._group.world_ranks

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group beneath, for torch's own wrappers."""
        if self._closed:
            raise UsageError("process_group: this Comms has been closed")
        return self._group.process_group

    @property
    def flight(self) -> Flight:
        """The flight recorder of this process: tell it which step training is at, and what is done between calls."""
        return self._group.flight

    @property
    def transport_name(self) -> str:
        """What carries its messages, such as "shm" or "gloo": for this, "auto" is resolved."""
        return self._group.transport_name

    @property
    def can_overlap(self) -> bool:
        """Whether communication in the background is worth it.

        Over a network it is. Through shared memory communication is work of the cores themselves, and where the ranks
        compute on all of them, doing it in the background takes from the computation what it gives.
        """
        return self._group.has_free_cores

    def take_held_states(self) -> HeldStates | None:
        """The memory for states that outlives these ranks, if there is any; it is handed out once."""
        held, self.held_states = self.held_states, None
        return held

    # ── from one rank to another ────────────────────────────────────────────────────────────────────────────────

    def send_tensor(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor, and return when it may be changed again. `send` is the same call."""
        self._send("send_tensor", tensor, dest).wait()

    def isend(self, tensor: torch.Tensor, dest: int) -> Request[None]:
        """Start sending a tensor; do not change it before the request has been waited for."""
        return self._send("isend", tensor, dest)

    def recv_tensor(self, shape: int | Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Wait for the next tensor from `src` and return it. `recv` is the same call.

        Both ends must mean the same shape and dtype. That is checked in checked mode; otherwise a shorter message than
        expected leaves the rest of the tensor undefined, and a longer one ends the rank.
        """
        return self._recv("recv_tensor", shape, src, dtype).wait()

    def irecv(self, shape: int | Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> Request[torch.Tensor]:
        """Start receiving the next tensor from `src`; the request's `wait()` returns it."""
        return self._recv("irecv", shape, src, dtype)

    send = send_tensor
    recv = recv_tensor

    def _send(self, name: str, tensor: torch.Tensor, dest: int) -> Request[None]:
        self._require_peer(name, "dest", dest)
        wire = to_wire(tensor, self._group.carries)
        call = Call.of_two(name, self._content(wire), dest, sends=True, size=wire.nbytes)

        def start() -> list[Work]:
            announced = [self._checker.announce(call, dest)] if self._checker else []
            return [*announced, self._group.isend(as_bytes(wire), dest)]

        return self._start(call, start, lambda: None)

    def _recv(self, name: str, shape: int | Sequence[int], src: int, dtype: torch.dtype) -> Request[torch.Tensor]:
        self._require_peer(name, "src", src)
        given: object = shape
        if isinstance(given, torch.Tensor):  # torch's recv fills the tensor that it is given
            raise UsageError(
                f"{name} returns a new tensor: pass the shape and the dtype of what comes, here "
                f"{tuple(given.shape)} and {given.dtype}, not a tensor"
            )
        wire = empty_on_wire((shape,) if isinstance(shape, int) else shape, dtype, self.device, self._group.carries)
        call = Call.of_two(name, self._content(wire), src, sends=False, size=wire.nbytes)

        def start() -> list[Work]:
            if self._checker:
                return [self._checker.receive(call, as_bytes(wire), src)]
            return [self._group.irecv(as_bytes(wire), src)]

        return self._start(call, start, lambda: wire.to(self.device))

    # ── for programs that run over this Comms ───────────────────────────────────────────────────────────────────

    @property
    def messages(self) -> Messages:
        """Messages under a tag of the caller's own, as a transport: for running programs over them."""
        return Messages(self._group)

    @property
    def messages_run_in_order(self) -> bool:
        """Whether a rank's messages run one after another, as NCCL's do: then none may be posted before its time."""
        return self.transport_name == "nccl" and self.device.type == "cuda"

    def explain(self, error: TransportError, call: str) -> CommsError:
        """Turn a failure of one of `messages` into an error that names the rank and the call."""
        return explain(error, Call(call, call), self._group)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised CPU tensor where the transport moves it fastest: in shared memory, if it has that."""
        return self._group.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    # ── smaller groups, and the end ─────────────────────────────────────────────────────────────────────────────

    def group(self, ranks: Iterable[int]) -> Comms | None:
        """A Comms of some of these ranks, numbered from 0 in ascending order; None on a rank that is not among them.

        Every rank of this Comms calls it with the same ranks.
        """
        members = sorted(ranks)
        if not members or len(set(members)) != len(members):
            raise UsageError(f"group: {members} must name at least one rank, and each only once")
        for rank in members:
            self._require_rank("group", "rank", rank)
        call = Call.of_all("group", str(members))
        if self._checker:
            self._collective(call, list, lambda: None).wait()
        group = self._group.subgroup(members)
        if group is None:
            return None
        return Comms(
            group,
            device=self.device,
            local_rank=self.local_rank,
            check=self._checker is not None,
            on_close=group.close,
        )

    def finish(self) -> None:
        """Do what is left to do before this rank's work is done; until then its launcher waits."""
        while self.before_finishing:
            self.before_finishing.pop()()

    def close(self) -> None:
        """Leave the group; closing twice is fine."""
        self.finish()
        self._closed = True
        while self.before_closing:
            self.before_closing.pop()()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def __enter__(self) -> Comms:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.flight.ends_with(error)
        self.close()

    def __deepcopy__(self, _: dict[int, object]) -> Comms:
        """Return this Comms: a copy of something that talks, such as a model, talks to the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a Comms cannot be pickled: it is this process's own connection to the other ranks; "
            "every rank gets one from mp.launch or mp.connect; of a model that has one, save its state_dict(), of a "
            "pipeline its whole_state_dict()"
        )

    def __repr__(self) -> str:
        return f"<Comms rank {self.rank} of {self.world_size} on {self.device}>"
