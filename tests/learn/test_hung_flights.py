"""The flights of hung runs that the exercise read-a-hang is graded with: are they right, and do ranks still hang so?"""

import subprocess
import sys
from pathlib import Path

import pytest

from microparallel.learn.graders._flights import from_text, hung_runs, to_text
from microparallel.observe.diagnosis import diagnose

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "hung_flights.py"
KINDS = {
    "still computing": "straggler",
    "missing call": "missing rank",
    "dead": "death",
    "other order": "wrong order",
    "other shape": "mismatched shape",
}


def blamed(run):
    first = diagnose(run.flights, longer_than=0.0)[0]
    return first.kind, first.ranks


@pytest.mark.parametrize("run", hung_runs(), ids=lambda run: run.name)
def test_our_own_diagnosis_blames_the_same_rank(run):
    assert blamed(run) == (KINDS[run.reason], (run.culprit,))
    turned = run.renumbered([*range(1, len(run.flights)), 0])
    assert turned.culprit != run.culprit
    assert blamed(turned) == (KINDS[run.reason], (turned.culprit,))


def test_every_reason_has_two_runs_with_different_culprits():
    for reason in KINDS:
        assert len({run.culprit for run in hung_runs() if run.reason == reason}) >= 2


def test_what_is_written_is_read_back():
    assert from_text(to_text(hung_runs())) == hung_runs()


@pytest.mark.slow
@pytest.mark.parametrize("reason", KINDS)
def test_real_ranks_still_hang_like_that(tmp_path, reason):
    kept = next(run for run in hung_runs() if run.reason == reason)
    file = tmp_path / "new.json"
    subprocess.run([sys.executable, SCRIPT, "--only", kept.name, "--to", file], check=True, capture_output=True)
    (new,) = from_text(file.read_text("utf-8"))
    assert (new.culprit, new.reason) == (kept.culprit, kept.reason)
    assert blamed(new) == blamed(kept)
    assert calls(new) == calls(kept)


def calls(run):
    return [[call.text for call in one.records] for one in run.flights]
