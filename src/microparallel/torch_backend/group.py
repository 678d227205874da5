"""torch.distributed's backend "microparallel": our collectives under anybody's torch program.

```python
torch.distributed.init_process_group("microparallel")    # or "cpu:microparallel,cuda:nccl"
```

torch calls the methods of a `ProcessGroup`; each turns its arguments into plain tensors, puts collectives into the line
of a `SharedMemoryGroup`, and returns a `Work`. A call that its caller waits for at once runs right here; the others run
in a thread while the caller computes, as DDP wants it, or at the end of backward where no core is left to that thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from microparallel.comms.calls import Call, describe, describe_list, named_failures
from microparallel.comms.shared_memory import SharedMemoryGroup
from microparallel.comms.work_queue import Turn
from microparallel.errors import UsageError
from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.torch_backend.calling import CallingGroup, flight_for, on_cpu
from microparallel.torch_backend.tensors import (
    Contribution,
    Options,
    Reduction,
    bring_back,
    flat_pieces,
    in_words,
    pieces,
    plain,
    require_sum,
)
from microparallel.torch_backend.work import MessageWork
from microparallel.torch_private import number_of_backward
from microparallel.transport.base import Work
from microparallel.transport.shared_memory import SharedMemoryTransport, futex, this_machine

_NOTHING = Call.of_all("nothing")  # an empty list of tensors


def create(options: Any) -> MicroparallelGroup:
    """What torch calls for every group: the world's, and those of `new_group`."""
    if obstacle := futex.why_not():
        raise UsageError(f"backend 'microparallel' cannot work here: {obstacle}; choose 'gloo'")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    _require_one_machine(options.store, options.group_rank, len(ranks))
    flight, owns_flight = flight_for(options.store, ranks[options.group_rank], len(ranks))
    timeout: timedelta = options.timeout
    transport = SharedMemoryTransport(
        dist.PrefixStore("shm", options.store), options.group_rank, ranks, timeout.total_seconds()
    )
    return MicroparallelGroup(options.store, SharedMemoryGroup(transport, flight), timeout, owns_flight=owns_flight)


def _require_one_machine(store: dist.Store, rank: int, ranks: int) -> None:
    machine = this_machine()
    store.set(f"machine/{rank}", machine)
    for other in range(ranks):
        if store.get(f"machine/{other}").decode() != machine:
            raise UsageError(
                f"backend 'microparallel' cannot work here: ranks {rank} and {other} are on different machines, "
                "or in containers that share no files; choose 'gloo'"
            )


