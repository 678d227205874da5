"""The sums of a pipeline's gradients over ranks: over the replicas of a stage, and over stages that share a parameter.

```
                replica 0            replica 1
%U0@dp          [ sum    │        ]  [        │ sum    ]     with shard="optimizer": each keeps its part of the sum
*:tied0@pp      [ sum    │        ]  [        │ sum    ]     + the same part, of the other stages that share it
S ~T0@dp        [ new    │ new    ]  [ new    │ new    ]     what mp.ShardedOptimizer does
```
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.compression import Cast, Compressor
from microparallel.data_parallel.bucket import FlatBucket, split, take_missing
from microparallel.data_parallel.compressed_bucket import CompressedBucket, ResidualsOfStep, is_large
from microparallel.data_parallel.layout import By, owners
from microparallel.data_parallel.sharding import GradientInParts, ShardedBucket, Wire, part_keepers
from microparallel.errors import UsageError
from microparallel.pipeline.interpreter import GroupSum, Sum
from microparallel.pipeline.stage import Stage
from microparallel.program import Bucket, Value, presence


class Column:
    """One rank's part in what its column does: the ranks that have the same stages in the other replicas.

    It is to a pipeline what a `Reducer` is to `mp.DataParallel`: an `mp.ShardedOptimizer`, which is handed parameters
    alone, finds the buckets of these parameters here, and the ranks that have the same ones.

    Args:
        stages: of this rank.
        comms: the ranks of the column.
        bucket_bytes: a bucket that has so many bytes of gradients takes no more.
        level: how much is kept in parts (ZeRO): 0 nothing, 1 the optimizer's state.
        compressor: how the sums are compressed: each stage's gradients as one bucket.
        wire: the 16-bit dtype in which gradients are sent that are kept in parts; None: that of the gradients.

    Attributes:
        comms: the ranks of the column.
        level: as above; 0 if there is one replica.
        sums: for each value of the program that the column sums, the sum.
        tied: for each parameter that stages on different ranks share, its number. It gets a bucket of its own, which
            all its holders cut in the same way: then a replica keeps the same part of it everywhere.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        comms: Comms,
        bucket_bytes: float,
        level: int,
        compressor: Compressor | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.comms = comms
        self._wire = None if wire is None else Wire(wire)
        self.compressor = compressor if comms.world_size > 1 else None
        self.passes = 0
        self._residuals_of_step = ResidualsOfStep()
        self.level = level if comms.world_size > 1 else 0
        self.tied: dict[nn.Parameter, int] = {}
        self._bucket_bytes = bucket_bytes
        self._by: By = "element"
        uses = Counter(parameter for stage in stages.values() for parameter in stage.parameters)
        self._parameters = list(uses)
        self._stages: dict[int, ColumnSum] = {}
        if comms.world_size > 1:
            for index, mine in summed_with({index: stage.parameters for index, stage in stages.items()}).items():
                self._stages[index] = ColumnSum(mine, comms, self._maker(index))
        self.sums: dict[Value, GroupSum] = {Bucket(index): one for index, one in self._stages.items()}
        if self.level:
            self.sums[presence()] = Presence(self)
        part_keepers.enter(self._parameters, self)

    # ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Before a step: make new buckets where parameters were frozen, unfrozen or converted."""
        for one in self._stages.values():
            one.prepare()

    def multiply_on_wire(self, factor: float) -> None:
        """Multiply 16-bit gradients by a factor while they travel; every rank, after `prepare`."""
        if self._wire is not None:
            self._wire.factor = factor
        for bucket in self.buckets:
            if isinstance(bucket, CompressedBucket) and isinstance(bucket.compressor, Cast):
                bucket.compressor.factor = factor

    def forget_buckets(self) -> None:
        """Make new buckets in the next step: the parameters are about to get another dtype."""
        for one in self._stages.values():
            one.require_no_parts()
            one.drop()

    def _maker(self, stage: int) -> Callable[[Sequence[nn.Parameter]], list[FlatBucket]]:
        def make(trained: Sequence[nn.Parameter]) -> list[FlatBucket]:
            if self.compressor is not None:
                return list(self._compressed(trained, stage, self.compressor))
            if not self.level:
                return [FlatBucket(group, self.comms) for group in split(trained, self._bucket_bytes)]
            alone = [[one] for one in trained if one in self.tied]
            others = split((one for one in trained if one not in self.tied), self._bucket_bytes)
            return [self._sharded(group, stage) for group in (*others, *alone)]

        return make

    def _compressed(self, trained: Sequence[nn.Parameter], stage: int, compressor: Compressor) -> Iterator[FlatBucket]:
        """All of a stage's gradients in one bucket, for each dtype; one without large ones is not compressed."""
        for group in split(trained, math.inf):
            if any(is_large(one, compressor) for one in group):
                yield CompressedBucket(group, self.comms, stage, compressor, whole=True)
            else:
                yield FlatBucket(group, self.comms, stage)

    @property
    def buckets(self) -> list[FlatBucket]:
        """Those of all stages of this rank."""
        return list(itertools.chain(*(one.buckets for one in self._stages.values())))

    def _sharded(self, group: list[nn.Parameter], stage: int) -> ShardedBucket:
        if self._by == "element":
            return ShardedBucket(group, self.comms, stage, wire=self._wire)
        owner_of = self._owners()
        group.sort(key=owner_of.__getitem__)
        return ShardedBucket(group, self.comms, stage, owners=[owner_of[one] for one in group], wire=self._wire)

    def _owners(self) -> dict[nn.Parameter, int]:
        """The replica of each whole parameter; of a tied one its number decides, which all its holders know."""
        replicas = self.comms.world_size
        untied = owners((one for one in self._parameters if one not in self.tied), replicas)
        return untied | {one: number % replicas for one, number in self.tied.items()}

    def bucket_of(self, parameter: nn.Parameter) -> ShardedBucket | None:
        """The bucket that keeps a parameter's gradient in parts."""
        return next((one for one in self.sharded_buckets if any(parameter is held for held in one.parameters)), None)

    # ── what a ShardedOptimizer asks for ────────────────────────────────────────────────────────────────────────

    @property
    def sharded_buckets(self) -> list[ShardedBucket]:
        """The buckets of which each replica keeps its part: all of them, or none."""
        buckets = itertools.chain(*(one.buckets for one in self._stages.values()))
        return [bucket for bucket in buckets if isinstance(bucket, ShardedBucket)]

    @property
    def gathered(self) -> list[int]:
        """The numbers of the parameters that the program gathers: this rank's stages, also those without any."""
        return list(self._stages) if self.level else []

    def shard_by(self, by: By) -> None:
        """Cut buckets into parts by element, or give whole parameters to replicas; make them if there are none."""
        if not self.level:
            return
        if by != self._by:
            self._by = by
            for one in self._stages.values():
                one.make_anew()
        elif not self.sharded_buckets:
            self.prepare()

    def step_ends(self) -> None:
        """Do nothing: a pipeline has no micro-batches that are counted from one step to the next."""

    def forget_sums(self) -> None:
        """Remove gradients that are in parts."""
        for bucket in self.sharded_buckets:
            bucket.forget()

    # ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────

    def keep_residuals(self) -> None:
        """Steps add up from here on until an optimizer's step: keep what was not sent of compressed gradients."""
        self._residuals_of_step.keep(self.buckets)

    def give_residuals_back(self) -> None:
        """The optimizer's step is not taken: what was sent for it waits again."""
        self._residuals_of_step.give_back(self.buckets)

    def scale(self, factor: float) -> None:
        """Multiply this rank's parts of the gradients by a number."""
        for bucket in self.sharded_buckets:
            bucket.shard.mul_(factor)

    @contextmanager
    def beside_earlier_parts(self) -> Iterator[None]:
        """Begin with no gradients in the buckets, and add the earlier ones to the parts at the end.

        They are means of batches already. A gradient that is whole, because it is not of this pipeline's steps, counts
        as the same on all replicas, as without parts. After a step that failed, the earlier ones alone are there.
        """
        buckets = self.sharded_buckets
        earlier = [_take_earlier(bucket) for bucket in buckets]
        try:
            yield
        except BaseException:
            for bucket in buckets:
                bucket.shard.zero_()
                for parameter in bucket.parameters:
                    parameter.grad = None
            raise
        finally:
            for bucket, (indices, pieces) in zip(buckets, earlier, strict=True):
                for index in indices:
                    bucket.hand_out(index)
                for gradient, kept in zip(bucket.gradients(), pieces, strict=True):
                    if gradient is not None and kept is not None:
                        gradient.add_(kept)


