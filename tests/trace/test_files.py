"""Traces in files: what was written is read back, files of the old format too, and nonsense is refused."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import recorded, span
from tests.trace.test_parts import events

import microparallel as mp
from microparallel.program import Backward, Lane, Recv
from microparallel.program.ops import Observed
from microparallel.trace import Sizes, Trace, parts


@given(st.lists(events(), max_size=10))
def test_a_recorded_trace_survives_its_text(found):
    trace = recorded(3, found, clock_error=1e-6, about={"model": "mlp"})
    again = Trace.from_json(trace.to_json())
    assert again == trace


@pytest.mark.parametrize("program", [mp.schedules.build("zb-h1", 2, 3), mp.collectives.build("ring", 3)], ids=str)
def test_a_simulated_trace_survives_its_text(program):
    trace = mp.simulate(program, mp.Costs(latency=0.1, seconds_per_byte=0.01, add_seconds_per_byte=0.01))
    again = Trace.from_json(trace.to_json())
    assert again == trace
    assert again.simulated and again.program == program
    assert again.waiting == trace.waiting and parts(again) == parts(trace)


def test_a_saved_trace_is_what_report_reads(tmp_path):
    trace = recorded(1, [span(0, "forward", "forward", 0.0, 1.0)])
    trace.save(tmp_path / "runs" / "own")
    found = Trace.from_json((tmp_path / "runs" / "own" / "trace.json").read_text())
    assert found == trace
    assert json.loads((tmp_path / "runs" / "own" / "trace-chrome.json").read_text())["traceEvents"]


def test_a_saved_trace_is_loaded(tmp_path):
    trace = recorded(1, [span(0, "forward", "forward", 0.0, 1.0)])
    trace.save(tmp_path)
    assert mp.Trace.load(tmp_path) == mp.Trace.load(str(tmp_path / "trace.json")) == trace


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "folder": "has no trace.json: name a folder",
        "absent": "is not there: name a folder",
        "list.json": "is no trace",
        "bytes.json": "is no trace",
    }.items():
        with pytest.raises(mp.errors.DataError, match=words) as raised:
            mp.Trace.load(tmp_path / name)
        assert "\n" not in str(raised.value)


# As earlier versions wrote it: a span began when its rank asked for it, and was named by its text alone.
FORMAT_1 = """{"format": 1, "ranks": 2, "clock_error": 2e-06, "about": {"model": "mlp"},
"columns": ["rank", "kind", "name", "start", "end", "step", "waited", "bytes", "group", "number", "peer", "place"],
"spans": [
[0, "backward", "backward", 0.0, 2.0, 3, null, 0, [], 0, null, ""],
[0, "collective", "all_reduce(float32[4])", 2.0, 7.0, 3, 2.0, 16, [0, 1], 0, null, "mine.py:8"],
[1, "backward", "B1.2", 0.0, 6.0, 3, null, 0, [], 0, null, ""],
[1, "collective", "all_reduce(float32[4])", 6.0, 7.0, 3, 6.0, 16, [0, 1], 0, null, "mine.py:8"],
[0, "send", ">A0.0@1", 7.0, 8.0, 3, 7.0, 64, [], 0, 1, ""],
[1, "receive", "<A0.0@0", 7.0, 8.5, 3, 7.0, 0, [], 0, 0, ""]]}"""


def test_files_of_the_old_format_are_read():
    trace = Trace.from_json(FORMAT_1)
    assert (trace.ranks, trace.clock_error, trace.about, trace.program) == (2, 2e-6, {"model": "mlp"}, None)
    assert trace.steps == [3] and not trace.simulated
    quick, collective, pipelined, _, send, receive = trace.events
    assert quick.op == Observed("backward", "backward") and quick.lane is Lane.COMPUTE
    assert (collective.asked, collective.waited, collective.start, collective.end) == (2, 2, 6, 7)
    assert (collective.bytes, collective.group, collective.place) == (16, (0, 1), "mine.py:8")
    assert pipelined.op == Backward(1, 2)  # a pipeline's were named after their operations
    assert isinstance(receive.op, Recv) and (send.messages, send.sent) == (1, 64)
    first, second = parts(trace)
    assert (first.backward, first.waiting, first.communicating) == (2, 4.5, 2)
    assert (second.backward, second.waiting, second.communicating) == (6, 0, 2.5)
    assert Trace.from_json(trace.to_json()) == trace  # and written in the new one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "this is a list, not an object"),
        ("{}", "it has no 'format'"),
        (FORMAT_1.replace("[0, 1]", "7"), "int"),
        ("[" * 100_000, "recursion"),
        (FORMAT_1.replace('"format": 1', '"format": 3'), "its format is 3, and this version reads up to 2"),
        (FORMAT_1.replace('"ranks": 2', '"ranks": 0'), "how many ranks"),
        (FORMAT_1.replace("2e-06", "NaN"), "clocks are nan seconds apart"),
        (FORMAT_1.replace('[0, "backward"', '[0, "dancing"'), "event 0 makes no sense"),
        (FORMAT_1.replace('[1, "backward", "B1.2", 0.0, 6.0', '[7, "backward", "B1.2", 0.0, 6.0'), "event 2 makes no"),
        (mp.simulate(mp.schedules.build("gpipe", 2, 1)).to_json().replace("F0.0", "F0.zero"), "F0.zero"),
        (recorded(1, [span(0, "forward", "forward", 0.0, math.inf)]).to_json(), "event 0 makes no sense"),
    ],
    ids=range(11),
)
def test_nonsense_is_refused_in_one_line(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        Trace.from_json(text)
    assert "\n" not in str(caught.value)


# ── Chrome's format ───────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_sizes_and_measured_activations_survive_and_old_files_have_none():
    program = mp.schedules.build("gpipe", 2, 2)
    trace = mp.simulate(program, mp.Costs(sizes=Sizes(parameters=[1, 2], activations=[3, 4])))
    measured = replace(trace, sizes={0: Sizes(optimizer=None)}, events=[trace.events[0]._replace(activations=(0, 5))])
    for one in (trace, measured):
        assert mp.Trace.from_json(one.to_json()) == one
    content = json.loads(measured.to_json())
    del content["sizes"]
    place = content["columns"].index("activations")
    content["columns"].pop(place)
    for row in content["events"]:
        row.pop(place)
    old = mp.Trace.from_json(json.dumps(content))
    assert old == replace(measured, sizes=None, events=[trace.events[0]])
    with pytest.raises(mp.errors.UsageError, match="does not say how large"):
        old.memory  # noqa: B018


@pytest.mark.parametrize("sizes", [{"parameters": "many"}, {"steps": {"0": {"gradients": [None]}}}, {"weights": 4}, 3])
def test_sizes_that_make_no_sense_are_refused(sizes):
    content = json.loads(mp.simulate(mp.schedules.build("gpipe", 2, 2)).to_json()) | {"sizes": sizes}
    with pytest.raises(ValueError, match=r"\S") as refused:
        mp.Trace.from_json(json.dumps(content))
    assert "\n" not in str(refused.value)
