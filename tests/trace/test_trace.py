"""What is measured on a trace, from events small enough to check by hand."""

import pytest

import microparallel as mp
from microparallel.program import Act, AllReduce, Backward, Bucket, Forward, Lane, Program, Recv, Send, TrainingStep
from microparallel.trace import Event, Trace, compare
from microparallel.trace.intervals import length

PROGRAM = Program("two", TrainingStep(2, 1), ((), ()))
EVENTS = [
    Event(0, Lane.COMPUTE, Forward(0, 0), 0, 2),
    Event(0, Lane.COMM, Send(Act(0, 0), 1), 2, 3, 1, 8),
    Event(1, Lane.COMM, Recv(Act(0, 0), 0), 2, 3),
    Event(1, Lane.COMPUTE, Forward(1, 0), 3, 5),
    Event(1, Lane.COMPUTE, Backward(1, 0), 5, 9),
]


def test_numbers():
    trace = Trace(EVENTS, PROGRAM)
    assert trace.makespan == 9
    assert trace.work == [2, 6]
    assert trace.bubble == 3
    assert trace.bubble_async == 0
    assert trace.bubble_fraction == pytest.approx(1 / 3)
    assert trace.peak_activations == [1, 1]
    assert trace.messages_sent == [1, 0]
    assert trace.bytes_sent == [8, 0]
    assert trace.exposed_communication == [1, 1]
    assert trace.waiting == [6, 2]


def test_communication_behind_computation_is_not_exposed():
    events = [
        Event(0, Lane.COMPUTE, Backward(1, 0), 0, 4),
        Event(0, Lane.COMM, AllReduce(Bucket(0), "dp"), 3, 9),
        Event(0, Lane.COMPUTE, Backward(0, 0), 5, 6),
    ]
    assert Trace(events, Program("one", TrainingStep(2, 1), ((),))).exposed_communication == [4]


def test_an_empty_trace():
    trace = Trace([], Program("nothing", TrainingStep(1, 1), ((),)))
    assert (trace.makespan, trace.bubble, trace.bubble_async, trace.bubble_fraction) == (0, 0, 0, 0)


def test_compare_puts_numbers_side_by_side():
    program = mp.schedules.build("1f1b", 4, 8)
    lines = {line.name: line for line in compare(mp.simulate(program), mp.simulate(program, mp.Costs(latency=1)))}
    assert lines["makespan"].one == 33
    assert lines["makespan"].ratio > 1
    assert lines["peak activations"].ratio == 1
    assert lines["exposed communication"].ratio == float("inf")


# ── how much communication is hidden, counted by hand ─────────────────────────────────────────────────────────────────


def made_up(*events):
    program = Program("made up", TrainingStep(2, 2, ((1, 2), (0, 1))), ((), ()))
    return mp.Trace([Event(rank, lane, op, start, end) for rank, lane, op, start, end in events], program)


def talk(rank, bucket, start, end):
    return rank, Lane.COMM, AllReduce(Bucket(bucket), "dp"), start, end


def compute(rank, op, start, end):
    return rank, Lane.COMPUTE, op, start, end


def test_a_share_is_counted_over_all_ranks_and_overlapping_messages_once():
    trace = made_up(
        compute(0, Forward(0, 0), 0, 2),
        compute(0, Backward(0, 0), 2, 6),
        talk(0, 0, 4, 7),  # 2 of 3 hidden
        talk(0, 1, 5, 9),  # 1 of 4, most of which the first one covers
        compute(1, Backward(0, 1), 0, 10),
        talk(1, 0, 5, 8),
    )
    assert [length(times) for times in trace.communicating] == [5, 3]
    assert trace.exposed_communication == [3, 0]
    assert trace.hidden_share == pytest.approx(1 - 3 / 8)


def test_without_communication_nothing_is_exposed():
    assert made_up(compute(0, Forward(0, 0), 0, 1)).hidden_share == 1
