"""A run's shares stay what they were, whatever becomes of its ranks."""

import json
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import microparallel as mp
from microparallel.train import checkpoint
from microparallel.train.build import build
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


def losses(out, name="loss"):
    records = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def weights(comms, config, resume):
    """Train, and return the final weights of the whole model."""
    train(comms, config, resume, True)
    found, _ = checkpoint.latest(Path(config.out) / "checkpoints")
    return found.model


def with_running_statistics():
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10))


def configuration(out, **changes):
    settings = {"model": f"{__name__}:with_dropout", "data": "digits", "precision": "float64", "lr": 0.01}
    settings |= {"out": str(out), "batch": 50, "steps": 12, "ranks": 4, "save_every": 4, "keep": 10}
    return TrainConfig(**settings | changes)


WITH_STATISTICS = {"model": f"{__name__}:with_running_statistics", "optimizer": "sgd"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accumulate": 3}, marks=pytest.mark.slow),
        pytest.param({"shard": "gradients"}, marks=pytest.mark.slow),
        pytest.param({"shard": "parameters"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "sgd", "momentum": 0.9, "clip": 0.5, "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param({**WITH_STATISTICS, "validate_every": 4}, marks=pytest.mark.slow),
        {**WITH_STATISTICS, "shard": "parameters", "accumulate": 2},
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
        pytest.param({"shard": "optimizer"}, [(6, 4, 4), (9, 4, 3), (12, 4, 1)], marks=pytest.mark.slow),
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


@pytest.mark.parametrize("options", [{}, {"pp": 2, "microbatches": 2}], ids=["ddp", "pipeline"])
def test_a_run_may_begin_with_fewer_ranks_than_shares(pool, tmp_path, options):
    ranks = "dp" if options else "ranks"
    few = configuration(tmp_path / "few", **{"ranks": 1, ranks: 1, "shares": 3}, steps=3, **options)
    many = configuration(tmp_path / "many", **{"ranks": 1, ranks: 3}, steps=3, **options)
    for config in (few, many):
        pool.run(weights, config.world_size, config, None, timeout=50)
    assert losses(tmp_path / "few") == pytest.approx(losses(tmp_path / "many"), rel=0, abs=1e-12)


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


# ── pipelines: a share belongs to a replica, and each layer draws for itself ─────────────────────────────────────────


class Drawing(nn.Module):
    """Draws from all three generators."""

    def forward(self, inputs):
        if not self.training:
            return inputs
        return inputs * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand()) + 0.1 * torch.rand_like(inputs)


def deep_with_dropout():
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Linear(64, 20), nn.Dropout(0.4), nn.ReLU(), nn.Linear(20, 16), Drawing(), nn.Dropout(0.3)),
        *(nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 10)),
    )


def in_pipelines(out, **changes):
    settings = {"model": f"{__name__}:deep_with_dropout", "ranks": 1, "dp": 3, "pp": 2, "microbatches": 3, "steps": 9}
    return configuration(out, **settings | {"batch": 50, "validate_every": 3} | changes)


def goes_on(pool, tmp_path, options, rounds):
    """A run that is killed again and again, and goes on in other layouts, beside one that is left alone.

    Rounds are: until which step, what is asked for instead, and if not all ranks that this needs can be had, how many.
    """
    first = in_pipelines(tmp_path / "whole", **options)
    whole = pool.run(weights, first.world_size, first, None, timeout=110)[0]
    out = tmp_path / "run"
    for steps, changes, *ranks in rounds:
        config = in_pipelines(out, save_every=1, **options | changes)
        ended = pool.run(until, *(ranks or [config.world_size]), config, "auto", steps, timeout=110)[0]
    assert whole.keys() == ended.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-12, msg=lambda text, name=name: name + text)
    for measured in ("loss", "validation_loss"):
        assert losses(out, measured) == pytest.approx(losses(tmp_path / "whole", measured), rel=0, abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"recompute": True, "schedule": "zb-h1", "optimizer": "sgd", "momentum": 0.9, "clip": 0.5},
        pytest.param({"schedule": "interleaved", "stages_per_rank": 2}, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "zb-h1-recompute", "interleaved"],
)
def test_replicas_of_a_pipeline_come_and_go(pool, tmp_path, options):
    """3 replicas, 2, 1, then 3 again; batches of 50 are shared out as 17, 17 and 16."""
    goes_on(pool, tmp_path, options, [(3, {}), (5, {"dp": 2}), (7, {"dp": 1}), (9, {})])


def test_a_pipeline_may_be_cut_elsewhere(pool, tmp_path):
    """What a layer draws depends neither on its stage nor on the order of the micro-batches."""
    other = {"schedule": "zbv", "balance": "3,2,4,2"}
    deeper = {"dp": 1, "pp": 3, "schedule": "gpipe", "recompute": True}
    goes_on(pool, tmp_path, {}, [(2, {}), (4, {"dp": 2, **other}), (6, deeper), (8, {"dp": 3, "pp": 1}), (9, {})])


def test_the_same_command_goes_on_with_as_many_pipelines_as_there_are(pool, tmp_path):
    """--min-ranks: of 6 ranks 4 can be started, then 2. The optimizer's state is in parts as long as there are two."""
    goes_on(pool, tmp_path, {"shard": "optimizer"}, [(3, {}), (6, {}, 4), (9, {}, 2)])


# ── small, uneven, and of other shapes ──────────────────────────────────────────────────────────────────────────────


