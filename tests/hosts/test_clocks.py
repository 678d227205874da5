"""Hosts whose clocks are apart: a recording puts all events on rank 0's, and says how well that is known."""

import json
import re

import pytest

from microparallel.trace import Trace

AHEAD = 1000
RECORD = """
import sys, time, torch, microparallel as mp
with mp.connect(timeout=30) as comms:
    with mp.record(comms) as recorder:
        for _ in range(5):
            comms.all_reduce(torch.ones(100))
            comms.barrier()
    if comms.rank == 0:
        recorder.trace.save("recorded")
    print(time.perf_counter(), flush=True)
"""


def test_hosts_can_have_clocks_of_their_own(hosts, tmp_path):
    (tmp_path / "now.py").write_text("import time; print(time.perf_counter())")
    runs = [host.run("python", "now.py") for host in hosts(2, ahead=AHEAD)]
    assert [run.wait(20) for run in runs] == [0, 0]
    first, second = (float(run.output) for run in runs)
    assert 0.9 * AHEAD < second - first < 1.1 * AHEAD


def test_events_of_all_hosts_are_on_one_clock(hosts, tmp_path):
    """Ranks meet in a barrier: nobody leaves it before the last one came, whatever the clocks of their hosts say."""
    (tmp_path / "record.py").write_text(RECORD)
    ranks = hosts(2, ahead=AHEAD).ranks("python", "record.py", on_each=2)
    assert [rank.wait(40) for rank in ranks] == [0] * 4, [rank.errors for rank in ranks]
    trace = Trace.load(tmp_path / "recorded")
    assert 0 < trace.clock_error < 0.5
    said = r"(\S+) s ahead of rank 0's, put right to within \S+ \S+; it gains \S+ ± \S+ µs a second"
    ahead = float(re.fullmatch(said, trace.about["clock of ranks 2, 3"])[1])
    assert abs(ahead - AHEAD) <= 2 * trace.clock_error  # a digit is rounded, too
    other = json.loads((tmp_path / "recorded" / "trace-chrome.json").read_text())["otherData"]
    assert other == {"about": trace.about, "clock_error": trace.clock_error}
    for number in range(5):
        meeting = [event for event in trace.events if "barrier" in event.name][number::5]
        came, left = max(event.asked for event in meeting), min(event.end for event in meeting)
        assert len(meeting) == 4 and came <= left + trace.clock_error


@pytest.mark.slow
def test_train_and_report_say_how_well_the_clocks_are_known(hosts, tmp_path):
    bed = hosts(2, ahead=AHEAD)
    train = ["microparallel", "train", "--quiet", "--steps", "6", "--trace", "--out", "run"]
    ranks = bed.ranks(*train)
    assert [rank.wait(55) for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
    assert re.search(r"recorded, all ranks on one clock to within \S+ \S+; see it with", ranks[0].output)
    report = bed[0].run("microparallel", "report", "run")
    assert report.wait(40) == 0, report.errors
    page = (tmp_path / "run" / "report.html").read_text()
    assert "put on rank 0" in page and "s ahead of rank 0" in page
