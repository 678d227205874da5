"""A sharded optimizer: state for a rank's own part alone, averaged gradients, and all parameters on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders import _sharding as sharding
from microparallel.learn.graders._common import mean_loss, small_model
from microparallel.learn.graders._sharding import Kind
from microparallel.learn.log import Called, Row
from microparallel.learn.requirements import flat
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Bucket, Parameters, Program, TrainingStep
from microparallel.program import ops as o
from microparallel.verifier import verify

_STEPS = 3


@dataclass
class Trained:
    """What came of a few steps on one rank."""

    given: list[list[torch.Tensor]]  # to each optimizer that was made
    state: int  # for how many numbers there is state
    weights: list[torch.Tensor]  # after each step


def check(exam: Exam) -> None:
    """Whose parts; the order; the numbers; how much is kept; parts that must be filled up."""
    with exam.step("each rank's optimizer knows its own part and nothing else"):
        exam.run(_train, 2, "momentum", 0, allowed=sharding.ALLOWED)
    with exam.step("gradients are reduce-scattered, the part is updated, parameters are gathered"):
        results = exam.run(_train, 2, "momentum", _STEPS, allowed=sharding.ALLOWED)
        _require_steps(exam.rows, "momentum")
        for rank, one in enumerate(results):
            sharding.require_once(rank, one.given)
    with exam.step("three steps of SGD with momentum: the parameters are those of one process"):
        _require_weights(results, "momentum")
    with exam.step("three steps of Adam; state is kept only for a part") as notes:
        adam = exam.run(_train, 2, "adam", _STEPS, allowed=sharding.ALLOWED)
        _require_weights(adam, "adam")
        notes.append(f"state for {adam[0].state} of {_numbers()} numbers a rank")
        _require_state(adam)
    with exam.step("three and seven ranks: the row must be filled up"):
        for ranks in (3, 7):
            more = exam.run(_train, ranks, "momentum", _STEPS, allowed=sharding.ALLOWED)
            _require_weights(more, "momentum")
            _require_state(more)
    with exam.step("a world of one has all parts"):
        alone = exam.run(_train, 1, "adam", _STEPS, allowed=sharding.ALLOWED)
        _require_weights(alone, "adam")


def _numbers() -> int:
    return len(flat(small_model().parameters()))


def _train(learner: Any, comms: Any, kind: Kind, steps: int) -> Trained:
    model, optimizers, weights = small_model(), sharding.Optimizers(comms, kind), []
    with sharding.about_parts():
        sharded = learner.ShardedOptimizer(model.parameters(), comms, optimizers)
        parts = sharding.in_parts(flat(model.parameters()).detach(), comms.world_size)
        sharding.require_own_parts(comms.rank, optimizers.given, parts)
        _require_own_memory(comms.rank, optimizers.memory[0], parts[comms.rank], model)
        for step in range(steps):
            model.zero_grad()
            comms.log.begins(Activity(o.Forward(0, comms.rank)))
            inputs, targets = sharding.samples_of(comms.rank, step)
            mean_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            comms.log.begins(Activity(o.Backward(0, comms.rank)))
            sharded.step()
            weights.append(flat(model.parameters()).detach())
    return Trained(optimizers.given, optimizers.state(), weights)


def _require_own_memory(rank: int, memory: dict[int, int], part: torch.Tensor, model: torch.nn.Module) -> None:
    """Refuse a part that is a view of a whole row, unless the parameters themselves are in that row."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = sum(size for address, size in memory.items() if address not in parameters)
    if kept > part.nbytes:
        raise Wrong(
            f"rank {rank}'s optimizer is given a part of {part.nbytes} bytes that keeps {kept} bytes in memory: it is "
            "a view of the whole row; clone() copies it into memory of its own"
        )


