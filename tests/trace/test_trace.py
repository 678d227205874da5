"""What is measured on a trace, from events small enough to check by hand."""

import itertools
import json

import pytest

import microparallel as mp
from microparallel.program import Act, AllReduce, Backward, Bucket, Forward, Lane, Program, Recv, Send, TrainingStep
from microparallel.trace import Event, Trace, compare, reasons
from microparallel.trace.intervals import length, outside, union

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


def test_intervals():
    assert union([(4, 5), (0, 1), (1, 2), (0, 1.5), (3, 3)]) == [(0, 2), (4, 5)]
    assert outside([(0, 10)], [(1, 2), (4, 6)]) == [(0, 1), (2, 4), (6, 10)]
    assert outside([(0, 2), (3, 5)], [(1, 4)]) == [(0, 1), (4, 5)]
    assert outside([(1, 2)], [(0, 3)]) == []
    assert length([(0, 1), (2, 5)]) == 4


def test_reasons_for_waiting():
    trace = mp.simulate(mp.schedules.build("1f1b", 3, 3), mp.Costs(latency=1))
    found = {str(trace.events[place].op): reason for place, reason in reasons(trace).items()}
    assert found["F1.0"] == "rank 1 waited for A0.0 from rank 0 before F1.0"
    assert found["B0.0"] == "rank 0 waited for G0.0 from rank 1 before B0.0"
    assert "F0.0" not in found
    later = Trace([e._replace(start=e.start + 100, end=e.end + 100) for e in trace.events], trace.program)
    assert reasons(later) == reasons(trace)
    ddp = mp.simulate(mp.schedules.ddp(2, 1, 2), mp.Costs(latency=1))
    words = {reason for place, reason in reasons(ddp).items() if str(ddp.events[place].op) == "S"}
    assert words == {f"rank {rank} waited for the all-reduce of U0 before S" for rank in range(2)}


def test_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    trace = mp.simulate(mp.schedules.build("1f1b", 2, 2), mp.Costs(latency=1))
    trace.to_chrome(path, seconds_per_unit=0.001)
    entries = json.loads(path.read_text())["traceEvents"]
    bars = [entry for entry in entries if entry["ph"] == "X"]
    assert len(bars) == len(trace.events)
    first = next(entry for entry in bars if entry["name"] == "F0.1")
    assert (first["pid"], first["ts"], first["dur"]) == (0, 1000, 1000)
    assert {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"} == {"rank 0", "rank 1"}
    starts = {entry["id"]: entry for entry in entries if entry["ph"] == "s"}
    ends = {entry["id"]: entry for entry in entries if entry["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(trace.messages_sent)
    for number, start in starts.items():
        assert ends[number]["ts"] >= start["ts"]
        assert ends[number]["pid"] != start["pid"]


def test_bars_of_one_row_do_not_overlap(tmp_path):
    path = tmp_path / "trace.json"
    mp.simulate(mp.schedules.build("zbv", 3, 6), mp.Costs(latency=2, seconds_per_byte=1)).to_chrome(path)
    rows = {}
    for entry in json.loads(path.read_text())["traceEvents"]:
        if entry["ph"] == "X":
            rows.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for bars in rows.values():
        bars.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(bars))


def test_compare_puts_numbers_side_by_side():
    program = mp.schedules.build("1f1b", 4, 8)
    lines = {line.name: line for line in compare(mp.simulate(program), mp.simulate(program, mp.Costs(latency=1)))}
    assert lines["makespan"].one == 33
    assert lines["makespan"].ratio > 1
    assert lines["peak activations"].ratio == 1
    assert lines["exposed communication"].ratio == float("inf")
