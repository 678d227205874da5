"""`train --compress`: it learns, goes on bit for bit, with other ranks too, and says what it cannot do."""

import json
from pathlib import Path

import pytest
import torch

from microparallel.errors import ConfigError
from microparallel.train import checkpoint
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train


def configuration(**changes):
    settings = {"batch": 96, "steps": 8, "lr": 0.01, "schedule_lr": "constant", "validate_every": 100}
    return TrainConfig(**settings | {"dim": 40, "depth": 3, "ranks": 2} | changes).resolved()


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def losses_of(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        *((text, {"ranks": 2}) for text in ("topk:0.05", "randomk:0.1", "powersgd:2", "int8", "topk:0.1+bf16")),
        *((text, {"dp": 2, "pp": 2, "ranks": 1, "microbatches": 2}) for text in ("topk:0.05", "powersgd:2")),
    ],
)
def test_a_run_goes_on_bit_for_bit(any_pool, tmp_path, text, layout):
    settings = {"compress": text, "compress_warmup": 2, "clip": 0.5, **layout}
    run(any_pool, configuration(out=str(tmp_path / "whole"), **settings))
    run(any_pool, configuration(out=str(tmp_path / "parts"), steps=5, **settings))
    summary = run(any_pool, configuration(out=str(tmp_path / "parts"), **settings), tmp_path / "parts")
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert summary["compress"] == text and summary["replicas_identical"]


def residuals_of(folder):
    """The sum of what all ranks have not sent."""
    found, _ = checkpoint.latest(Path(folder) / "checkpoints")
    saved = found.stored_by_rank["compression"]["residuals"]
    assert sorted(saved) == [f"replica_{number}" for number in range(len(saved))]
    ranks = [{name: stored.whole() for name, stored in of_rank.items()} for of_rank in saved.values()]
    return len(ranks), {name: sum(rank[name] for rank in ranks) for name in ranks[0]}


IN_STAGES = {"dp": 2, "pp": 2, "ranks": 1, "microbatches": 2}


@pytest.mark.parametrize(
    ("first", "then"), [({"ranks": 3}, {"ranks": 2}), (IN_STAGES, {"ranks": 3}), ({"ranks": 3}, IN_STAGES)]
)
def test_a_run_goes_on_with_other_ranks_and_keeps_what_was_not_sent(pool, tmp_path, first, then):
    out = str(tmp_path / "run")
    run(pool, configuration(out=out, compress="topk:0.05", steps=3, **first))
    count, before = residuals_of(out)
    assert count == first.get("dp", first["ranks"]) and all(total.any() for total in before.values())
    later = configuration(out=out, compress="topk:0.05", steps=5, **then)

    def unchanged(comms):
        from microparallel.train.build import build

        training = build(later, comms)
        training.load(checkpoint.latest(Path(out) / "checkpoints", comms)[0])
        return training.held.residuals()["compression"]

    kept = pool.run(unchanged, later.world_size, timeout=50)
    residuals = [of_replica for rank in kept for of_replica in rank["residuals"].values()]
    for name, total in before.items():
        torch.testing.assert_close(sum(one[name] for one in residuals if name in one), total)
    assert {rank["passes"] for rank in kept} == {3}
    run(pool, later, Path(out))
    assert residuals_of(out)[0] == then.get("dp", then["ranks"]) and len(losses_of(out)) == 5


def test_activations_of_a_pipeline(pool, tmp_path):
    """The loss is close to that of stages that send all bits, and not the same."""
    found = {}
    for method in (None, "bf16", "int8"):
        out = str(tmp_path / str(method))
        run(pool, configuration(out=out, ranks=1, pp=2, microbatches=2, compress_activations=method))
        found[method] = losses_of(out)[-1]
    assert found["bf16"] == pytest.approx(found[None], rel=0.01) and found["bf16"] != found[None]
    assert found["int8"] == pytest.approx(found[None], rel=0.05) and found["int8"] != found[None]


def test_feedback_makes_a_difference(pool, tmp_path):
    """Every hundredth number: what is left out is lost without feedback, and learnt later with it."""
    losses = {}
    for name, changes in {"plain": {}, "with": {"compress": "topk:0.01"}, "without": {"compress": "topk:0.01"}}.items():
        out = str(tmp_path / name)
        changes |= {"no_feedback": True} if name == "without" else {}
        run(pool, configuration(out=out, steps=30, optimizer="sgd", lr=0.3, **changes))
        losses[name] = losses_of(out)[-1]
    assert losses["plain"] < losses["with"] < losses["without"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress": "topkk"}, "--compress topkk: there is no compression 'topkk'; did you mean 'topk'"),
        ({"compress": "topk:2"}, "--compress topk:2: compression 'topk:2': topk keeps a fraction"),
        ({"compress": "topk", "shard": "optimizer"}, "--compress topk: a compressed sum .* --shard optimizer"),
        ({"compress": "topk", "ranks": 1}, "--compress topk: .* there is one rank; try --ranks 2"),
        ({"compress": "topk", "strategy": "naive"}, "--compress topk is for --strategy ddp, and it is naive"),
        ({"compress": "topk", "average_every": 2}, "no gradients are sent"),
        ({"compress": "topk", "pp": 2}, "--dp is 1; try --dp 2"),
        ({"no_feedback": True}, "--no-feedback is for --compress; add that"),
        ({"compress_activations": "topk", "pp": 2}, "a stage needs every number of its input"),
        ({"compress_activations": "bf16"}, "--compress-activations bf16 is for pipelines; add --pp 2"),
        ({"compress_warmup": 3}, "--compress-warmup 3 is for --compress; add that"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        TrainConfig(**{"ranks": 2} | changes)
    assert "\n" not in str(error.value)


def test_none_is_nothing():
    assert TrainConfig(ranks=2, compress="none").resolved().compress is None
