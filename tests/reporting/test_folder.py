"""What is read from a run's folder, and what is said when it cannot be."""

import json
import math

import pytest

from microparallel.errors import DataError
from microparallel.reporting import read_run


def test_a_run_is_read_back(run_folder, run):
    found = read_run(run_folder)
    assert (found.name, found.config, found.metrics, found.summary) == (run.name, run.config, run.metrics, run.summary)
    assert found.trace.ranks == 4
    assert len(found.trace.events) == len(run.trace.events)
    assert found.predicted is None


def test_a_trace_alone_is_enough(tmp_path, trace):
    (tmp_path / "trace.json").write_text(trace.to_json())
    found = read_run(tmp_path)
    assert found.trace is not None
    assert (found.config, found.metrics, found.summary) == ({}, [], {})


def test_a_line_that_a_crash_cut_in_two_is_left_out(run_folder, run):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')
    assert read_run(run_folder).metrics == run.metrics


@pytest.mark.parametrize(("name", "words"), [("", "it has none of"), ("nothing", "there is no such folder")])
def test_what_is_not_a_run(tmp_path, name, words):
    with pytest.raises(DataError, match=words):
        read_run(tmp_path / name)


def spoiled(trace, **changes):
    content = json.loads(trace.to_json())
    columns = content["columns"]
    for name, value in changes.items():
        content["events"][0][columns.index(name)] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 4},
        {"kind": "dancing"},
        {"op": None},
        {"end": -1.0},
        {"end": None},
        {"start": math.nan},
        {"step": "first"},
        {"group": [9]},
        {"peer": 7},
        {"place": 3},
    ],
    ids=str,
)
def test_an_event_that_makes_no_sense(run_folder, trace, changes):
    (run_folder / "trace.json").write_text(spoiled(trace, **changes))
    with pytest.raises(DataError, match=r"trace.json is broken: .*; record it again") as caught:
        read_run(run_folder)
    assert "\n" not in str(caught.value)


BROKEN_TRACES = ("", "{", "[]", "null", "{}", '{"format": 9}', "\udcff", "[" * 100_000)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((file, content) for file in ("trace.json", "predicted.json") for content in BROKEN_TRACES),
        ("config.toml", "model = "),
        ("summary.json", "[1]"),
    ],
    ids=range(18),
)
def test_a_broken_file_is_named(run_folder, file, content):
    (run_folder / file).write_text(content, errors="surrogateescape")
    with pytest.raises(DataError, match=f"{file} is broken"):
        read_run(run_folder)