class Sentences:
    """23 rows of tokens of different lengths, some of whose tokens change at random when they are read."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 2 + index % 5) % 11
        noise = int(torch.randint(11, ())) + random.randrange(11)
        return (tokens + (noise if index % 3 else 0)) % 11, tokens % 4


def padded(samples):
    """A batch is as long as the longest of its samples; what is padded counts nothing."""
    inputs, targets = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-100)


def over_tokens(outputs, targets):
    total = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return total, (targets >= 0).sum()


def of_tokens():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)
    )


SENTENCES = {
    **{"model": f"{__name__}:of_tokens", "data": f"{__name__}:Sentences", "collate": f"{__name__}:padded"},
    **{"loss": f"{__name__}:over_tokens", "batch": 7, "microbatches": 2, "validate_every": None},
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_shares_of_other_lengths_and_without_samples(pool, tmp_path, workers):
    """An epoch is 7, 7, 7 and 2 samples: one of the three shares of the last batch is empty."""
    options = {**SENTENCES, "workers": workers}
    goes_on(pool, tmp_path, options, [(3, {}), (5, {"dp": 2}), (8, {"dp": 1}), (9, {})])


def test_a_program_of_ones_own_is_repeated(pool, tmp_path):
    (tmp_path / "mine.txt").write_text(
        "program mine\ngoal: training step of 2 stages, 2 micro-batches\n"
        "rank 0: F0.1 F0.0 B0.1 B0.0\nrank 1: F1.1 B1.1 F1.0 B1.0\n"
    )
    options = {"schedule": str(tmp_path / "mine.txt"), "microbatches": None, "batch": 20}
    goes_on(pool, tmp_path, options, [(3, {}), (6, {"dp": 2}), (9, {"dp": 1})])


@pytest.mark.parametrize(
    "precision", [pytest.param("float32", marks=pytest.mark.slow), "bf16", pytest.param("fp16", marks=pytest.mark.slow)]
)
def test_the_same_replicas_go_on_bit_for_bit(pool, tmp_path, precision):
    """Also where they are fewer than shares."""
    config = in_pipelines(tmp_path / "whole", dp=2, shares=3, precision=precision)
    whole = pool.run(weights, 4, config, None, timeout=110)[0]
    for steps in (2, 5, 9):
        config = in_pipelines(tmp_path / "run", dp=2, shares=3, precision=precision, save_every=1)
        ended = pool.run(until, 4, config, "auto", steps, timeout=110)[0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert all(torch.equal(ended[name], tensor) for name, tensor in whole.items())


def remark(comms, config):
    """What is said when a run of two shares goes on so."""
    training = build(config.resolved().with_shares(2), comms)
    return training.load(checkpoint.latest(Path(config.out) / "checkpoints", comms)[0])


def test_a_line_says_when_random_numbers_cannot_be_kept(pool, tmp_path):
    config = in_pipelines(tmp_path / "run", dp=2, steps=1)
    pool.run(train, config.world_size, config, None, True, timeout=110)

    def on_with(**changes):
        config = in_pipelines(tmp_path / "run", **changes)
        return pool.run(remark, config.world_size, config, timeout=110)[0] or ""

    assert on_with(dp=2) == on_with(dp=1, pp=3, schedule="gpipe") == ""
    end = "drawing for each layer, and there were 2 shares of 3 micro-batches, drawing for each layer"
    assert on_with(dp=1, microbatches=4) == (
        "note: random numbers are not those of the undisturbed run from here on, which matters with dropout: "
        f"there are 2 shares of 4 micro-batches, {end}"
    )
    assert on_with(dp=3).endswith(f"there are 3 shares of 3 micro-batches, {end}")
    none = dict.fromkeys(("dp", "pp", "microbatches"))
    assert "there are 2 shares of 1 micro-batch, drawing in a row" in on_with(**none, ranks=2)


def test_the_same_command_may_ask_for_more_pipelines_than_shares(pool, tmp_path):
    for steps, dp in ((1, 1), (2, 2)):
        config = in_pipelines(tmp_path / "run", dp=dp, steps=steps)
        pool.run(train, config.world_size, config, "auto", True, timeout=110)
    assert len(losses(tmp_path / "run")) == 2
    refused = in_pipelines(tmp_path / "run", dp=2, steps=3, shares=4)
    with pytest.raises(mp.errors.RankFailed, match="--shares 4 would change the run"):
        pool.run(train, refused.world_size, refused, "auto", True, timeout=110)


# ── every combination ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev"])
def test_four_pipelines_then_three_then_one_then_four(pool, tmp_path, schedule, recompute):
    options = {"dp": 4, "schedule": schedule, "recompute": recompute, "steps": 12}
    goes_on(pool, tmp_path, options, [(4, {}), (6, {"dp": 3}), (9, {"dp": 1}), (12, {})])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [{"shard": "optimizer"}, {"optimizer": "sgd", "momentum": 0.9, "clip": 0.3}, {"pp": 3}, SENTENCES | {"batch": 9}],
    ids=["shard", "clip", "pp-3", "sentences"],
)
def test_four_pipelines_come_and_go(pool, tmp_path, options):
    whole = {"shard": "none"} if "shard" in options else {}
    goes_on(
        pool, tmp_path, {"dp": 4, "steps": 12} | options, [(4, {}), (6, {"dp": 3}), (9, {"dp": 1, **whole}), (12, {})]
    )
