"""torch.distributed's backend "microparallel": our collectives under any torch program.

```python
torch.distributed.init_process_group("microparallel")    # or "cpu:microparallel,cuda:nccl"
```

It takes tensors of the CPU, and those of a GPU that all ranks share. If the ranks have begun to use that GPU when they
make the group, one transport carries both; otherwise, one for the GPU is started with its first tensor.

torch calls the methods of a `ProcessGroup`. Each makes plain tensors of its arguments, puts collectives into the work
queue of a `SharedMemoryGroup`, and returns a `Work`. Without `async_op`, a call runs in the thread that calls. With it,
the call runs in the queue's thread while the caller computes, as DDP wants it; where all cores compute, it runs at the
end of backward.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from microparallel.comms.calls import Call, describe, describe_list
from microparallel.comms.on_one_gpu import OneGpuGroup
from microparallel.comms.request import named_failures
from microparallel.comms.shared_memory import SharedMemoryGroup
from microparallel.comms.work_queue import QueuedWork
from microparallel.errors import UsageError
from microparallel.observe.flight import Flight
from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.topology.hosts import Hosts, hosts_of, transport_between
from microparallel.torch_backend.base import GroupBase, agreed_link, carried, flight_for, no_backend_for, transport_for
from microparallel.torch_backend.tensors import (
    Contribution,
    Options,
    TorchReduction,
    bring_back,
    contiguous,
    flat_pieces,
    in_words,
    pieces,
    plain,
    require_sum,
)
from microparallel.torch_backend.work import MessageWork
from microparallel.torch_private import is_profiling, number_of_backward, uncompiled
from microparallel.transport.base import Work
from microparallel.transport.between_hosts import HostsTransport
from microparallel.transport.cuda import CudaTransport
from microparallel.transport.interfaces import address_towards, take_the_way
from microparallel.transport.shared_memory import SharedMemoryTransport, futex, this_machine

_NOTHING = Call.of_all("nothing")  # an empty list of tensors


def create(options: Any) -> MicroparallelGroup:
    """Make a group: torch calls this for the world's, and for each of `new_group`."""
    if obstacle := futex.why_not():
        raise UsageError(f"backend 'microparallel' cannot work here: {obstacle}; choose 'gloo'")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    store, rank, timeout = options.store, options.group_rank, options.timeout
    name = transport_for(ranks) or _transport(store, rank, len(ranks))
    flight, owns_flight = flight_for(store, ranks[rank], len(ranks))
    return make(name, store, rank, ranks, timeout, flight, owns_flight=owns_flight)


def make(
    name: str,
    store: dist.Store,
    rank: int,
    world_ranks: Sequence[int],
    timeout: timedelta,
    flight: Flight,
    *,
    owns_flight: bool = False,
) -> MicroparallelGroup:
    """Make a group over a transport that these ranks can use."""
    arguments = (dist.PrefixStore("shm", store), rank, world_ranks, timeout.total_seconds())
    group: SharedMemoryGroup
    if name == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        group = OneGpuGroup(CudaTransport(*arguments, device=device), flight)
    elif hosts_of(name) is not None:
        group = SharedMemoryGroup(HostsTransport(*arguments, name=name), flight)
    else:
        group = SharedMemoryGroup(SharedMemoryTransport(*arguments), flight)
    return MicroparallelGroup(store, group, timeout, owns_flight=owns_flight)


def _transport(store: dist.Store, rank: int, ranks: int) -> str:
    """What these ranks can use; a rank says which GPU it uses if it has begun to use one."""
    name = transport_between(_hosts(store, rank, ranks), agreed_link(store, rank))
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = identity_of_gpu(torch.device("cuda", torch.cuda.current_device())) if begun else ""
    return "cuda" if name == "shm" and all_on_one_gpu(store, rank, ranks, gpu) else name


