"""`microparallel simulate` and `verify`: what they print, what they write, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from microparallel.cli import main
from microparallel.drawing import draw
from microparallel.program import to_text
from microparallel.schedules import build
from microparallel.simulator import Costs, simulate
from microparallel.trace import Sizes

MINE = """program mine
goal: training step of 2 stages, 2 micro-batches
rank 0: F0.0 F0.1 B0.0 B0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["microparallel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code, *capfd.readouterr())

    return call


def test_simulate_shows_each_rank(run):
    code, output, _ = run("simulate", "1f1b", "--ranks", 4, "--microbatches", 8)
    assert code == 0
    assert "1f1b · 4 ranks · training step of 4 stages, 8 micro-batches" in output
    assert "makespan 33" in output
    assert "bubble   9 (27.3%)" in output
    rows = [line.split() for line in output.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])]
    assert [(row[1], row[4]) for row in rows] == [("24", "4"), ("24", "3"), ("24", "2"), ("24", "1")]


def test_simulate_says_it_in_json(run):
    code, output, _ = run(
        "simulate", "ring", "--ranks", 4, "--bytes", 8, "--latency", 1, "--seconds-per-byte", 1, "--json"
    )
    found = json.loads(output)
    assert code == 0
    assert found["makespan"] == 6 * (1 + 2)
    assert found["messages_sent"] == [6] * 4
    assert found["bytes_sent"] == [12] * 4


def test_simulate_several_on_the_same_model(run):
    code, output, _ = run(
        "simulate", "1f1b", "interleaved", "--ranks", 4, "--microbatches", 8, "--same-model", "--json"
    )
    plain, interleaved = json.loads(output)
    assert code == 0
    assert plain["work"] == interleaved["work"] == [24] * 4
    assert interleaved["bubble"] == plain["bubble"] / 2


def test_simulate_shows_what_ranks_hold(run):
    arguments = ("ddp", "zero-1", "--ranks", 2, "--layers", 2, "--buckets", 2, "--memory", "--optimizer-bytes", 12)
    code, output, _ = run("simulate", *arguments)
    traces = [
        simulate(build(name, 2, layers=2, buckets=2), Costs(seconds_per_byte=1, sizes=Sizes(optimizer=12)))
        for name in ("ddp", "zero-1")
    ]
    assert code == 0 and output.endswith("\n" + draw(traces, memory=True))
    ddp, zero = json.loads(run("simulate", *arguments, "--json")[1])
    assert ddp["peak_memory_by_kind"]["optimizer"] == [24, 24] and zero["peak_memory_by_kind"]["optimizer"] == [12, 12]
    code, _, errors = run("simulate", "gpipe", "--ranks", 64, "--microbatches", 400, "--memory")
    assert code == 2 and "too many to read" in errors and "leave out --memory" in errors


def test_zero_with_replicas(run):
    hybrid = ("zero-3", "--ranks", 4, "--replicas", 2, "--layers", 2, "--buckets", 1)
    code, output, _ = run("draw", *hybrid, "--width", 100)
    assert code == 0 and output == draw(build("zero-3", 4, layers=2, buckets=1, replicas=2), width=100)
    assert "zero-3 × 2 · 4 ranks" in output and "U0.0/ is a rank's part of U0.0, summed along replica" in output
    code, output, _ = run("verify", *hybrid)
    assert code == 0 and "right: every message" in output
    found = json.loads(run("simulate", *hybrid, "--bytes", 10, "--memory", "--json")[1])
    assert found["bytes_sent"] == [3 * 20 / 2 + 20 / 2] * 4  # 3 copies inside of a replica, then a half there and back
    assert found["peak_memory_by_kind"]["optimizer"] == [2 * 8 / 2] * 4


