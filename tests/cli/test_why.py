"""`microparallel why`: the world of a process, of a run, or all that run."""

import io
import json
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from microparallel.cli.why import report_on, show
from microparallel.observe.flight import Flight

RANK = """
import sys, time
from pathlib import Path
from microparallel.observe.flight import Flight
flight = Flight.open(Path(sys.argv[1]), int(sys.argv[2]), 2, 2)
log = flight.group([0, 1])
log.collective("all_reduce(float32[4])", "all_reduce(float32[4])").ends()
if flight.recorder.rank == 0:
    entry = log.collective("barrier()", "barrier()")
    entry.waits()
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"microparallel-{os.getuid()}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def world(runtime):
    """Two ranks, of which one waits for the other: their folder, and their processes."""
    folder = runtime / "a-world"
    program = folder.parent / "rank.py"
    program.write_text(RANK)
    ranks = [
        subprocess.Popen([sys.executable, program, folder, str(rank)], stdout=subprocess.PIPE) for rank in range(2)
    ]
    for process in ranks:
        process.stdout.readline()
    program.unlink()
    yield folder, ranks
    for process in ranks:
        process.kill()
        process.wait()
        process.stdout.close()


def test_help(microparallel):
    result = microparallel("why", "--help")
    assert result.returncode == 0 and "Examples" in result.stdout and "[PID|RUN]" in result.stdout


def test_a_rank_its_world_and_whoever_started_it(microparallel, world):
    folder, ranks = world
    time.sleep(0.2)
    for name in (str(ranks[1].pid), str(os.getpid()), folder):
        result = microparallel("why", name, "--after", "0.1")
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0].startswith("2 ranks, began ") and f"started by process {os.getpid()}" in lines[0]
        assert lines[1].startswith(
            "  straggler: rank 1 is in no call: it is in rank.py:13; its last call was all_reduce"
        )
        assert "rank 0 waits for it in barrier() (rank.py:9), the 2nd of the group" in lines[1]
        assert lines[2].split() == ["rank", "pid", "state", "in", "since", "where", "step"]
        assert lines[3].split()[:4] == ["0", str(ranks[0].pid), "waits", "barrier()"]
        assert lines[4].split()[:3] == ["1", str(ranks[1].pid), "running"]


def test_a_world_that_makes_progress(microparallel, world):
    result = microparallel("why", world[0], "--after", "3600")
    assert (result.returncode, "nothing is wrong: every rank makes progress" in result.stdout) == (1, True)


def test_all_that_run_as_json(microparallel, world):
    folder, ranks = world
    time.sleep(0.2)
    result = microparallel("why", "--after", "0.1", "--json")
    assert result.returncode == 0
    (report,) = [report for report in json.loads(result.stdout) if report["folder"] == str(folder)]
    (finding,) = report["findings"]
    assert (finding["kind"], finding["ranks"], finding["line"]) == ("straggler", [1], 13)
    assert [row["pid"] for row in report["ranks"]] == [process.pid for process in ranks]


def test_the_dead_are_asked_too(microparallel, world):
    _folder, ranks = world
    ranks[1].kill()
    ranks[1].wait()
    result = microparallel("why", ranks[1].pid)
    assert result.returncode == 0
    assert "death: rank 1 died (killed, or it crashed); its last call was all_reduce(float32[4])" in result.stdout


def test_a_run_s_folder(microparallel, tmp_path):
    flight = Flight.open(tmp_path / "run" / "flight", 0, 1, 1)
    result = microparallel("why", tmp_path / "run")
    flight.close()
    assert (result.returncode, "nothing is wrong" in result.stdout) == (1, True)


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"steps": 120, "stopped_early": False}, "finished after 120 steps; nothing to explain"),
        ({"steps": 7, "stopped_early": True}, "was stopped, and ended in order after 7 steps; nothing to explain"),
    ],
)
def test_a_run_that_ended_in_order(microparallel, tmp_path, summary, words):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    result = microparallel("why", tmp_path)
    assert (result.returncode, result.stdout) == (1, f"{tmp_path}: {words}\n")
    assert json.loads(microparallel("why", tmp_path, "--json").stdout)[0]["findings"] == []


def test_a_world_whose_ranks_have_all_finished(microparallel, tmp_path):
    flight = Flight.open(tmp_path / "flight", 0, 1, 1)
    flight.recorder.ends("finished")
    result = microparallel("why", tmp_path)
    flight.close()
    assert (result.returncode, "every rank has finished: nothing to explain" in result.stdout) == (1, True)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(world, width):
    folder, ranks = world
    time.sleep(0.2)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, highlight=False)
    show(report_on(folder, 0.1), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("  straggler: rank 1 is in no call")
    if width == 60:
        assert lines[2].startswith("      ")  # a sentence goes on, a little further in
    rank_0 = next(line.split() for line in lines if line.split()[:2] == ["0", str(ranks[0].pid)])
    assert rank_0[2:4] == ["waits", "barrier()"] and rank_0[-1] == "rank.py:9"


OURS = """
import sys
from pathlib import Path
from microparallel.observe.flight import Flight
flight = Flight.open(Path(sys.argv[1]), 0, 1, 1)
exec(compile("flight.group([0]).collective('barrier()', 'barrier()').waits()", sys.argv[2], "exec"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_place_of_our_own_is_called_so(microparallel, runtime):
    import microparallel.models.mlp as ours  # it stands for any file that calls a Comms

    # The user's line is the -c program's, which has no file.
    process = subprocess.Popen(
        [sys.executable, "-c", OURS, runtime / "ours", ours.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    result = microparallel("why", runtime / "ours", "--after", "0")
    process.communicate()
    assert "barrier() (mlp.py:1 of microparallel)" in result.stdout
    assert "no line of your code led there" in result.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "nonsense is neither a process nor the folder of a run"),
        ("999999999", "process 999999999 belongs to no world of microparallel's"),
        (".", ". has no flight files"),
    ],
)
def test_what_cannot_be_asked(microparallel, runtime, name, words):
    result = microparallel("why", name)
    assert result.returncode == 2
    assert words in result.stderr


def test_torch_is_not_needed():
    program = (
        "import sys\nfrom microparallel.cli import main\nsys.argv = ['microparallel', 'why', 'x']\n"
        "try: main()\nexcept SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split() == ["2", "False"]
