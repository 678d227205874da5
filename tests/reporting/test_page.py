"""The page as text: what is in it, that nothing breaks out of it, and that it stays small."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files

import pytest
from tests.spans import recorded, span

from microparallel.program.ops import Observed
from microparallel.reporting import Run, report_page
from microparallel.reporting.page import tiles_of


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_it_holds_everything(run):
    page = report_page(run, "1.2.3")
    for words in ("gpt on 4 ranks", "accuracy", "91.0\u00a0%", "typical step", "Learning", "Inside a step", "1.2.3"):
        assert words in page
    data = data_of(page)
    assert data["curves"]["loss"][0] == [1, 3.0]
    assert data["curves"]["validation"] == [[30, 0.12]]
    assert [step["step"] for step in data["measured"]["steps"]] == [0, 1, 2, 3, 4]
    assert data["memory"] is None
    assert "memory-figures" not in page.partition("<script")[0]


def test_it_needs_no_network(run):
    page = report_page(run)
    assert "default-src 'none'" in page
    assert not re.search(r"\bsrc=|\bhref=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}


EVIL = "</script><script>alert('&')</script><!--"


def test_nothing_breaks_out(run):
    events = [event._replace(op=Observed(EVIL, event.kind), place=EVIL) for event in run.trace.events]
    trace = replace(run.trace, events=events, about={EVIL: EVIL})
    page = report_page(Run(EVIL, {"model": EVIL, EVIL: EVIL}, run.metrics, {"data": EVIL}, trace), EVIL)
    assert EVIL not in page
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert data_of(page)["measured"]["names"] == [EVIL]


def test_without_a_recording_it_says_how_to_get_one(run):
    page = report_page(replace(run, trace=None))
    assert "microparallel train --trace" in page
    assert "<canvas" not in page
    assert "Learning" in page
    assert data_of(page)["measured"] is None


@pytest.mark.parametrize("trace", [None, recorded(2, [])], ids=["no trace", "an empty one"])
def test_an_empty_run(trace):
    page = report_page(Run("empty", {"model": "mlp"}, [], {}, trace))
    assert "microparallel train --trace" in page
    assert "Learning" not in page


def test_losses_that_are_no_numbers_are_gaps(run):
    metrics = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": math.nan}, {"loss": 1.0}]
    data = data_of(report_page(replace(run, metrics=metrics, summary={"loss": math.inf})))
    assert data["curves"]["loss"] == [[1, 2.0], [2, None], [3, None]]


def test_long_runs_are_thinned_to_means(run):
    metrics = [{"step": step, "loss": float(step % 2)} for step in range(10_000)]
    curves = data_of(report_page(replace(run, metrics=metrics)))["curves"]
    assert curves["steps_a_point"] == 17
    assert len(curves["loss"]) <= 600
    assert all(0.4 < value < 0.6 for _, value in curves["loss"])


def test_memory_is_shown_where_somebody_wrote_it_down(run):
    about = {**run.trace.about, "peak_memory_mb": [1, 2, 3, 4]}
    metrics = [{"step": 1, "memory": 5e6}, {"step": 2, "memory": 6e6}]
    summary = {"memory budget": "none"}  # not a number
    found = replace(run, metrics=metrics, summary=summary, trace=replace(run.trace, about=about))
    assert data_of(report_page(found))["memory"] == {
        "over_steps": {"memory": [[1, 5e6], [2, 6e6]]},
        "sizes": {"peak_memory_mb": [1e6, 2e6, 3e6, 4e6]},
    }


def long_recording(events, steps):
    """Four ranks that compute, and talk to each other about it, in turns."""
    found = []
    each = events // steps // 4 // 2
    for step in range(steps):
        for rank in range(4):
            for number in range(each):
                begin = step * each * 2e-4 + number * 2e-4 + rank * 1e-6
                numbers = {"group": (0, 1, 2, 3), "number": step * each + number, "bytes": 123_456, "step": step}
                found.append(span(rank, "backward", f"backward of layer {number % 50}", begin, begin + 1e-4, step))
                found.append(
                    span(
                        rank,
                        "collective",
                        f"all_reduce(float32[{number % 30}])",
                        begin + 1e-4,
                        begin + 2e-4,
                        waited=begin + 1e-4,
                        place=f"model.py:{number % 20}",
                        **numbers,
                    )
                )
    return recorded(4, found)


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_ten_thousand_bars_are_less_than_two_megabytes(run, steps):
    page = report_page(replace(run, trace=long_recording(10_000, steps)))
    assert len(page.encode()) < 2_000_000
    assert len(data_of(page)["measured"]["steps"]) == steps


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_what_does_not_fit_is_left_out_and_counted(run, steps):
    trace = long_recording(80_000, steps)
    page = report_page(replace(run, trace=trace))
    assert len(page.encode()) < 2_000_000
    measured = data_of(page)["measured"]
    assert measured["recorded_steps"] == steps
    shown = sum(len(step["bars"]) for step in measured["steps"])
    assert shown < len(trace.events)
    assert measured["steps"][0]["left_out"] == (0 if steps > 1 else len(trace.events) - shown)
    assert measured["typical"] in [step["step"] for step in measured["steps"]]


def test_predictions_have_to_fit_too(run):
    trace = long_recording(20_000, 2)
    page = report_page(replace(run, trace=trace, predicted=trace))
    assert len(page.encode()) < 2_000_000
    assert data_of(page)["measured"]["predictions"]


def test_long_names_are_cut(run):
    events = [span(0, "forward", f"{number}" * 1000, number, number + 1) for number in range(20)]
    assert len(report_page(replace(run, trace=recorded(1, events)))) < 200_000


SCRIPTS = [file for file in files("microparallel.reporting").iterdir() if file.name.endswith(".js")]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine, which checks JavaScript")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_well_formed(script):
    subprocess.run(["node", "--check", str(script)], check=True, timeout=30)


def test_every_script_is_used(run):
    page = report_page(run)
    assert len(SCRIPTS) == 10
    assert all(script.read_text() in page for script in SCRIPTS)


def test_what_was_predicted_stands_beside_what_was_measured(pipeline):
    faster = [event._replace(start=event.start / 2, end=event.end / 2) for event in pipeline.events]
    page = report_page(Run("pipeline", {}, [], {}, pipeline, recorded(2, faster)))
    [table] = re.findall(r'<table id="prediction">.*?</table>', page, re.DOTALL)
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in table.split("<tr>")[2:]]
    assert ["work of the busiest rank", "6.00\u00a0ms", "12.0\u00a0ms", "2.00"] in rows
    assert [row[0] for row in rows] == ["makespan", "work of the busiest rank", "bubble", "exposed communication"]
    assert 'id="prediction"' not in report_page(Run("pipeline", {}, [], {}, pipeline))


def test_metrics_of_ones_own_stand_beside_the_accuracy():
    summary = {"validation_accuracy": 0.5, "validation_recall_of_seven": 0.25, "validation_failed": None}
    run = Run("mine", {}, [], summary)
    [learning, *_] = tiles_of(run, None)
    assert learning == {"accuracy": "50.0\u00a0%", "recall of seven": "0.25"}