def identity_of_gpu(device: torch.device) -> str:
    """A text that is the same in all processes that use this GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def all_on_one_gpu(store: dist.Store, rank: int, ranks: int, gpu: str) -> bool:
    """Whether all ranks name the same GPU; every rank asks."""
    store.set(f"gpu/{rank}", gpu)
    gpus = {store.get(f"gpu/{other}").decode() for other in range(ranks)}
    return gpus == {gpu} and bool(gpu)


class _Place(NamedTuple):
    """Where a rank is."""

    machine: str
    address: str


def _hosts(store: dist.Store, rank: int, ranks: int) -> Hosts:
    """Which ranks can share memory; where there are several hosts, gloo is told which way leads to the others."""
    store.set(f"machine/{rank}", this_machine())
    machines = [store.get(f"machine/{other}").decode() for other in range(ranks)]
    hosts = Hosts.of(machines)
    meeting = os.environ.get("MASTER_ADDR")  # without it, the program has a store of its own
    if len(hosts.ranks) > 1 and meeting:
        store.set(f"address/{rank}", address_towards(meeting, 0))
        addresses = [store.get(f"address/{other}").decode() for other in range(ranks)]
        take_the_way([_Place(*one) for one in zip(machines, addresses, strict=True)], rank)
    return hosts


@uncompiled
class MicroparallelGroup(GroupBase):
    """One rank's place in a group, as torch sees it."""

    def _on_gpu(self, device: torch.device, store: dist.Store) -> MicroparallelGroup:
        """A group of the same ranks that share a GPU, for its tensors; an error if they do not."""
        if not all_on_one_gpu(store, self.rank(), self.size(), identity_of_gpu(device)):
            raise no_backend_for(device)
        return make("cuda", store, self.rank(), self._group.world_ranks, self._timeout, self._group.flight)

    # ── combining ───────────────────────────────────────────────────────────────────────────────────────────────

    @carried
    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Combine the ranks' tensors, in place, on every rank."""
        return self._all_reduce(_as_list(tensors), Options.of(opts, **named))

    @carried
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """The same, for several tensors."""
        return self._all_reduce(_as_list(tensors), Options.of(opts))

    def _all_reduce(self, tensors: list[torch.Tensor], options: Options) -> dist.Work:
        call, works = _NOTHING, _new_works()
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self._sparse_all_reduce(tensors, options)
        for tensor in tensors:
            reduction = TorchReduction(options.op, tensor.dtype, self.size())
            call = self._announce(options, "all_reduce", describe(tensor), f"op={reduction.name}")
            wire = self._wire(tensor, works, reduction)
            works.append(self._group.all_reduce(wire, reduction.together))
            works += self._finish([wire], [tensor], reduction)
        return self._work(call, works, tensors, options, after_backward=number_of_backward() is not None)

    def _sparse_all_reduce(self, tensors: list[torch.Tensor], options: Options) -> dist.Work:
        """Add up sparse tensors: every rank gets all ranks' indices and values, and adds them in rank order."""
        call, works = _NOTHING, _new_works()
        for tensor in tensors:
            require_sum(tensor, options.op)
            self._group.in_turn(_nothing).wait()  # a collective that was called before may change the tensor
            content = f"sparse {describe(tensor)}"
            call = self._announce(options, "all_reduce", content, f"sparse_dim={tensor.sparse_dim()}")
            contribution = Contribution(tensor)
            # How much comes must be known before there is room for it, so this much is waited for.
            gathered = [torch.empty_like(contribution.count) for _ in range(self.size())]
            self._work(call, [self._group.all_gather(contribution.count, gathered)], gathered, options).wait()
            counts = [int(count) for count in gathered]
            arrived = contribution.room(counts)
            for mine, theirs in zip(contribution.wires, arrived, strict=True):
                works.append(self._group.all_to_all(theirs, [mine] * self.size()))
            works.append(self._group.in_turn(functools.partial(contribution.add_up, counts, *arrived)))
        return self._work(call, works, tensors, options)

    @carried
    def reduce(self, tensors: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Combine the ranks' tensors on one rank; those of the other ranks stay as they are."""
        (tensor,), options = _as_list(tensors), Options.of(opts, **named)
        reduction = TorchReduction(options.op, tensor.dtype, self.size())
        call = self._announce(
            options, "reduce", describe(tensor), f"dst={self._world_rank(options.root)}", f"op={reduction.name}"
        )
        here, works = self.rank() == options.root, _new_works()
        wire = self._wire(tensor, works, reduction, separate=reduction.changes_input and not here)
        works.append(self._group.reduce(wire, options.root, reduction.together))
        if here:
            works += self._finish([wire], [tensor], reduction)
        return self._work(call, works, [tensor], options)

    @carried
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Combine the ranks' lists position by position; rank r gets position r."""
        (output,), options = _as_list(outputs), Options.of(opts, **named)
        (listed,) = _as_lists(inputs)
        self._require_one_for_each("reduce_scatter", listed)
        reduction = TorchReduction(options.op, output.dtype, self.size())
        call = self._announce(options, "reduce_scatter", describe_list(listed), f"op={reduction.name}")
        works, separate = _new_works(), reduction.changes_input
        wires = [self._wire(tensor, works, reduction, separate=separate) for tensor in listed]
        works += self._reduce_scatter(output, wires, reduction)
        return self._work(call, works, [output], options)

    @carried
    def reduce_scatter_single(self, output: torch.Tensor, entire: torch.Tensor, opts: Any = None) -> dist.Work:
        """The same, with the list as one tensor."""
        return self._reduce_scatter_tensors([output], [entire], Options.of(opts))

    @carried
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same, for several tensors."""
        return self._reduce_scatter_tensors(outputs, inputs, Options.of(opts))

    def _reduce_scatter_tensors(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Options
    ) -> dist.Work:
        call, works = _NOTHING, _new_works()
        for output, entire in zip(outputs, inputs, strict=True):
            reduction = TorchReduction(options.op, output.dtype, self.size())
            call = self._announce(options, "reduce_scatter_tensor", describe(output), f"op={reduction.name}")
            wire = self._wire(entire, works, reduction, separate=reduction.changes_input)
            wires = flat_pieces(wire, output, self.size(), str(call))
            works += self._reduce_scatter(output, wires, reduction)
        return self._work(call, works, list(outputs), options)

    def _reduce_scatter(
        self, output: torch.Tensor, wires: list[torch.Tensor], reduction: TorchReduction
    ) -> list[QueuedWork]:
        mine, works = plain(output).view(-1), _new_works()
        if len({wire.numel() for wire in wires}) == 1:
            works.append(self._group.reduce_scatter(mine, [wire.view(-1) for wire in wires], reduction.together))
        else:
            works.append(self._group.in_turn(functools.partial(mine.copy_, wires[self.rank()].view(-1))))
            wires = [mine if rank == self.rank() else wire for rank, wire in enumerate(wires)]
            works += [self._group.reduce(wire, rank, reduction.together) for rank, wire in enumerate(wires)]
        return works + self._finish([mine.view(output.shape)], [output], reduction)

    # ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────

    @carried
    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Copy one rank's tensors over those of every other rank."""
        tensors, options = _as_list(tensors), Options.of(opts, **named)
        call, works = _NOTHING, _new_works()
        for tensor in tensors:
            call = self._announce(options, "broadcast", describe(tensor), f"src={self._world_rank(options.root)}")
            wire = self._wire(tensor, works)
            works.append(self._group.broadcast(wire, options.root))
            works += self._finish([wire], [tensor])
        return self._work(call, works, tensors, options)

    @carried
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Collect every rank's tensor on every rank."""
        return self._all_gather_lists(_as_lists(outputs), _as_list(inputs), Options.of(opts, **named))

    @carried
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same for several tensors, with a list of them for each rank."""
        lists = [list(of_one) for of_one in zip(*outputs, strict=True)]
        return self._all_gather_lists(lists, _as_list(inputs), Options.of(opts))

    def _all_gather_lists(
        self, lists: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Options
    ) -> dist.Work:
        call, works = _NOTHING, _new_works()
        for tensor, listed in zip(inputs, lists, strict=True):
            self._require_one_for_each("all_gather", listed)
            call = self._announce(options, "all_gather", describe_list(listed))
            works += self._all_gather(tensor, [plain(output) for output in listed], listed, str(call))
        return self._work(call, works, lists, options)

    @carried
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """The same, with the list as one tensor."""
        return self._all_gather_tensors([output], [tensor], Options.of(opts))

    @carried
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """The same, for several tensors."""
        return self._all_gather_tensors(outputs, inputs, Options.of(opts))

    def _all_gather_tensors(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Options
    ) -> dist.Work:
        call, works = _NOTHING, _new_works()
        for output, tensor in zip(outputs, inputs, strict=True):
            call = self._announce(options, "all_gather_into_tensor", describe(tensor))
            wire = plain(output)
            rows = flat_pieces(wire, tensor, self.size(), str(call))
            works += self._all_gather(tensor, rows, rows, str(call))
            works += self._finish([wire], [output])
        return self._work(call, works, list(outputs), options)

    def _all_gather(
        self, tensor: torch.Tensor, wires: list[torch.Tensor], outputs: Sequence[torch.Tensor], call: str
    ) -> list[QueuedWork]:
        mine = wires[self.rank()].view(-1)
        if tensor.numel() != mine.numel() or tensor.dtype != mine.dtype:
            raise UsageError(f"{call}: this rank's tensor is {describe(tensor)}, and its output {describe(mine)}")
        wires, works = [wire.view(-1) for wire in wires], _new_works()
        flat = self._wire(tensor, works).view(-1)
        if len({wire.numel() for wire in wires}) == 1:
            works.append(self._group.all_gather(flat, wires))
        else:
            works.append(self._group.in_turn(functools.partial(mine.copy_, flat)))
            works += [self._group.broadcast(wire, rank) for rank, wire in enumerate(wires)]
        shaped = [wire.view(output.shape) for wire, output in zip(wires, outputs, strict=True)]
        return works + self._finish(shaped, outputs)

    @carried
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Collect every rank's tensor on one rank."""
        options, (tensor,) = Options.of(opts, **named), _as_list(inputs)
        call = self._announce(options, "gather", describe(tensor), f"dst={self._world_rank(options.root)}")
        works = _new_works()
        if self.rank() != options.root:
            works.append(self._group.gather(self._wire(tensor, works), None, options.root))
            return self._work(call, works, [], options)
        (listed,) = _as_lists(outputs)
        self._require_one_for_each("gather", listed)
        self._require_alike(call, listed, tensor)
        wires = [plain(output) for output in listed]
        works.append(self._group.gather(self._wire(tensor, works), wires, options.root))
        works += self._finish(wires, listed)
        return self._work(call, works, [listed], options)

    @carried
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Hand one rank's list out, a tensor to each rank."""
        options, (output,) = Options.of(opts, **named), _as_list(outputs)
        call = self._announce(options, "scatter", describe(output), f"src={self._world_rank(options.root)}")
        wires, works = None, _new_works()
        if self.rank() == options.root:
            (listed,) = _as_lists(inputs)
            self._require_one_for_each("scatter", listed)
            self._require_alike(call, listed, output)
            wires = [self._wire(tensor, works) for tensor in listed]
        mine = plain(output)
        works += [self._group.scatter(mine, wires, options.root), *self._finish([mine], [output])]
        return self._work(call, works, [output], options)

    @carried
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> dist.Work:
        """Hand tensor r to rank r, and get one from each."""
        self._require_one_for_each("all_to_all", inputs)
        self._require_one_for_each("all_to_all", outputs)
        works, options = _new_works(), Options.of(opts, **named)
        wires = [self._wire(tensor, works) for tensor in inputs]
        return self._all_to_all("all_to_all", list(outputs), wires, list(outputs), options, works)

    @carried
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
        wire, works = plain(output), _new_works()
        outputs = pieces(wire, output_sizes, self.size())
        inputs = pieces(self._wire(tensor, works), input_sizes, self.size())
        options = Options.of(opts, **named)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output], options, works, wire)

    def _all_to_all(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        result: list[torch.Tensor],
        options: Options,
        works: list[QueuedWork],
        entire: torch.Tensor | None = None,
    ) -> dist.Work:
        mine, theirs = outputs[self.rank()], inputs[self.rank()]
        if mine.numel() != theirs.numel() or mine.dtype != theirs.dtype:
            raise UsageError(f"{name}: this rank hands itself {describe(theirs)}, and expects {describe(mine)}")
        call = self._announce(options, name, str(theirs.dtype).removeprefix("torch."))
        wires = [plain(output).view(-1) for output in outputs]
        works.append(self._group.all_to_all(wires, [tensor.view(-1) for tensor in inputs]))
        if entire is None:
            shaped = [wire.view(output.shape) for wire, output in zip(wires, outputs, strict=True)]
            works += self._finish(shaped, outputs)
        else:
            works += self._finish([entire], result)
        return self._work(call, works, result, options)

    @carried
    def barrier(self, opts: Any = None, **named: Any) -> dist.Work:
        """Meet: complete when every rank has called this."""
        device = getattr(opts, "device", None)
        if device is not None and device.type not in self.carries:
            return self.side_of(device).barrier(opts)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        options = Options.of(opts, **named)
        call = self._announce(options, "barrier", "")
        return self._work(call, [self._group.barrier()], [], options)

    @carried
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Meet in time, or raise `CommsTimeout` on every rank that came, naming all ranks that did not.

        torch does that with `wait_all_ranks=True`; without it, only rank 0 raises, and names one rank.
        `torch.distributed.monitored_barrier` accepts gloo only: call the method of the group.
        """
        options = Options.of(timeout)
        call = self._announce(options, "monitored_barrier", "")
        self._work(call, [self._group.barrier()], [], options).wait()

    # ── messages between two ranks ──────────────────────────────────────────────────────────────────────────────

    @carried
    def send(self, tensors: Any, to: int, tag: int = 0) -> dist.Work:
        """Start sending."""
        (tensor,) = _as_list(tensors)
        words = in_words("send", describe(tensor), f"dst={self._world_rank(to)}", f"tag={tag}")
        call = words.as_message(to, sends=True, size=tensor.nbytes)
        entry = self._group.log.send(call.text, describe(tensor), to, tag, tensor.nbytes)
        with named_failures(call, self._group, entry):
            work = self._group.isend(contiguous(tensor), to, tag)
        entry.started()
        return self._message(MessageWork(self._group, call, entry, work, [tensor]))

    @carried
    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Start receiving."""
        (tensor,) = _as_list(tensors)
        words = in_words("recv", describe(tensor), f"src={self._world_rank(source)}", f"tag={tag}")
        call = words.as_message(source, sends=False, size=tensor.nbytes)
        wire = plain(tensor)
        entry = self._group.log.recv(call.text, describe(tensor), source, tag, tensor.nbytes)
        work = self._group.irecv(wire, source, tag, allow_less=True)
        return self._receiving(call, entry, work, wire, tensor)

    @carried
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start receiving the first message that comes, from any rank."""
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
        return self._message(receipt)

    def _message(self, work: MessageWork) -> dist.Work:
        if is_profiling():
            work.profile()
        return self._remember(work)

    # The names that torch used before 2.13; `torch_private.BEFORE_2_13` has the others.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _new_works() -> list[QueuedWork]:
    """What a call puts into the queue: nothing as yet."""
    return []


def _nothing() -> None:
    """Take a turn in the queue."""


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _as_lists(lists: Any) -> list[list[torch.Tensor]]:
    """A list of lists, or one list."""
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else list(lists)
