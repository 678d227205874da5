"""Several pipelines side by side are right for every schedule."""

from dataclasses import replace

import pytest

import microparallel as mp
from microparallel.errors import ProgramError
from microparallel.program import (
    AllReduce,
    Backward,
    BackwardWeight,
    Broadcast,
    Bucket,
    Free,
    Grad,
    Named,
    Send,
    from_text,
    halves,
    parse_op,
    peak_activations,
    to_text,
)
from microparallel.schedules import PIPELINES, build, replicate
from microparallel.schedules.replicas import shifted, with_reductions

SHAPES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3, 5, 8)]


@pytest.mark.parametrize("name", PIPELINES)
def test_replicas_of_every_schedule_are_right(name):
    for ranks, microbatches in SHAPES:
        for replicas in (2, 3):
            one = build(name, ranks, microbatches)
            program = replicate(one, replicas)
            mp.verify(program)
            assert program.world_size == ranks * replicas
            assert program.goal.microbatches == microbatches * replicas
            assert program.messages_sent() == one.messages_sent() * replicas
            assert [peak_activations(ops) for ops in program.ranks] == [
                peak_activations(ops) for ops in one.ranks
            ] * replicas
            assert from_text(to_text(program)) == program


@pytest.mark.parametrize("name", PIPELINES)
def test_a_stage_is_summed_when_its_last_gradient_is_there_and_after_it_was_passed_on(name):
    for ops in build(name, 4, 8).ranks:
        summed = with_reductions(ops)
        assert [op for op in summed if not isinstance(op, AllReduce)] == list(ops)
        stages = {half.stage for op in ops for half in halves(op)}
        for stage in stages:
            place = summed.index(AllReduce(Bucket(stage), "dp"))
            ends = [
                index
                for index, op in enumerate(summed)
                for half in halves(op)
                if isinstance(half, Backward | BackwardWeight) and half.stage == stage
            ]
            assert all(isinstance(op, Send | AllReduce | Free) for op in summed[max(ends) + 1 : place])
            passed_on = [
                index for index, op in enumerate(summed) if isinstance(op, Send) and op.value == Grad(stage - 1, 7)
            ]
            assert max([*ends, *passed_on]) < place
        assert sum(isinstance(op, AllReduce) for op in summed) == len(stages)


def test_the_drawing():
    program = replicate(build("1f1b", 2, 1), 2)
    rows = [" ".join(str(op) for op in ops if not isinstance(op, Free)) for ops in program.ranks]
    assert rows == [
        "F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp",
        "<A0.0@0 F1.0 B1.0 >G0.0@0 *U1@dp",
        "F0.1 >A0.1@3 <G0.1@3 B0.1 *U0@dp",
        "<A0.1@2 F1.1 B1.1 >G0.1@2 *U1@dp",
    ]


def test_one_replica_is_the_pipeline_itself():
    program = build("zbv", 3, 4)
    assert replicate(program, 1) is program


@pytest.mark.parametrize(
    "program", [build("ddp", 2), mp.collectives.build("ring", 2), replicate(build("gpipe", 2, 2), 2)]
)
def test_only_a_pipeline_without_replicas_is_replicated(program):
    with pytest.raises(ProgramError, match="only a pipeline without replicas can be replicated"):
        replicate(program, 2)


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("F0.1", "F0.4"),
        ("F1.0&B2.2", "F1.3&B2.5"),
        (">A0.1@1", ">A0.4@3"),
        ("<G0.1@0", "<G0.4@2"),
        ("!R0.1", "!R0.4"),
        ("*U0@dp", "*U0@dp"),
    ],
)
def test_an_operation_of_another_replica(op, wanted):
    assert str(shifted(parse_op(op), 3, 2)) == wanted


def test_what_a_pipeline_shares_stays_within_each_replica():
    """Two ranks of a pipeline sum tied weights: twice two ranks then, not four."""
    tied = AllReduce(Named("tied"), "pp")
    pipeline = build("1f1b", 3, 4)
    with_sum = [(*ops, tied) if rank != 1 else ops for rank, ops in enumerate(pipeline.ranks)]
    shared = [(*ops, Broadcast(Named("loss"), "pp", 2)) for ops in with_sum]
    program = replicate(replace(pipeline, ranks=tuple(shared)), 2)
    mp.verify(program)
    groups = program.groups()
    assert groups[0, tied] == (0, 2) and groups[5, tied] == (3, 5)
    assert groups[4, Broadcast(Named("loss"), "pp", 5)] == (3, 4, 5)
    assert groups[4, AllReduce(Bucket(1), "dp")] == (1, 4)
    assert mp.simulate(program, mp.Costs(latency=1)).messages_sent[0] > 0
    assert mp.program.from_text(mp.program.to_text(program)) == program


def test_replicas_may_name_their_algorithm():
    program = replicate(build("gpipe", 2, 2), 2, algorithm="tree")
    assert {op.algorithm for op in program.all_reduces()} == {"tree"}
    mp.verify(program)
