"""Every collective of a Comms. Each is the same three steps.

Make the tensors fit for the wire, start the transfer (`_collective`), and bring the result back when it is waited for
(`finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, overload

import torch

from microparallel.collectives import all_reduce_program, is_compressed
from microparallel.comms.calls import Call, describe, describe_content, describe_list
from microparallel.comms.group import Group
from microparallel.comms.interpreter import Algorithm
from microparallel.comms.own_program import verified_all_reduce
from microparallel.comms.request import Caller, Request, Result
from microparallel.comms.rounds import Exchanged, Rounds, WireRounds
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
from microparallel.errors import Mismatch, UsageError
from microparallel.program import AUTO, AllReduce, Op, Program
from microparallel.transport.base import Work

Exchange = TypeVar("Exchange")  # what the rounds of an exchange return


class Collectives(Caller):
    """The calls that every rank of a group makes, in the same order.

    Each takes torch's `async_op`. Without it, a call returns its result. With `async_op=True` it returns a `Request` as
    soon as the transfer has started: the transfer goes on in the background, and the request's `wait()` returns the
    result. Until then, neither change the tensors that were handed over nor read those that are written to.
    """

    def __init__(self, group: Group, *, device: torch.device, check: bool) -> None:
        super().__init__(group, check)
        self.device = device

    def _answer(self, request: Request[Result], async_op: bool) -> Result | Request[Result]:
        """The result, or with `async_op` the request, while the transfer goes on in the background."""
        if not async_op:
            return request.wait()
        self._group.run_in_background()
        return request

    # ── from one rank to all, and back ──────────────────────────────────────────────────────────────────────────

    @overload
    def barrier(self, *, async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Request[None]: ...
    def barrier(self, *, async_op: bool = False) -> Request[None] | None:
        """Wait until every rank has called this."""
        # No rank can know the sum before every rank has added to it.
        token = to_wire(torch.zeros(1, device=self.device), self._group.carries)

        def finish() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        request = self._collective(Call.of_all("barrier"), lambda: [self._group.all_reduce(token, "sum", AUTO)], finish)
        return self._answer(request, async_op)

    @overload
    def broadcast(
        self, tensor: torch.Tensor, src: int = ..., *, async_op: Literal[False] = ..., operation: Op | None = ...
    ) -> torch.Tensor: ...
    @overload
    def broadcast(
        self, tensor: torch.Tensor, src: int = ..., *, async_op: Literal[True], operation: Op | None = ...
    ) -> Request[torch.Tensor]: ...
    def broadcast(
        self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False, operation: Op | None = None
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Copy the tensor of `src` over that of every other rank, in place.

        Args:
            tensor: what is copied, or overwritten.
            src: the rank whose tensor is copied.
            async_op: return a `Request`, whose `wait()` returns the tensor.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        self._require_rank("broadcast", "src", src)
        require_writable(tensor, "broadcast")
        wire = to_wire(tensor, self._group.carries)
        call = Call.of_all("broadcast", self._content(wire), f"src={src}", size=wire.nbytes)
        request = self._collective(
            call, lambda: [self._group.broadcast(as_bytes(wire), src)], lambda: from_wire(wire, tensor), operation
        )
        return self._answer(request, async_op)

    @overload
    def scatter(
        self, tensors: Sequence[torch.Tensor] | None, src: int = ..., *, async_op: Literal[False] = ...
    ) -> torch.Tensor: ...
    @overload
    def scatter(
        self, tensors: Sequence[torch.Tensor] | None, src: int = ..., *, async_op: Literal[True]
    ) -> Request[torch.Tensor]: ...
    def scatter(
        self, tensors: Sequence[torch.Tensor] | None, src: int = 0, *, async_op: bool = False
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Hand out the list of `src`, one tensor to each rank, and return this rank's; the other ranks pass None.

        The tensors may differ in shape and dtype: `src` describes them to their receivers first, and with `async_op`
        this much is waited for.
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
            wires = [to_wire(tensor, self._group.carries) for tensor in tensors]
        headers = write_headers(wires, self.world_size)
        self._collective(call, lambda: [self._group.broadcast(headers, src)], lambda: None).wait()
        contents = read_headers(headers)

        # The backends scatter equal sizes only, so every message is as long as the longest.
        most = max(shape.numel() * dtype.itemsize for dtype, shape in contents)
        mine = empty_on_wire((most,), torch.uint8, self.device, self._group.carries)
        padded = [torch.empty_like(mine) for _ in wires]
        for row, wire in zip(padded, wires, strict=True):
            row[: wire.nbytes].copy_(as_bytes(wire))
        dtype, shape = contents[self.rank]

        def finish() -> torch.Tensor:
            return mine[: shape.numel() * dtype.itemsize].view(dtype).reshape(shape).to(self.device, copy=True)

        request = self._start(call, lambda: [self._group.scatter(mine, padded or None, src)], finish)
        return self._answer(request, async_op)

    @overload
    def gather(
        self, tensor: torch.Tensor, dst: int = ..., *, async_op: Literal[False] = ...
    ) -> list[torch.Tensor] | None: ...
    @overload
    def gather(
        self, tensor: torch.Tensor, dst: int = ..., *, async_op: Literal[True]
    ) -> Request[list[torch.Tensor] | None]: ...
    def gather(
        self, tensor: torch.Tensor, dst: int = 0, *, async_op: bool = False
    ) -> list[torch.Tensor] | Request[list[torch.Tensor] | None] | None:
        """Collect every rank's tensor on `dst`, which gets the list in rank order; the other ranks get None."""
        self._require_rank("gather", "dst", dst)
        wire = to_wire(tensor, self._group.carries)
        call = Call.of_all("gather", self._content(wire), f"dst={dst}", size=wire.nbytes)
        outputs = [torch.empty_like(wire) for _ in range(self.world_size)] if self.rank == dst else None
        rows = None if outputs is None else [as_bytes(output) for output in outputs]

        def finish() -> list[torch.Tensor] | None:
            return None if outputs is None else [output.to(tensor.device) for output in outputs]

        request = self._collective(call, lambda: [self._group.gather(as_bytes(wire), rows, dst)], finish)
        return self._answer(request, async_op)

    @overload
    def all_gather(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor | Sequence[torch.Tensor] | None = ...,
        *,
        async_op: Literal[False] = ...,
        operation: Op | None = ...,
    ) -> list[torch.Tensor]: ...
    @overload
    def all_gather(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor | Sequence[torch.Tensor] | None = ...,
        *,
        async_op: Literal[True],
        operation: Op | None = ...,
    ) -> Request[list[torch.Tensor]]: ...
    def all_gather(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor | Sequence[torch.Tensor] | None = None,
        *,
        async_op: bool = False,
        operation: Op | None = None,
    ) -> list[torch.Tensor] | Request[list[torch.Tensor]]:
        """Collect every rank's tensor on every rank, as a list in rank order.

        Args:
            tensor: this rank's.
            into: where they go: one flat tensor, of which each rank's is an equal part, or a tensor for each rank;
                these may differ in size. All ranks give the same kind. This rank's place may be `tensor` itself.
            async_op: return a `Request`, whose `wait()` returns the list.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        wire = to_wire(tensor, self._group.carries)
        if into is None:
            places = outputs = [torch.empty_like(wire) for _ in range(self.world_size)]
            call = Call.of_all("all_gather", self._content(wire), size=wire.nbytes)
        else:
            places = self._places("all_gather", into, tensor)
            entire = _to_write(into, self._group.carries) if isinstance(into, torch.Tensor) else None
            outputs = [_to_write(one, self._group.carries) for one in places] if entire is None else self._cut(entire)
            words = describe(into) if isinstance(into, torch.Tensor) else describe_list(into)
            call = Call.of_all("all_gather", words, size=_bytes(outputs))
        rows = [as_bytes(output) for output in outputs]
        together = isinstance(into, torch.Tensor)

        def start() -> list[Work]:
            if len({len(row) for row in rows}) == 1:
                return [self._group.all_gather(as_bytes(wire), rows, together=together)]
            if rows[self.rank].data_ptr() != wire.data_ptr():
                rows[self.rank].copy_(as_bytes(wire))
            return [self._group.broadcast(row, rank) for rank, row in enumerate(rows) if len(row)]

        def finish() -> list[torch.Tensor]:
            if into is None:
                return [output.to(tensor.device) for output in outputs]
            return [from_wire(output, place) for output, place in zip(outputs, places, strict=True)]

        return self._answer(self._collective(call, start, finish, operation), async_op)

    @overload
    def all_to_all(
        self,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = ...,
        *,
        async_op: Literal[False] = ...,
        operation: Op | None = ...,
    ) -> list[torch.Tensor]: ...
    @overload
    def all_to_all(
        self,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = ...,
        *,
        async_op: Literal[True],
        operation: Op | None = ...,
    ) -> Request[list[torch.Tensor]]: ...
    def all_to_all(
        self,
        tensors: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor] | None = None,
        *,
        async_op: bool = False,
        operation: Op | None = None,
    ) -> list[torch.Tensor] | Request[list[torch.Tensor]]:
        """Hand tensor r of the list to rank r, and return what each rank had for this one, in rank order.

        The tensors may differ in shape and dtype: each rank describes them to their receivers first, unless these know.

        Args:
            tensors: one for each rank, this one included.
            into: tensors to receive into, for ranks that know what comes: then no descriptions are exchanged. Either
                all ranks give them, or none does.
            async_op: return a `Request` as soon as it is known what comes; its `wait()` returns the list.
            operation: what this call is in the program that its caller follows, who knows what comes; observers are
                told so.
        """
        for name, given in (("tensors", tensors), ("into", into)):
            if given is not None and len(given) != self.world_size:
                raise UsageError(
                    f"all_to_all: {name} needs one tensor for each of {self.world_size} ranks, not {len(given)}"
                )
        wires = [to_wire(tensor, self._group.carries) for tensor in tensors]
        call = Call.of_all("all_to_all", *(["into"] if into is not None else []), size=_bytes(wires))
        agreed = into is None or (self._checker is not None and operation is None)
        contents = self._exchange_headers(call, wires) if agreed else []
        device = tensors[self.rank].device
        if into is None:
            outputs = [empty_on_wire(shape, dtype, device, self._group.carries) for dtype, shape in contents]
        else:
            for tensor in into:
                require_writable(tensor, "all_to_all")
            _require_room(into, wires[self.rank], self.rank, contents)
            outputs = [to_wire(tensor, self._group.carries) for tensor in into]

        def finish() -> list[torch.Tensor]:
            if into is None:
                return [output.to(device) for output in outputs]
            return [from_wire(output, tensor) for output, tensor in zip(outputs, into, strict=True)]

        def start() -> list[Work]:
            return [self._group.all_to_all([as_bytes(one) for one in outputs], [as_bytes(one) for one in wires])]

        if agreed:
            return self._answer(self._start(call, start, finish), async_op)
        return self._answer(self._collective(call, start, finish, operation), async_op)

    def _exchange_headers(self, call: Call, wires: list[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
        """Tell each rank what it will get, and learn what comes from each."""
        mine = write_headers(wires, self.world_size)
        theirs = torch.empty_like(mine)
        self._collective(
            call, lambda: [self._group.all_to_all(list(theirs.unbind()), list(mine.unbind()))], lambda: None
        ).wait()
        return read_headers(theirs)

    def _places(
        self, call: str, into: torch.Tensor | Sequence[torch.Tensor], tensor: torch.Tensor
    ) -> list[torch.Tensor]:
        """The place of each rank's tensor; refuse those that cannot hold what comes, as far as this rank can know."""
        places = self._cut(into) if isinstance(into, torch.Tensor) else list(into)
        if len(places) != self.world_size:
            raise UsageError(f"{call}: into needs one tensor for each of {self.world_size} ranks, not {len(places)}")
        _require_same_kind(call, places[self.rank], tensor)
        for place in places:
            require_writable(place, call)
        return places

    def _cut(self, entire: torch.Tensor) -> list[torch.Tensor]:
        """The equal parts of a flat tensor, one for each rank."""
        if entire.dim() != 1 or len(entire) % self.world_size:
            raise UsageError(
                f"{describe(entire)} cannot be cut into {self.world_size} equal parts; give a flat tensor whose length "
                f"is a multiple of {self.world_size}, or a list of tensors"
            )
        return list(entire.detach().view(self.world_size, -1).unbind())

    # ── combining the ranks' tensors ────────────────────────────────────────────────────────────────────────────

    @overload
    def reduce(
        self, tensor: torch.Tensor, dst: int = ..., op: str = ..., *, async_op: Literal[False] = ...
    ) -> torch.Tensor: ...
    @overload
    def reduce(
        self, tensor: torch.Tensor, dst: int = ..., op: str = ..., *, async_op: Literal[True]
    ) -> Request[torch.Tensor]: ...
    def reduce(
        self, tensor: torch.Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Combine the ranks' tensors on `dst`, in place; the tensors of the other ranks stay as they are."""
        self._require_rank("reduce", "dst", dst)
        check_reduction(op, tensor.dtype, "reduce")
        call = Call.of_all("reduce", describe(tensor), f"dst={dst}", f"op={op!r}", size=_bytes([tensor]))
        wire = to_wire(tensor, self._group.carries).to(stand_in(tensor.dtype))
        if self.rank == dst:
            require_writable(tensor, "reduce")
        else:
            wire = wire.clone()  # the backend uses it as scratch

        def finish() -> torch.Tensor:
            if self.rank != dst:
                return tensor
            return from_wire(finish_reduction(wire, op, self.world_size), tensor)

        request = self._collective(call, lambda: [self._group.reduce(wire, dst, wire_reduction(op))], finish)
        return self._answer(request, async_op)

    @overload
    def reduce_scatter(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        op: str = ...,
        *,
        into: torch.Tensor | None = ...,
        async_op: Literal[False] = ...,
        operation: Op | None = ...,
    ) -> torch.Tensor: ...
    @overload
    def reduce_scatter(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        op: str = ...,
        *,
        into: torch.Tensor | None = ...,
        async_op: Literal[True],
        operation: Op | None = ...,
    ) -> Request[torch.Tensor]: ...
    def reduce_scatter(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        op: str = "sum",
        *,
        into: torch.Tensor | None = None,
        async_op: bool = False,
        operation: Op | None = None,
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Combine the lists of all ranks position by position; rank r gets position r.

        The positions may differ in shape, as long as every rank's list has the same shapes.

        Args:
            tensors: one for each rank, or one flat tensor that is cut into equal parts; they stay as they are. All
                ranks give the same kind.
            op: "sum", "mean", "min", "max" or "product".
            into: where the result goes, which may be this rank's own position.
            async_op: return a `Request`, whose `wait()` returns the result.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        together = isinstance(tensors, torch.Tensor)
        if isinstance(tensors, torch.Tensor):
            words, positions = describe(tensors), self._cut(tensors)
        else:
            words, positions = describe_list(tensors), list(tensors)
        if len(positions) != self.world_size:
            raise UsageError(
                f"reduce_scatter: the list needs one tensor for each of {self.world_size} ranks, not {len(positions)}"
            )
        for tensor in positions:
            check_reduction(op, tensor.dtype, "reduce_scatter")
        call = Call.of_all("reduce_scatter", words, f"op={op!r}", size=sum(one.nbytes for one in positions))
        mine = positions[self.rank]
        wires = [to_wire(tensor, self._group.carries).to(stand_in(tensor.dtype)) for tensor in positions]
        alike = len({(wire.shape, wire.dtype) for wire in wires}) == 1
        if into is None:
            output = torch.empty_like(wires[self.rank])
        else:
            _require_same_kind("reduce_scatter", into, mine)
            output = _to_write(into, self._group.carries).to(stand_in(into.dtype))
            if output.data_ptr() == wires[self.rank].data_ptr():
                output = wires[self.rank]  # in place: the group sees that nothing is to be copied

        def start() -> list[Work]:
            if alike:
                return [self._group.reduce_scatter(output, wires, wire_reduction(op), together=together)]
            if output is not wires[self.rank]:
                output.copy_(wires[self.rank])
            # In a reduction, a rank's tensor is scratch where it is not the result.
            buffers = [output if rank == self.rank else wire.clone() for rank, wire in enumerate(wires)]
            return [self._group.reduce(buffer, rank, wire_reduction(op)) for rank, buffer in enumerate(buffers)]

        def finish() -> torch.Tensor:
            result = finish_reduction(output, op, self.world_size)
            return result.to(device=mine.device, dtype=mine.dtype) if into is None else from_wire(result, into)

        return self._answer(self._collective(call, start, finish, operation), async_op)

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = ...,
        algorithm: str | Program = ...,
        *,
        async_op: Literal[False] = ...,
        operation: Op | None = ...,
    ) -> torch.Tensor: ...
    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = ...,
        algorithm: str | Program = ...,
        *,
        async_op: Literal[True],
        operation: Op | None = ...,
    ) -> Request[torch.Tensor]: ...
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str | Program = AUTO,
        *,
        async_op: bool = False,
        operation: Op | None = None,
    ) -> torch.Tensor | Request[torch.Tensor]:
        """Combine the ranks' tensors, in place, on every rank, with bit-identical results.

        Args:
            tensor: this rank's contribution, overwritten with the result.
            op: "sum", "mean", "min", "max" or "product".
            algorithm: "auto" leaves the choice to the transport; a name such as "ring" or "tree" runs that program of
                `mp.collectives` over point-to-point messages; a Program of your own is verified, once, and then runs
                like those. All ranks give the same: shared memory notices if not, other transports in checked mode. If
                your program adds up in another order on each rank, their results may differ in the last bits.
            async_op: return a `Request` at once; its `wait()` returns the tensor.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        if algorithm == AUTO and isinstance(operation, AllReduce):
            algorithm = operation.algorithm
        chosen, words = self._chosen(algorithm)
        call = Call.of_all("all_reduce", describe(tensor), f"op={op!r}{words}", size=_bytes([tensor]))
        check_reduction(op, tensor.dtype, "all_reduce")
        require_writable(tensor, "all_reduce")
        wire = to_wire(tensor, self._group.carries).to(stand_in(tensor.dtype))
        request = self._collective(
            call,
            lambda: [self._group.all_reduce(wire, wire_reduction(op), chosen)],
            lambda: from_wire(finish_reduction(wire, op, self.world_size), tensor),
            operation,
            tensor,
        )
        return self._answer(request, async_op)

    @overload
    def exchange_rounds(
        self,
        rounds: Rounds[Exchange],
        words: str,
        *,
        size: int = ...,
        async_op: Literal[False] = ...,
        operation: Op | None = ...,
    ) -> Exchange: ...
    @overload
    def exchange_rounds(
        self,
        rounds: Rounds[Exchange],
        words: str,
        *,
        size: int = ...,
        async_op: Literal[True],
        operation: Op | None = ...,
    ) -> Request[Exchange]: ...
    def exchange_rounds(
        self,
        rounds: Rounds[Exchange],
        words: str,
        *,
        size: int = 0,
        async_op: bool = False,
        operation: Op | None = None,
    ) -> Exchange | Request[Exchange]:
        """Sum and gather several times, each time with what came before: all as one call (`comms/rounds.py`).

        Args:
            rounds: a generator that yields `("sum", tensor)` or `("gather", tensor)`, and is sent the result. It runs
                in the thread that runs the call.
            words: what is exchanged, the same on every rank: "topk-0.01 of 1000 numbers".
            size: how many bytes are exchanged, as if they were not compressed.
            async_op: return a `Request`, whose `wait()` returns what the generator has returned.
            operation: what this call is in the program that its caller follows; observers are told so.
        """
        results: list[Exchange] = []
        request = self._collective(
            Call.of_all("exchange_rounds", words, size=size),
            lambda: [self._group.exchange_rounds(self._on_wire(rounds, results))],
            results.pop,
            operation,
        )
        return self._answer(request, async_op)

    def _on_wire(self, rounds: Rounds[Exchange], results: list[Exchange]) -> WireRounds:
        """The same rounds with tensors that the transport carries; what they return becomes a result."""
        answer: Exchanged | None = None
        while True:
            try:
                kind, tensor = next(rounds) if answer is None else rounds.send(answer)
            except StopIteration as stop:
                results.append(stop.value)
                return
            found = yield kind, to_wire(tensor, self._group.carries)
            answer = (
                from_wire(found, tensor)
                if isinstance(found, torch.Tensor)
                else [one.to(tensor.device) for one in found]
            )

    def _chosen(self, algorithm: str | Program) -> tuple[Algorithm, str]:
        """How an all-reduce runs, and what its call says of that; refused if it is no all-reduce of these ranks."""
        if isinstance(algorithm, Program):
            own = verified_all_reduce(algorithm, self.world_size)
            return own.of_rank(self.rank), f", algorithm={own.words}"
        if not isinstance(algorithm, str):
            raise UsageError(f"all_reduce: algorithm={algorithm!r}; give a name such as 'ring', or a Program")
        if algorithm == AUTO:
            return AUTO, ""
        if is_compressed(algorithm):
            raise UsageError(
                f"all_reduce: algorithm={algorithm!r} loses most of the numbers; it is for gradients: "
                "mp.DataParallel(model, comms, compress=…)"
            )
        all_reduce_program(algorithm, self.world_size)  # says so if there is none
        return algorithm, f", algorithm={algorithm!r}"

    @overload
    def all_reduce_mean(self, tensor: torch.Tensor, *, async_op: Literal[False] = ...) -> torch.Tensor: ...
    @overload
    def all_reduce_mean(self, tensor: torch.Tensor, *, async_op: Literal[True]) -> Request[torch.Tensor]: ...
    def all_reduce_mean(self, tensor: torch.Tensor, *, async_op: bool = False) -> torch.Tensor | Request[torch.Tensor]:
        """Average the ranks' tensors, in place, on every rank."""
        return self.all_reduce(tensor, "mean", async_op=True) if async_op else self.all_reduce(tensor, "mean")


def _require_same_kind(call: str, into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Refuse a place for a tensor that has another dtype, size or device."""
    require_writable(into, call)
    if (into.dtype, into.numel(), into.device) != (tensor.dtype, tensor.numel(), tensor.device):
        raise UsageError(
            f"{call}: into is {describe(into)} on {into.device}, for {describe(tensor)} on {tensor.device}"
        )


def _to_write(tensor: torch.Tensor, carries: frozenset[str]) -> torch.Tensor:
    """Memory that the transport can write to: the tensor's own, or room beside it, whose contents do not matter."""
    if tensor.device.type in carries and tensor.is_contiguous():
        return tensor.detach()
    return empty_on_wire(tensor.shape, tensor.dtype, tensor.device, carries)


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