class MicroparallelGroup(CallingGroup):
    """One rank's place in a group, as torch sees it."""

    # ── combining ───────────────────────────────────────────────────────────────────────────────────────────────

    @on_cpu
    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Combine everybody's tensors, in place, on every rank."""
        tensors, options = _as_list(tensors), Options.of(opts, **named)
        call, turns = _NOTHING, []
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self._sparse_all_reduce(tensors, options)
        for tensor in tensors:
            reduction = Reduction(options.op, tensor.dtype, self.size())
            call = self._announce(options, "all_reduce", describe(tensor), f"op={reduction.name}")
            wire = plain(tensor)
            reduction.before(wire)
            turns.append(self._group.all_reduce(wire, reduction.together))
            turns += self._finish([wire], [tensor], reduction)
        return self._work(call, turns, tensors, options, after_backward=number_of_backward() is not None)

    def _sparse_all_reduce(self, tensors: list[torch.Tensor], options: Options) -> dist.Work:
        """Add up sparse tensors: everybody gets everybody's indices and values, and adds them in rank order."""
        call, turns = _NOTHING, []
        for tensor in tensors:
            require_sum(tensor, options.op)
            content = f"sparse {describe(tensor)}"
            call = self._announce(options, "all_reduce", content, f"sparse_dim={tensor.sparse_dim()}")
            contribution = Contribution(tensor)
            # How much comes must be known before there is room for it, so this much is waited for.
            told = [torch.empty_like(contribution.count) for _ in range(self.size())]
            self._work(call, [self._group.all_gather(contribution.count, told)], told, options).wait()
            counts = [int(count) for count in told]
            arrived = contribution.room(counts)
            for mine, theirs in zip(contribution.wires, arrived, strict=True):
                turns.append(self._group.all_to_all(theirs, [mine] * self.size()))
            turns.append(self._group.afterwards(functools.partial(contribution.add_up, counts, *arrived)))
        return self._work(call, turns, tensors, options)

    @on_cpu
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """The same, for several tensors."""
        return self.allreduce(tensors, opts)

    @on_cpu
    def reduce(self, tensors: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Combine everybody's tensor on one rank; the others' stay as they are."""
        (tensor,), options = _as_list(tensors), Options.of(opts, **named)
        reduction = Reduction(options.op, tensor.dtype, self.size())
        call = self._announce(
            options, "reduce", describe(tensor), f"dst={self._world_rank(options.root)}", f"op={reduction.name}"
        )
        wire, here = plain(tensor), self.rank() == options.root
        if reduction.changes_input and not here:
            wire = wire.clone()
        reduction.before(wire)
        turns = [self._group.reduce(wire, options.root, reduction.together)]
        if here:
            turns += self._finish([wire], [tensor], reduction)
        return self._work(call, turns, [tensor], options)

    @on_cpu
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Combine the ranks' lists position by position; rank r gets position r."""
        (output,), options = _as_list(outputs), Options.of(opts, **named)
        (listed,) = _as_lists(inputs)
        self._require_one_for_each("reduce_scatter", listed)
        reduction = Reduction(options.op, output.dtype, self.size())
        call = self._announce(options, "reduce_scatter", describe_list(listed), f"op={reduction.name}")
        turns = self._reduce_scatter(output, [plain(tensor) for tensor in listed], reduction)
        return self._work(call, turns, [output], options)

    @on_cpu
    def reduce_scatter_single(self, output: torch.Tensor, entire: torch.Tensor, opts: Any = None) -> dist.Work:
        """The same, with the list as one tensor."""
        return self.reduce_scatter_single_coalesced([output], [entire], opts)

    @on_cpu
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same, for several tensors."""
        options, call, turns = Options.of(opts), _NOTHING, []
        for output, entire in zip(outputs, inputs, strict=True):
            reduction = Reduction(options.op, output.dtype, self.size())
            call = self._announce(options, "reduce_scatter_tensor", describe(output), f"op={reduction.name}")
            wires = flat_pieces(plain(entire), output, self.size(), str(call))
            turns += self._reduce_scatter(output, wires, reduction)
        return self._work(call, turns, list(outputs), options)

    def _reduce_scatter(self, output: torch.Tensor, wires: list[torch.Tensor], reduction: Reduction) -> list[Turn]:
        mine = plain(output).view(-1)
        if reduction.changes_input:
            wires = [wire.clone() for wire in wires]
        for wire in wires:
            reduction.before(wire)
        if len({wire.numel() for wire in wires}) == 1:
            turns = [self._group.reduce_scatter(mine, [wire.view(-1) for wire in wires], reduction.together)]
        else:
            mine.copy_(wires[self.rank()].view(-1))
            wires = [mine if rank == self.rank() else wire for rank, wire in enumerate(wires)]
            turns = [self._group.reduce(wire, rank, reduction.together) for rank, wire in enumerate(wires)]
        return turns + self._finish([mine.view(output.shape)], [output], reduction)

    # ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────

    @on_cpu
    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Copy one rank's tensors over everybody else's."""
        tensors, options = _as_list(tensors), Options.of(opts, **named)
        call, turns = _NOTHING, []
        for tensor in tensors:
            call = self._announce(options, "broadcast", describe(tensor), f"src={self._world_rank(options.root)}")
            wire = plain(tensor)
            turns.append(self._group.broadcast(wire, options.root))
            turns += self._finish([wire], [tensor])
        return self._work(call, turns, tensors, options)

    @on_cpu
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Collect everybody's tensor on every rank."""
        options, lists, call, turns = Options.of(opts, **named), _as_lists(outputs), _NOTHING, []
        for tensor, listed in zip(_as_list(inputs), lists, strict=True):
            self._require_one_for_each("all_gather", listed)
            call = self._announce(options, "all_gather", describe_list(listed))
            turns += self._all_gather(tensor, [plain(output) for output in listed], listed, str(call))
        return self._work(call, turns, lists, options)

    @on_cpu
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same for several tensors, with a list of them for each rank."""
        return self.allgather([list(of_one) for of_one in zip(*outputs, strict=True)], inputs, opts)

    @on_cpu
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """The same, with the list as one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    @on_cpu
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same, for several tensors."""
        options, call, turns = Options.of(opts), _NOTHING, []
        for output, tensor in zip(outputs, inputs, strict=True):
            call = self._announce(options, "all_gather_into_tensor", describe(tensor))
            wire = plain(output)
            rows = flat_pieces(wire, tensor, self.size(), str(call))
            turns += self._all_gather(tensor, rows, rows, str(call))
            turns += self._finish([wire], [output])
        return self._work(call, turns, list(outputs), options)

    def _all_gather(
        self, tensor: torch.Tensor, wires: list[torch.Tensor], outputs: Sequence[torch.Tensor], call: str
    ) -> list[Turn]:
        mine = wires[self.rank()].view(-1)
        if tensor.numel() != mine.numel() or tensor.dtype != mine.dtype:
            raise UsageError(f"{call}: this rank's tensor is {describe(tensor)}, and its output {describe(mine)}")
        wires = [wire.view(-1) for wire in wires]
        if len({wire.numel() for wire in wires}) == 1:
            turns = [self._group.all_gather(plain(tensor).view(-1), wires)]
        else:
            mine.copy_(plain(tensor).view(-1))
            turns = [self._group.broadcast(wire, rank) for rank, wire in enumerate(wires)]
        shaped = [wire.view(output.shape) for wire, output in zip(wires, outputs, strict=True)]
        return turns + self._finish(shaped, outputs)

    @on_cpu
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Collect everybody's tensor on one rank."""
        options, (tensor,) = Options.of(opts, **named), _as_list(inputs)
        call = self._announce(options, "gather", describe(tensor), f"dst={self._world_rank(options.root)}")
        if self.rank() != options.root:
            return self._work(call, [self._group.gather(plain(tensor), None, options.root)], [], options)
        (listed,) = _as_lists(outputs)
        self._require_one_for_each("gather", listed)
        self._require_alike(call, listed, tensor)
        wires = [plain(output) for output in listed]
        turns = [self._group.gather(plain(tensor), wires, options.root), *self._finish(wires, listed)]
        return self._work(call, turns, [listed], options)

    @on_cpu
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Hand one rank's list out, a tensor to each rank."""
        options, (output,) = Options.of(opts, **named), _as_list(outputs)
        call = self._announce(options, "scatter", describe(output), f"src={self._world_rank(options.root)}")
        wires = None
        if self.rank() == options.root:
            (listed,) = _as_lists(inputs)
            self._require_one_for_each("scatter", listed)
            self._require_alike(call, listed, output)
            wires = [plain(tensor) for tensor in listed]
        mine = plain(output)
        turns = [self._group.scatter(mine, wires, options.root), *self._finish([mine], [output])]
        return self._work(call, turns, [output], options)

    @on_cpu
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Hand tensor r to rank r, and get one from each."""
        self._require_one_for_each("all_to_all", inputs)
        self._require_one_for_each("all_to_all", outputs)
        return self._all_to_all("all_to_all", list(outputs), list(inputs), list(outputs), Options.of(opts, **named))

    @on_cpu
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
        **named: Any,
    ) -> dist.Work:
        """The same, with the lists as one tensor each, cut along the first dimension."""
        wire = plain(output)
        outputs = pieces(wire, output_sizes, self.size())
        inputs = pieces(plain(tensor), input_sizes, self.size())
        options = Options.of(opts, **named)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output], options, wire)

    def _all_to_all(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        result: list[torch.Tensor],
        options: Options,
        entire: torch.Tensor | None = None,
    ) -> dist.Work:
        mine, theirs = outputs[self.rank()], inputs[self.rank()]
        if mine.numel() != theirs.numel() or mine.dtype != theirs.dtype:
            raise UsageError(f"{name}: this rank hands itself {describe(theirs)}, and expects {describe(mine)}")
        call = self._announce(options, name, str(theirs.dtype).removeprefix("torch."))
        wires = [plain(output).view(-1) for output in outputs]
        turns = [self._group.all_to_all(wires, [plain(tensor).view(-1) for tensor in inputs])]
        if entire is None:
            shaped = [wire.view(output.shape) for wire, output in zip(wires, outputs, strict=True)]
            turns += self._finish(shaped, outputs)
        else:
            turns += self._finish([entire], result)
        return self._work(call, turns, result, options)

    def barrier(self, opts: Any = None, **named: Any) -> dist.Work:
        """Meet: nobody goes on before everybody has come."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self.side_of(device).barrier(opts)
        options = Options.of(opts, **named)
        call = self._announce(options, "barrier", "")
        return self._work(call, [self._group.barrier()], [], options)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Meet in time, or raise `CommsTimeout`, on every rank that came, with all the ranks that did not.

        That is what torch does with `wait_all_ranks=True`; without it, only its first rank knows, and of one rank.
        `torch.distributed.monitored_barrier` refuses any backend but gloo before it comes here: call the group's.
        """
        options = Options.of(timeout)
        call = self._announce(options, "monitored_barrier", "")
        self._work(call, [self._group.barrier()], [], options).wait()

    # ── messages between two ranks ──────────────────────────────────────────────────────────────────────────────

    @on_cpu
    def send(self, tensors: Any, to: int, tag: int = 0) -> dist.Work:
        """Start sending."""
        (tensor,) = _as_list(tensors)
        words = in_words("send", describe(tensor), f"dst={self._world_rank(to)}", f"tag={tag}")
        call = words.as_message(to, sends=True, size=tensor.nbytes)
        entry = self._group.log.send(call.text, describe(tensor), to, tag, tensor.nbytes)
        with named_failures(call, self._group, entry):
            work = self._group.isend(plain(tensor), to, tag)
        entry.started()
        return self._remember(MessageWork(self._group, call, entry, work, [tensor]))

    @on_cpu
    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Start receiving."""
        (tensor,) = _as_list(tensors)
        words = in_words("recv", describe(tensor), f"src={self._world_rank(source)}", f"tag={tag}")
        call = words.as_message(source, sends=False, size=tensor.nbytes)
        wire = plain(tensor)
        entry = self._group.log.recv(call.text, describe(tensor), source, tag, tensor.nbytes)
        work = self._group.irecv(wire, source, tag)
        return self._receiving(call, entry, work, wire, tensor)

    @on_cpu
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start receiving from whoever sends first."""
        (tensor,) = _as_list(tensors)
        words = in_words("recv", describe(tensor), "src=any", f"tag={tag}")
        call = words.as_message(None, sends=False, size=tensor.nbytes)
        wire = plain(tensor)
        entry = self._group.log.recv(call.text, describe(tensor), None, tag, tensor.nbytes)
        work = self._group.irecv_from_any(wire, tag)
        return self._receiving(call, entry, work, wire, tensor)

    def _receiving(
        self, call: Call, entry: Entry | NoEntry, work: Work, wire: torch.Tensor, tensor: torch.Tensor
    ) -> dist.Work:
        entry.started()
        receipt = MessageWork(self._group, call, entry, work, [tensor], lambda: bring_back([wire], [tensor]))
        return self._remember(receipt)

    # The names that torch used before 2.13, as in `torch_private.BEFORE_2_13`, which leads the others here.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _as_lists(lists: Any) -> list[list[torch.Tensor]]:
    """A list of lists, or one list."""
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else list(lists)
