"""Comparing the shortcuts, and whole runs that take them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from microparallel.cli.compare import draw_curves, explain
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train
from microparallel.train.shortcuts import compare_shortcuts

SMALL = {"dim": 16, "depth": 3, "precision": "float64", "schedule_lr": "constant", "transport": "gloo", "device": "cpu"}


def curves(pool, every, **changes):
    """Batches of 211: the seventh of an epoch has 172, and no number of ranks divides them."""
    settings = SMALL | {"optimizer": "sgd", "lr": 0.1, "batch": 211, "steps": 12, "ranks": 3} | changes
    config = TrainConfig(**settings).resolved()
    return compare_shortcuts(config, every, pool), config


def test_every_step_all_three_are_the_same_with_sgd(pool):
    rows, config = curves(pool, 1)
    assert [row.synchronisations for row in rows] == [12, 12, 12]
    assert all(row.losses == pytest.approx(rows[0].losses, rel=1e-12, abs=0) for row in rows)
    assert len(set(rows[0].losses)) == 13
    assert "is the same as averaging gradients" in explain(rows, config)


def test_adam_makes_averaging_differ_even_every_step(pool):
    rows, config = curves(pool, 1, optimizer="adam", lr=0.003)
    assert rows[1].loss_difference == 0
    assert rows[2].loss_difference > 1e-4
    assert "even after every step: adam divides" in explain(rows, config)


def test_less_often_sends_less_and_learns_something_else(pool):
    rows, config = curves(pool, 4)
    assert [(row.synchronisations, row.updates) for row in rows] == [(12, 12), (3, 3), (3, 12)]
    first, accumulation, averaging = rows
    assert first.bytes_a_sample / accumulation.bytes_a_sample == pytest.approx(4, rel=0.01)
    assert first.bytes_a_sample / averaging.bytes_a_sample == pytest.approx(4, rel=0.05)
    for row in rows:
        # The rest are flags, padding and the loss.
        assert row.bytes_by_formula <= row.bytes_a_sample < 1.1 * row.bytes_by_formula
        assert row.samples == [0, 844, 1649, 2493] and len(row.losses) == 4
    assert accumulation.loss_difference > 0.01 and averaging.loss_difference > 1e-6
    assert "weights of its own and computes its next gradients there; that" in explain(rows, config)
    adam = replace(config, optimizer="adam")
    assert "next gradients there, with an optimizer state of its own; that" in explain(rows, adam)
    assert "3 updates where every step made 12" in explain(rows, config)


def test_accumulation_is_a_run_with_the_larger_batch(pool):
    accumulation = curves(pool, 2, batch=100, steps=8)[0][1]
    larger = curves(pool, 1, batch=200, steps=4)[0][0]
    # Measured on a number of samples that depends on the batch, so only the bytes and numbers of updates can be alike.
    assert accumulation.updates == larger.updates
    assert accumulation.samples == larger.samples
    assert accumulation.bytes_a_sample == larger.bytes_a_sample


def test_the_chart_shows_where_curves_part_and_leaves_out_what_is_no_number():
    chart = draw_curves({"one": [2.0, 1.0, 0.0], "two": [2.0, 2.0, float("nan")]}, [0, 50, 100], "samples")
    lines = chart.splitlines()
    assert lines[0].startswith("2 ┤◆") and lines[0].count("▲") == 1
    assert lines[11].startswith("0 ┤") and lines[11].endswith("●")
    assert "0" in lines[13] and "100  samples" in lines[13]
    assert "● one   ▲ two" in lines[14]
    assert draw_curves({"flat": [1.0, 1.0]}, [0, 1], "x").splitlines()[0].count("●") == 2


# ── whole runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run(pool, out, resume=None, **changes):
    settings = {"out": str(out), "dim": 16, "depth": 3, "batch": 301, "steps": 10, "ranks": 2} | changes
    config = TrainConfig(**settings)
    return pool.run(train, config.ranks, config, resume, True, timeout=50)[0]


def losses(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("ranks", [1, 3])
def test_accumulating_changes_nothing_but_rounding(pool, tmp_path, ranks):
    """1438 samples in batches of 301: the last of an epoch has 234, and five parts of a rank's share differ in size."""
    settings = {"ranks": ranks, "precision": "float64", "optimizer": "sgd", "lr": 0.05}
    run(pool, tmp_path / "whole", **settings)
    run(pool, tmp_path / "parts", **settings, accumulate=5)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-12, abs=0)
    assert losses(tmp_path / "parts")[1:] != losses(tmp_path / "whole")[1:]  # it was really computed in parts


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_averaging_goes_on_bit_for_bit(pool, tmp_path, optimizer):
    """Saved when due and together: 3 is due at 4, 6 at 8; and at the end, when the ranks have come together again."""
    settings = {"average_every": 4, "save_every": 3, "optimizer": optimizer, "accumulate": 2}
    summary = run(pool, tmp_path / "whole", **settings)
    assert summary["strategy"] == "averaging" and summary["replicas_identical"]
    checkpoints = tmp_path / "copy" / "checkpoints"
    shutil.copytree(tmp_path / "whole", tmp_path / "copy")
    assert sorted(path.name[-2:] for path in checkpoints.glob("step-*")) == ["04", "08", "10"]
    for last in ("08", "10"):
        shutil.rmtree(checkpoints / f"step-000000{last}")
    resumed = run(pool, tmp_path / "whole", resume=tmp_path / "copy", **settings)
    assert losses(tmp_path / "copy") == losses(tmp_path / "whole")
    assert resumed["validation_loss"] == summary["validation_loss"]


def test_every_rank_goes_on_with_its_own_optimizer(pool, tmp_path):
    """With the moments of rank 0 on all ranks the losses would be others: the test above can fail."""
    settings = {"average_every": 2, "steps": 4, "save_every": 2, "momentum": 0.9, "optimizer": "sgd", "lr": 0.05}
    run(pool, tmp_path / "run", **settings)
    path = tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json"
    assert len(json.loads(path.read_text())["optimizer"]["by_rank"]) == 2


def test_averaging_every_step_with_sgd_is_ddp(pool, tmp_path):
    settings = {"precision": "float64", "optimizer": "sgd", "lr": 0.05, "ranks": 3, "steps": 8}
    run(pool, tmp_path / "ddp", **settings)
    run(pool, tmp_path / "averaging", **settings, average_every=1)
    assert losses(tmp_path / "averaging") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-12, abs=0)