def _take_earlier(bucket: ShardedBucket) -> tuple[list[int], list[torch.Tensor | None]]:
    """Take the gradients that a bucket's parameters have; returns which have one, and for each piece its part of it."""
    pieces: list[torch.Tensor | None] = []
    for piece, part in zip(bucket.pieces, bucket.gradients(), strict=True):
        whole = bucket.parameters[piece.index].grad
        if part is not None:
            pieces.append(part.clone())
        else:
            pieces.append(None if whole is None else whole.reshape(-1)[piece.start : piece.stop].clone())
    having = [index for index, parameter in enumerate(bucket.parameters) if parameter.grad is not None]
    for parameter in bucket.parameters:
        parameter.grad = None
    return having, pieces


def summed_with(parameters: Mapping[int, Sequence[nn.Parameter]]) -> dict[int, list[nn.Parameter]]:
    """For each stage of a rank, the parameters whose gradients are in its sum: what several share is in the first's.

    That is the last sum of the rank, so all stages have added to what they share.
    """
    uses = Counter(one for mine in parameters.values() for one in mine)
    found = {index: [one for one in mine if uses[one] == 1] for index, mine in parameters.items()}
    if found:
        found[min(found)] += [one for one, times in uses.items() if times > 1]
    return found


# ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ColumnSum:
    """The sum of a stage's gradients over the replicas of that stage, in background buckets.

    Attributes:
        buckets: of the parameters that are trained.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        column: Comms,
        make: Callable[[Sequence[nn.Parameter]], list[FlatBucket]],
    ) -> None:
        self.buckets: list[FlatBucket] = []
        self._parameters = parameters
        self._column = column
        self._make = make
        self._kept: dict[nn.Parameter, torch.Tensor] = {}  # what was not sent, while there are no buckets

    def prepare(self) -> None:
        """Clean up after a step that an error cut short; make new buckets if parameters were changed."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.reset()
        trained = {parameter for parameter in self._parameters if parameter.requires_grad}
        held = {parameter for bucket in self.buckets for parameter in bucket.parameters}
        if trained != held or not all(bucket.fits for bucket in self.buckets):
            self.make_anew()

    def make_anew(self) -> None:
        """Make new buckets."""
        self.require_no_parts()
        self.drop()
        self.buckets = self._make([parameter for parameter in self._parameters if parameter.requires_grad])
        for bucket in self.buckets:
            for parameter, residual in bucket.residuals() if isinstance(bucket, CompressedBucket) else ():
                if parameter in self._kept:
                    residual.copy_(self._kept[parameter])
        self._kept.clear()

    def drop(self) -> None:
        """Have no buckets; what has not been sent of compressed gradients waits for new ones."""
        for bucket in self.buckets:
            if isinstance(bucket, CompressedBucket):
                self._kept |= {parameter: residual.clone() for parameter, residual in bucket.residuals()}
        self.buckets = []

    def require_no_parts(self) -> None:
        """Raise `UsageError` if there are gradients in parts: they would be lost with the buckets."""
        held = (parameter for bucket in self.buckets for parameter in bucket.parameters)
        if any(isinstance(parameter.grad, GradientInParts) for parameter in held):
            raise UsageError(
                "there are gradients in parts of an earlier step, which do not outlive that parameters are frozen, "
                "unfrozen or converted, or that an optimizer with another by= is made: call zero_grad() before that"
            )

    def start(self, operation: Sum) -> None:
        """Put all gradients into buckets, and start their sums."""
        for bucket in self.buckets:
            bucket.fill_up(1.0)
            bucket.start(self._column, operation, overlap=True)

    def finish(self) -> None:
        """Wait for the sums; whole ones become the gradients here, also where only other replicas had one."""
        for bucket in self.buckets:
            bucket.wait()
            if not isinstance(bucket, ShardedBucket):
                if bucket.missing:  # otherwise the host need not wait for what the ranks have counted
                    take_missing(bucket)
                if isinstance(bucket, CompressedBucket) and bucket.any_not_finite:
                    bucket.invalidate()  # as without compression: what is not finite on one replica is on all
                bucket.reset()


