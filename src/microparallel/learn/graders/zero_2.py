"""ZeRO-2: every gradient is reduce-scattered at once and let go, in every micro-batch; a part of the sum is kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders import _sharding as sharding
from microparallel.learn.graders._common import mean_loss, names, small_model
from microparallel.learn.graders._sharding import Kind
from microparallel.learn.log import Called, Moment, Row, calls
from microparallel.learn.requirements import flat
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Bucket, Delta, Parameters, Program, TrainingStep
from microparallel.program import ops as o
from microparallel.verifier import verify

_STEPS = 2
_TURNS = 3  # micro-batches of a rank in a step
_ON_ITS_WAY = 1  # whole gradient that may be there beside the one that has just come
_NAMES = names(small_model())
_SIZES = [parameter.numel() for parameter in small_model().parameters()]


@dataclass
class Trained:
    """What came of a few steps on one rank."""

    given: list[list[torch.Tensor]]  # to the optimizer
    state: int  # for how many numbers there is state
    weights: list[torch.Tensor] = field(default_factory=list)  # after each step
    begins: list[int] = field(default_factory=list)  # where in the rank's row each step begins
    # By the place in the row where a forward or a backward begins: the whole gradients that were there then.
    held: dict[int, list[Delta]] = field(default_factory=dict)
    # By the place where a forward begins: the parameters that had a gradient then.
    left: dict[int, list[int]] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """How many whole gradients were there at once, with the one that has just come."""
        return max((len(held) for held in self.held.values()), default=0)


def check(exam: Exam) -> None:
    """What is let go; the order; the numbers; how much is kept; parts that must be filled up."""
    with exam.step("every gradient is reduce-scattered in its micro-batch, and freed") as notes:
        results = exam.run(_train, 2, "momentum", _TURNS, allowed=sharding.ALLOWED)
        for rank, one in enumerate(results):
            _require_let_go(rank, len(results), one, exam.rows[rank])
        notes.append(f"at most {max(one.most for one in results)} of {len(_NAMES)} gradients are whole at once")
    with exam.step("one update, after the last micro-batch; then the new parameters are gathered"):
        _require_steps(exam.rows, results, _TURNS)
    with exam.step("two steps of SGD with momentum: the parameters are those of one process"):
        _require_weights(results, "momentum", _TURNS)
    with exam.step("two steps of Adam with three ranks; state is kept only for a part") as notes:
        more = exam.run(_train, 3, "adam", 2, allowed=sharding.ALLOWED)
        _require_weights(more, "adam", 2)
        notes.append(f"state for {more[0].state} of {sum(_SIZES)} numbers a rank, with what fills the parts up")
    with exam.step("one micro-batch; and a world of one"):
        _require_weights(exam.run(_train, 2, "momentum", 1, allowed=sharding.ALLOWED), "momentum", 1)
        _require_weights(exam.run(_train, 1, "momentum", 2, allowed=sharding.ALLOWED), "momentum", 2)


def _train(learner: Any, comms: Any, kind: Kind, turns: int) -> Trained:
    model, optimizers, done = small_model(), sharding.Optimizers(comms, kind), Trained([], 0)
    watched = _Watched(comms, model, done)
    with sharding.about_parts():
        zero = learner.Zero2(model, comms, optimizers)
        cut = [sharding.in_parts(p.detach().reshape(-1), comms.world_size) for p in model.parameters()]
        parts = [flat(same[rank] for same in cut) for rank in range(comms.world_size)]
        sharding.require_own_parts(comms.rank, optimizers.given, parts)
        for step in range(_STEPS):
            watched.begin()
            zero.step([sharding.samples_of(comms.rank, step, turn) for turn in range(turns)], mean_loss)
            done.weights.append(flat(model.parameters()).detach())
    sharding.require_once(comms.rank, optimizers.given)
    done.given, done.state = optimizers.given, optimizers.state()
    return done


class _Watched:
    """A model that tells the log of forwards and gradients, and which whole gradients are in memory then."""

    def __init__(self, comms: Any, model: nn.Module, done: Trained) -> None:
        self._comms, self._done = comms, done
        self._parameters = list(model.parameters())
        self._memory: dict[Delta, weakref.ref[torch.UntypedStorage]] = {}
        self._turn = -1
        model.register_forward_pre_hook(self._forward)
        for stage, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, stage))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A step begins."""
        self._turn = -1
        self._memory.clear()
        self._done.begins.append(len(self._comms.row))

    def _forward(self, *_: Any) -> None:
        self._turn += 1
        place = len(self._comms.row)
        self._done.left[place] = [stage for stage, own in enumerate(self._parameters) if own.grad is not None]
        self._tell(o.ForwardStages(0, len(self._parameters), self._microbatch))

    def _ready(self, stage: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._memory[Delta(stage, self._microbatch)] = weakref.ref(parameter.grad.untyped_storage())
        self._tell(o.Backward(stage, self._microbatch))

    @property
    def _microbatch(self) -> int:
        return int(max(self._turn, 0) * self._comms.world_size + self._comms.rank)

    def _tell(self, op: o.Op) -> None:
        held = [delta for delta, storage in self._memory.items() if storage() is not None]
        self._done.held[len(self._comms.row)] = held
        self._comms.log.begins(Activity(op))


# ── what is let go ──────────────────────────────────────────────────────────────────────────────────────────────────


def _require_let_go(rank: int, ranks: int, one: Trained, row: Row) -> None:
    for place, left in one.left.items():
        op = row[place].op
        turn = op.microbatch // ranks if isinstance(op, o.ForwardStages) else 0
        if left and turn > 0:
            _refuse_left(rank, ranks, turn, left, row[:place])
    for place, held in one.held.items():
        op = row[place].op
        if isinstance(op, o.Backward) and len(held) > 1 + _ON_ITS_WAY:
            others = ", ".join(_NAMES[delta.stage] for delta in held[:-1])
            raise Wrong(
                f"rank {rank}: when the gradient of {_NAMES[op.stage]} comes, those of {others} are still there, "
                "whole: reduce-scatter each in its hook, keep only your part of it, and set parameter.grad to "
                "None at once. What is freed later is in memory at the same time"
            )


def _refuse_left(rank: int, ranks: int, turn: int, left: list[int], before: Sequence[Moment]) -> None:
    which = ", ".join(_NAMES[stage] for stage in left)
    scattered = [_collective(call, 0, ranks) for call in calls(before, "reduce_scatter")]
    if any(o.ReduceScatter(Bucket(_bucket(stage), 0), "dp") in scattered for stage in left):
        raise Wrong(
            f"rank {rank} begins micro-batch {turn} with the gradients of the one before still in parameter.grad "
            f"({which}): torch adds to them, so what has been reduce-scattered travels again and counts twice; set "
            "parameter.grad to None in the hook"
        )
    raise Wrong(
        f"rank {rank} keeps the whole gradients of micro-batch {turn - 1} ({which}), which have not been "
        "reduce-scattered: ZeRO-1 adds up whole gradients. Here each leaves in its own micro-batch, from its hook"
    )


# ── what the ranks did ──────────────────────────────────────────────────────────────────────────────────────────────


def _require_steps(rows: list[Row], results: list[Trained], turns: int) -> None:
    """Verify each step as a program, in which every parameter is a stage and a bucket."""
    stages, ranks = len(_NAMES), len(rows)
    goal = TrainingStep(stages, ranks * turns, tuple((stage, stage + 1) for stage in reversed(range(stages))))
    right = sharding.updates("momentum", ranks, _STEPS, turns)
    for step in range(_STEPS):
        programs = [tuple(_operations(row, one, step, ranks)) for row, one in zip(rows, results, strict=True)]
        program = Program("your step", goal, tuple(programs))
        try:
            verify(program, completed=False)
        except ProgramError as error:
            for rank, ops in enumerate(program.ranks):
                _name_the_mistake(rank, list(ops), turns)
            raise Wrong(str(error)) from None
        for rank, (row, one) in enumerate(zip(rows, results, strict=True)):
            gathered = [call for call in calls(_of_step(row, one, step), "all_gather") if call.content is not None]
            for gradient in torch.split(right[step].gradient, _SIZES):
                for call in gathered:
                    sharding.refuse_gathered_gradients(call, sharding.in_parts(gradient, ranks)[rank])


def _of_step(row: Row, one: Trained, step: int) -> Row:
    bounds = [*one.begins, len(row)]
    return row[bounds[step] : bounds[step + 1]]


def _operations(row: Row, one: Trained, step: int, ranks: int) -> list[o.Op]:
    ops: list[o.Op] = []
    there: list[Delta] = []
    turn = -1
    for place, moment in enumerate(_of_step(row, one, step), one.begins[step]):
        if place in one.held:
            gone = [delta for delta in there if delta not in one.held[place]]
            ops += [o.Free(delta) for delta in gone]
            there = one.held[place]
        if moment.phase != "begins":
            continue
        if isinstance(moment.op, Called):
            ops.append(_collective(moment.op, turn, ranks))
        else:
            turn += isinstance(moment.op, o.ForwardStages)
            ops.append(moment.op)
    return ops


def _bucket(stage: int) -> int:
    """The bucket of a parameter: backward comes to the last one first."""
    return len(_NAMES) - 1 - stage


def _collective(call: Called, turn: int, ranks: int) -> o.Op:
    """What a call took, known by its size: all parameters have different ones."""
    numbers = 0 if call.content is None else call.content.numel()
    parts = [-(-size // ranks) for size in _SIZES]
    if call.call == "all_gather" and numbers in parts:
        return o.AllGather(Parameters(_bucket(parts.index(numbers))), "dp")
    whole = [part * ranks for part in parts]
    if call.call == "reduce_scatter" and numbers in whole:
        return o.ReduceScatter(Bucket(_bucket(whole.index(numbers)), turn), "dp")
    raise Wrong(
        f"line {call.line}: {call.call} was given {numbers} numbers, and no parameter has so many: give it one "
        "parameter at a time, filled up and in parts"
    )


def _name_the_mistake(rank: int, ops: list[o.Op], turns: int) -> None:
    kinds = [type(op) for op in ops]
    updates, backwards = (
        [place for place, kind in enumerate(kinds) if kind is wanted] for wanted in (o.OptimizerStep, o.Backward)
    )
    if not updates:
        raise Wrong(f"rank {rank} never updates its parts: no optimizer.step() was called")
    if backwards and updates[0] < backwards[-1]:
        done = sum(place < updates[0] for place in backwards) // len(_NAMES)
        raise Wrong(
            f"rank {rank} updates after {done} of {turns} micro-batches: the others would be computed with other "
            "parameters. Update once, after the last one"
        )
    if len(updates) > 1:
        raise Wrong(f"rank {rank} calls optimizer.step() {len(updates)} times in one step: once is enough")
    if len(backwards) < turns * len(_NAMES):
        raise Wrong(
            f"rank {rank} does {len(backwards) // len(_NAMES)} backwards for {turns} micro-batches: each has a forward "
            "and a backward of its own, so that the activations of one are there at a time"
        )
    _require_each_scattered(rank, ops, turns)
    if o.AllGather not in kinds:
        raise Wrong(
            f"rank {rank} has new numbers only in its own parts, and every rank has other parts: gather the parts "
            "(all_gather) after the update"
        )
    if kinds.index(o.AllGather) < updates[0]:
        raise Wrong(
            f"rank {rank} gathers before the update: what it hands out are old parameters; update first, then gather"
        )


def _require_each_scattered(rank: int, ops: list[o.Op], turns: int) -> None:
    scattered = [op.value for op in ops if isinstance(op, o.ReduceScatter)]
    for turn in range(turns):
        for stage, name in enumerate(_NAMES):
            times = scattered.count(Bucket(_bucket(stage), turn))
            if times > 1:
                raise Wrong(
                    f"rank {rank} reduce-scatters the gradient of {name} {times} times in micro-batch {turn}: it would "
                    "count as often"
                )
            if not times:
                raise Wrong(
                    f"rank {rank} never reduce-scatters the gradient of {name} that micro-batch {turn} gave: every "
                    "gradient leaves in its own micro-batch, from its hook"
                )


# ── the numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_weights(results: list[Trained], kind: Kind, turns: int) -> None:
    ranks = len(results)
    mistakes: dict[str, sharding.Combine] = {
        "the gradients of an earlier step are still in part.grad: let them go after the update (zero_grad)": (
            sharding.carried_over()
        ),
    }
    if turns > 1:
        mistakes |= {
            f"the loss is not divided by the {turns} micro-batches: a sum of means is not a mean": (
                lambda own: own.sum(1).mean(0)
            ),
            f"divided twice by the {turns} micro-batches": lambda own: sharding.mean(own) / turns,
            "only the last micro-batch is in the sum: add to part.grad, and do not replace it": (
                lambda own: own[:, -1].mean(0) / turns
            ),
            "only the first micro-batch is in the sum": lambda own: own[:, 0].mean(0) / turns,
        }
    if ranks > 1:
        mistakes |= {
            'the gradients were added up over ranks and not averaged: op="mean" divides by their number': (
                lambda own: own.mean(1).sum(0)
            ),
            'divided twice by the number of ranks: op="mean" has done it already': (
                lambda own: sharding.mean(own) / ranks
            ),
        }
    sharding.require_weights([one.weights for one in results], kind, turns, mistakes)
