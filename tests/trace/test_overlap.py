"""How much communication is hidden, counted by hand."""

import pytest

import microparallel as mp
from microparallel.program import AllReduce, Backward, Bucket, Forward, Lane, Program, TrainingStep
from microparallel.trace import Event
from microparallel.trace.intervals import length


def trace(*events):
    program = Program("made up", TrainingStep(2, 2, ((1, 2), (0, 1))), ((), ()))
    return mp.Trace([Event(rank, lane, op, start, end) for rank, lane, op, start, end in events], program)


def talk(rank, bucket, start, end):
    return rank, Lane.COMM, AllReduce(Bucket(bucket), "dp"), start, end


def compute(rank, op, start, end):
    return rank, Lane.COMPUTE, op, start, end


def test_a_share_is_counted_over_all_ranks_and_overlapping_messages_once():
    made_up = trace(
        compute(0, Forward(0, 0), 0, 2),
        compute(0, Backward(0, 0), 2, 6),
        talk(0, 0, 4, 7),  # 2 of 3 hidden
        talk(0, 1, 5, 9),  # 1 of 4, most of which the first one covers
        compute(1, Backward(0, 1), 0, 10),
        talk(1, 0, 5, 8),
    )
    assert [length(times) for times in made_up.communicating] == [5, 3]
    assert made_up.exposed_communication == [3, 0]
    assert made_up.hidden_share == pytest.approx(1 - 3 / 8)


def test_without_communication_nothing_is_exposed():
    assert trace(compute(0, Forward(0, 0), 0, 1)).hidden_share == 1
