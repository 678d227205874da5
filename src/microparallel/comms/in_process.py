"""A collective among tensors of one process: each tensor plays one rank, and no processes are started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from microparallel.collectives import build
from microparallel.comms.calls import describe
from microparallel.comms.interpreter import COMBINE, Memory, Sums, perform, rounds, slices_of
from microparallel.comms.own_program import verified_all_reduce
from microparallel.errors import ProgramError, UsageError
from microparallel.program import Add, Join, Message, Policy, Program, Recv, Send, Walk
from microparallel.transport.base import Transport
from microparallel.transport.in_process import Pollable


def all_reduce_in_process(name: str | Program, tensors: Sequence[torch.Tensor], **options: int) -> None:
    """Sum a list of tensors in place, each tensor playing one rank of an all-reduce.

    The tensors may be on different devices. Afterwards they all hold the same bits.

    Args:
        name: of the all-reduce, such as "ring"; or a Program of your own, which is verified first.
        tensors: one for each rank, all of one shape and dtype.
        options: of the named all-reduce, such as `ranks_per_node`.

    Example:
        ```python
        tensors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
        mp.all_reduce_in_process("ring", tensors)
        print(tensors)  # [tensor([11., 22.]), tensor([11., 22.])]
        ```
    """
    if not tensors:
        raise UsageError("all_reduce_in_process: the list of tensors is empty; give one for each rank")
    for index, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype) != (tensors[0].shape, tensors[0].dtype):
            raise UsageError(
                f"all_reduce_in_process: tensor {index} is {describe(tensor)}, and tensor 0 is {describe(tensors[0])}; "
                "all must be alike"
            )
    if not isinstance(name, Program):
        run_in_process(build(name, len(tensors), **options), tensors)
        return
    for option, value in options.items():
        raise UsageError(
            f"all_reduce_in_process: {option}={value}: program {name.name!r} is built already, and takes no options"
        )
    run_in_process(verified_all_reduce(name, len(tensors)).program, tensors)


def run_in_process(
    program: Program, tensors: Sequence[torch.Tensor], transports: Sequence[Transport] | None = None
) -> None:
    """Run a collective program on one tensor for each rank, in place; the ranks run one after another.

    Args:
        program: what to run.
        tensors: one for each rank.
        transports: one for each rank, such as `nccl_rules_transports(ranks)`: then each rank does what it would do in
            a process of its own. By default the ranks read straight from each other's tensors.
    """
    slices = slices_of(program)
    flat = [tensor.detach().contiguous() for tensor in tensors]
    memories = [Memory(tensor, slices) for tensor in flat]
    if transports is None:
        _walk(program, memories)
    else:
        # Transports of one process start nothing but work that can be polled.
        runs = [
            cast("Iterator[Pollable]", perform(rounds(ops), memory, transport, COMBINE["sum"]))
            for ops, memory, transport in zip(program.ranks, memories, transports, strict=True)
        ]
        take_turns(runs, program.name)
    for tensor, result in zip(tensors, flat, strict=True):
        tensor.detach().copy_(result)


def _walk(program: Program, memories: Sequence[Memory]) -> None:
    """Do each operation as soon as it can be done."""
    everyones = [Sums(memory, COMBINE["sum"]) for memory in memories]
    walk = Walk(program, _Straight(everyones))
    for cursor in walk:
        op, sums = cursor.op, everyones[cursor.rank]
        if isinstance(op, Send) and cursor.message is not None:
            cursor.message.content = sums[op.value]
        elif isinstance(op, Recv) and op.reduce and cursor.message is not None:
            sums.add(op.value, cursor.message.content)
        elif isinstance(op, Add):
            sums.add(op.into, sums.to_add(op.value))
        elif not isinstance(op, Recv | Join):
            raise ProgramError(f"{op} is no operation of a collective; it knows Send, Recv and Add")
    if walk.stuck():
        raise ProgramError(f"program {program.name!r} stands still: {'; '.join(map(str, walk.waits()))}")
    for sums in everyones:
        sums.finish()


class _Straight(Policy):
    """Copies a message straight from its sender's memory, when both ranks are ready for it."""

    def __init__(self, everyones: Sequence[Sums]) -> None:
        super().__init__("rendezvous")
        self._everyones = everyones

    def carry(self, message: Message) -> bool:
        """Copy what is sent to where it is received; what is to be added there, into a tensor of its own."""
        assert message.receive is not None
        sums, receive = self._everyones[message.receiver], message.receive
        if receive.reduce:
            message.content = torch.empty_like(sums.memory[receive.value]).copy_(message.content)
        else:
            sums[receive.value].copy_(message.content)
        return True


def take_turns(runs: Sequence[Iterator[Pollable]], name: str) -> None:
    """Let ranks that share this process run one after another, each as far as it can, until all have ended."""
    waiting: dict[int, Pollable | None] = dict.fromkeys(range(len(runs)))  # what each unfinished rank waits for
    while waiting:
        ready = [rank for rank, work in waiting.items() if work is None or work.poll()]
        if not ready:
            raise ProgramError(f"program {name!r} stands still: {'; '.join(map(str, waiting.values()))}")
        for rank in ready:
            waiting[rank] = next(runs[rank], None)
            if waiting[rank] is None:
                del waiting[rank]
