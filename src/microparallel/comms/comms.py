"""Comms: how one rank talks to the others.

Every primitive follows the same three steps, and that is all there is to read here:
make the tensors fit for the wire, start the transfer, and bring the result back when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Literal, overload

import torch
import torch.distributed as dist

from microparallel.collectives import all_reduce_program
from microparallel.comms.calls import Call, describe, describe_content, describe_list, explain
from microparallel.comms.group import Group
from microparallel.comms.messages import Mail
from microparallel.comms.request import Conversation, Request
from microparallel.comms.wire import (
    as_bytes,
    check_reduction,
    empty_on_wire,
    finish_reduction,
    from_wire,
    read_headers,
    require_writable,
    stand_in,
    to_wire,
    wire_reduction,
    write_headers,
)
from microparallel.errors import CommsError, Mismatch, TransportError, UsageError
from microparallel.observe.flight import Flight
from microparallel.program import AllReduce, Op
from microparallel.transport.base import Work


class Comms(Conversation):
    """One rank's end of the conversation with all others of its group.

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
        transport: Group,
        *,
        device: torch.device,
        local_rank: int,
        check: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(transport, check)
        self.local_rank = local_rank
        self.device = device
        self._on_close = on_close
        self.before_closing: list[Callable[[], None]] = []  # what must end while there still is a conversation

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
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group beneath, for torch's own wrappers."""
        if self._closed:
            raise UsageError("process_group: this Comms has been closed")
        return self._transport.process_group

    @property
    def flight(self) -> Flight:
        """The flight recorder of this process: tell it which step training is at, and what is done between calls."""
        return self._transport.flight

    @property
    def transport_name(self) -> str:
        """What carries its messages, such as "shm" or "gloo": for this, "auto" is resolved."""
        return self._transport.transport_name

    @property
    def can_overlap(self) -> bool:
        """Whether communication in the background is worth it.

        Over a network it is. Through shared memory communication is work of the cores themselves, and where the ranks
        compute on all of them, doing it in the background takes from the computation what it gives.
        """
        return self._transport.has_free_cores

    # ── from one rank to another ────────────────────────────────────────────────────────────────────────────────

    def send_tensor(self, tensor: torch.Tensor, dest: int) -> None:
        """Send a tensor, and return when it may be changed again."""
        self._send("send_tensor", tensor, dest).wait()

    def isend(self, tensor: torch.Tensor, dest: int) -> Request[None]:
        """Start sending a tensor; do not change it before the request has been waited for."""
        return self._send("isend", tensor, dest)

    def recv_tensor(self, shape: int | Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Wait for the next tensor from `src` and return it.

        Both ends must mean the same shape and dtype. That is checked in checked mode; otherwise a shorter message than
        expected leaves the rest of the tensor undefined, and a longer one ends the rank.
        """
        return self._recv("recv_tensor", shape, src, dtype).wait()

    def irecv(self, shape: int | Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> Request[torch.Tensor]:
        """Start receiving the next tensor from `src`; the request's `wait()` returns it."""
        return self._recv("irecv", shape, src, dtype)

    def _send(self, name: str, tensor: torch.Tensor, dest: int) -> Request[None]:
        self._require_peer(name, "dest", dest)
        wire = to_wire(tensor, self._transport.carries)
        call = Call.of_two(name, self._content(wire), dest, sends=True, size=wire.nbytes)

        def start() -> list[Work]:
            announced = [self._checker.announce(call, dest)] if self._checker else []
            return [*announced, self._transport.isend(as_bytes(wire), dest)]

        return self._start(call, start, lambda: None)

    def _recv(self, name: str, shape: int | Sequence[int], src: int, dtype: torch.dtype) -> Request[torch.Tensor]:
        self._require_peer(name, "src", src)
        wire = empty_on_wire((shape,) if isinstance(shape, int) else shape, dtype, self.device, self._transport.carries)
        call = Call.of_two(name, self._content(wire), src, sends=False, size=wire.nbytes)

        def start() -> list[Work]:
            if self._checker:
                return [self._checker.receive(call, as_bytes(wire), src)]
            return [self._transport.irecv(as_bytes(wire), src)]

        return self._start(call, start, lambda: wire.to(self.device))

    # ── from one rank to all, and back ──────────────────────────────────────────────────────────────────────────

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        # Nobody can know the sum before everybody has added to it.
        token = torch.zeros(1, device=self.device)
        self._all_reduce(Call.of_all("barrier"), token, "sum").wait()
        if token.is_cuda:
            torch.cuda.synchronize(self.device)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, operation: Op | None = None) -> torch.Tensor:
        """Copy the tensor of `src` over everybody else's, in place.

        Args:
            tensor: what is copied, or overwritten.
            src: whose it is.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        self._require_rank("broadcast", "src", src)
        require_writable(tensor, "broadcast")
        wire = to_wire(tensor, self._transport.carries)
        call = Call.of_all("broadcast", self._content(wire), f"src={src}", size=wire.nbytes)
        request = self._collective(
            call, lambda: [self._transport.broadcast(as_bytes(wire), src)], lambda: from_wire(wire, tensor), operation
        )
        return request.wait()

    def scatter(self, tensors: Sequence[torch.Tensor] | None, src: int = 0) -> torch.Tensor:
        """Hand out the list of `src`, one tensor to each rank, and return this rank's; the others pass None.

        The tensors may differ in shape and dtype: they are described to their receivers first.
        """
        self._require_rank("scatter", "src", src)
        call = Call.of_all("scatter", f"src={src}")
        wires: list[torch.Tensor] = []
        if self.rank == src:
            if tensors is None or len(tensors) != self.world_size:
                given = "None" if tensors is None else f"{len(tensors)} tensors"
                raise UsageError(
                    f"scatter: rank {src} must give one tensor for each of {self.world_size} ranks, not {given}"
                )
            wires = [to_wire(tensor, self._transport.carries) for tensor in tensors]
        headers = write_headers(wires, self.world_size)
        self._collective(call, lambda: [self._transport.broadcast(headers, src)], lambda: None).wait()
        contents = read_headers(headers)

        # The backends scatter equal sizes only, so every message is as long as the longest.
        most = max(shape.numel() * dtype.itemsize for dtype, shape in contents)
        device = self.device if self.device.type in self._transport.carries else torch.device("cpu")
        mine = torch.empty(most, dtype=torch.uint8, device=device)
        padded = [torch.empty_like(mine) for _ in wires]
        for row, wire in zip(padded, wires, strict=True):
            row[: wire.nbytes].copy_(as_bytes(wire))
        request = self._start(call, lambda: [self._transport.scatter(mine, padded or None, src)], lambda: mine)
        dtype, shape = contents[self.rank]
        return request.wait()[: shape.numel() * dtype.itemsize].view(dtype).reshape(shape).to(self.device, copy=True)

    def gather(self, tensor: torch.Tensor, dst: int = 0) -> list[torch.Tensor] | None:
        """Collect everybody's tensor on `dst`, which gets the list in rank order; the others get None."""
        self._require_rank("gather", "dst", dst)
        wire = to_wire(tensor, self._transport.carries)
        call = Call.of_all("gather", self._content(wire), f"dst={dst}", size=wire.nbytes)
        outputs = self._outputs(wire) if self.rank == dst else None
        rows = None if outputs is None else [as_bytes(output) for output in outputs]
        request = self._collective(
            call,
            lambda: [self._transport.gather(as_bytes(wire), rows, dst)],
            lambda: None if outputs is None else [output.to(tensor.device) for output in outputs],
        )
        return request.wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Collect everybody's tensor on every rank, as a list in rank order."""
        wire = to_wire(tensor, self._transport.carries)
        call = Call.of_all("all_gather", self._content(wire), size=wire.nbytes)
        outputs = self._outputs(wire)
        request = self._collective(
            call,
            lambda: [self._transport.all_gather(as_bytes(wire), [as_bytes(output) for output in outputs])],
            lambda: [output.to(tensor.device) for output in outputs],
        )
        return request.wait()

    @overload
    def all_to_all(
        self,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[torch.Tensor]: ...
    @overload
    def all_to_all(
        self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = ..., *, async_op: Literal[True]
    ) -> Request[list[torch.Tensor]]: ...
    def all_to_all(
        self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None, async_op: bool = False
    ) -> list[torch.Tensor] | Request[list[torch.Tensor]]:
        """Hand tensor r of the list to rank r, and return what each rank had for this one, in rank order.

        The tensors may differ in shape and dtype: they are described to their receivers first, unless these know.

        Args:
            tensors: one for each rank, this one included.
            into: tensors to receive into, for ranks that know what comes: then no descriptions are exchanged. Either
                all ranks give them, or none does.
            async_op: return a `Request` as soon as it is known what comes; its `wait()` returns the list.
        """
        for name, given in (("tensors", tensors), ("into", into)):
            if given is not None and len(given) != self.world_size:
                raise UsageError(
                    f"all_to_all: {name} needs one tensor for each of {self.world_size} ranks, not {len(given)}"
                )
        wires = [to_wire(tensor, self._transport.carries) for tensor in tensors]
        call = Call.of_all("all_to_all", *(["into"] if into is not None else []), size=_bytes(wires))
        agreed = into is None or self._checker is not None
        contents = self._exchange_headers(call, wires) if agreed else []
        device = tensors[self.rank].device
        if into is None:
            outputs = [empty_on_wire(shape, dtype, device, self._transport.carries) for dtype, shape in contents]
        else:
            for tensor in into:
                require_writable(tensor, "all_to_all")
            _require_room(into, wires[self.rank], self.rank, contents)
            outputs = [to_wire(tensor, self._transport.carries) for tensor in into]

        def finish() -> list[torch.Tensor]:
            if into is None:
                return [output.to(device) for output in outputs]
            return [from_wire(output, tensor) for output, tensor in zip(outputs, into, strict=True)]

        start = self._start if agreed else self._collective
        request = start(
            call,
            lambda: [self._transport.all_to_all([as_bytes(one) for one in outputs], [as_bytes(one) for one in wires])],
            finish,
        )
        if not async_op:
            return request.wait()
        self._transport.run_in_background()
        return request

    def _exchange_headers(self, call: Call, wires: list[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
        """Tell each rank what it will get, and hear what comes from each."""
        mine = write_headers(wires, self.world_size)
        theirs = torch.empty_like(mine)
        self._collective(
            call, lambda: [self._transport.all_to_all(list(theirs.unbind()), list(mine.unbind()))], lambda: None
        ).wait()
        return read_headers(theirs)

    # ── combining everybody's tensor ────────────────────────────────────────────────────────────────────────────

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum") -> torch.Tensor:
        """Combine everybody's tensor on `dst`, in place; the tensors of the others stay as they are."""
        self._require_rank("reduce", "dst", dst)
        check_reduction(op, tensor.dtype, "reduce")
        call = Call.of_all("reduce", describe(tensor), f"dst={dst}", f"op={op!r}", size=_bytes([tensor]))
        wire = to_wire(tensor, self._transport.carries).to(stand_in(tensor.dtype))
        if self.rank == dst:
            require_writable(tensor, "reduce")
        else:
            wire = wire.clone()  # the backend uses it as scratch

        def finish() -> torch.Tensor:
            if self.rank != dst:
                return tensor
            return from_wire(finish_reduction(wire, op, self.world_size), tensor)

        return self._collective(call, lambda: [self._transport.reduce(wire, dst, wire_reduction(op))], finish).wait()

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
        """Combine the lists of all ranks position by position; rank r gets position r.

        The positions may differ in shape, as long as every rank's list has the same shapes.
        """
        if len(tensors) != self.world_size:
            raise UsageError(
                f"reduce_scatter: the list needs one tensor for each of {self.world_size} ranks, not {len(tensors)}"
            )
        for tensor in tensors:
            check_reduction(op, tensor.dtype, "reduce_scatter")
        call = Call.of_all(
            "reduce_scatter", describe_list(tensors), f"op={op!r}", size=sum(one.nbytes for one in tensors)
        )
        mine = tensors[self.rank]
        wires = [to_wire(tensor, self._transport.carries).to(stand_in(tensor.dtype)) for tensor in tensors]
        alike = len({(wire.shape, wire.dtype) for wire in wires}) == 1
        output = torch.empty_like(wires[self.rank]) if alike else wires[self.rank].clone()

        def start() -> list[Work]:
            if alike:
                return [self._transport.reduce_scatter(output, wires, wire_reduction(op))]
            buffers = [output if rank == self.rank else wire.clone() for rank, wire in enumerate(wires)]
            return [self._transport.reduce(buffer, rank, wire_reduction(op)) for rank, buffer in enumerate(buffers)]

        def finish() -> torch.Tensor:
            return finish_reduction(output, op, self.world_size).to(device=mine.device, dtype=mine.dtype)

        return self._collective(call, start, finish).wait()

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        *,
        operation: Op | None = ...,
    ) -> torch.Tensor: ...
    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = ...,
        algorithm: str = ...,
        *,
        async_op: Literal[True],
        operation: Op | None = ...,
    ) -> Request[torch.Tensor]: ...
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: bool = False,
        *,
        operation: Op | None = None,
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Combine everybody's tensor, in place, on every rank, with bit-identical results.

        Args:
            tensor: this rank's contribution, overwritten with the result.
            op: "sum", "mean", "min", "max" or "product".
            algorithm: "auto" leaves the choice to the transport; a name such as "ring" or "tree" runs that program of
                `mp.collectives` over point-to-point messages.
            async_op: return a `Request` at once; its `wait()` returns the tensor.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        if algorithm == "auto" and isinstance(operation, AllReduce):
            algorithm = operation.algorithm
        chosen = "" if algorithm == "auto" else f", algorithm={algorithm!r}"
        call = Call.of_all("all_reduce", describe(tensor), f"op={op!r}{chosen}", size=_bytes([tensor]))
        if algorithm != "auto":
            all_reduce_program(algorithm, self.world_size)  # says so if there is none
        request = self._all_reduce(call, tensor, op, algorithm, operation)
        if not async_op:
            return request.wait()
        self._transport.run_in_background()
        return request

    def all_reduce_mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average everybody's tensor, in place, on every rank."""
        return self.all_reduce(tensor, op="mean")

    def _all_reduce(
        self, call: Call, tensor: torch.Tensor, op: str, algorithm: str = "auto", operation: Op | None = None
    ) -> Request[torch.Tensor]:
        check_reduction(op, tensor.dtype, "all_reduce")
        require_writable(tensor, "all_reduce")
        wire = to_wire(tensor, self._transport.carries).to(stand_in(tensor.dtype))
        return self._collective(
            call,
            lambda: [self._transport.all_reduce(wire, wire_reduction(op), algorithm)],
            lambda: from_wire(finish_reduction(wire, op, self.world_size), tensor),
            operation,
            tensor,
        )

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised CPU tensor where the transport moves it fastest: in shared memory, if it has that."""
        return self._transport.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The numbers that the ranks of this group have in the world."""
        return self._transport.world_ranks

    @property
    def mail(self) -> Mail:
        """Messages under a tag of one's own, as a transport: for running programs over them."""
        return Mail(self._transport)

    @property
    def messages_wait_in_line(self) -> bool:
        """Whether a rank's messages run one after another, as NCCL's do: then none may be posted before its time."""
        return self.device.type == "cuda" and "cuda" in self._transport.carries

    def explain(self, error: TransportError, call: str) -> CommsError:
        """Turn a transport's failure in messages of one's own into an error that names the rank and the call."""
        return explain(error, Call(call, call), self._transport)

    # ── smaller worlds ──────────────────────────────────────────────────────────────────────────────────────────

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
        transport = self._transport.subgroup(members)
        if transport is None:
            return None
        return Comms(
            transport,
            device=self.device,
            local_rank=self.local_rank,
            check=self._checker is not None,
            on_close=transport.close,
        )

    def close(self) -> None:
        """Leave the conversation; closing twice is fine."""
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

    def __repr__(self) -> str:
        return f"<Comms rank {self.rank} of {self.world_size} on {self.device}>"


def _require_room(
    into: Sequence[torch.Tensor], own: torch.Tensor, rank: int, contents: list[tuple[torch.dtype, torch.Size]]
) -> None:
    """Refuse tensors that do not fit what is known to come: what a rank has for itself; in checked mode, everything."""
    known = dict(enumerate(contents)) or {rank: (own.dtype, own.shape)}
    for source, (dtype, shape) in known.items():
        tensor = into[source]
        if (tensor.dtype, tensor.numel()) != (dtype, shape.numel()):
            raise Mismatch(
                f"all_to_all: rank {source} has {describe_content(dtype, shape)} for rank {rank}, "
                f"which receives it into {describe(tensor)}"
            )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # nbytes is not for sparse ones
