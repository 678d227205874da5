"""What the labs on pipelines say along the way, and how they end."""

import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import microparallel as mp

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def call(monkeypatch, capfd, quick_ranks):
    """Call a lab in this process; returns what it was ended with, and what it printed."""

    def call(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return ended.value.code, capfd.readouterr().out

    return call


def test_a_deadlock_leaves_nothing_behind(call, monkeypatch, tmp_path):
    """Not even what the killed rank was doing: the lab has killed it on purpose."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("MICROPARALLEL_FLIGHT_DIR", raising=False)
    call("pipeline_deadlock.py", "--limit", "1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_deadlock_is_diagnosed_as_it_was_foreseen(call):
    code, said = call("pipeline_deadlock.py", "--limit", "1")
    assert code.startswith("\ndeadlock: 0 → 1 → 0")
    foreseen, happened = said.split("now it runs")
    assert "rank 0: F0.0 >A0.0@1 F0.1 [>A0.1@1] <G0.0@1" in foreseen
    assert happened.endswith(
        "nobody has moved for 1 s, and the board says:\n"
        "  rank 0 is in send of A0.1 to rank 1, which has not received it\n"
        "  rank 1 is in send of G0.0 to rank 0, which has not received it\n"
    )
    assert all(len(line) <= 80 for line in said.splitlines())


def test_a_rank_that_fails_is_no_deadlock(call, monkeypatch):
    def launch(*arguments, **named_arguments):
        raise mp.errors.RankFailed(1, "raised MemoryError", "")

    monkeypatch.setattr(mp, "launch", launch)
    code, said = call("pipeline_deadlock.py")
    assert "rank 1 raised MemoryError" in code
    assert "board" not in said


def test_the_driver_s_number_stands_beside_the_trace_s(capsys):
    show = runpy.run_path(str(EXAMPLES / "pipeline_utilisation.py"))["show"]
    trace = mp.simulate(mp.schedules.build("naive", 4, 2))
    show(trace, 97.4, None)
    assert "GPU 0   97 % busy, says its driver; a rank computes 25 % of the time" in capsys.readouterr().out
    show(trace, None, "nvidia-smi cannot be run")
    assert "GPU 0   nvidia-smi cannot be run" in capsys.readouterr().out


def test_the_drawing_shows_a_step_in_80_columns(capsys):
    show = runpy.run_path(str(EXAMPLES / "pipeline_utilisation.py"))["show"]
    show(mp.simulate(mp.schedules.build("1f1b", 4, 4), mp.Costs(latency=0.1)), None, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1f1b · 4 ranks · 4 micro-batches · makespan 2")
    assert not any("comm" in line or "never happens" in line for line in lines[:9])
    assert all(len(line) <= 80 for line in lines)


def test_torchrun_trains_and_saves(tmp_path, torchrun):
    arguments = ["--steps", "2", "--width", "16", "--out", "model.pt"]
    finished = torchrun(2, "python", EXAMPLES / "train_pipeline.py", *arguments)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("conclusion: the saved model") == 1  # the first rank speaks
    assert "1f1b on 2 ranks" in finished.stdout
    assert "0.weight" in torch.load(tmp_path / "model.pt", weights_only=True)


def test_torchrun_decides_how_many_ranks_there_are(call, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert call("train_pipeline.py", "--ranks", "2") == (2, "")


def test_gathers_first_is_what_zero_makes():
    written = mp.program.from_text((EXAMPLES / "zero_1_gathers_first.txt").read_text(encoding="utf-8"))
    built = mp.schedules.zero(1, 4, 2, gather="before")
    assert (written.ranks, written.goal) == (built.ranks, built.goal)


def test_two_pipelines_are_what_replicate_makes():
    written = mp.program.from_text((EXAMPLES / "two_pipelines.txt").read_text(encoding="utf-8"))
    built = mp.schedules.replicate(mp.schedules.build("1f1b", 2, 4), 2)
    assert mp.schedules.lower(written).ranks == built.ranks
    assert written.goal == built.goal
