"""Who takes part in a pass, and how much each rank's gradients count."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.bucket import FlatBucket, split
from microparallel.errors import GradientError, UsageError
from microparallel.observe import Activity, Observation, Observer
from microparallel.program import ORDER, WEIGHTS, AllReduce, Backward, Broadcast, Bucket, Program
from microparallel.schedules import data_parallel_step
from microparallel.torch_private import at_end_of_backward


class RollCall:
    """By default everybody is there, and all count alike; otherwise the ranks ask each other before every pass."""

    def __init__(self, comms: Comms) -> None:
        self.present = list(range(comms.world_size))
        self.joining = False  # ranks may run out of data
        self.weight: float | None = None  # how much this rank's gradients count, if not all alike
        self.total: float | None = None  # what all ranks' weights add up to, if that is known
        self._comms = comms

    @property
    def asks(self) -> bool:
        """Whether the ranks ask each other in the pass that begins."""
        return self.joining or (self.weight is not None and self.total is None)

    def answer(self, here: bool = True) -> float:
        """Learn who is there; returns what this rank's gradients are multiplied with before all are added up."""
        weight = 1.0 if self.weight is None else self.weight
        if not self.asks:
            self.present = list(range(self._comms.world_size))
            return weight / (self._comms.world_size if self.weight is None else self.total or 1.0)
        roll = torch.zeros(2, self._comms.world_size, dtype=torch.float64)
        roll[:, self._comms.rank] = torch.tensor([1.0, weight]) * here
        self._comms.all_reduce(roll, operation=AllReduce(WEIGHTS, "dp"))
        attendance, weights = roll.tolist()
        self.present = [rank for rank, there in enumerate(attendance) if there]
        total = sum(weights)
        return weight / total if total else 0.0


# A backward as observers are told of it: one operation for each bucket, which ends with the last of its gradients.


class WatchedBackward:
    """Where one backward stands, in the order of the program: bucket 0 holds the last layers, and is computed first.

    A bucket that is complete before the one it stands behind takes no time: its backward ends with that one's.

    Args:
        observers: who is told.
        sizes: how many gradients each bucket has.
        microbatch: the number of the micro-batch.
    """

    def __init__(self, observers: Sequence[Observer], sizes: Sequence[int], microbatch: int) -> None:
        self._observers = observers
        self._missing = list(sizes)
        self._microbatch = microbatch
        self._at = 0
        self._told: Observation | None = None
        self.goes_on()

    def arrives(self, bucket: int) -> None:
        """A gradient of this bucket has been accumulated, in a backward after which nothing leaves."""
        self._missing[bucket] -= 1
        while self._at < len(self._missing) and self._missing[self._at] <= 0:
            self.ends()
            self.goes_on()

    def goes_on(self) -> None:
        """The backward of the next bucket begins, if there is one."""
        if self._told is None and self._at < len(self._missing):
            operation = Backward(len(self._missing) - 1 - self._at, self._microbatch)
            self._told = Observation(self._observers, Activity(operation)).__enter__()

    def ends(self) -> None:
        """The backward of this bucket has ended, and it may leave."""
        if self._told is not None:
            self._told.__exit__()
            self._told = None
            self._at += 1

    def end(self) -> None:
        """Backward has ended: what has not come by now does not come."""
        while self._at < len(self._missing):
            self.goes_on()
            self.ends()


# Average gradients while backward still computes: what `DataParallel` does between `backward()` and its return.
#
# ```
# backward   ▒▒ g3 ▒▒ g2 ▒▒ g1 ▒▒ g0 │ end: wait for the last bucket
# buckets         [g3 g2]────┐  [g1 g0]───┐
# all-reduce                 └▓▓▓▓▓▓      └▓▓▓▓▓▓
# ```
#
# It follows a program (`schedules.data_parallel_step`). Every rank must start its all-reduces in the same order,
# whatever
# the order in which its gradients arrive: the program's. So a full bucket leaves when the program comes to it. Before
# the
# first backward its buckets are made for gradients that come in the reversed order of registration; then for the order
# in
# which they came, as one rank saw it.


_MOST_NAMES = 8  # parameters of a rank that an error names


_step = functools.lru_cache(maxsize=64)(data_parallel_step)  # the same step again and again


