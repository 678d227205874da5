"""Compressed all-reduces by name: `draw`, `simulate` and `verify`."""

import json


def test_drawn_and_verified(microparallel):
    assert microparallel("draw", "topk", "--ranks", "4").stdout.startswith("topk-0.01 · all-reduce")
    assert microparallel("verify", "powersgd-4", "--ranks", "3").returncode == 0
    wrong = microparallel("draw", "topk-7")
    assert wrong.returncode == 2 and "above 0, and at most 1" in wrong.stderr


def test_simulated(microparallel):
    step = microparallel("simulate", "ddp", "--algorithm", "topk-0.01", "--bytes", "4e6", "--json")
    assert json.loads(step.stdout)["bytes_sent"] == [3 * 8 * 20_000 * 4] * 4  # four buckets, of two layers each
    alone = microparallel("simulate", "topk-0.01", "--bytes", "4e6", "--json")
    assert json.loads(alone.stdout)["bytes_sent"] == [3 * 8 * 10_000] * 4
    wrong = microparallel("simulate", "ddp", "--algorithm", "topkk")
    assert wrong.returncode == 2 and "did you mean 'topk'" in wrong.stderr
