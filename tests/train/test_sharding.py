"""`--shard`: each rank keeps its part of optimizer and gradients, and learns what one process does."""

import functools
import json
from pathlib import Path

import pytest
import torch
from tests.pairwise import sampled
from tests.test_what_runs_is_what_is_drawn import differences
from torch import nn

import microparallel as mp
from microparallel.comms.record import Recorder
from microparallel.data_parallel.sharding import GradientInParts
from microparallel.errors import ConfigError
from microparallel.train.build import build
from microparallel.train.config import SHARDED, TrainConfig
from microparallel.train.loop import train_on_rank as train

STEPS = 7  # over the end of an epoch


def configuration(**changes):
    """1438 samples in batches of 479: the last batch of each epoch has a single sample."""
    settings = {
        **{"batch": 479, "steps": STEPS, "dtype": "float64", "lr": 0.01, "schedule_lr": "constant"},
        **{"validate_every": 100, **({} if "model" in changes else {"dim": 16, "depth": 3})},
    }
    return TrainConfig(**settings | changes).resolved()


def layers():
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 10))


def without_biases():
    """Muon takes matrices only."""
    return nn.Sequential(nn.Linear(64, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False))


def in_two_groups(model, lr):
    biases = [one for name, one in model.named_parameters() if name.endswith("bias")]
    others = [one for name, one in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": lr / 2}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


class Own(torch.optim.SGD):
    """Not known to update each element by itself."""


def of_my_own(model, lr):
    return Own(model.parameters(), lr=lr)


def sum_over_some(outputs, targets):
    """A sum over some samples, and how many these are; a batch of one sample has it."""
    counted = targets > (2 if len(targets) > 1 else -1)
    return nn.functional.cross_entropy(outputs[counted], targets[counted], reduction="sum"), counted.sum()


def learn(comms, config):
    training = build(config, comms)
    losses = [training.step() for _ in range(STEPS)]
    return losses, torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


@pytest.fixture(scope="module")
def learn_alone(pool):
    """What one process learns; each configuration is run once."""
    return functools.cache(lambda config: pool.run(learn, 1, config, timeout=50)[0])


JOBS = {
    "adamw": {},
    "clipped": {"optimizer": "sgd", "momentum": 0.9, "clip": 0.05},
    "sum and count": {"loss": f"{__name__}:sum_over_some"},
    "own groups, clipped": {"optimizer": f"{__name__}:in_two_groups", "clip": 0.1, "warmup": 2},
    "whole parameters": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon", "model": f"{__name__}:without_biases", "data": "digits"},
}
CASES = sampled([*JOBS], SHARDED, [1, 3], [2, 3, 4], ["shm", "gloo"])


@pytest.mark.parametrize(("job", "shard", "accumulate", "ranks", "transport"), CASES)
def test_any_number_of_ranks_learns_what_one_process_learns(
    pool, learn_alone, job, shard, accumulate, ranks, transport
):
    """Also in steps in which ranks have no sample, or fewer micro-batches than others."""
    wanted, wanted_weights = learn_alone(configuration(**JOBS[job]))
    config = configuration(shard=shard, accumulate=accumulate, ranks=ranks, **JOBS[job])
    results = pool.run(learn, ranks, config, transport=transport, timeout=50)
    for losses, weights in results:
        assert losses == pytest.approx(wanted, rel=1e-12, abs=0)
        assert torch.equal(weights, results[0][1])  # bit-identical on every rank
        torch.testing.assert_close(weights, wanted_weights, rtol=0, atol=1e-11)


@pytest.mark.parametrize("job", ["adamw", "clipped", "own groups, clipped"])
def test_replicas_of_a_pipeline_share_the_optimizer(pool, learn_alone, job):
    wanted, _ = learn_alone(configuration(**JOBS[job]))
    config = configuration(shard="optimizer", dp=2, pp=2, microbatches=3, **JOBS[job])
    for losses, _ in pool.run(learn, 4, config, timeout=50):
        assert losses == pytest.approx(wanted, rel=1e-12, abs=0)


def what_is_kept(comms, shard):
    config = configuration(shard=shard, ranks=comms.world_size, accumulate=2)
    training = build(config, comms)
    training.step()
    state = training.optimizer.state_parts()["state"]
    kept = sum(part.tensor.numel() for one in state.values() for key, part in one.items() if key == "exp_avg")
    in_parts = all(isinstance(one.grad, GradientInParts) for one in training.model.parameters())
    recorder = Recorder(comms)
    recorder.start()
    training.step()
    recorder.stop()
    trace = recorder.gather({})
    scattered = len([event for event in trace.by_rank[comms.rank] if str(event.op).startswith("%")])
    return kept, training.parameters, in_parts, scattered


@pytest.mark.parametrize(("shard", "times"), [("optimizer", 1), ("gradients", 2)])
def test_each_rank_keeps_its_part_and_gradients_leave_after_each_micro_batch(pool, shard, times):
    results = pool.run(what_is_kept, 2, shard, timeout=50)
    assert sum(kept for kept, *_ in results) == results[0][1]
    assert max(kept for kept, *_ in results) < 0.6 * results[0][1]
    assert [one[2:] for one in results] == [(True, times)] * 2


# ── runs that go on ─────────────────────────────────────────────────────────────────────────────────────────────────


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def losses_of(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("shard", SHARDED)
def test_a_run_goes_on_bit_for_bit(pool, tmp_path, shard):
    settings = {"shard": shard, "ranks": 2, "dtype": "float32", "model": f"{__name__}:layers", "data": "digits"}
    settings |= {"clip": 0.5, "accumulate": 2}
    run(pool, configuration(out=str(tmp_path / "whole"), **settings))
    run(pool, configuration(out=str(tmp_path / "parts"), **settings | {"steps": 3}))
    summary = run(pool, configuration(out=str(tmp_path / "parts"), **settings), tmp_path / "parts")
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert summary["shard"] == shard and summary["replicas_identical"]


def test_a_run_goes_on_with_other_ranks_and_other_parts(pool, tmp_path):
    out = str(tmp_path / "run")
    run(pool, configuration(out=str(tmp_path / "alone")))
    for steps, layout in enumerate(
        [
            {"ranks": 1},
            {"ranks": 2, "shard": "optimizer"},
            {"ranks": 3, "shard": "gradients"},
            {"ranks": 1, "shard": "gradients", "strategy": "ddp"},
            {"dp": 2, "pp": 2, "shard": "optimizer"},
            {"ranks": 4, "shard": "optimizer"},
        ],
        start=2,
    ):
        run(pool, configuration(out=out, **layout | {"steps": steps}), Path(out) if steps > 2 else None)
    assert losses_of(out) == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-12, abs=0)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED = [
    ({"shard": "parameters", "ranks": 2}, "--shard parameters: parameters cannot be kept in parts yet; try --shard gr"),
    ({"shard": "optimiser", "ranks": 2}, "--shard optimiser: did you mean 'optimizer'"),
    ({"shard": "optimizer"}, "--shard optimizer: one rank has no other rank to share with; try --ranks 2"),
    ({"shard": "optimizer", "ranks": 2, "strategy": "naive"}, "is for --strategy ddp, and it is naive"),
    ({"shard": "optimizer", "ranks": 2, "strategy": "torch-ddp"}, "is for --strategy ddp, and it is torch-ddp"),
    ({"shard": "gradients", "ranks": 2, "average_every": 3}, "with --average-every 3 every rank has .* of its own"),
    ({"shard": "gradients", "dp": 2, "pp": 2}, "--shard gradients: a pipeline adds up .* try --shard optimizer"),
    ({"shard": "optimizer", "pp": 2}, "--shard optimizer: replicas of a pipeline share it, and --dp is 1; try --dp 2"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=str)
def test_what_cannot_be_kept_in_parts_is_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words) as caught:
        TrainConfig(**settings)
    assert "\n" not in str(caught.value)


def test_none_is_no_sharding():
    assert configuration(shard="none").shard is None
    assert configuration(shard="optimizer", ranks=2).strategy == "ddp"


def refused_optimizer(comms):
    with pytest.raises(ConfigError) as caught:
        build(configuration(shard="optimizer", ranks=2, optimizer=f"{__name__}:of_my_own"), comms)
    return str(caught.value)


def test_an_optimizer_of_ones_own_class_is_refused_by_name(pool):
    for words in pool.run(refused_optimizer, 2):
        assert f"--optimizer {__name__}:of_my_own returned Own, which is none of torch's own" in words


# ── accumulated_step ────────────────────────────────────────────────────────────────────────────────────────────────


def accumulated(comms, shares, counted):
    """What is summed, and what should have been, after micro-batches of these sizes on each rank."""
    torch.manual_seed(0)
    whole = nn.Linear(3, 2).double()
    model = mp.DataParallel(nn.Linear(3, 2).double(), comms, shard="gradients")
    model.module.load_state_dict(whole.state_dict())
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, lr=1.0)
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = inputs[:, :2].sum(1) > 0
    targets = targets.long()
    loss_fn = of_class_one if counted else nn.functional.cross_entropy
    start = sum(map(sum, shares[: comms.rank]))
    mine = [part[start : start + sum(shares[comms.rank])].split(shares[comms.rank]) for part in (inputs, targets)]
    program = model.program([len([one for one in each if one]) for each in shares], samples=True, loss=True)
    with mp.record(comms) as recorder:
        loss = mp.course.accumulated_step(model, list(zip(*mine, strict=True)), loss_fn)
        optimizer.step()
    wanted = loss_fn(whole(inputs), targets)
    wanted = wanted[0] / wanted[1] if counted else wanted
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.data, theirs.data - theirs.grad, rtol=0, atol=1e-12)
    return differences(recorder.trace, program)


def of_class_one(outputs, targets):
    counted = targets > 0
    return nn.functional.cross_entropy(outputs[counted], targets[counted], reduction="sum"), counted.sum()


@pytest.mark.parametrize("counted", [False, True], ids=["mean", "sum and count"])
@pytest.mark.parametrize("shares", [[[2, 2, 2], [2, 2, 2]], [[5], [1, 1, 2], [3]], [[4], [0], [7, 1]]], ids=str)
def test_a_rank_without_more_micro_batches_takes_part_in_the_sums_of_the_others(pool, shares, counted):
    for wrong in pool.run(accumulated, len(shares), shares, counted, transport="shm", timeout=50):
        assert not wrong
