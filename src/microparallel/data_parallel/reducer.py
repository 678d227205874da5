"""The reducer: it averages gradients over the ranks while backward still computes.

```
backward   ▒▒ g3 ▒▒ g2 ▒▒ g1 ▒▒ g0 │ end: wait for the last bucket
buckets         [g3 g2]────┐  [g1 g0]───┐
all-reduce                 └▓▓▓▓▓▓      └▓▓▓▓▓▓
```

The reducer follows a program (`schedules.data_parallel_step`). All ranks must start their all-reduces in one order, but
gradients may arrive in another order on each rank. So the all-reduce of a full bucket starts when the program comes to
it.

Before the first backward the reducer assumes that gradients arrive in the reversed order of registration. After it, the
buckets are made again for the order in which they arrived on one rank, which that rank broadcasts.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.compression import Cast, Compressor
from microparallel.data_parallel.bucket import FlatBucket, numbers_of, split, take_missing
from microparallel.data_parallel.compressed_bucket import (
    CompressedBucket,
    ResidualsOfStep,
    compression_state,
    is_large,
    load_compression_state,
)
from microparallel.data_parallel.layout import By, owners
from microparallel.data_parallel.sharding import Buffers, ShardedBucket, Wire
from microparallel.data_parallel.skipped_steps import StepGuard
from microparallel.data_parallel.sync_batch_norm import LayerSum, LayerSums
from microparallel.errors import GradientError, UsageError
from microparallel.observe import Activity, Observation, Observer
from microparallel.program import (
    AUTO,
    ORDER,
    WEIGHTS,
    AllReduce,
    Backward,
    Broadcast,
    Bucket,
    Delta,
    Free,
    Program,
    ReduceScatter,
    overflow,
    presence,
)
from microparallel.schedules import data_parallel_step
from microparallel.torch_private import at_end_of_backward, leave_uncompiled

_MOST_NAMES = 8  # parameters of a rank that an error names
_step = functools.lru_cache(maxsize=64)(data_parallel_step)  # every backward asks for its program
Sum = AllReduce | ReduceScatter


class Reducer:
    """The buckets of one model on one rank, and how far they are in this backward.

    Args:
        named: the model's parameters by name.
        comms: the ranks that average.
        sums_inside: the sums of its layers, which are done inside of its forward and backward.
        bucket_bytes: a bucket that has so many bytes of gradients takes no more.
        overlap: all-reduce in the background, while backward goes on.
        check_finite: raise `GradientError` for gradients that are infinite or not a number.
        refuse_unused: raise `GradientError` for parameters that got no gradient.
        overwrites: overwrite gradients of the last pass, also if the user still holds them.
        level: how much is kept in parts (ZeRO): 0 nothing, 1 the optimizer's state, 2 the gradients, too. From 1 on
            buckets are reduce-scattered, and keep the order of registration: each rank's part stays what it is.
        axis: of these ranks in the program's mesh.
        guard: is told whether averages are finite; if not, there are no gradients. None: they are what they are.
        wire: the 16-bit dtype in which gradients are sent that are kept in parts; None: that of the gradients.
        compressor: how the buckets of large parameters are compressed. But for a `Cast` without feedback, such buckets
            keep the order of registration, so that a run that is resumed compresses the same numbers together.

    Attributes:
        participants: which ranks have data, and how much each counts.
        buckets: in the order of the program; none before the first `prepare()`.
        passes: how many backwards were averaged.
        running: whether a backward is under way that is averaged.
        begin_if_wanted: is called at a gradient that arrives outside of such a backward; says whether one begins.
        pass_ended: is called after each averaged backward with the lowest rank that had data.
        microbatch: the number of the next backward, counted since the last one that was averaged.
        compressor: how buckets are compressed.
        refuses_not_finite: whether gradients that cannot be compressed, since they are not finite, raise
            `GradientError`. Otherwise all ranks get gradients that are not finite, as without compression.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        comms: Comms,
        bucket_bytes: float,
        sums_inside: LayerSums,
        *,
        overlap: bool,
        check_finite: bool,
        refuse_unused: bool,
        overwrites: bool,
        level: int = 0,
        axis: str = "dp",
        guard: StepGuard | None = None,
        wire: torch.dtype | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        self.level = level
        self.compressor = compressor
        self.refuses_not_finite = True
        self._kept: dict[str, Any] | None = None  # the state of compression, while buckets are made anew
        # A cast without feedback keeps nothing, and rounds each number by itself: its buckets may change.
        forgets = compressor is None or (isinstance(compressor, Cast) and not compressor.feedback)
        self._keeps_order = level > 0 or not forgets
        self.by: By = "element"
        self.participants = Participants(comms, axis)
        self.buckets: list[FlatBucket] = []
        self.passes = 0
        self.running = False
        self.begin_if_wanted: Callable[[], bool] = lambda: False
        self.pass_ended: Callable[[int], None] = lambda _: None
        self.microbatch = 0
        self._axis = axis
        self._guard = guard
        self._residuals_of_step = ResidualsOfStep()
        self._wire = Wire(wire) if wire is not None and comms.world_size > 1 else None
        self._overlap = overlap
        self._check_finite = check_finite
        self._refuse_unused = refuse_unused
        self._overwrites = overwrites
        self._comms = comms
        self._sums_inside = sums_inside
        for number, layer in enumerate(sums_inside.layers):
            layer.follow(self, number)
        self._bucket_bytes = bucket_bytes
        self._names = {parameter: name for name, parameter in named.items()}
        self._order: list[nn.Parameter] = []  # in which gradients are expected
        self._learnt = self._keeps_order  # whether that is the order in which they arrived, or it is kept as it is
        self._places: dict[nn.Parameter, tuple[FlatBucket, int]] = {}  # its bucket, and its index there
        self._hooks: list[RemovableHandle] = []
        self._arrived: list[nn.Parameter] = []  # whose gradients have come in this backward
        self._not_started: deque[Sum] = deque()  # the program's sums that are still to do
        self._turn = 0  # how many passes have been summed since gradients were removed (level 2)
        self._observed: ObservedBackward | None = None  # this backward, if there are observers
        self._not_finite: list[str] = []  # parameters of this rank
        self._scale = 1.0  # the factor for this rank's gradients
        self._local_backward = False  # whether a backward is under way that is not averaged
        self._local_gradients = False  # whether it has made gradients

    def program(
        self,
        microbatches: int | tuple[int, ...] = 1,
        *,
        buffers: bool,
        samples: bool = False,
        loss: bool = False,
        gone: tuple[int, ...] = (),
        norm: bool = False,
        at_once: bool = True,
    ) -> Program:
        """What the next step does, on all ranks."""
        return self._built(
            microbatches,
            gone,
            overlap=self._overlap,
            buffers=buffers,
            weights=self.participants.are_exchanged,
            samples=samples,
            loss=loss,
            norm=norm and self.level > 0,
            at_once=at_once,
            overflow=self._guard is not None and self.level > 0,
        )

    def _built(self, microbatches: int | tuple[int, ...], gone: tuple[int, ...], **shared: bool) -> Program:
        """The program with these options, which all levels have; beside them, what this reducer knows itself."""
        return _step(
            len(self.buckets),
            self._comms.world_size,
            microbatches,
            order=not self._learnt,
            joining=self.participants.joining,
            gone=gone,
            norms=self._sums_inside.in_slots(self._complete_after()) if self._sums_inside.layers else (),
            level=self.level,
            algorithms=self._algorithms(),
            **shared,
        )

    def _algorithms(self) -> str | tuple[str, ...]:
        """How each bucket of the next pass is summed."""
        if self.compressor is None or self.passes < self.compressor.warmup:
            return AUTO
        return tuple(bucket.algorithm if isinstance(bucket, CompressedBucket) else AUTO for bucket in self.buckets)

    def _complete_after(self) -> list[int]:
        """For each bucket, how many gradients there are when its all-reduce leaves, if they come as expected."""
        numbers = {parameter: number for number, parameter in enumerate(self._order, start=1)}
        last = (max(numbers[parameter] for parameter in bucket.parameters) for bucket in self.buckets)
        return list(itertools.accumulate(last, max))

    # ── sums of layers inside of forward and backward ───────────────────────────────────────────────────────────

    @property
    def weight(self) -> float:
        """How much this rank's gradients count, beside those of the other ranks."""
        return 1.0 if self.participants.weight is None else self.participants.weight

    def layer_sums(self, layer: int, of_gradient: bool) -> None:
        """Note that the layer of this number sums something now, for the program of the next step."""
        if not self._learnt:
            arrived = len(self._arrived) if self.running else -1
            self._sums_inside.seen.append(LayerSum(arrived, layer, of_gradient))

    # ── before backward ─────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Clean up after a backward that an error cut short; make new buckets if parameters were changed.

        They may be frozen or unfrozen since, converted to another dtype, or moved to another device.
        """
        if self.running or self._local_backward:
            self._clean_up()
        trainable = [parameter for parameter in self._names if parameter.requires_grad]
        if len(trainable) != len(self._places) or any(parameter not in self._places for parameter in trainable):
            self._order = trainable[::-1]  # backward begins at the end
            self._learnt = self._keeps_order
            self._register_hooks(trainable)
        elif not all(bucket.fits for bucket in self.buckets):
            self._drop_buckets()
        if not self.buckets:
            self._make_buckets()

    def require_known(self, module: nn.Module) -> None:
        """Raise `UsageError` if the module has a parameter whose gradient this reducer does not know of."""
        for name, parameter in module.named_parameters():
            if parameter not in self._names and isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                raise UsageError(
                    f"DataParallel: parameter {name!r} was added or replaced after the model was wrapped, so its "
                    "gradient would not be averaged; change the model first, then wrap it"
                )

    def _register_hooks(self, trainable: Sequence[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [_register(parameter, ArrivalHook(self)) for parameter in trainable]
        self._drop_buckets()

    def _drop_buckets(self) -> None:
        """Let `_make_buckets` make new ones; what has not been sent of gradients is kept."""
        if self.compressed_buckets:
            self._kept = self.compression_state()
        self.buckets = []

    def _make_buckets(self) -> None:
        self._places.clear()
        groups = split(self._order, self._bucket_bytes, self._is_compressed)
        if self.level:
            self.buckets = list(self._sharded(groups))
        elif self.compressor is not None:
            self.buckets = list(self._compressed(groups, self.compressor))
        else:
            self.buckets = [
                FlatBucket(group, self._comms, number, overwrites=self._overwrites)
                for number, group in enumerate(groups)
            ]
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._places[parameter] = (bucket, index)
        if self._kept is not None:
            trained = {self._names[parameter] for parameter in self._places}
            residuals = {name: residual for name, residual in self._kept["residuals"].items() if name in trained}
            load_compression_state(self.buckets, self._names, [{"residuals": residuals}], self._kept["methods"])
            self._kept = None

    def _is_compressed(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient is compressed; small ones are left alone."""
        return self.compressor is not None and is_large(parameter, self.compressor)

    def _compressed(self, groups: Sequence[list[nn.Parameter]], compressor: Compressor) -> Iterator[FlatBucket]:
        """Make buckets that are compressed, and plain ones for small parameters."""
        for number, group in enumerate(groups):
            if self._is_compressed(group[0]):
                yield CompressedBucket(group, self._comms, number, compressor, overwrites=self._overwrites)
            else:
                yield FlatBucket(group, self._comms, number, overwrites=self._overwrites)

    def _sharded(self, groups: Sequence[list[nn.Parameter]]) -> Iterator[ShardedBucket]:
        """Make buckets of which each rank keeps its part."""
        owner_of = owners(self._names, self._comms.world_size) if self.by == "parameter" else {}
        pools: dict[object, Buffers] = {}
        for number, group in enumerate(groups):
            if owner_of:
                group.sort(key=owner_of.__getitem__)
            kind = (group[0].dtype, group[0].device)
            if self.level > 1 and kind not in pools:
                pools[kind] = Buffers(group[0], self._comms)
            given = [owner_of[parameter] for parameter in group] if owner_of else None
            pool = pools.get(kind)
            yield ShardedBucket(group, self._comms, number, owners=given, pool=pool, wire=self._wire)

    @property
    def axis(self) -> str:
        """Of these ranks in the program's mesh."""
        return self._axis

    @property
    def comms(self) -> Comms:
        """The ranks that average."""
        return self._comms

    @property
    def gathered(self) -> Sequence[int]:
        """In a world of one rank nothing is sent, but its program has the gathers all the same."""
        return range(len(self.sharded_buckets)) if self._comms.world_size == 1 else ()

    @property
    def sharded_buckets(self) -> list[ShardedBucket]:
        """The buckets of which each rank keeps its part: all of them, or none."""
        return [bucket for bucket in self.buckets if isinstance(bucket, ShardedBucket)]

    def shard_by(self, by: By) -> None:
        """Cut buckets into parts by element, or give whole parameters to ranks; before the first pass."""
        if by != self.by:
            self.by = by
            self.buckets = []
            self.prepare()

    # ── compression ─────────────────────────────────────────────────────────────────────────────────────────────

    def multiply_on_wire(self, factor: float) -> None:
        """Multiply 16-bit numbers by a factor while they travel (`Cast.factor`); every rank, between two passes."""
        for one in (self.compressor, *(bucket.compressor for bucket in self.compressed_buckets)):
            if isinstance(one, Cast):
                one.factor = factor
        if self._wire is not None:
            self._wire.factor = factor

    @property
    def compressed_buckets(self) -> list[CompressedBucket]:
        """The buckets that are compressed, but in warm-up."""
        return [bucket for bucket in self.buckets if isinstance(bucket, CompressedBucket)]

    def compression_state(self) -> dict[str, Any]:
        """What this rank keeps of compression from pass to pass, by the parameters' names."""
        return compression_state(self.buckets, self._names, self.passes)

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what all ranks of an earlier run have kept; this rank takes its share of them."""
        mine = list(states[self._comms.rank :: self._comms.world_size])
        load_compression_state(self.buckets, self._names, mine, states[0]["methods"])
        self.passes = int(states[0]["passes"])

    # ── during backward ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Begin a backward whose gradients are averaged; they are about to arrive."""
        self.running = True
        self.find_participants()
        self.take_stand_ins()
        self._follow_program()
        self.observe_backward()
        at_end_of_backward(self._end)

    def find_participants(self, has_data: bool = True) -> None:
        """Find out which ranks have data in the pass that begins, and how much this rank's gradients count."""
        if not self.buckets:
            self._make_buckets()
        if self._guard is not None:
            self.multiply_on_wire(self._guard.scale)
            if self._guard.begins:
                self._residuals_of_step.keep(self.buckets)
        self._scale = self.participants.find(has_data)

    def take_stand_ins(self) -> None:
        """Before gradients come: what stands for sums of earlier passes makes room for them."""
        for bucket in self.sharded_buckets:
            bucket.take_stand_ins()

    def _follow_program(self) -> None:
        """Look up in the program which buckets are summed, and in which order."""
        if self.level < 2:
            mine = self.program(buffers=False).ranks[self._comms.rank]
            self._not_started = deque(op for op in mine if isinstance(op, Sum) and isinstance(op.value, Bucket))
            return
        step_is_lost = self._guard is not None and self._guard.overflow  # then no bucket keeps its sums
        if not step_is_lost and not any(bucket.keeps_sum for bucket in self.sharded_buckets):
            self.microbatch -= self._turn  # gradients begin anew: so do their numbers
            self._turn = 0
        at_once = self.microbatch <= self._turn  # otherwise gradients of earlier backwards, in no_sync, go along
        turn = self._turn if at_once else None
        mine = self.program(self._turn + 1, buffers=False, at_once=at_once).ranks[self._comms.rank]
        sums = (op for op in mine if isinstance(op, ReduceScatter) and isinstance(op.value, Bucket))
        self._not_started = deque(op for op in sums if op.value.turn == turn)  # type: ignore[union-attr]

    def observe_backward(self) -> None:
        """Tell the observers, if there are any, that a backward begins; and count it if it is not averaged."""
        if not self.running and not self._local_backward:  # begin() sees to the end of an averaged one
            self._local_backward = True
            self.take_stand_ins()
            at_end_of_backward(self._local_backward_ends)
        if self._comms.observers and self._observed is None and self.buckets:
            number = self.microbatch * self._comms.world_size + self._comms.rank
            sizes = [len(bucket.parameters) for bucket in self.buckets]
            self._observed = ObservedBackward(self._comms.observers, sizes, number)

    def _local_backward_ends(self) -> None:
        self._end_observed()
        self.put_stand_ins_back()
        self.microbatch += self._local_gradients
        self._local_backward = self._local_gradients = False

    def put_stand_ins_back(self) -> None:
        """Let `grad` say again that there are sums of earlier passes, where no gradient has come."""
        for bucket in self.sharded_buckets:
            bucket.put_stand_ins_back()

    def _end_observed(self) -> None:
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.end_all()

    def arrive(self, parameter: nn.Parameter) -> None:
        """Move a gradient, which torch has just added to `parameter.grad`, into its bucket, if it is averaged.

        Runs for every parameter in every backward, so it does what must be done for each, and nothing else.
        """
        if not self.running and not self.begin_if_wanted():
            self._arrive_locally(parameter)
            return
        bucket, index = self._places[parameter]
        self._require_usable(parameter, bucket.ready[index])
        bucket.put(index, self._scale)
        self._arrived.append(parameter)
        if not bucket.missing:
            self._start_full_buckets()

    def _arrive_locally(self, parameter: nn.Parameter) -> None:
        """A gradient has come in a backward that is not averaged."""
        self._local_gradients = True
        if not self._local_backward or self._comms.observers:
            self.observe_backward()
        if self._observed is not None:
            self._observed.gradient_arrived(self._places[parameter][0].number)

    def _require_usable(self, parameter: nn.Parameter, came_before: bool) -> None:
        gradient = parameter.grad
        if not (came_before or (gradient is not None and (gradient.is_sparse or gradient.requires_grad))):
            return
        name = self._names[parameter]
        if came_before:
            raise UsageError(
                f"parameter {name!r} got two gradients in one backward, which reentrant activation "
                "checkpointing does to shared parameters; use checkpoint(..., use_reentrant=False)"
            )
        if gradient is not None and gradient.is_sparse:
            raise UsageError(f"the gradient of {name!r} is sparse, and buckets are dense; use sparse=False")
        raise UsageError("backward(create_graph=True) cannot be averaged; call it inside no_sync()")

    def _start_full_buckets(self) -> None:
        while self._not_started and not self._bucket_of(self._not_started[0]).missing:
            self._start(self._not_started.popleft())

    def _bucket_of(self, operation: Sum) -> FlatBucket:
        assert isinstance(operation.value, Bucket)
        return self.buckets[operation.value.index]

    def _start(self, operation: Sum) -> None:
        if self._observed is not None:
            self._observed.end_current()
        bucket = self._bucket_of(operation)
        if self._check_finite:
            bucket.look_for_not_finite()
        bucket.start(self._comms, operation, self._overlap)
        if isinstance(bucket, CompressedBucket):
            bad = (self._names[bucket.parameters[index]] for index in bucket.unsendable)
            self._not_finite += [name for name in bad if name not in self._not_finite]
        self._tell_of_freed(operation)
        if self._observed is not None:
            self._observed.begin_next()

    # ── the end of backward ─────────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        """Average what is left; torch calls this after backward has computed everything, before it returns."""
        if self._arrived:
            self._average(take_results=True)
        else:  # torch.autograd.grad does not change parameter.grad, and neither does the reducer
            self._end_observed()
            self.put_stand_ins_back()
            self.running = False

    def take_part(self, *, take_results: bool) -> None:
        """Take part in the all-reduces of the other ranks' backward; this rank has no gradients.

        Args:
            take_results: whether the averages become this rank's gradients, too.
        """
        self.running = True
        self.take_stand_ins()
        self._follow_program()
        self._average(take_results)

    def _start_rest(self, take_results: bool) -> None:
        """Sum the buckets that have not been summed; what is missing of them counts as zero."""
        while self._not_started:
            bucket = self._bucket_of(self._not_started[0])
            bucket.fill_up(self._scale) if take_results else bucket.fill_with_zeros()
            self._start(self._not_started.popleft())

    def _average(self, take_results: bool) -> None:
        self._start_rest(take_results)
        self._end_observed()
        self._share_presence()
        for bucket in self.buckets:
            bucket.wait()
        self.passes += 1
        self._require_fine()
        self._look_for_overflow()
        for bucket in self.buckets:
            if isinstance(bucket, ShardedBucket):
                bucket.take_results()
            elif take_results and bucket.missing:
                take_missing(bucket)
        if self._guard is not None and self._guard.overflow:
            self._remove_gradients()
            self._residuals_of_step.give_back(self.buckets)
        self._count_pass()
        if not self._learnt:
            self._learn_order()
        self._clean_up()
        self.pass_ended(self.participants.ranks[0])

    def _share_presence(self) -> None:
        """Tell all ranks which gradients this one has.

        A reduce-scatter would carry that to one rank each, and a compressed sum would lose it.
        """
        buckets = [
            bucket
            for bucket in self.buckets
            if isinstance(bucket, ShardedBucket) or (isinstance(bucket, CompressedBucket) and bucket.shares_presence)
        ]
        if not buckets:
            return
        mine = [bucket.presence() for bucket in buckets]
        also = self._also_shared()
        counts = torch.tensor([*itertools.chain(*mine), *also], dtype=torch.float64, device="cpu")
        self._comms.all_reduce(counts, operation=AllReduce(presence(self._turn), self._axis))
        *of_buckets, of_all = torch.split(counts, [*map(len, mine), len(also)])
        for bucket, sums in zip(buckets, of_buckets, strict=True):
            bucket.take_presence(sums)
        self._require_alike(of_all)

    def _also_shared(self) -> list[float]:
        """What else ranks add up with the counts of gradients."""
        return []

    def _require_alike(self, sums: torch.Tensor) -> None:
        """Look at these sums, which are the same on all ranks."""

    def _look_for_overflow(self) -> None:
        """Tell the guard whether the averages are finite. Where each rank has its part, the ranks tell each other."""
        if self._guard is None:
            return
        found = not all(bucket.sums_are_finite for bucket in self.buckets)
        if self.sharded_buckets:
            ranks = torch.tensor([float(found)], dtype=torch.float64, device="cpu")
            self._comms.all_reduce(ranks, operation=AllReduce(overflow(self._turn), self._axis))
            found = bool(ranks)
        self._guard.pass_ended(overflow=found)

    def _remove_gradients(self) -> None:
        """Let no parameter have a gradient: this step is not taken."""
        self.forget_sums()
        for parameter in self._names:
            parameter.grad = None

    def _tell_of_freed(self, operation: Sum) -> None:
        """At level 2, tell the observers that a bucket's gradients are let go: its sum, which has begun, does that."""
        if self.level < 2 or not self._comms.observers or not self._arrived:
            return
        stage = len(self.buckets) - 1 - self._bucket_of(operation).number
        for microbatch in range(self._turn, self.microbatch + 1):  # those in no_sync, too
            number = microbatch * self._comms.world_size + self._comms.rank
            with Observation(self._comms.observers, Activity(Free(Delta(stage, number)))):
                pass

    def _count_pass(self) -> None:
        """At level 2 each pass of a step has sums of its own."""
        self._turn += self.level == 2

    def step_ends(self) -> None:
        """The optimizer has updated the weights: micro-batches are counted anew."""
        self._turn = self.microbatch = 0

    def forget_sums(self) -> None:
        """Remove gradients that are in parts."""
        for bucket in self.sharded_buckets:
            bucket.forget()

    def _require_fine(self) -> None:
        """Raise on bad gradients; every rank has the same sums here, so all ranks raise, or none does."""
        if self._check_finite or self.compressor is not None:
            self._require_finite()
        with_data = len(self.participants.ranks)
        if self._refuse_unused and min(numbers_of([bucket.fewest_ranks for bucket in self.buckets])) < with_data:
            arrived = set(self._arrived)
            unused = [self._names[parameter] for parameter in self._order if parameter not in arrived]
            self._refuse("no gradients", unused, "\n  try: find_unused_parameters=True, which counts them as zero")

    def _require_finite(self) -> None:
        counts = numbers_of([bucket.not_finite_on_all for bucket in self.buckets])
        bad = [bucket for bucket, count in zip(self.buckets, counts, strict=True) if count]
        if bad and (self._check_finite or self.refuses_not_finite):
            found = (bucket.parameters[index] for bucket in self.buckets for index in bucket.found_not_finite())
            names = dict.fromkeys([*self._not_finite, *(self._names[parameter] for parameter in found)])
            self._refuse("gradients that are not finite", list(names))
        for bucket in bad:
            if isinstance(bucket, CompressedBucket):
                bucket.invalidate()

    def _refuse(self, what: str, mine: list[str], fix: str = "") -> NoReturn:
        parts = [
            names_of_rank(rank, names)
            for rank, names in enumerate(gather_json(mine, self._comms))
            if names and rank in self.participants.ranks
        ]
        self._clean_up()
        self.forget_sums()
        raise GradientError(f"step {self.passes}: {what} for parameters of {'; '.join(parts)}{fix}")

    def _learn_order(self) -> None:
        """Expect gradients in the order in which they arrived on one rank; those of unused parameters come last."""
        numbers = {parameter: number for number, parameter in enumerate(self._order)}
        arrived = dict.fromkeys(self._arrived)
        order = [*arrived, *(parameter for parameter in self._order if parameter not in arrived)]
        count = len(order)
        inside = self._sums_inside.seen  # every rank has as many: no rank gets past such a sum alone
        indices = torch.tensor([*(numbers[parameter] for parameter in order), *itertools.chain(*inside)], device="cpu")
        source = self.participants.ranks[0]
        self._comms.broadcast(indices, src=source, operation=Broadcast(ORDER, "dp", source))
        learnt = indices[:count].tolist()
        self._sums_inside.expect(indices[count:].view(-1, 3).tolist())
        if learnt != sorted(learnt):
            self._order = [self._order[index] for index in learnt]
            self.buckets = []  # prepare() makes new ones before the next pass
        self._learnt = True

    def gradient_order(self) -> list[str] | None:
        """The names of parameters in the order in which their gradients arrived; None if buckets do not follow it."""
        return [self._names[one] for one in self._order] if self._learnt and not self._keeps_order else None

    def expect(self, order: Sequence[str]) -> None:
        """Expect gradients as `gradient_order` once said; every rank calls this, before a pass.

        Where layers sum inside of backward, the next pass learns the order again, and their places in it.
        """
        self.prepare()
        trained = {self._names[parameter]: parameter for parameter in self._order}
        if not self._keeps_order and sorted(order) == sorted(trained):
            self._order = [trained[name] for name in order]
            self._learnt = not self._sums_inside.layers
            self._drop_buckets()

    def _clean_up(self) -> None:
        self._end_observed()
        for bucket in self.buckets:
            bucket.wait()
            bucket.reset()
        self._arrived = []
        self._not_finite = []
        self._not_started.clear()
        self._local_backward = self._local_gradients = False
        self.microbatch = self._turn  # at level 2, what comes next may be another micro-batch of the same step
        self.running = False