class Reducer:
    """The buckets of one model on one rank, and how far they are in this backward."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        comms: Comms,
        bucket_bytes: float,
        *,
        overlap: bool,
        check_finite: bool,
        refuse_unused: bool,
    ) -> None:
        self.roll_call = RollCall(comms)
        self.buckets: list[FlatBucket] = []
        self.passes = 0  # backward passes that were averaged
        self.running = False
        self.wanted: Callable[[], bool] = lambda: False  # begins, if this backward is to be averaged
        self.afterwards: Callable[[int], None] = lambda _: None  # is told a rank that took part
        self._overlap = overlap
        self._check_finite = check_finite
        self._refuse_unused = refuse_unused
        self._comms = comms
        self._bucket_bytes = bucket_bytes
        self._names = {parameter: name for name, parameter in named.items()}
        self._order: list[nn.Parameter] = []
        self._learnt = False
        self._places: dict[nn.Parameter, tuple[FlatBucket, int]] = {}
        self._hooks: list[RemovableHandle] = []
        self._arrived: list[nn.Parameter] = []
        self._ahead: deque[AllReduce] = deque()  # the program's, of buckets that have not left
        self._watched: WatchedBackward | None = None  # this backward, if there are observers
        self._not_finite: list[str] = []
        self._scale = 1.0
        self.microbatch = 0  # the backward that is next, counted since the last that was averaged
        self._local_backward = False  # whether one is under way that is not averaged
        self._came_locally = False  # whether it brought gradients

    def program(
        self,
        microbatches: int | tuple[int, ...] = 1,
        *,
        buffers: bool,
        samples: bool = False,
        loss: bool = False,
        gone: tuple[int, ...] = (),
    ) -> Program:
        """What the step that begins does, on all ranks."""
        return _step(
            len(self.buckets),
            self._comms.world_size,
            microbatches,
            overlap=self._overlap,
            buffers=buffers,
            weights=self.roll_call.asks,
            order=not self._learnt,
            samples=samples,
            loss=loss,
            joining=self.roll_call.joining,
            gone=gone,
        )

    # ── before backward ─────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Look whether parameters were frozen or unfrozen, or the last backward was cut short by an error."""
        if self.running or self._local_backward:
            self._clean_up()
        trainable = [parameter for parameter in self._names if parameter.requires_grad]
        if len(trainable) != len(self._places) or any(parameter not in self._places for parameter in trainable):
            self._order = trainable[::-1]  # backward begins at the end
            self._learnt = False
            self._watch(trainable)
        if not self.buckets:
            self._make_buckets()

    def _watch(self, trainable: Sequence[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [_register(parameter, ArrivalHook(self)) for parameter in trainable]
        self.buckets = []

    def _make_buckets(self) -> None:
        self._places.clear()
        groups = split(self._order, self._bucket_bytes)
        self.buckets = [FlatBucket(group, self._comms, number) for number, group in enumerate(groups)]
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._places[parameter] = (bucket, index)

    # ── during backward ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Gradients are about to arrive, and to be averaged."""
        self.running = True
        self.answer_roll_call()
        self._follow()
        self.watch_backward()
        at_end_of_backward(self._end)

    def answer_roll_call(self, here: bool = True) -> None:
        """Learn who takes part in the pass that begins, and how much each counts."""
        if not self.buckets:
            self._make_buckets()
        self._scale = self.roll_call.answer(here)

    def _follow(self) -> None:
        """Look up in the program which buckets leave, and in which order."""
        mine = self.program(buffers=False).ranks[self._comms.rank]
        self._ahead = deque(op for op in mine if isinstance(op, AllReduce) and isinstance(op.value, Bucket))

    def watch_backward(self) -> None:
        """A backward begins: tell the observers, if there are any; and count those that are not averaged."""
        if not self.running and not self._local_backward:  # nobody else sees to its end
            self._local_backward = True
            at_end_of_backward(self._local_backward_ends)
        if self._comms.observers and self._watched is None and self.buckets:
            number = self.microbatch * self._comms.world_size + self._comms.rank
            sizes = [len(bucket.parameters) for bucket in self.buckets]
            self._watched = WatchedBackward(self._comms.observers, sizes, number)

    def _local_backward_ends(self) -> None:
        self._end_watch()
        self.microbatch += self._came_locally
        self._local_backward = self._came_locally = False

    def _end_watch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.end()

    def arrive(self, parameter: nn.Parameter) -> None:
        """A gradient has been added to `parameter.grad`."""
        averaged = self.running or self.wanted()
        if not averaged:
            self._came_locally = True
            self.watch_backward()
        bucket, index = self._places[parameter]
        if not averaged:
            if self._watched is not None:
                self._watched.arrives(bucket.number)
            return
        self._require_usable(parameter, bucket.ready[index])
        if self._check_finite and not bool(parameter.grad.isfinite().all()):  # type: ignore[union-attr]
            bucket.bad += 1
            self._not_finite.append(self._names[parameter])
        bucket.put(index, self._scale)
        self._arrived.append(parameter)
        if not bucket.missing:
            self._let_full_buckets_leave()

    def _require_usable(self, parameter: nn.Parameter, came_before: bool) -> None:
        gradient = parameter.grad
        if came_before:
            raise UsageError(
                f"parameter {self._names[parameter]!r} got two gradients in one backward, which reentrant activation "
                "checkpointing does to shared parameters; use checkpoint(..., use_reentrant=False)"
            )
        if gradient is not None and gradient.is_sparse:
            raise UsageError(
                f"the gradient of {self._names[parameter]!r} is sparse, and buckets are dense; use sparse=False"
            )
        if gradient is not None and gradient.requires_grad:
            raise UsageError("backward(create_graph=True) cannot be averaged; call it inside no_sync()")

    def _let_full_buckets_leave(self) -> None:
        while self._ahead and not self._bucket_of(self._ahead[0]).missing:
            self._leave(self._ahead.popleft())

    def _bucket_of(self, operation: AllReduce) -> FlatBucket:
        assert isinstance(operation.value, Bucket)
        return self.buckets[operation.value.index]

    def _leave(self, operation: AllReduce) -> None:
        if self._watched is not None:
            self._watched.ends()
        self._bucket_of(operation).leave(self._comms, operation, self._overlap)
        if self._watched is not None:
            self._watched.goes_on()

    # ── the end of backward ─────────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        """torch calls this when backward has computed everything, and before it returns to its caller."""
        if self._arrived:
            self._average(take_results=True)
        else:  # torch.autograd.grad leaves parameters alone, and so do we
            self._end_watch()
            self.running = False

    def take_part(self, *, take_results: bool) -> None:
        """Go through a backward of the others without gradients of one's own."""
        self.running = True
        self._follow()
        self._average(take_results)

    def _average(self, take_results: bool) -> None:
        while self._ahead:
            bucket = self._bucket_of(self._ahead[0])
            bucket.fill_up(self._scale) if take_results else bucket.buffer.zero_()
            self._leave(self._ahead.popleft())
        self._end_watch()
        for bucket in self.buckets:
            bucket.come_back()
        self.passes += 1
        self._require_fine()
        for bucket in self.buckets:
            if take_results and bucket.missing:
                _take_from_others(bucket)
        if not self._learnt:
            self._learn_order()
        self._clean_up()
        self.afterwards(self.roll_call.present[0])

    def _require_fine(self) -> None:
        """Every rank finds the same sums here, so all of them raise, or none does."""
        if self._check_finite and any(bucket.anything_bad for bucket in self.buckets):
            self._refuse("gradients that are not finite", self._not_finite)
        present = len(self.roll_call.present)
        if self._refuse_unused and any(bucket.had_by_fewest < present for bucket in self.buckets):
            came = set(self._arrived)
            self._refuse("no gradients", [self._names[parameter] for parameter in self._order if parameter not in came])

    def _refuse(self, what: str, mine: list[str]) -> NoReturn:
        parts = [
            f"rank {rank}: {', '.join(names[:_MOST_NAMES])}{', …' * (len(names) > _MOST_NAMES)}"
            for rank, names in enumerate(gather_json(mine, self._comms))
            if names and rank in self.roll_call.present
        ]
        self._clean_up()
        raise GradientError(f"step {self.passes}: {what} for parameters of {'; '.join(parts)}")

    def _learn_order(self) -> None:
        """Put gradients into buckets in the order in which they arrived; the unused ones come last."""
        numbers = {parameter: number for number, parameter in enumerate(self._order)}
        came = dict.fromkeys(self._arrived)
        order = [*came, *(parameter for parameter in self._order if parameter not in came)]
        indices = torch.tensor([numbers[parameter] for parameter in order])
        source = self.roll_call.present[0]
        self._comms.broadcast(indices, src=source, operation=Broadcast(ORDER, "dp", source))
        learnt = indices.tolist()
        if learnt != sorted(learnt):
            self._order = [self._order[index] for index in learnt]
            self.buckets = []  # made anew before the next pass
        self._learnt = True

    def _clean_up(self) -> None:
        self._end_watch()
        for bucket in self.buckets:
            bucket.come_back()
            bucket.reset()
        self._arrived = []
        self._not_finite = []
        self._ahead.clear()
        self._local_backward = self._came_locally = False
        self.microbatch = 0
        self.running = False


class ArrivalHook:
    """What torch calls when a gradient has arrived.

    Python cannot see that a hook and its parameter hold each other, so the hook does not hold on to the reducer.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = weakref.ref(reducer)

    def __call__(self, parameter: nn.Parameter) -> None:
        """Pass it on, if there still is somebody who cares."""
        reducer = self.reducer()
        if reducer is not None:
            reducer.arrive(parameter)


def _register(parameter: nn.Parameter, hook: ArrivalHook) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _take_from_others(bucket: FlatBucket) -> None:
    """A gradient that only others had arrives here too; one that nobody had stays None."""
    having = bucket.having.tolist()
    for parameter, view, ready, ranks in zip(bucket.parameters, bucket.views, bucket.ready, having, strict=True):
        if not ready and ranks > 0:
            parameter.grad = view