def test_an_option_goes_to_the_programs_that_take_it(run, tmp_path):
    (tmp_path / "mine.txt").write_text(MINE)
    names = ["ring", "hierarchical", "1f1b", "ddp", "mine.txt"]
    code, output, _ = run(
        "simulate", *names, "--ranks", 8, "--ranks-per-node", 4, "--microbatches", 2, "--layers", 3, "--json"
    )
    found = json.loads(output)
    assert code == 0
    assert [one["ranks"] for one in found] == [8, 8, 8, 8, 2]
    assert [one["goal"].partition(",")[0] for one in found] == [
        "all-reduce of 8 slices",
        "all-reduce of 8 slices",
        "training step of 8 stages",
        "training step of 3 stages",
        "training step of 2 stages",
    ]
    assert found[1]["messages_sent"] == [2 * 3 + 2 * 1] * 8
    table = run("simulate", "ring", "mine.txt")[1]
    assert [line.split()[:2] for line in table.splitlines()[3:5]] == [["ring", "4"], ["mine", "2"]]


def test_zero_3_gathers_as_far_ahead_as_it_is_told(run):
    one = ["simulate", "zero-3", "--ranks", 2, "--layers", 4, "--json"]
    exposed = [json.loads(run(*one, "--prefetch", ahead)[1])["exposed_communication"][0] for ahead in (0, 1)]
    assert exposed == [6, 1.5]
    assert json.loads(run(*one)[1])["exposed_communication"][0] == 1.5


CLUSTER = ["--nodes", 2, "--per-node", 4, "--inside", "1us,100GB", "--between", "10us,10GB"]


def test_simulate_shows_the_files_of_programs_that_have_one_name(run):
    text = to_text(build("gpipe", 2, microbatches=2))
    for file in ("before.txt", "after.txt"):
        Path(file).write_text(text, encoding="utf-8")
    table = run("simulate", "before.txt", "after.txt", "1f1b", "--ranks", 2)[1]
    assert [line.split()[0] for line in table.splitlines()[3:6]] == ["before.txt", "after.txt", "1f1b"]


def test_simulate_on_a_cluster(run):
    """A ring crosses the network with each of its 14 steps; two levels with 2, in which 4 ranks take turns."""
    code, output, _ = run("simulate", "ring", "hierarchical", *CLUSTER, "--bytes", 8e6, "--json")
    ring, two_levels = json.loads(output)
    assert code == 0
    assert (ring["ranks"], two_levels["ranks"]) == (8, 8)
    assert ring["makespan"] == pytest.approx(14 * (10e-6 + 1e6 / 10e9))
    inside, between = 1e-6 + 2e6 / 100e9, 10e-6 + 1e6 / 10e9
    assert two_levels["makespan"] == pytest.approx(6 * inside + 2 * 4 * between)
    code, output, _ = run("simulate", "hierarchical", *CLUSTER, "--bytes", 8e6, "--no-shared-nic", "--json")
    assert json.loads(output)["makespan"] == pytest.approx(6 * inside + 2 * between)


def test_draw_on_a_cluster(run):
    code, output, _ = run("draw", "hierarchical", *CLUSTER)
    assert code == 0
    assert "8 ranks" in output and "time" in output


def test_simulate_writes_a_chrome_trace(run, tmp_path):
    code, output, _ = run("simulate", "1f1b", "--chrome", "trace.json")
    assert code == 0
    assert "wrote trace.json" in output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_verify_a_schedule_of_ones_own(run, tmp_path):
    (tmp_path / "mine.txt").write_text(MINE)
    code, output, notes = run("verify", "mine.txt")
    assert code == 0
    assert "right" in output and "peak activations of each rank: 2 1" in output
    assert "sends, receives and frees were added" in notes


def test_verify_finds_what_is_wrong(run, tmp_path):
    (tmp_path / "mine.txt").write_text(MINE.replace("B1.0 F1.1", "F1.1"))
    code, output, errors = run("verify", "mine.txt")
    assert code == 1
    assert "sends, receives and frees were added" in errors
    assert "rank 0 does B0.0, which needs G0.0, and no rank makes that" in output


def test_simulate_refuses_what_is_wrong(run, tmp_path):
    (tmp_path / "mine.txt").write_text("program mine\ngoal: all-reduce of 1 slice\nrank 0: >C0@1\nrank 1:\n")
    code, output, errors = run("simulate", "mine.txt")
    assert (code, output) == (1, "")
    assert "rank 0 does >C0@1, which rank 1 never receives" in errors