def names_of_rank(rank: int, names: Sequence[str]) -> str:
    """A rank and the first of its parameters that an error names."""
    return f"rank {rank}: {', '.join(names[:_MOST_NAMES])}{', …' * (len(names) > _MOST_NAMES)}"


class ArrivalHook:
    """Tells the reducer when torch has added a gradient to a parameter.

    The hook holds only a weak reference: Python's garbage collector does not see that a parameter holds its hooks, so a
    strong one would keep the reducer, and with it the parameters, alive for ever.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = weakref.ref(reducer)

    @leave_uncompiled
    def __call__(self, parameter: nn.Parameter) -> None:
        """Pass the parameter on, if its reducer still exists."""
        reducer = self.reducer()
        if reducer is not None:
            reducer.arrive(parameter)


def _register(parameter: nn.Parameter, hook: ArrivalHook) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


# ── which ranks take part ───────────────────────────────────────────────────────────────────────────────────────────


class Participants:
    """Which ranks have data in a pass, and how much each rank's gradients count in the average.

    By default all ranks have data and count alike, and nothing is sent. With `joining`, or with a `weight` whose
    `total` is not known, the ranks exchange both in an all-reduce before every pass.

    Attributes:
        ranks: those that have data in this pass.
        joining: whether ranks may run out of data (`DataParallel.join`).
        weight: how much this rank's gradients count; None if all ranks count alike.
        total: the sum of all ranks' weights, if the caller knows it.
    """

    def __init__(self, comms: Comms, axis: str = "dp") -> None:
        self.ranks = list(range(comms.world_size))
        self.joining = False
        self.weight: float | None = None
        self.total: float | None = None
        self._comms = comms
        self._axis = axis

    @property
    def are_exchanged(self) -> bool:
        """Whether the next pass begins with that all-reduce."""
        return self.joining or (self.weight is not None and self.total is None)

    def find(self, has_data: bool = True) -> float:
        """Find out which ranks have data; return the factor for this rank's gradients before all are added up."""
        weight = 1.0 if self.weight is None else self.weight
        if not self.are_exchanged:
            self.ranks = list(range(self._comms.world_size))
            return weight / (self._comms.world_size if self.weight is None else self.total or 1.0)
        table = torch.zeros(2, self._comms.world_size, dtype=torch.float64, device="cpu")  # a column for each rank
        table[:, self._comms.rank] = torch.tensor([1.0, weight], device="cpu") * has_data
        self._comms.all_reduce(table, operation=AllReduce(WEIGHTS, self._axis))
        having, weights = table.tolist()
        self.ranks = [rank for rank, has in enumerate(having) if has]
        total = sum(weights)
        return weight / total if total else 0.0


