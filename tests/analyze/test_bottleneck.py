"""What bounds a step: fitted to traces that were made up, and to what the simulator made of known programs."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import recorded, span

from microparallel.analyze.bottleneck import Demand, Machine, demand_of, find_bottleneck, measure_machine
from microparallel.analyze.what_if import changes
from microparallel.errors import UsageError
from microparallel.program import (
    AllReduce,
    Backward,
    Bucket,
    ForwardStages,
    Join,
    Observed,
    OptimizerStep,
    Program,
    TrainingStep,
    to_text,
)
from microparallel.schedules import build, data_parallel_step
from microparallel.schedules.replicas import shifted
from microparallel.simulator import Costs, simulate
from microparallel.simulator.fitted import Fitted, RecordedCosts, fit_step, predicted
from microparallel.trace import Trace, compare
from microparallel.trace.meetings import meetings
from microparallel.trace.parts import parts


def step(works, seconds, sizes=None, waits=False, last=1.0):
    """Ranks whose forward takes a third of their work, and whose backward is cut evenly by the collectives."""
    count, ranks = len(seconds), len(works)
    times, bytes_of = {}, {}
    for rank, work in enumerate(works):
        times[rank, ForwardStages(0, max(1, count), rank)] = work / 3
        times |= {(rank, Backward(stage, rank)): work * 2 / 3 / max(1, count) for stage in range(max(1, count))}
        times[rank, OptimizerStep()] = last
        for index, (taken, size) in enumerate(zip(seconds, sizes or [10**6] * count, strict=True)):
            times[rank, AllReduce(Bucket(index), "dp")] = taken
            bytes_of[rank, AllReduce(Bucket(index), "dp")] = size
    program = data_parallel_step(count, ranks, overlap=not waits) if count else alone(ranks)
    return Fitted(program, RecordedCosts(seconds=times, exchanged=bytes_of))


def alone(ranks):
    orders = tuple((ForwardStages(0, 1, rank), Backward(0, rank), OptimizerStep()) for rank in range(ranks))
    return Program("alone", TrainingStep(1, ranks), orders)


def observed(trace):
    """The same, as nobody told it."""
    events = [event._replace(op=Observed(event.kind, event.kind)) for event in trace.events]
    numbers = {}
    for place, event in sorted(enumerate(events), key=lambda pair: pair[1].asked):
        if event.kind == "collective":
            numbers[event.rank] = numbers.get(event.rank, -1) + 1
            events[place] = event._replace(number=numbers[event.rank])
    return Trace(events, ranks=trace.ranks, simulated=True)


def test_a_fitted_step_takes_what_it_should():
    fitted = step([6, 6], [2, 2], waits=True)
    # forward 2, backward 2, all-reduce 2, backward 2, all-reduce 2, optimizer 1
    assert fitted.makespan == pytest.approx(11)
    assert step([6, 6], [2, 2]).makespan == pytest.approx(9)  # the first is hidden behind the second half of backward


works = st.lists(st.floats(0.5, 10), min_size=1, max_size=4)
durations = st.lists(st.floats(0.1, 5), max_size=4)


@given(works, durations, st.booleans())
def test_a_simulated_step_is_fitted_by_that_step(times, seconds, waits):
    """There and back: what was simulated and fitted again takes the same time."""
    seconds = seconds if len(times) > 1 else []  # one rank has nobody to talk to
    fitted = step(times, seconds, waits=waits)
    trace = fitted.simulate()
    assert trace.makespan == pytest.approx(fitted.makespan)
    assert fit_step(trace).program == fitted.program
    assert fit_step(trace).makespan == pytest.approx(fitted.makespan, rel=1e-6)
    again = fit_step(replace(trace, program=None))
    assert again.pipeline == 1
    assert again.makespan == pytest.approx(fitted.makespan, rel=1e-6)
    assert [[op for op in ops if op != Join()] for ops in again.program.ranks] == [
        [op for op in ops if op != Join()] for ops in fitted.program.ranks
    ]
    assert again.program.goal == fitted.program.goal
    seen = fit_step(observed(trace))
    assert "*U" not in to_text(seen.program) and len(seen.collectives) == len(again.collectives)
    assert seen.makespan == pytest.approx(fitted.makespan, rel=1e-6)
    for one in parts(trace):
        assert one.computing + one.communicating + one.waiting + one.other == pytest.approx(one.step)
        assert one.other == pytest.approx(0, abs=1e-6)
    for known in (trace, replace(trace, program=None), observed(trace)):
        assert predicted(known).makespan == pytest.approx(trace.makespan, rel=1e-6)
        assert parts(predicted(known))[0].computing == pytest.approx(parts(trace)[0].computing, rel=1e-6)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("latency", [0.0, 0.3])
@pytest.mark.parametrize("known", [True, False], ids=["program", "events"])
def test_a_recorded_pipeline_is_the_program_that_ran(schedule, latency, known):
    trace = simulate(build(schedule, 3, 4), Costs(forward=1, backward_input=1, backward_weight=1, latency=latency))
    trace = trace if known else replace(trace, program=None)
    fitted = fit_step(trace)
    assert fitted.pipeline == 3
    assert fitted.makespan == pytest.approx(trace.makespan)
    assert [event.op for event in predicted(trace).compute[0]] == [event.op for event in trace.compute[0]]
    for rank, one in enumerate(parts(trace)):
        assert one.computing == pytest.approx(trace.work[rank])
        assert one.other == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("microbatches", [0, 4], ids=["counted from 0 each", "counted through"])
def test_pipelines_side_by_side(microbatches):
    trace = simulate(build("1f1b", 2, 4), Costs(forward=1, backward_input=1, backward_weight=1, latency=0.1))
    events = [
        event._replace(
            rank=event.rank + 2 * copy,
            peer=None if event.peer is None else event.peer + 2 * copy,
            op=shifted(event.op, microbatches * copy, 2 * copy if microbatches else 0),
        )
        for copy in range(2)
        for event in trace.events
    ]
    both = Trace(events, ranks=4, simulated=True)
    fitted = fit_step(both)
    assert fitted.replicas == 2 and fitted.pipeline == 2
    assert fitted.makespan == pytest.approx(fit_step(trace).makespan)
    for mine, theirs in zip(predicted(both).compute, both.compute, strict=True):
        assert [event.op for event in mine] == [event.op for event in theirs]
    assert "twice the micro-batches" in {change.name for change in changes(fitted)}


def test_what_is_predicted_is_called_as_it_was_recorded():
    names = ("forward of MLP", "backward", "SGD", "all_reduce(float32[8])", "all_reduce(float32[4])")
    events = [
        event
        for rank in range(2)
        for event in (
            span(rank, "forward", names[0], 0, 2),
            span(rank, "backward", names[1], 2, 7),
            span(rank, "collective", names[3], 3, 5, bytes=32, group=(0, 1)),
            span(rank, "collective", names[4], 5, 7, bytes=16, group=(0, 1), waited=6, number=1),
            span(rank, "optimizer", names[2], 7, 8),
        )
    ]
    measured = recorded(2, events)
    found = predicted(measured)
    assert {event.name for event in found.events} == set(names)
    assert [event.bytes for event in found.by_rank[0] if event.kind == "collective"] == [32, 16]
    assert found.simulated and found.makespan == pytest.approx(measured.makespan)
    assert predicted(found).makespan == pytest.approx(found.makespan)
    assert [len(one) for one in meetings(found.events)] == [2, 2]
    numbers = {row.name: row for row in compare(found, measured)}
    assert numbers["makespan"].ratio == pytest.approx(1)
    assert numbers["work of the busiest rank"].ratio == pytest.approx(1)
    assert numbers["exposed communication"].ratio == pytest.approx(1)


def test_data_parallel_operations_are_no_pipeline():
    """Every rank has all stages: what counts are the collectives between them."""
    trace = simulate(build("ddp", 2, layers=4, buckets=2), Costs(latency=0.1, optimizer=1))
    fitted = fit_step(trace)
    assert fitted.pipeline == 1 and len(fitted.collectives) == 2
    assert fitted.makespan == pytest.approx(trace.makespan)


def verdict(fitted, **known):
    return find_bottleneck(fitted.simulate(), **known)


def test_communication_that_costs_half_the_step():
    found = verdict(step([6, 6], [4, 4], waits=True))
    assert found.kind == "communication"
    assert found.error < 1e-6
    assert found.advice is not None and found.advice.speed > 1.1
    assert "1 MB" in found.reasons[0] or "2 MB" in found.reasons[0]
    names = {change.name: change for change in found.changes}
    assert names["no communication"].seconds == pytest.approx(7)
    assert names["overlap"].seconds == pytest.approx(2 + 2 + 4 + 4 + 1)
    assert names["twice the bandwidth"].seconds == pytest.approx(11)


def test_overlap_is_the_advice_where_there_is_much_to_hide_behind():
    found = verdict(step([24, 24], [4] * 4, waits=True, last=0.1))
    assert (found.kind, found.advice.name) == ("communication", "overlap")
    assert "overlap=True" in found.advice.advice


def test_hidden_communication_bounds_nothing():
    found = verdict(step([24, 24], [2, 2, 2, 1], waits=False))
    assert found.kind == "compute"


def test_a_straggler():
    found = verdict(step([6, 6, 12, 6], [0.5], last=0.1))
    assert found.kind == "straggler"
    assert any("rank 2" in reason for reason in found.reasons)
    assert "rank 2" in found.advice.advice
    names = {change.name: change for change in found.changes}
    assert names["no straggler"].seconds == pytest.approx(6 + 0.5 + 0.1, rel=0.02)
    assert 6 < names["fair shares"].seconds < 8


def test_many_small_messages_want_larger_buckets():
    """Each takes 1 and carries next to nothing: half as many take half as long."""
    found = verdict(step([6, 6], [1.0] * 8, sizes=[1000, 1100] * 4, waits=True))
    names = {change.name: change for change in found.changes}
    assert names["double buckets"].speed > 1.2 > names["half the buckets"].speed


def test_memory_bounds_what_touches_more_than_it_computes():
    fitted, machine = step([6], []), Machine(100e9, 10e9)
    assert verdict(fitted, demand=Demand(1e9, 1e9), machine=machine).kind == "memory"
    many = verdict(fitted, demand=Demand(1e9, 1e6), machine=machine)
    assert many.kind == "compute" and "1000.0 operations" in many.reasons[-1]
    assert verdict(fitted).kind == "compute"


def test_operations_and_bytes_of_a_step_are_counted():
    layer = torch.nn.Linear(64, 32, bias=False)
    inputs = torch.randn(16, 64)
    demand = demand_of(lambda: layer(inputs).sum().backward(), list(layer.parameters()), "SGD")
    assert demand.operations == 2 * 2 * 16 * 64 * 32  # a product forward, and one for the weights' gradients
    assert demand.bytes == 6 * 64 * 32 * 4 + 2 * inputs.nbytes
    machine = measure_machine(torch.device("cpu"))
    assert machine.operations_per_second > 0 and machine.bytes_per_second > 0 and machine.balance > 0


def test_a_pipeline_with_few_microbatches_is_bound_by_its_bubble():
    trace = simulate(build("1f1b", 4, 4), Costs(forward=1, backward_input=1, backward_weight=1))
    found = find_bottleneck(trace)
    assert found.kind == "bubble"
    assert found.advice.name == "twice the micro-batches"
    # (m + p - 1) / m: 7/4 of the work before, and 11/8 then
    assert found.advice.seconds == pytest.approx(trace.makespan * (11 / 8) / (7 / 4))


def test_a_pipeline_with_one_long_stage_is_bound_by_it():
    trace = simulate(
        build("1f1b", 3, 12), Costs(forward=[1, 3, 1], backward_input=[1, 3, 1], backward_weight=[1, 3, 1])
    )
    found = find_bottleneck(trace)
    assert found.kind == "straggler"
    assert any("rank 1" in reason for reason in found.reasons)
    assert "--balance" in found.advice.advice


def shown(fitted):
    """What rank 0 does, and how long each takes."""
    return [(str(op), pytest.approx(fitted.seconds(0, op))) for op in fitted.program.ranks[0]]


def test_spans_of_python_and_data_count_to_what_a_rank_does_by_itself():
    events = [
        span(rank, kind, kind, start, end)
        for rank in range(2)
        for kind, start, end in (("forward", 1, 2), ("backward", 3, 5), ("optimizer", 7, 8))
    ]
    meetings = [span(rank, "collective", "all_reduce", 5, 6.5, waited=5, bytes=8, group=(0, 1)) for rank in range(2)]
    fitted = fit_step(recorded(2, [*events, *meetings]))
    assert shown(fitted) == [("forward", 2), ("backward", 2), ("all_reduce", 1.5), ("=", 0), ("optimizer", 1.5)]
    assert fitted.makespan == pytest.approx(7)


def test_asynchronous_collectives_are_waited_for_where_they_were():
    """Issued at 2, computing goes on until 5; it ends at 6."""
    events = [
        event
        for rank in range(2)
        for event in (
            span(rank, "backward", "backward", 0, 6),
            span(rank, "collective", "all_reduce", 2, 6, waited=5, bytes=8, group=(0, 1)),
            span(rank, "optimizer", "SGD", 6, 7),
        )
    ]
    fitted = fit_step(recorded(2, events))
    assert shown(fitted) == [("backward", 2), ("all_reduce", 4), ("backward", 3), ("=", 0), ("SGD", 1)]
    assert fitted.makespan == pytest.approx(7)
    alone = fit_step(recorded(1, events[:3]))
    assert shown(alone) == [("backward", 6), ("SGD", 1)] and alone.makespan == pytest.approx(7)


def test_a_recording_without_spans_is_refused():
    with pytest.raises(UsageError, match="no events"):
        find_bottleneck(recorded(2, []))


def test_nothing_can_be_changed_about_a_step_that_takes_no_time():
    assert changes(step([0], [], last=0)) == []
    assert math.isfinite(verdict(step([1, 1], [0.5])).error)


def test_the_bubble_s_cost_is_what_a_step_without_it_gains():
    """Slow messages and one long stage: the three causes do not hide each other."""
    stages = [1.0, 1.6, 1.0, 1.0]
    costs = Costs(forward=stages, backward_input=stages, backward_weight=stages, latency=1.0)
    found = find_bottleneck(simulate(build("gpipe", 4, 6), costs))
    [words] = [reason for reason in found.reasons if reason.startswith("simulated without its bubble, ")]
    [change] = [change for change in found.changes if change.name == "no bubble"]
    lost = found.simulated - change.seconds
    assert lost > 0
    assert f"({lost / found.simulated:.0%})" in words
    # Alike and without messages, gpipe's bubble is (p - 1)/(m + p - 1) of a step of m + p - 1 times the mean stage.
    assert lost == pytest.approx(3 * 3 * 1.15, rel=0.3)


def test_what_is_mostly_data_and_python_is_not_called_computing():
    events = [
        event
        for rank in range(2)
        for event in (
            span(rank, "forward", "forward", 0.0, 1.0),
            span(rank, "backward", "backward", 1.0, 3.0),
            span(rank, "collective", "all_reduce", 3.0, 3.5, waited=3.0, bytes=8, group=(0, 1)),
            span(rank, "optimizer", "SGD", 4.0, 4.5),
        )
    ]
    trace = recorded(2, events)
    assert find_bottleneck(trace).kind == "compute"
    found = find_bottleneck(trace, took=10.0)  # 5.5 s between two steps are in no event
    assert found.kind == "other"
    assert "data, Python and the like take 60%" in found.reasons[0]
    assert found.advice is not None and found.advice.speed == pytest.approx(10 / 4)
    assert found.measured == pytest.approx(10) and found.error < 0.01
    names = {change.name: change for change in found.changes}
    assert names["no communication"].seconds == pytest.approx(9.5)
    assert find_bottleneck(trace, took=5.0).kind == "compute"
