"""Runs with pipelines: as good as one process, and free to go on in another layout."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.pairwise import every
from torch import nn

import microparallel as mp
from microparallel.train import checkpoint
from microparallel.train.config import TrainConfig, read_config
from microparallel.train.loop import train_on_rank as train

STEPS = 6


def configuration(out, **changes):
    settings = {
        **{"out": str(out), "dim": 16, "depth": 6, "batch": 300, "steps": STEPS, "validate_every": 3},
        **{"schedule_lr": "constant", "precision": "float64"},
    }
    return TrainConfig(**settings | changes).resolved()


def metrics(folder, name):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def run(pool, config, resume=None):
    return pool.run(train, config.ranks, config, resume, True, timeout=50)[0]


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """One process, from the first step to the last; an epoch's last batch is smaller than the others."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    return out, run(pool, configuration(out))


@pytest.mark.parametrize(
    "layout",
    every(
        2,
        [
            {"pp": 3, "schedule": "zb-h1", "microbatches": 5},
            {"pp": 2},
            {"dp": 2, "pp": 2, "microbatches": 4, "recompute": True},
            {"dp": 2, "pp": 1, "schedule": "gpipe"},
            {"pp": 2, "schedule": "interleaved", "stages_per_rank": 3, "balance": "time"},
            {"pp": 2, "schedule": "zbv", "balance": "1,2,1,2"},
        ],
    ),
    ids=lambda layout: " ".join(f"{name}={value}" for name, value in layout.items()),
)
def test_a_pipeline_learns_what_one_process_learns(pool, alone, tmp_path, layout):
    out, reference = alone
    summary = run(pool, configuration(tmp_path / "run", **layout))
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(out, "loss"), rel=1e-11)
    for name in ("validation_loss", "validation_accuracy"):
        assert metrics(tmp_path / "run", name) == pytest.approx(metrics(out, name), rel=1e-11)
    assert summary["parameters"] == reference["parameters"] and summary["replicas_identical"]
    assert summary["strategy"] == "pipeline" and summary["pp"] == layout["pp"]
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}")
    whole = checkpoint.load(out / "checkpoints" / f"step-{STEPS:08d}")
    assert saved.model.keys() == whole.model.keys()
    for name, tensor in whole.model.items():
        torch.testing.assert_close(saved.model[name], tensor, rtol=1e-10, atol=1e-12)
    assert saved.optimizer_state["state"].keys() == whole.optimizer_state["state"].keys()


OWN = """
program mine
goal: training step of 2 stages, 3 micro-batches
rank 0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
"""


@pytest.fixture
def own_schedule(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(OWN)
    return file


def test_a_schedule_of_ones_own_learns_the_same(pool, alone, tmp_path, own_schedule):
    out, _ = alone
    config = configuration(tmp_path / "run", pp=2, schedule=str(own_schedule))
    assert config.microbatches == 3
    run(pool, config)
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(out, "loss"), rel=1e-11)
    again = TrainConfig(**read_config(tmp_path / "run" / "config.toml"))
    assert again.schedule == str(own_schedule)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "DualPipeV"])
def test_the_letter_case_of_a_schedule_does_not_matter(name):
    assert TrainConfig(pp=2, schedule=name).resolved().schedule == name.lower()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 3}, "its program is for 2 ranks, and the pipeline has 3; try --pp 2"),
        ({"pp": 2, "microbatches": 4}, "has 3 micro-batches, and --microbatches is 4; leave that out"),
        ({"pp": 2, "batch": 2}, "has 3 micro-batches, and a pipeline has only 2 samples; try a larger --batch"),
        ({}, "is for pipelines; add --pp 2"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_in_one_line(own_schedule, settings, message):
    with pytest.raises(mp.errors.ConfigError) as refused:
        TrainConfig(schedule=str(own_schedule), **settings)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("program mine\ngoal: all-reduce of 2 slices\nrank 0:\nrank 1:\n", "a pipeline runs a training step"),
        ("nonsense", "microparallel verify"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path, text, message):
    (tmp_path / "mine.txt").write_text(text)
    with pytest.raises(mp.errors.ConfigError, match=message):
        TrainConfig(pp=2, schedule=str(tmp_path / "mine.txt"))


def test_a_run_goes_on_in_any_layout(pool, alone, tmp_path):
    """Two pipelines, then data parallelism, then one pipeline with another schedule, then one process."""
    out, _ = alone
    folder = tmp_path / "run"
    run(pool, configuration(folder, steps=2, dp=2, pp=2))
    run(pool, configuration(folder, steps=3, ranks=3), resume=folder)
    run(pool, configuration(folder, steps=5, pp=3, schedule="zb-h2"), resume=folder)
    run(pool, configuration(folder), resume=folder)
    assert metrics(folder, "loss") == pytest.approx(metrics(out, "loss"), rel=1e-11)


def test_resuming_repeats_the_losses_bit_for_bit(pool, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    layout = {"dp": 2, "pp": 2, "precision": "float32", "model": f"{__name__}:with_dropout", "loss": "cross-entropy"}
    sizes = {"dim": None, "depth": None, "data": "digits"}
    run(pool, configuration(whole, **layout | sizes))
    run(pool, configuration(parts, **layout | sizes | {"steps": 4}))
    run(pool, configuration(parts, **layout | sizes), resume=parts)
    assert metrics(parts, "loss") == metrics(whole, "loss")


def with_dropout():
    return nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 10)
    )