# ── what observers are told ─────────────────────────────────────────────────────────────────────────────────────────


class ObservedBackward:
    """Tells observers of one backward, as one operation for each bucket, in the order of the program.

    Bucket 0 holds the last layers, and is computed first. An operation ends with the last gradient of its bucket. A
    bucket that is complete before the one in front of it takes no time: both operations end together.

    Args:
        observers: those that are told.
        sizes: how many gradients each bucket has.
        microbatch: the number of the micro-batch.
    """

    def __init__(self, observers: Sequence[Observer], sizes: Sequence[int], microbatch: int) -> None:
        self._observers = observers
        self._missing = list(sizes)
        self._microbatch = microbatch
        self._bucket = 0  # whose backward is under way, or next
        self._told: Observation | None = None
        self.begin_next()

    def gradient_arrived(self, bucket: int) -> None:
        """Count a gradient of this bucket, in a backward after which nothing is averaged."""
        self._missing[bucket] -= 1
        while self._bucket < len(self._missing) and self._missing[self._bucket] <= 0:
            self.end_current()
            self.begin_next()

    def begin_next(self) -> None:
        """Tell that the backward of the next bucket begins, if there is one and it has not begun."""
        if self._told is None and self._bucket < len(self._missing):
            operation = Backward(len(self._missing) - 1 - self._bucket, self._microbatch)
            self._told = Observation(self._observers, Activity(operation)).__enter__()

    def end_current(self) -> None:
        """Tell that the backward of the current bucket has ended."""
        if self._told is not None:
            self._told.__exit__()
            self._told = None
            self._bucket += 1

    def end_all(self) -> None:
        """Tell that the whole backward has ended; gradients that are still missing will not arrive."""
        while self._bucket < len(self._missing):
            self.begin_next()
            self.end_current()
