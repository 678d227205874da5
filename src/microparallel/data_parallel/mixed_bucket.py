"""The gradients of a unit in mixed precision: 16 bits while they are whole and on the wire, 32 where they are added.

```
backward         [g g g│g g g]      whole, of one unit, in the dtype of the wire
all-to-all   →   [g g g][h h h]     this rank's part, from every rank
added up     →   [ sum ]            in float32, in rank order; divided by the loss scale: in `grad` of the shards
```

So what a rank sends is rounded once. Between groups of ranks (hybrid sharding) the part's sum is rounded again.
"""

from __future__ import annotations

import torch

from microparallel.comms import Comms
from microparallel.data_parallel.sharding import FreshBuffers, empty_like_of
from microparallel.data_parallel.unit_bucket import UnitBucket
from microparallel.data_parallel.units import ShardedParameters
from microparallel.program import AllReduce, ReduceScatter


class GradientScale:
    """By what the gradients of the backward that is under way are multiplied; the reducer says so to its buckets."""

    def __init__(self) -> None:
        self.value = 1.0


class MixedUnitBucket(UnitBucket):
    """The gradients of a unit's parameters, of which shards are kept, sent and computed with in different dtypes.

    Whole gradients of several backwards (`no_sync`) are added up in the dtype of the shards, beside the parameters:
    `grad` of a 16-bit parameter has 16 bits.

    Args:
        part: the parameters.
        comms: the ranks that keep the parts.
        number: that of the unit in the program.
        pool: where buffers of the wire's dtype are borrowed from.
        across: the ranks of other groups that keep the same part, if there are such groups.
        wire: the dtype in which gradients are sent.
        scale: by what gradients are multiplied on their way here.
    """

    def __init__(
        self,
        part: ShardedParameters,
        comms: Comms,
        number: int,
        pool: FreshBuffers,
        across: Comms | None,
        wire: torch.dtype,
        scale: GradientScale,
    ) -> None:
        self._wire = torch.empty(0, dtype=wire, device=part.flat.device)
        self._scale = scale
        self._unscale = 1.0  # of the sum that is under way
        self._wide = torch.promote_types(part.flat.dtype, torch.float32)
        self._whole: list[torch.Tensor | None] = [None] * len(part.whole)  # gradients that were not summed
        self._received: torch.Tensor | None = None  # this rank's part, from all ranks
        self._sum: torch.Tensor | None = None
        self._sum_on_wire: torch.Tensor | None = None  # between groups
        super().__init__(part, comms, number, pool, across)

    # ── gradients that were not summed ──────────────────────────────────────────────────────────────────────────

    def whole_gradient(self, index: int) -> torch.Tensor | None:
        """The gradient of backwards that were not summed."""
        return self._whole[index]

    def keep_whole(self, index: int) -> None:
        """Add a gradient that has come to those of earlier backwards."""
        parameter = self.parameters[index]
        if parameter.grad is None:
            return
        gradient = parameter.grad.detach().to(self.shard.dtype, copy=True).mul_(1 / self._scale.value)
        parameter.grad = None
        earlier = self._whole[index]
        self._whole[index] = gradient if earlier is None else earlier.add_(gradient)

    def remove_whole(self, index: int) -> None:
        """Forget the gradient of backwards that were not summed."""
        self.parameters[index].grad = self._whole[index] = None

    # ── the sum ─────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, index: int, scale: float) -> None:
        """Copy a gradient into the buffer, multiplied by `scale`, with those of backwards before; let them go."""
        self.open()
        gradient, earlier, place = self.parameters[index].grad, self._whole[index], self.views[index]
        if earlier is not None:
            total = earlier.mul_(self._scale.value)
            place.copy_((total if gradient is None else total.add_(gradient)).mul_(scale))
        elif gradient is not None and gradient.dtype is place.dtype:
            torch.mul(gradient, scale, out=place)
        elif gradient is not None:
            place.copy_(gradient.to(torch.promote_types(gradient.dtype, self._wide)).mul_(scale))
        self.remove_whole(index)
        self.ready[index] = True
        self.missing -= 1

    def start(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool) -> None:
        """Hand each rank its part of this rank's buffer; what comes is added up when it is waited for."""
        self._fill_gaps()
        self._unscale = 1 / self._scale.value
        if comms.world_size == 1:
            self._sum = self.buffer.to(self._wide, copy=True)
            self._let_go()
            return
        if self.buffer.dtype is self._wide:
            self._sum = torch.empty_like(self.shard, dtype=self._wide)
            parts = self.layout.parts(self.buffer)
            self.request = comms.reduce_scatter(parts, into=self._sum, async_op=True, operation=operation)
        else:
            self._received = empty_like_of(self.buffer, self.layout.length, comms)
            sent, received = (list(flat.view(comms.world_size, -1).unbind()) for flat in (self.buffer, self._received))
            self.request = comms.all_to_all(sent, received, async_op=True, operation=operation)
        if not overlap:
            self._add_up()
        elif self._pool is not None:
            self._pool.is_summing(self)

    def _add_up(self) -> None:
        """Return when this rank's part of its group's sum is there."""
        request, self.request = self.request, None
        if request is not None:
            request.wait()
        received, self._received = self._received, None
        if received is not None:
            first, *others = received.view(self._comms.world_size, -1).unbind()
            self._sum = first.to(self._wide)
            for other in others:
                self._sum.add_(other)
        self._let_go()

    def sum_across(self, operation: AllReduce, overlap: bool) -> None:
        """Sum this rank's part over the groups that keep the same one."""
        assert self._across is not None
        self._add_up()
        assert self._sum is not None
        self._sum_on_wire = empty_like_of(self._wire, len(self._sum), self._across).copy_(self._sum)
        self.request = self._across.all_reduce(self._sum_on_wire, async_op=True, operation=operation)
        if not overlap:
            self._take_sum_of_groups()

    def _take_sum_of_groups(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            request.wait()
        if self._sum_on_wire is not None:
            self._sum, self._sum_on_wire = self._sum_on_wire.to(self._wide), None

    def wait(self) -> None:
        """Return when this rank's part of the sum is there, added to those of earlier passes, without any scale."""
        self._take_sum_of_groups() if self._sum_on_wire is not None else self._add_up()
        total, self._sum = self._sum, None
        if total is not None:
            if self._unscale != 1.0:
                total.mul_(self._unscale)
            self.shard.copy_(total) if self._earlier is None else self.shard.add_(total)
            self._earlier = None

    def memory(self) -> list[torch.Tensor]:
        """The tensors in which gradients lie."""
        kept = (self._received, self._sum, self._sum_on_wire, *self._whole)
        return [*super().memory(), *(one for one in kept if one is not None)]