def test_tied_weights_have_one_optimizer_state(pool, tmp_path):
    settings = {"model": f"{__name__}:tied", "data": "text", "loss": "cross-entropy", "batch": 8, "steps": 3}
    sizes = {"dim": None, "depth": None, "context": 8}
    alone = run(pool, configuration(tmp_path / "alone", **settings | sizes))
    together = run(pool, configuration(tmp_path / "together", **settings | sizes, pp=2, dp=2))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-11)
    assert together["parameters"] == alone["parameters"]
    states = [checkpoint.load(tmp_path / run / "checkpoints" / "step-00000003") for run in ("alone", "together")]
    assert states[0].optimizer_state["state"].keys() == states[1].optimizer_state["state"].keys()


def tied():
    return mp.models.GPT(context=8, dim=8, heads=2, depth=2, tied=True)


def test_a_model_that_computes_its_own_loss_is_refused(pool, tmp_path):
    config = configuration(
        tmp_path / "run", model=f"{__name__}:OwnLoss", data="digits", pp=2, dim=None, depth=None, steps=1
    )
    with pytest.raises(mp.errors.RankFailed, match="--loss cross-entropy"):
        run(pool, config)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 8), nn.Linear(8, 10)])

    def pipeline_layers(self):
        return self.layers

    def forward(self, inputs, targets):
        for layer in self.layers:
            inputs = layer(inputs)
        return nn.functional.cross_entropy(inputs, targets)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "gpipe"}, "--schedule gpipe is for pipelines; add --pp 2"),
        ({"pp": 2, "schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"pp": 2, "ranks": 3}, "--ranks 3 cannot be shared out among pipelines of --pp 2; try --ranks 2"),
        ({"dp": 2, "pp": 2, "ranks": 3}, "--dp 2 times --pp 2 is 4, and there are 3 ranks"),
        ({"pp": 2, "strategy": "ddp"}, "--pp 2 makes a pipeline, and --strategy is ddp"),
        ({"pp": 2, "batch": 8, "microbatches": 9}, "try --microbatches 8, or --batch 9"),
        ({"pp": 2, "dp": 4, "batch": 3, "ranks": 1}, "--batch 3 is smaller than --dp 4"),
        ({"pp": 2, "stages_per_rank": 2}, "--stages-per-rank 2 is for --schedule interleaved"),
        ({"pp": 2, "balance": "3;4"}, "--balance 3;4: choose parameters or time"),
        ({"pp": 2, "accumulate": 4}, "try --microbatches"),
        ({"pp": 0}, "--pp 0: must be at least 1"),
        ({"pp": 2, "dp": 2, "min_ranks": 3}, "--min-ranks 3: a pipeline needs all of its 2 ranks; try --min-ranks 2"),
        ({"pp": 2, "dp": 2, "min_ranks": 2, "compress": "topk"}, "--compress topk needs two replicas that send each"),
        ({"ranks": 3, "min_ranks": 1, "compress": "topk"}, "send each other gradients; try --min-ranks 2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(settings, message):
    with pytest.raises(mp.errors.ConfigError, match="(?s).*" + message.replace("(", r"\(")):
        TrainConfig(**settings)


def test_a_loss_that_is_not_finite_names_the_rank_and_its_parameters(pool, tmp_path):
    config = configuration(tmp_path / "run", pp=2, lr=1e300, optimizer="sgd", steps=3)
    with pytest.raises(mp.errors.RankFailed, match=r"the loss of step \d is (nan|inf)") as failed:
        run(pool, config)
    assert re.search(r"rank 1: gradients that are not finite: \S+weight", str(failed.value))


def test_the_usual_micro_batches_go_by_the_shares_of_a_run():
    begun = TrainConfig(pp=2, dp=4, batch=8).resolved().with_shares()
    assert (begun.shares, begun.microbatches) == (4, 2)
    fewer = TrainConfig(pp=2, dp=1, batch=8).resolved()
    assert fewer.microbatches == 8 and fewer.with_shares(4).microbatches == 2  # the same command, with one pipeline
    assert TrainConfig(pp=2, dp=1, batch=8, microbatches=5).resolved().with_shares(4).microbatches == 5
    assert TrainConfig(pp=2, dp=1, batch=8, shares=4).resolved().microbatches == 2


def test_layouts():
    assert TrainConfig(dp=2, pp=2).resolved().ranks == 4
    assert TrainConfig(ranks=6, pp=2).resolved().dp == 3
    assert TrainConfig(ranks=4, strategy="pipeline").resolved().pp == 4
    assert TrainConfig(dp=3).resolved().strategy == "ddp"
    resolved = TrainConfig(pp=2, batch=5).resolved()
    assert (resolved.schedule, resolved.microbatches, resolved.balance) == ("1f1b", 5, "parameters")