def test_verify_draws_the_circle_of_a_deadlock(run):
    code, output, _ = run("verify", "1f1b", "--ranks", 4, "--microbatches", 8, "--sends", "blocking")
    assert code == 1
    assert "rank 2 sends A2.1 to rank 3, rank 3 sends G2.0 to rank 2" in output
    assert "[>A2.1@3] <G2.0@3" in output


def test_verify_says_it_in_json(run, tmp_path):
    (tmp_path / "lowered.txt").write_text(to_text(build("gpipe", 3, 4)))
    code, output, _ = run("verify", "lowered.txt", "--max-activations", 3, "--json")
    found = json.loads(output)
    assert code == 1
    assert not found["right"]
    assert found["error"] == "rank 0 holds 4 activations at once, and 3 are allowed"
    assert found["peak_activations"] == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "1f1"], ["'1f1'", "did you mean '1f1b'"]),
        (["simulate", "1f1b", "--ranks", "0"], ["ranks=0"]),
        (["simulate", "ring", "--microbatches", "4"], ["--microbatches 4", "collective"]),
        (["simulate", "1f1b", "--stages-per-rank", "2"], ["stages_per_rank"]),
        (["simulate", "1f1b", "--replicas", "2"], ["'1f1b' does not take replicas"]),
        (["verify", "zero-3", "--replicas", "3"], ["replicas=3: 4 ranks do not make", "choose a divisor of 4"]),
        (["verify", "zero-2", "--replicas", "2"], ["replicas=2: only at level 3", "level=2"]),
        (["simulate", "1f1b", "--forward", "fast"], ["--forward fast"]),
        (["simulate", "1f1b", "--forward", "1,2"], ["forward has 2 numbers, and the program has 4 stages"]),
        (["simulate", "1f1b", "--latency", "-1"], ["--latency -1"]),
        (["simulate", "ring", "--link", "2:3"], ["--link 2:3", "2-3=5"]),
        (["simulate", "ring", "tree", "--chrome", "trace.json"], ["--chrome trace.json", "2 were named"]),
        (["simulate", "ring", "--chrome", "absent/trace.json"], ["absent/trace.json", "no folder absent"]),
        (["simulate", "ring", "tree", "--layers", "2"], ["'ring' does not take layers"]),
        (["simulate", "ring", "--nodes", "2"], ["--nodes 2", "--per-node, --inside and --between as well"]),
        (["simulate", "ring", "--between", "5us"], ["--between 5us", "--nodes, --per-node and --inside as well"]),
        (["simulate", "ring", "--no-shared-nic"], ["--no-shared-nic", "--nodes"]),
        (["simulate", "ring", *CLUSTER, "--ranks", 4], ["--ranks 4", "2 nodes of 4 ranks are 8 ranks"]),
        (["simulate", "ring", *CLUSTER[:3], 0, *CLUSTER[4:]], ["--per-node 0", "at least 1"]),
        (["simulate", "ring", *CLUSTER[:3], 10**9, *CLUSTER[4:]], ["--ranks 2000000000", "at most 1024"]),
        (["simulate", "ring", *CLUSTER[:5], "fast", *CLUSTER[6:]], ["--inside fast", "5ms", "100Mbit"]),
        (["verify", "absent.txt"], ["absent.txt"]),
        (["verify", "bad.txt"], ["bad.txt", "line 3", "'F0'"]),
        (["verify", "1f1b", "--sends", "eager"], ["--sends eager", "blocking"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if value[0] in ("simulate", "verify") else "",
)
def test_wrong_calls_get_one_line(run, tmp_path, arguments, words):
    (tmp_path / "bad.txt").write_text(MINE.replace("F0.0", "F0"))
    code, output, errors = run(*arguments)
    assert code == 2
    assert output == ""
    assert len(errors.splitlines()) == 1, errors
    for word in words:
        assert word in errors
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]


def test_neither_needs_torch(tmp_path):
    """With None in its place, importing torch raises: a program is simulated and verified in a fraction of a second."""
    code = "import sys; sys.modules['torch'] = None; from microparallel.cli import main; main()"
    for verb in ("simulate", "verify"):
        result = subprocess.run(
            [sys.executable, "-c", code, verb, "1f1b"], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
