"""The gradients of a unit: whole while a pass makes them; each rank's part of their sum, afterwards.

```
backward          [g g g│g g g]    whole, of one unit, in a buffer that is borrowed
reduce-scatter →  [ sum ]          this rank's part, in `grad` of its shards
```
"""

from __future__ import annotations

import math

import torch

from microparallel.comms import Comms
from microparallel.data_parallel.sharding import FreshBuffers, GradientInParts, ShardedBucket
from microparallel.data_parallel.units import ShardedParameters
from microparallel.data_parallel.without_norm import FOR_CLIPPING, GradientWithoutNorm
from microparallel.program import AllReduce, ReduceScatter
from microparallel.torch_private import largest_of_each


class GradientOfShard(GradientWithoutNorm):
    """A rank's part of a gradient: a tensor like any other, but no norm is taken of it, which would be a part's."""

    refused = FOR_CLIPPING | {"norm", "linalg_norm", "linalg_matrix_norm"}
    refusal = (
        "the norm of a gradient of which each rank has a part is not that of the part; to clip gradients, call "
        "clip_grad_norm_ of the wrapped model"
    )


class GradientNotSummed(GradientInParts):
    """Stands in `grad` of a shard while its gradient, of backwards inside of `no_sync()`, is whole on each rank."""

    refusal = "gradients were not summed over the ranks; the last backward before a step must be outside of no_sync()"