def _require_state(results: list[Trained]) -> None:
    part = -(-_numbers() // len(results))
    for rank, one in enumerate(results):
        if one.state > part:
            raise Wrong(
                f"rank {rank} keeps state for {one.state} numbers, and its part has {part}: the parts of the others "
                "are updated by the others"
            )


def _require_weights(results: list[Trained], kind: Kind) -> None:
    ranks = len(results)
    mistakes: dict[str, sharding.Combine] = {
        'the gradients were added up and not averaged: op="mean" divides by the number of ranks': (
            lambda own: own.mean(1).sum(0)
        ),
        'divided twice by the number of ranks: op="mean" has done it already': lambda own: sharding.mean(own) / ranks,
        "each rank has updated its part with its own gradient: use the mean over all ranks": (sharding.own_gradients),
        "the gradient of the step before is still in part.grad: put the new one there, do not add it": (
            sharding.carried_over()
        ),
    }
    sharding.require_weights([one.weights for one in results], kind, 1, mistakes if ranks > 1 else {})


# ── what the ranks did ──────────────────────────────────────────────────────────────────────────────────────────────


def _require_steps(rows: list[Row], kind: Kind) -> None:
    """Verify each step as a program."""
    right = sharding.updates(kind, len(rows), _STEPS)
    by_rank = [_steps(row) for row in rows]
    for step in range(_STEPS):
        ranks = [[_op(one) for one in mine[step]] for mine in by_rank]
        program = Program("your step", TrainingStep(1, len(rows), ((0, 1),)), tuple(tuple(_once(ops)) for ops in ranks))
        try:
            verify(program, completed=False)
        except ProgramError as error:
            for rank, ops in enumerate(program.ranks):
                _name_the_mistake(rank, list(ops))
            raise Wrong(str(error)) from None
        for rank, mine in enumerate(by_rank):
            _require_content(rank, len(rows), mine[step], right[step])


def _steps(row: Row) -> list[list[Called | o.Op]]:
    """What a rank did in each step, from its forward on."""
    steps: list[list[Called | o.Op]] = []
    for moment in row:
        if isinstance(moment.op, o.Forward):
            steps.append([])
        if moment.phase == "begins" and steps:
            steps[-1].append(moment.op)
    return steps


def _op(one: Called | o.Op) -> o.Op:
    if isinstance(one, Called):
        return o.ReduceScatter(Bucket(0), "dp") if one.call == "reduce_scatter" else o.AllGather(Parameters(0), "dp")
    return one


def _once(ops: list[o.Op]) -> list[o.Op]:
    """The row may travel in several pieces, one after another: together they are one operation."""
    return [op for place, op in enumerate(ops) if place == 0 or op != ops[place - 1] or isinstance(op, o.OptimizerStep)]


def _name_the_mistake(rank: int, ops: list[o.Op]) -> None:
    kinds = [type(op) for op in ops]
    if o.OptimizerStep not in kinds:
        raise Wrong(f"rank {rank} never updates its part: no optimizer.step() was called")
    if kinds.count(o.OptimizerStep) > 1:
        times = kinds.count(o.OptimizerStep)
        raise Wrong(f"rank {rank} calls optimizer.step() {times} times in one step: once is enough")
    if o.ReduceScatter not in kinds:
        raise Wrong(
            f"rank {rank} never reduce-scatters its gradients: its part is updated with what its own samples say, and "
            "not with the mean over all ranks"
        )
    updated = kinds.index(o.OptimizerStep)
    if o.ReduceScatter not in kinds[:updated]:
        raise Wrong(f"rank {rank} updates its part before the gradients are averaged: reduce-scatter them first")
    if o.AllGather not in kinds:
        raise Wrong(
            f"rank {rank} has new numbers only in its own part, and every rank has another part: gather the parts "
            "(all_gather) after the update"
        )
    if o.AllGather not in kinds[updated:]:
        raise Wrong(
            f"rank {rank} gathers before the update: what it hands out are old parameters; update first, then gather"
        )


def _require_content(rank: int, ranks: int, ops: list[Called | o.Op], right: sharding.Update) -> None:
    """Refuse what is right in its order, and was done with other numbers."""
    calls = {
        name: [one for one in ops if isinstance(one, Called) and one.call == name and one.content is not None]
        for name in sharding.ALLOWED
    }
    scattered, gathered = (flat(one.content for one in calls[name]) for name in sharding.ALLOWED)
    scatters, gathers = (f"line {calls[name][0].line}" for name in sharding.ALLOWED)
    if sharding.starts_with(scattered, right.before):
        raise Wrong(f"{scatters} reduce-scatters the parameters: it is their gradients that are averaged")
    sharding.refuse_gathered_gradients(calls["all_gather"][0], sharding.in_parts(right.gradient, ranks)[rank])
    if sharding.starts_with(gathered, sharding.in_parts(right.before, ranks)[rank]):
        raise Wrong(f"{gathers} gathers old parameters: rank {rank}'s part has not been updated")
