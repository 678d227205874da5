"""The reducer of a model in parts: it gathers units before they are used, sums their gradients, and lets them go.

It follows a program (`schedules.fully_sharded_step`), of which this is one rank's part for 3 units:

```
forward    ~T2 ~T1 F0 !T2 ~T0 F1 !T1 F2 !T0
backward   ~T0 ~T1 B2 %U0 !D2 !T0 ~T2 B1 %U1 !D1 !T1 B0 %U2 !D0 !T2
```

In a forward, a stage begins when its unit is used for the first time; all that stands before it in the program is
done then. In a backward, a stage ends when all gradients of its unit have come; all that stands behind it is done then,
up to the next stage. So all ranks gather and sum in one order, also a rank that skips a unit.

What no program can foresee is done *on demand*: a unit that is used when it is not there is gathered at that moment.
All ranks must then do the same. That happens in the first forward, if the model does not use its units in the order in
which it has them, and for parameters that are used again after they were let go. After the first forward the program is
that of the order in which the ranks have used their units. Until then, if a rank has no samples, the others tell it of
each unit that they gather.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel.mixed_bucket import GradientScale, MixedUnitBucket
from microparallel.data_parallel.precision import MixedPrecision
from microparallel.data_parallel.reducer import Reducer
from microparallel.data_parallel.sharding import FreshBuffers
from microparallel.data_parallel.sync_batch_norm import LayerSums
from microparallel.data_parallel.unit_bucket import UnitBucket
from microparallel.data_parallel.unit_order import DIFFERENT_ORDERS, Announcements, share_order
from microparallel.data_parallel.units import ShardedParameters, Unit
from microparallel.errors import UsageError
from microparallel.observe import Activity, Observation
from microparallel.program import (
    AUTO,
    AllGather,
    AllReduce,
    Backward,
    Bucket,
    Delta,
    Forward,
    Free,
    Op,
    Parameters,
    Program,
    ReduceScatter,
    Shard,
)
from microparallel.schedules import fully_sharded_step
from microparallel.torch_private import (
    at_end_of_backward,
    backward_adds_to,
    version_of,
)

_step = functools.lru_cache(maxsize=64)(fully_sharded_step)  # every pass asks for its program


class UnitReducer(Reducer):
    """The units of one model on one rank, and how far they are in a pass.

    Args:
        named: the model's own parameters by name.
        comms: all ranks.
        units: which it gathers and lets go, as the model has them.
        shard_comms: the ranks that keep the parts.
        across: the ranks of other groups that keep the same parts, if there are such groups.
        prefetch: how many stages ahead units are gathered.
        reshard_after_forward: whether units are let go after their last use in a forward.
        precision: in which dtypes gradients come, are sent and are kept; None: in those of the shards.
        options: of `Reducer`.

    Attributes:
        gradient_scale: by what the gradients of the backward that is under way are multiplied.
        outputs_are_scaled: whether what comes through the outputs of the last forward is multiplied by that.
        in_float16: whether the last forward computed in float16, under torch's autocast.
        units: in the order of stages.
        computes: whether a forward or a backward of the model is under way: then its parameters are read whole.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        comms: Comms,
        units: Sequence[Unit],
        shard_comms: Comms,
        across: Comms | None,
        sums_inside: LayerSums,
        *,
        prefetch: int,
        reshard_after_forward: bool,
        precision: MixedPrecision | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            named,
            comms,
            float("inf"),
            sums_inside,
            overwrites=False,
            level=3,
            axis="world" if across else "dp",
            **options,
        )
        self.computes = False
        self.in_float16 = False
        self.outputs_are_scaled = False
        self.units = list(units)
        self._shard_comms = shard_comms
        self._across = across
        self._replicas = 1 if across is None else across.world_size
        self._prefetch = prefetch
        self._reshard = reshard_after_forward
        self._precision = precision
        self.gradient_scale = GradientScale()
        self._pools: dict[object, FreshBuffers] = {}
        self._buckets_of_unit: dict[Unit, list[UnitBucket]] = {}
        self._unit_of: dict[nn.Parameter, Unit] = {one: unit for unit in units for one in unit.parameters}
        self._knows_order = False  # whether stages are in the order of the first forward
        self._announcements = Announcements(comms, self._axis)
        self._todo: deque[Op] = deque()  # what the program says of the pass that is under way
        self._backward = False  # whether that is a backward
        self._finishing = False  # whether all gradients have come that will
        self._forwards = 0  # since the last backward
        self._passed = -1  # in a forward, the last stage that has begun
        self._reached = 0  # in a backward, the stage that autograd has come to: all above it have ended
        self._gathers = 0  # which units were gathered in this step, in which order, as one number
        self._missing: dict[Unit, int] = {}  # gradients that have not come in this backward
        self._uses: list[tuple[Unit, list[Unit]]] = []  # calls that are under way, with what else they have used
        self._first_uses: list[Unit] = []  # of the forward that is under way, in order
        self._last_uses: dict[Unit, int] = {}  # for each unit, how many units had been used then
        self._told: Observation | None = None  # the stage that observers know to be under way
        self._packed: list[torch.Tensor] | None = None  # what the stage's backward will need, if there are observers
        self._given: Sequence[torch.Tensor] = ()
        self._parts_of_program: dict[object, tuple[Program, Sequence[Op]]] = {}  # as they were last looked up
        self._summed: set[Unit] = set()  # in this backward
        self._versions: list[int] = []  # of the shards' memory, when a pass last began
        self._number_stages()

    def _number_stages(self) -> None:
        for stage, unit in enumerate(self.units):
            unit.stage, unit.number = stage, len(self.units) - 1 - stage
            for bucket in self._buckets_of_unit.get(unit, ()):
                bucket.number = unit.number

    def guess_last_uses(self, users: Mapping[Unit, Sequence[Unit]]) -> None:
        """Before the first forward: say which units' modules use each unit; the last of their stages is its last."""
        for unit in self.units:
            unit.last = max(unit.stage, *(user.stage for user in users[unit]))

    def _built(self, microbatches: int | tuple[int, ...], gone: tuple[int, ...], **shared: bool) -> Program:  # noqa: ARG002
        return _step(
            len(self.units),
            self._comms.world_size,
            microbatches,
            last=tuple(unit.last for unit in self.units),
            prefetch=self._prefetch,
            reshard_after_forward=self._reshard,
            replicas=self._replicas,
            order=not self._knows_order,
            algorithm=self._algorithm,
            **shared,
        )

    @property
    def _algorithm(self) -> str:
        """How gradients are summed: 16-bit ones go directly to the rank that adds them up, and so are rounded once."""
        return AUTO if self._precision is None or self._precision.wire is None else "direct"

    # ── before a pass ───────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Clean up after a pass that an error cut short; take over what the user has changed in the shards."""
        if self.running or self._local_backward or self.computes:
            self._clean_up()
        self._let_all_go()
        for unit in self.units:
            for part in unit.parts:
                part.move_with_shards()
                for parameter, shard in zip(part.whole, part.shards, strict=True):
                    if parameter.requires_grad is not shard.requires_grad:
                        parameter.requires_grad_(shard.requires_grad)
        super().prepare()
        versions = [version_of(part.flat) for unit in self.units for part in unit.parts]
        begins_anew = not self._step_is_lost and not any(shard.grad is not None for shard in self._shards())
        if versions != self._versions or begins_anew:
            self._versions = versions
            self.step_ends()  # an optimizer has updated the shards, or gradients begin anew

    @property
    def _step_is_lost(self) -> bool:
        """Whether gradients were not finite, and so were removed: what comes until the step ends belongs to it."""
        return self._guard is not None and self._guard.overflow

    def _shards(self) -> Iterator[nn.Parameter]:
        return (shard for unit in self.units for part in unit.parts for shard in part.shards)

    def require_known(self, module: nn.Module) -> None:
        """Raise `UsageError` if the module has a parameter that is no part of this reducer's units."""
        known = set(self._shards())
        for name, parameter in module.named_parameters():
            if parameter not in known and isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                raise UsageError(
                    f"FullyShardedDataParallel: parameter {name!r} was added or replaced after the model was wrapped, "
                    "so its gradient would not be averaged; change the model first, then wrap it"
                )

    def _make_buckets(self) -> None:
        self._places.clear()
        self._buckets_of_unit = {}
        for unit in self.units:
            trained = [part for part in unit.parts if any(one.requires_grad for one in part.whole)]
            mine = [self._new_bucket(unit, part) for part in trained]
            self._buckets_of_unit[unit] = mine
            for bucket in mine:
                places = enumerate(bucket.parameters)
                self._places |= {one: (bucket, index) for index, one in places if one.requires_grad}
        self.buckets = [bucket for unit in self.units for bucket in self._buckets_of_unit[unit]]

    def _new_bucket(self, unit: Unit, part: ShardedParameters) -> UnitBucket:
        mixed, wire = self._precision is not None and part.flat.is_floating_point(), part.flat.dtype
        if self._precision is not None and mixed:
            wire = self._precision.reduce or wire
            mixed = self._precision.scales_loss or not (wire is part.flat.dtype is part.compute)
        kind = wire, part.flat.device
        if kind not in self._pools:
            example = torch.empty(0, dtype=wire, device=part.flat.device)
            self._pools[kind] = FreshBuffers(example, self._shard_comms)
        given = part, self._shard_comms, unit.number, self._pools[kind], self._across
        return MixedUnitBucket(*given, wire, self.gradient_scale) if mixed else UnitBucket(*given)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a number: this rank's parts of the sums, and what was not summed (`no_sync`)."""
        for bucket in chain.from_iterable(self._buckets_of_unit.values()):
            bucket.scale(factor)
            bucket.scale_whole(factor)

    def _let_all_go(self) -> None:
        for unit in self.units:
            unit.active = 0
            if unit.is_started:
                unit.let_go()

    # ── a forward ───────────────────────────────────────────────────────────────────────────────────────────────

    def begin_forward(self, given: Sequence[torch.Tensor], *, has_samples: bool = True) -> None:
        """A forward of the model begins.

        Args:
            given: the batch and the buffers, for observers.
            has_samples: whether this rank computes.
        """
        self.computes = True
        self._forwards += torch.is_grad_enabled()
        self._backward, self._passed = False, -1
        self._uses, self._first_uses, self._last_uses = [], [], {}
        self._given = given
        self._todo = deque(self._part_of_program(forward=True))
        if not self._knows_order:
            self._announcements.begin(has_samples)

    def _part_of_program(self, *, forward: bool, turn: int | None = 0) -> Sequence[Op]:
        """What the program says of the forward or the backward that begins."""
        program = self.program(1, buffers=False, at_once=turn is not None)
        which = (forward, turn, self.microbatch, self._turn)
        if which not in self._parts_of_program or self._parts_of_program[which][0] is not program:
            self._parts_of_program[which] = program, list(self._find_part(program, forward, turn))
        return self._parts_of_program[which][1]

    def _find_part(self, program: Program, forward: bool, turn: int | None) -> Iterator[Op]:
        """The forward or the backward of this rank: all turns of a step are alike but for their numbers."""
        ops = program.ranks[self._comms.rank]
        ranks = self._comms.world_size
        number = self.microbatch * ranks + self._comms.rank
        behind = max(place for place, op in enumerate(ops) if isinstance(op, Forward)) + 1
        while isinstance(ops[behind], Free):
            behind += 1
        for op in ops[:behind] if forward else ops[behind:]:
            match op:
                case Forward(stage) | Backward(stage):
                    yield type(op)(stage, number)
                case AllGather(Parameters()) | Free(Parameters()):
                    yield op
                case ReduceScatter(Bucket(index), axis, algorithm):
                    yield ReduceScatter(Bucket(index, turn), axis, algorithm)
                case AllReduce(Shard(Bucket(index)), axis, algorithm):
                    yield AllReduce(Shard(Bucket(index, turn)), axis, algorithm)
                case Free(Delta(stage)):  # with those of earlier micro-batches, in no_sync
                    mine = range(self.microbatch if turn is not None else self._turn, self.microbatch + 1)
                    yield from (Free(Delta(stage, each * ranks + self._comms.rank)) for each in mine)

    def enter(self, unit: Unit) -> None:
        """A module begins that uses a unit."""
        if not self.computes:
            return
        self._uses.append((unit, []))
        unit.active += 1
        self.use(unit)

    def leave(self, unit: Unit) -> None:
        """It has ended."""
        if not self.computes or not self._uses or self._uses[-1][0] is not unit:
            return  # the pass was cleaned up meanwhile
        for one in (unit, *self._uses.pop()[1]):
            one.active -= 1
            self._last_uses[one] = len(self._first_uses)
            if not one.active and not one.planned and not self._backward:
                self._free(one)

    def use(self, unit: Unit) -> None:
        """Let a unit be whole: its parameters are about to be used."""
        if not self._backward:
            if unit not in self._last_uses:
                self._first_uses.append(unit)
            self._last_uses[unit] = len(self._first_uses)
            if unit.stage > self._passed:
                self._begin_stage(unit.stage)
        if unit.is_whole:
            return
        if not unit.is_started:
            self._make_room(unit)
            self._gather(unit, overlap=False)
            unit.planned = False
        else:
            unit.wait()

    def use_again(self, unit: Unit, during: Unit | None) -> None:
        """Let a unit be whole: autograd computes with what it has saved of it.

        Args:
            unit: of which something was saved.
            during: the last unit whose first use was before that; None if there is more than one forward to go back
                through, of which that was not the first.
        """
        if self._backward and during is not None and during.stage < self._reached:
            self._reached = during.stage
            self._go_on()
        self.use(unit)

    @property
    def now(self) -> Unit | None:
        """For `use_again`, in a forward: its last unit that was used for the first time."""
        return self._first_uses[-1] if self._first_uses and self._forwards == 1 else None

    def read(self, unit: Unit) -> None:
        """Parameters of a unit are read in a forward, or in a forward that a backward repeats."""
        if unit.is_whole and unit.active:
            return
        self.use(unit)
        if self._uses and not unit.active:  # then it is needed as long as the module that reads it is under way
            unit.active += 1
            self._uses[-1][1].append(unit)

    def _make_room(self, unit: Unit) -> None:
        """Let go what was gathered on demand and is not in use: no more than the program has at a time."""
        idle = [one for one in self.units if one.is_whole and not one.planned and not one.active and one is not unit]
        for one in idle[: max(0, len(idle) - self._prefetch)]:
            self._free(one)

    def _begin_stage(self, stage: int) -> None:
        """Do what the program says up to a stage's forward; stages in between are skipped on this rank."""
        self._end_told()
        while self._todo:
            op = self._todo.popleft()
            if isinstance(op, Forward):
                self._passed = op.stage
                self._tell(op)
                if op.stage == stage:
                    return
                self._end_told()
            else:
                self._do(op)

    def end_forward(self, outputs: Sequence[torch.Tensor], *, keep: bool) -> None:
        """A forward has ended: do what is left of its program.

        Args:
            outputs: what it has returned, for observers.
            keep: whether a backward may follow; otherwise all units are let go.
        """
        for unit, also in self._uses:  # if an error has ended the forward
            for one in (unit, *also):
                one.active = 0
        self._uses = []
        if self._told is not None:
            self._told.activity.kept = [*self._told.activity.kept, *outputs]
        self._begin_stage(len(self.units))
        self._announcements.end()
        for unit in self.units:
            if unit.is_started and (not unit.planned or not keep):
                unit.let_go()
        self.computes = False
        self._given = ()

    # ── the order in which units are used ───────────────────────────────────────────────────────────────────────

    def _learn_order_of_units(self) -> None:
        """Share in which order the ranks have used their units, and number the stages accordingly."""
        order, last_users = share_order(self.units, self._first_uses, self._last_uses, self._comms, self._axis)
        self._knows_order = True
        self.units = order
        self._number_stages()
        for unit in order:
            unit.last = max((unit.stage, *(user.stage for user in last_users[unit])))
        self.buckets = [bucket for unit in order for bucket in self._buckets_of_unit[unit]]

    # ── a backward ──────────────────────────────────────────────────────────────────────────────────────────────

    def observe_backward(self) -> None:
        """A backward begins, which may be local: follow the program's."""
        if self.computes:
            return
        if not self.running:
            self._local_backward = True
            self.take_stand_ins()
            at_end_of_backward(self._local_backward_ends)
        self._begin_backward(computes=True)

    def take_scale(self, scale: float) -> None:
        """Gradients of the backward that begins, or is under way, are multiplied by this."""
        if self._backward and scale != self.gradient_scale.value:
            raise UsageError(
                "FullyShardedDataParallel in float16: one backward goes through forwards before and after a step, "
                "which has changed the loss scale; call backward for each of them before the step"
            )
        self.gradient_scale.value = scale

    def adds_gradients(self) -> bool:
        """Whether the backward that begins adds to gradients, or is one of `torch.autograd.grad`."""
        return any(map(backward_adds_to, self._places))

    def _begin_backward(self, *, computes: bool) -> None:
        """Do what the program says up to the first stage's backward; on a rank without samples no stage computes."""
        if not self._knows_order:
            self._learn_order_of_units()
        self.computes = self._backward = True
        self._finishing = False
        self._reached = len(self.units)
        self._missing = {unit: sum(bucket.missing for bucket in self._buckets_of_unit[unit]) for unit in self.units}
        alone = self.microbatch <= self._turn  # otherwise gradients of earlier backwards, in no_sync, go along
        ops = self._part_of_program(forward=False, turn=self._turn if alone else None)
        self._todo = deque(op for op in ops if self._is_done_here(op, computes))
        self._summed = set()
        self._go_on()

    def _is_done_here(self, op: Op, computes: bool) -> bool:
        """Whether this rank does an operation of a backward: it may have no samples, or sum nothing yet (`no_sync`)."""
        if isinstance(op, Backward):
            return computes
        if isinstance(op, Free) and isinstance(op.value, Delta):
            return self.running and computes
        return self.running or not isinstance(op, ReduceScatter | AllReduce)

    def _follow_program(self) -> None:
        """`observe_backward` does that, also for a backward that is not summed; for a rank without data, this does."""
        keeps_sum = self._step_is_lost or any(bucket.keeps_sum for bucket in self.sharded_buckets)
        if self.microbatch <= self._turn and not keeps_sum:
            self.step_ends()

    def arrive(self, parameter: nn.Parameter) -> None:
        """Move a gradient, which torch has just added to `parameter.grad`, into its bucket, if it is summed."""
        gradient = parameter.grad
        if self._guard is not None and not (self._backward and self.outputs_are_scaled):
            raise UsageError(
                "FullyShardedDataParallel in float16: a gradient did not come through the outputs of the wrapped "
                "model, and so was not scaled; let the model return tensors, or tuples, lists and dicts of them"
            )
        averaged = self.running or self.begin_if_wanted()
        if not averaged:
            self._local_gradients = True
            self.observe_backward()
        if parameter.grad is not gradient:  # no output told that backward began: it was taken for one of before
            parameter.grad = gradient
        bucket, index = self._places[parameter]
        if not averaged:
            assert isinstance(bucket, UnitBucket)
            bucket.keep_whole(index)
        else:
            self._require_usable(parameter, bucket.ready[index])
            if bucket.request is not None or self._unit_of[parameter] in self._summed:
                raise UsageError(
                    f"the gradient of {self._names[parameter]!r} came after those of its unit were summed: one "
                    "backward went through forwards of different steps; call backward for each, or no_sync() around "
                    "all but one"
                )
            bucket.put(index, self._scale)
            self._arrived.append(parameter)
        unit = self._unit_of[parameter]
        self._missing[unit] -= 1
        if not self._missing[unit]:
            self._go_on()

    def _go_on(self) -> None:
        """Do what the program says, up to the backward of a stage that has not ended."""
        while self._todo:
            op = self._todo[0]
            if isinstance(op, Backward):
                self._tell(op)
                if not self._has_ended(self.units[op.stage]):
                    return
                self._end_told()
                self._todo.popleft()
            else:
                self._do(self._todo.popleft())

    def _has_ended(self, unit: Unit) -> bool:
        """Whether a unit's backward has ended: all its gradients have come, or autograd has come to a stage below.

        Autograd does first what the forward did last. So when it comes to a stage, all stages above have ended, also if
        some of their parameters were not used. Frozen parameters may still be needed when all gradients have come.
        """
        if self._finishing or self._reached < unit.stage:
            return True
        return self._missing[unit] <= 0 and all(parameter.requires_grad for parameter in unit.parameters)

    def _do(self, op: Op) -> None:
        """Do an operation of the program that is no computation."""
        match op:
            case AllGather(Parameters(index)):
                unit = self.units[len(self.units) - 1 - index]
                if not unit.is_started:
                    self._gather(unit, overlap=self._overlap)
                unit.planned = True
            case Free(Parameters(index)):
                unit = self.units[len(self.units) - 1 - index]
                if unit.active:
                    unit.planned = False  # when its module has ended
                elif unit.is_started:
                    self._free(unit)
            case ReduceScatter(Bucket(index)):
                self._sum(self.units[len(self.units) - 1 - index], op)
            case AllReduce(Shard(Bucket(index))):
                for bucket in self._buckets_of_unit[self.units[len(self.units) - 1 - index]]:
                    bucket.sum_across(op, self._overlap)
            case Free():
                with Observation(self._comms.observers, Activity(op)):
                    pass

    def _gather(self, unit: Unit, *, overlap: bool) -> None:
        announced = self._announcements.are_made
        if announced:
            self._announcements.announce(self.units.index(unit))
        self._gather_with_others(unit, overlap=overlap and not announced)

    def _gather_with_others(self, unit: Unit, *, overlap: bool) -> None:
        self._gathers = (self._gathers * 31 + self.units.index(unit) + 1) % 2**20
        unit.gather(overlap=overlap)

    def _free(self, unit: Unit) -> None:
        with Observation(self._comms.observers, Activity(Free(Parameters(unit.number)))):
            unit.let_go()

    def _sum(self, unit: Unit, operation: ReduceScatter) -> None:
        """Sum the gradients of a unit over the ranks, one operation however many calls it takes; maybe none."""
        self._summed.add(unit)
        buckets = self._buckets_of_unit[unit]
        for bucket in buckets:
            if not bucket._open or bucket.missing:
                bucket.fill_up(self._scale)
            if self._check_finite:
                bucket.look_for_not_finite()
            if self.in_float16 and not bucket.is_finite:
                bucket.not_finite += 1
        if len(buckets) == 1 and self._shard_comms.world_size > 1:
            buckets[0].start(self._shard_comms, operation, self._overlap)
            return
        with Observation(self._comms.observers, Activity(operation)):
            for bucket in buckets:
                bucket.start(self._shard_comms, operation, self._overlap)

    def take_part_in_forward(self) -> None:
        """Gather with the other ranks what they use; this rank has no samples, and so lets it go at once."""
        self.begin_forward((), has_samples=False)
        self._todo = deque(op for op in self._todo if not isinstance(op, Forward))
        if self._announcements.are_made:
            self._todo.clear()
            while (place := self._announcements.next()) is not None:
                unit = self.units[place]
                self._gather_with_others(unit, overlap=False)
                if self._reshard:
                    self._free(unit)
        self.end_forward((), keep=True)

    def take_part(self, *, take_results: bool) -> None:
        """Gather and sum with the other ranks in their backward; this rank has no gradients of its own."""
        self.running = True
        self.take_stand_ins()
        self._follow_program()
        self._begin_backward(computes=False)
        self._average(take_results)

    def take_part_in_local_backward(self) -> None:
        """Gather with the other ranks in a backward of theirs that sums nothing (`no_sync`)."""
        self._local_backward = self._local_gradients = True  # so that micro-batches have the others' numbers
        self.take_stand_ins()
        self._begin_backward(computes=False)
        self._local_backward_ends()

    def _start_rest(self, take_results: bool) -> None:  # noqa: ARG002
        self._finishing = True
        self._go_on()

    def _count_pass(self) -> None:
        self._turn += 1

    def _require_fine(self) -> None:
        """Beside what others look at: let every rank find gradients that are not finite, if one rank has such.

        A `GradScaler` around a model that computes under autocast looks at this rank's parts alone. It skips steps, and
        changes its scale; all ranks must do the same.
        """
        super()._require_fine()
        if not self._check_finite and any(bucket.any_not_finite for bucket in self.buckets):
            for bucket in chain.from_iterable(self._buckets_of_unit.values()):
                bucket.spoil()

    def _also_shared(self) -> list[float]:
        """Beside the counts of gradients: which units this rank has gathered, in which order, as one number."""
        return [float(self._gathers), float(self._gathers) ** 2]

    def _require_alike(self, sums: torch.Tensor) -> None:
        """Raise `UsageError`, on every rank, if ranks have gathered units in different orders.

        Shared memory notices that at once. Other transports exchange what they are given, and weights would be wrong.
        """
        mean, mean_square = (sums / self._comms.world_size).tolist()
        if mean_square != mean**2:  # numbers below 2²⁰: exact
            raise UsageError(DIFFERENT_ORDERS)

    def _local_backward_ends(self) -> None:
        self._finishing = True
        self._go_on()
        self._end_told()
        self._let_all_go()
        self.computes = self._backward = False
        self._forwards = 0
        super()._local_backward_ends()
        for bucket in self.sharded_buckets:
            bucket.reset()

    def _end(self) -> None:
        if not self._arrived:  # torch.autograd.grad does not change parameter.grad: nothing is summed
            self._todo.clear()
            self._let_all_go()
            self.computes = self._backward = False
            self._forwards = 0
        super()._end()

    def _clean_up(self) -> None:
        self._end_told()
        self._todo.clear()
        self._let_all_go()
        self.computes = self._backward = False
        self._announcements.are_made = False
        self._uses = []
        self._forwards = self._gathers = 0
        super()._clean_up()

    # ── what observers are told ─────────────────────────────────────────────────────────────────────────────────

    def _tell(self, op: Forward | Backward) -> None:
        """Tell the observers, if there are any, that a stage begins."""
        if not self._comms.observers or self._told is not None:
            return
        activity = Activity(op)
        if isinstance(op, Forward):
            unit = self.units[op.stage]
            shards = {op.stage: [shard for part in unit.parts for shard in part.shards]}
            activity = Activity(op, parameters={op.stage: unit.parameters}, shards=shards, given=self._given)
            self._packed = []
        self._told = Observation(self._comms.observers, activity).__enter__()

    def _end_told(self) -> None:
        """Tell them that it has ended, and what it keeps for its backward."""
        told, self._told = self._told, None
        if told is not None:
            told.activity.kept = [*told.activity.kept, *(self._packed or ())]
            told.__exit__()
            told.activity.kept = ()
        self._packed = None

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Autograd has saved a tensor for backward that is no parameter."""
        if self._packed is not None:
            self._packed.append(tensor)