class UnitBucket(ShardedBucket):
    """The gradients of a unit's parameters: whole while a pass makes them; this rank's part of the sum, afterwards.

    `grad` of a shard is this rank's part. While gradients have not been summed (`no_sync`), a `GradientNotSummed`
    stands there, and the whole gradient is in `grad` of the model's own parameter.

    Args:
        part: the parameters.
        comms: the ranks that keep the parts.
        number: that of the unit in the program.
        pool: where buffers are borrowed from.
        across: the ranks of other groups that keep the same part, if there are such groups.
    """

    def __init__(
        self, part: ShardedParameters, comms: Comms, number: int, pool: FreshBuffers, across: Comms | None
    ) -> None:
        self.part = part
        self._across = across
        self._kind_of_shards = part.kind
        super().__init__(part.whole, comms, number, pool=pool, layout=part.layout)
        self._stand_ins = [GradientNotSummed.like(shard) for shard in part.shards]
        of_piece = {piece.index: piece.of(self.shard, self._begin) for piece in self.pieces}
        self._gradients = [
            of_piece.get(index, self.shard[:0]).view(shard.shape).as_subclass(GradientOfShard)
            for index, shard in enumerate(part.shards)
        ]
        self.reset()

    @property
    def _example(self) -> torch.Tensor:
        return self.part.flat

    @property
    def fits(self) -> bool:
        """Whether gradients still fit into their places; not after `module.double()`, `.to(device)` and the like."""
        return super().fits and self.part.kind == self._kind_of_shards

    def reset(self) -> None:
        """Make the gradients of all parameters that are trained missing again, before the next pass."""
        super().reset()
        self.missing = sum(parameter.requires_grad for parameter in self.parameters)

    def take_stand_ins(self) -> None:
        """Before gradients come: find out which sums of earlier passes are kept, and which gradients were removed."""
        for index, shard in enumerate(self.part.shards):
            mine, gradient = self._gradients[index], shard.grad
            if gradient is None:
                self.remove_whole(index)  # the user has removed it: also what was not summed
            elif gradient is not mine and gradient is not self._stand_ins[index]:
                mine.copy_(gradient)
                shard.grad = mine
            self._taken[index] = shard.grad is mine

    def put_stand_ins_back(self) -> None:
        """After a backward that was not summed: say in `grad` of each shard that there is a gradient."""
        for index, shard in enumerate(self.part.shards):
            if self.whole_gradient(index) is not None and shard.grad is None:
                shard.grad = self._stand_ins[index]

    # ── gradients that were not summed ──────────────────────────────────────────────────────────────────────────

    def whole_gradient(self, index: int) -> torch.Tensor | None:
        """The gradient of backwards that were not summed."""
        return self.parameters[index].grad

    def keep_whole(self, index: int) -> None:
        """Keep a gradient that has come in a backward that is not summed: autograd has added it to earlier ones."""

    def remove_whole(self, index: int) -> None:
        """Forget the gradient of backwards that were not summed."""
        self.parameters[index].grad = None

    def fill_up(self, scale: float) -> None:
        """Fill the places of missing gradients: with those of backwards that were not summed, otherwise with zeros."""
        self.open()
        for index, ready in enumerate(self.ready):
            if not ready and self.whole_gradient(index) is not None:
                self.put(index, scale)
        self._fill_gaps()

    def _fill_gaps(self) -> None:
        for index, ready in enumerate(self.ready):
            if not ready:
                self.views[index].zero_()

    # ── the sum ─────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool) -> None:
        """Sum the buffers of all ranks that keep parts; each keeps its own part of the sum."""
        self._fill_gaps()
        if self._across is not None and self._across.rank > 0:
            self._earlier = None  # one group adds it, since the sums of all groups are summed
        if comms.world_size == 1:
            self._keep_all()
        else:
            super().start(comms, operation, overlap)

    def _keep_all(self) -> None:
        """The sum over one rank is what that rank has; the reducer has told the observers."""
        if self._earlier is not None:
            self.buffer.add_(self._earlier)
            self._earlier = None
        self.shard.copy_(self.buffer)
        self._let_go()

    @property
    def is_finite(self) -> bool:
        """Whether all gradients of this rank that are in the buffer are finite."""
        there = [view for view, ready in zip(self.views, self.ready, strict=True) if ready and view.numel()]
        return not there or bool(largest_of_each(there).isfinite().all())  # the host waits once, not for each

    def spoil(self) -> None:
        """Let this rank's part of each gradient's sum be infinite: another rank's is."""
        for piece in self.pieces:
            piece.of(self.shard, self._begin)[:1].fill_(math.inf)

    def sum_across(self, operation: AllReduce, overlap: bool) -> None:
        """Sum this rank's part over the groups that keep the same one."""
        self.wait()
        assert self._across is not None
        if overlap:
            self.request = self._across.all_reduce(self.shard, async_op=True, operation=operation)
        else:
            self._across.all_reduce(self.shard, operation=operation)

    def hand_out(self, index: int) -> None:
        """Let `grad` of a shard be this rank's part of the sum, and what autograd itself has put there."""
        shard, mine = self.part.shards[index], self._gradients[index]
        if shard.grad is not None and shard.grad is not mine and shard.grad is not self._stand_ins[index]:
            mine.add_(shard.grad)  # of a loss that has the shards in it
        shard.grad = mine
        self._taken[index] = False

    def scale(self, factor: float) -> None:
        """Multiply this rank's part of the sum by a number."""
        for gradient in self.gradients():
            if gradient is not None:
                gradient.mul_(factor)

    def scale_whole(self, factor: float) -> None:
        """Multiply gradients that were not summed by a number."""
        for gradient in map(self.whole_gradient, range(len(self.parameters))):
            if gradient is not None:
                gradient.mul_(factor)

    def forget(self) -> None:
        """Remove all gradients, also those that were not summed."""
        for index, shard in enumerate(self.part.shards):
            self.remove_whole(index)
            shard.grad = None
            self._taken[index] = False

    def gradients(self) -> list[torch.Tensor | None]:
        """For each piece of this rank, the sum of its gradients; None if no rank had one, or if it was removed."""
        found = [self.part.shards[piece.index].grad for piece in self.pieces]
        return [None if one is None or isinstance(one, GradientInParts) else _plain(one) for one in found]


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.as_subclass(torch.Tensor)
