"""Programs and their goals: which micro-batches a step has, and which ranks do something together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.program import (
    AllGather,
    AllReduce,
    Broadcast,
    Bucket,
    Collective,
    Named,
    Parameters,
    Program,
    ReduceScatter,
    TrainingStep,
)


@given(st.sets(st.integers(0, 20), min_size=1))
def test_a_goal_has_the_micro_batches_it_was_given(given):
    goal = TrainingStep.of(1, given)
    assert goal.microbatches == len(given)
    assert list(goal.numbers()) == sorted(given)
    assert [number for number in range(-1, 25) if goal.has(number)] == sorted(given)
    assert goal == TrainingStep(1, len(given)) or "skipping" in str(goal)


@pytest.mark.parametrize("skipped", [(3,), (2,), (-1,), (1, 0), (0, 0)], ids=str)
def test_a_goal_skips_only_numbers_below_its_last(skipped):
    with pytest.raises(mp.errors.ProgramError, match="numbers below its last micro-batch, once each, in order"):
        TrainingStep(1, 1 if len(skipped) == 2 else 2, skipped=skipped)


def test_ranks_meet_along_their_axis():
    loss, weights = AllReduce(Named("loss"), "dp"), Broadcast(Named("w"), "pp", 0)
    goal, ranks = TrainingStep(1, 1), ((loss, weights), (loss,), (weights, loss), (), (loss,), (weights,))
    grid = Program("grid", goal, ranks, mesh=(("dp", 2), ("pp", 3))).groups()
    assert grid == {
        (0, loss): (0,),
        (1, loss): (1, 4),
        (4, loss): (1, 4),
        (2, loss): (2,),
        (0, weights): (0, 2),
        (2, weights): (0, 2),
        (5, weights): (5,),
    }
    alone = Program("grid", goal, ranks).groups()  # without a mesh all ranks are on one axis
    assert alone[0, loss] == (0, 1, 2, 4) and alone[5, weights] == (0, 2, 5)


def test_who_keeps_the_parts_of_a_bucket():
    summed, gathered = ReduceScatter(Bucket(0, 1), "dp"), AllGather(Parameters(1), "pp")
    ranks = ((summed,), (summed, gathered), (summed, gathered), (summed,))
    program = Program("parts", TrainingStep(1, 1), ranks, mesh=(("dp", 2), ("pp", 2)))
    assert program.shared_by() == {
        (0, 0): (0, 2),
        (2, 0): (0, 2),
        (1, 0): (1, 3),
        (3, 0): (1, 3),
        (1, 1): (1,),
        (2, 1): (2,),
    }


def test_names_that_would_not_read_back_are_refused():
    for name in ("", " a", "a#b", "a\nb"):
        with pytest.raises(mp.errors.ProgramError, match="is no name for a program"):
            Program(name, Collective("all-reduce", 1), ((),))
