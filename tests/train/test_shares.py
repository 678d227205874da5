"""A run's shares stay what they were, whatever becomes of its ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train
from microparallel.train.sampler import share
from microparallel.train.shares import Shares


@given(total=st.integers(1, 9), ranks=st.integers(1, 9), samples=st.integers(0, 40), cuts=st.integers(1, 4))
def test_every_sample_has_one_rank_and_a_share_that_the_ranks_do_not_change(total, ranks, samples, cuts):
    everyones = [Shares(total, rank, ranks) for rank in range(ranks)]
    parts = [part for shares in everyones for part in shares.cut(range(samples))]
    assert [number for number, _ in parts] == [*range(max(total, ranks))]
    assert [sample for _, mine in parts for sample in mine] == [*range(samples)]
    if total >= ranks:
        assert all(mine == share([*range(samples)], number, total) for number, mine in parts)
    filled = [sum(min(cuts, len(mine)) for _, mine in shares.cut(range(samples))) for shares in everyones]
    assert everyones[0].most_microbatches(samples, cuts) == max(filled)


def with_dropout():
    return nn.Sequential(nn.Linear(64, 24), nn.Dropout(0.4), nn.ReLU(), nn.Linear(24, 10))


def losses(out):
    records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def weights(comms, config, resume):
    """Train, and return the final weights of the whole model."""
    from microparallel.train import checkpoint

    train(comms, config, resume, True)
    found, _ = checkpoint.latest(Path(config.out) / "checkpoints")
    return found.model


def configuration(out, **changes):
    settings = {"model": f"{__name__}:with_dropout", "data": "digits", "precision": "float64", "lr": 0.01}
    settings |= {"out": str(out), "batch": 50, "steps": 12, "ranks": 4, "save_every": 4, "keep": 10}
    return TrainConfig(**settings | changes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accumulate": 3}, marks=pytest.mark.slow),
        {"shard": "gradients"},
        {"shard": "parameters"},
        {"optimizer": "sgd", "momentum": 0.9, "clip": 0.5, "accumulate": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_a_run_that_shrinks_and_grows_again_learns_the_same(pool, tmp_path, options):
    """4 ranks, then 3, then 1, then 4: dropout of every share as in the undisturbed run."""
    whole = pool.run(weights, 4, configuration(tmp_path / "whole", **options), None, timeout=50)[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    alone = {"strategy": "ddp"} if "shard" in options else {}
    for steps, changes in ((6, {"ranks": 3}), (8, {"ranks": 1, **alone}), (12, {"ranks": 4})):
        config = configuration(tmp_path / "run", **options | changes | {"shares": 4, "save_every": 1})
        ended = pool.run(until, config.ranks, config, tmp_path / "run", steps, timeout=50)[0]
    for name, tensor in whole.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-12)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=0, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        # Until which step, how many ranks the command asks for, and how many can be had.
        ({"validate_every": 2}, [(6, 4, 4), (9, 4, 3), (12, 1, 1)]),
        ({"shard": "optimizer"}, [(6, 4, 4), (9, 4, 3), (12, 4, 1)]),
        ({"shard": "parameters", "replicas": 2, "validate_every": 2}, [(6, 4, 4), (9, 4, 3), (12, 4, 1)]),
    ],
    ids=["plain", "optimizer", "parameters"],
)
def test_the_same_command_goes_on_with_as_many_ranks_as_there_are(pool, tmp_path, options, rounds):
    """As --resume auto does, and --min-ranks: the run keeps the shares it began with."""
    whole = pool.run(weights, 4, configuration(tmp_path / "whole", **options), None, timeout=50)[0]
    out = tmp_path / "run"
    for steps, ranks, world_size in rounds:
        config = configuration(out, **options, ranks=ranks, save_every=1)
        ended = pool.run(until, world_size, config, "auto", steps, timeout=50)[0]
    for name, tensor in whole.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-12)
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=0, abs=1e-12)


def until(comms, config, resume, steps):
    """Go on with a run as if it were killed after so many steps: its schedule is that of the whole run."""
    from microparallel.train.training import Training

    class Killed(Exception):
        pass

    before = Training.step

    def step(self):
        if self.steps_done == steps < config.steps:
            raise Killed
        return before(self)

    Training.step = step
    try:
        return weights(comms, config, resume)
    except Killed:
        return None
    finally:
        Training.step = before