class Presence:
    """For each gradient in parts, how many replicas have one: a reduce-scatter carries a count to one of them alone."""

    def __init__(self, column: Column) -> None:
        self._column = weakref.proxy(column)  # which holds this

    def start(self, operation: Sum) -> None:
        """Add up what all replicas have."""
        buckets = self._column.sharded_buckets
        if not buckets:
            return
        mine = [bucket.presence() for bucket in buckets]
        counts = torch.tensor(list(itertools.chain(*mine)), dtype=torch.float32, device="cpu")
        self._column.comms.all_reduce(counts, operation=operation)
        for bucket, sums in zip(buckets, torch.split(counts, list(map(len, mine))), strict=True):
            bucket.take_presence(sums)

    def finish(self) -> None:
        """Every parameter that has a gradient somewhere gets what stands for it; all sums have been waited for."""
        for bucket in self._column.sharded_buckets:
            bucket.take_results()
            bucket.reset()


class TiedSum:
    """The sum of one parameter's gradients over the ranks whose stages share it: of the whole, or of a replica's part.

    Args:
        parameter: which they share; all get the first one's.
        holders: these ranks.
        column: where this rank's part of the gradient is, if it is in parts.
    """

    def __init__(self, parameter: nn.Parameter, holders: Comms, column: Column) -> None:
        self.parameter = parameter
        self.holders = holders
        self._column = column
        holders.broadcast(parameter.data)

    def start(self, operation: Sum) -> None:
        """Add the gradients up; then every holder has the same bits, and its optimizer updates its copy alike."""
        if not self.parameter.requires_grad:
            return
        bucket = self._column.bucket_of(self.parameter)
        if bucket is not None:
            if len(bucket.shard):  # no holder of this replica has a part, where whole parameters are given to replicas
                self.holders.all_reduce(bucket.shard, operation=operation)
            bucket.hand_out(0)
            return
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.holders.all_reduce(self.parameter.grad, operation=operation)

    def finish(self) -> None:
        """Do nothing: `start` has waited for the sum."""
