"""A group whose every collective is a program of `collectives/`, whatever it runs over."""

from __future__ import annotations

import torch

from microparallel.collectives import GroupKind, resolve
from microparallel.comms.blocks import Blocks, listed, personal, whole
from microparallel.comms.plans import Plan, plan_of
from microparallel.comms.turns import Line, Turn
from microparallel.program import AUTO


class ProgramGroup:
    """One rank's place in a group: the program of each collective, and the line in which collectives wait to run.

    Which program that is, `resolve` says for the group's transport. How it runs, a group of this kind says in `_run`.

    Args:
        rank: the number of this rank in the group.
        world_size: how many ranks the group has.
        transport_name: what "auto" is resolved for, such as "shm" or "gloo".
        block_bytes: how much of a tensor a program runs over at a time; None: over the whole of it.
    """

    def __init__(self, rank: int, world_size: int, transport_name: str, block_bytes: int | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.transport_name = transport_name
        self._block_bytes = block_bytes
        self._line = Line()

    def _run(self, plan: Plan, blocks: Blocks, op: str = "sum") -> Turn:
        """Put a program into the line: to be run by whoever waits for it, or by the line's thread."""
        raise NotImplementedError

    def _plan(self, collective: GroupKind, size: int = 0, algorithm: str = AUTO, root: int | None = None) -> Plan:
        """The part that this rank has in a collective to which each contributes `size` bytes."""
        chosen = resolve(collective, algorithm, self.world_size, size, self.transport_name)
        return plan_of(collective, chosen, self.world_size, self.rank, root)

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = AUTO) -> Turn:
        """Combine everybody's tensor, in place, on every rank."""
        plan = self._plan("all-reduce", tensor.numel() * tensor.element_size(), algorithm)
        return self._run(plan, whole(tensor, self._block_bytes), op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Turn:
        """Copy the source's tensor over everybody else's."""
        return self._run(self._plan("broadcast", root=source), whole(tensor, self._block_bytes))

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> Turn:
        """Combine everybody's tensor on one rank."""
        return self._run(self._plan("reduce", root=to), whole(tensor, self._block_bytes), op)

    def all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor]) -> Turn:
        """Collect everybody's tensor on every rank."""
        outputs[self.rank].copy_(tensor)
        return self._run(self._plan("all-gather"), listed(outputs, self._block_bytes))

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: str) -> Turn:
        """Combine the ranks' inputs position by position; rank r gets position r."""
        plan = self._plan("reduce-scatter")
        output.copy_(inputs[self.rank])
        # The inputs stay as they are: sums that only pass through this rank, as in a ring, are made in copies.
        pieces = [piece.clone() if slice_ in plan.written else piece for slice_, piece in enumerate(inputs)]
        pieces[self.rank] = output
        return self._run(plan, listed(pieces, self._block_bytes), op)

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, source: int) -> Turn:
        """Hand the source's inputs out, one to each rank."""
        if inputs is not None:
            output.copy_(inputs[self.rank])
        pieces = inputs or [output] * self.world_size
        return self._run(self._plan("scatter", root=source), listed(pieces, self._block_bytes))

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, to: int) -> Turn:
        """Collect everybody's tensor on one rank."""
        if outputs is not None:
            outputs[self.rank].copy_(tensor)
        pieces = outputs or [tensor] * self.world_size
        return self._run(self._plan("gather", root=to), listed(pieces, self._block_bytes))

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Turn:
        """Hand input r to rank r, and get one from each; sizes may differ, as long as each pair of ranks agrees."""
        outputs[self.rank].copy_(inputs[self.rank])
        return self._run(self._plan("all-to-all"), personal(inputs, outputs, self.rank))

    def barrier(self) -> Turn:
        """Meet: nobody goes on before everybody has come."""
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8), "sum")

    def run_in_background(self) -> None:
        """Let a thread run the collectives that have been called and not waited for."""
        self._line.run_in_background()
