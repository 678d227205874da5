"""`--shard`: each rank keeps its part of optimizer, gradients, parameters, and learns what one process does."""

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.pairwise import sampled
from tests.test_what_runs_is_what_is_drawn import differences
from torch import nn

import microparallel as mp
from microparallel.comms.record import Recorder
from microparallel.data_parallel.deferred import is_deferred
from microparallel.data_parallel.sharding import GradientInParts
from microparallel.errors import ConfigError
from microparallel.train import build as building
from microparallel.train import checkpoint
from microparallel.train.build import build, check
from microparallel.train.config import SHARDED, TrainConfig
from microparallel.train.data import digits
from microparallel.train.fully_sharded import FullyShardedTraining
from microparallel.train.loop import train_on_rank as train

STEPS = 7  # over the end of an epoch


def configuration(**changes):
    """1438 samples in batches of 479: the last batch of each epoch has a single sample."""
    settings = {
        **{"batch": 479, "steps": STEPS, "precision": "float64", "lr": 0.01, "schedule_lr": "constant"},
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
    return losses, weights_of(training)


def weights_of(training):
    """All parameters, whole; every rank calls this."""
    if isinstance(training, FullyShardedTraining):
        state = training.sharded.full_state_dict()
        return torch.cat([state[name].flatten() for name, _ in training.model.named_parameters()])
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


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
WHOLE = ("whole parameters", "muon")  # these optimizers look at whole parameters


def is_possible(job, shard, *_):
    return shard != "parameters" or job not in WHOLE


CASES = sampled([*JOBS], SHARDED, [1, 3], [2, 3, 4], ["shm", "gloo"], possible=is_possible)


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


OPTIONS = sampled(["adamw", "sum and count", "clipped"], [0, 2], [None, True], [(2, 1), (4, 2), (2, 2), (1, 1)], [1, 3])


@pytest.mark.parametrize(("job", "prefetch", "keep", "ranks", "accumulate"), OPTIONS)
def test_parameters_may_be_gathered_earlier_or_kept_or_in_groups(
    pool, learn_alone, job, prefetch, keep, ranks, accumulate
):
    wanted, wanted_weights = learn_alone(configuration(**JOBS[job]))
    ranks, replicas = ranks
    parts = {"shard": "parameters", "prefetch": prefetch, "keep_parameters": keep, "replicas": replicas}
    config = configuration(ranks=ranks, strategy="ddp", accumulate=accumulate, **parts, **JOBS[job])
    for losses, weights in pool.run(learn, ranks, config, timeout=50):
        assert losses == pytest.approx(wanted, rel=1e-12, abs=0)
        torch.testing.assert_close(weights, wanted_weights, rtol=0, atol=1e-11)


def is_built_without_memory(comms, config):
    real, found = building.ShardedModelWithLoss, []

    def watched(with_loss, *arguments, **named):
        found.append(is_deferred(with_loss.model))
        return real(with_loss, *arguments, **named)

    building.ShardedModelWithLoss = watched
    try:
        build(config, comms)
    finally:
        building.ShardedModelWithLoss = real
    return found


def test_a_model_of_ours_is_built_in_parts_unless_a_rank_is_slow(pool, learn_alone):
    config = configuration(shard="parameters", ranks=2)
    assert pool.run(is_built_without_memory, 2, config, timeout=50) == [[True]] * 2
    config = configuration(shard="parameters", ranks=2, slow_rank="1=1.5x")
    assert pool.run(is_built_without_memory, 2, config, timeout=50) == [[False]] * 2
    wanted, _ = learn_alone(configuration())
    for losses, _ in pool.run(learn, 2, config, timeout=50):
        assert losses == pytest.approx(wanted, rel=1e-12, abs=0)


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


def held(comms):
    """What a rank keeps of parameters and optimizer between steps; and the most that it has gathered at a time."""
    training = build(configuration(shard="parameters", ranks=comms.world_size, depth=8), comms)
    most = 0
    parts = [part for unit in training.sharded.units for part in unit.parts]

    def look(*_):
        nonlocal most
        most = max(most, sum(part.gathered.numel() for part in parts if part.gathered is not None))

    for module in training.model.modules():
        module.register_forward_hook(look)
    for part in parts:
        for parameter in part.whole:
            parameter.register_post_accumulate_grad_hook(look)
    training.step()
    moments = sum(one["exp_avg"].numel() for one in training.optimizer.state.values())
    return sum(one.numel() for one in training.model.parameters()), moments, most, training.parameters


def test_each_rank_keeps_its_part_of_the_parameters(pool):
    results = pool.run(held, 2, timeout=50)
    total = results[0][3]
    assert sum(kept for kept, *_ in results) == sum(moments for _, moments, *_ in results) == total
    assert all(kept < 0.6 * total and most < 0.7 * total for kept, _, most, _ in results)


# ── runs that go on ─────────────────────────────────────────────────────────────────────────────────────────────────


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def losses_of(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("shard", SHARDED)
def test_a_run_goes_on_bit_for_bit(pool, tmp_path, shard):
    settings = {"shard": shard, "ranks": 2, "precision": "float32", "model": f"{__name__}:layers", "data": "digits"}
    settings |= {"clip": 0.5, "accumulate": 2}
    run(pool, configuration(out=str(tmp_path / "whole"), **settings))
    run(pool, configuration(out=str(tmp_path / "parts"), **settings | {"steps": 3}))
    summary = run(pool, configuration(out=str(tmp_path / "parts"), **settings), tmp_path / "parts")
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    assert summary["shard"] == shard and summary["replicas_identical"]


def test_a_run_goes_on_with_other_ranks_and_other_parts(pool, tmp_path):
    out = str(tmp_path / "run")
    run(pool, configuration(out=str(tmp_path / "alone"), steps=9))
    for steps, layout in enumerate(
        [
            {"ranks": 1},
            {"ranks": 2, "shard": "optimizer"},
            {"ranks": 4, "shard": "parameters", "replicas": 2},
            {"ranks": 3, "shard": "gradients"},
            {"ranks": 1, "shard": "gradients", "strategy": "ddp"},
            {"dp": 2, "pp": 2, "shard": "optimizer"},
            {"ranks": 4, "shard": "optimizer"},
            {"ranks": 3, "shard": "parameters"},
        ],
        start=2,
    ):
        run(pool, configuration(out=out, **layout | {"steps": steps}), Path(out) if steps > 2 else None)
    assert losses_of(out) == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-12, abs=0)


BY_ELEMENT = ["asgd", "adadelta", "adagrad", "adam", "adamax", "nadam", "radam", "rmsprop", "rprop", "sgd"]


def go_on_alone(comms, config, folder):
    """Some steps, a checkpoint; rank 0 goes on with it by itself, and as one that has a part of the parameters."""
    training = build(config, comms)
    losses = [training.step() for _ in range(3)]
    training.save(folder, keep=1)
    alone, found = comms.group([0]), []
    if alone is None:
        return losses, []
    for changes in ({"shard": None}, {}):
        again = build(replace(config, ranks=1, **changes), alone)
        again.load(checkpoint.load(folder / "step-00000003"))
        found.append([*losses, *(again.step() for _ in range(STEPS - 3))])
    return losses, found


@pytest.mark.parametrize("optimizer", BY_ELEMENT)
def test_the_state_of_every_optimizer_that_can_be_cut_is_saved_and_read(pool, learn_alone, tmp_path, optimizer):
    wanted, _ = learn_alone(configuration(optimizer=optimizer, lr=0.002))
    config = configuration(optimizer=optimizer, lr=0.002, shard="parameters", ranks=3)
    _, found = pool.run(go_on_alone, 3, config, tmp_path, timeout=50)[0]
    assert len(found) == 2
    for losses in found:
        assert losses == pytest.approx(wanted, rel=1e-11, abs=0)


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Backwards(nn.Module):
    """Uses its layers in another order than it has them."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(12, 10)
        self.norm = nn.LayerNorm(12)
        self.first = nn.Linear(64, 12)

    def forward(self, inputs):
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def backwards():
    return Backwards()


class Again(Backwards):
    """Uses a layer twice, with others in between."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return self.last(torch.tanh(self.norm(outputs @ self.last.weight)))


def again():
    return Again()


def held_back(samples):
    data = digits()
    inputs, targets = data.training.batch(range(1000))
    few = torch.utils.data.TensorDataset(inputs[:samples], targets[:samples])
    return torch.utils.data.TensorDataset(inputs, targets), few


def one_more_than_a_batch():
    return held_back(257)


def fewer_than_ranks():
    return held_back(2)


def largest_output(outputs, targets):
    return outputs.abs().amax(1).sum(), len(targets)


def measure(comms, config, steps):
    training = build(config, comms)
    losses = [training.step() for _ in range(steps)]
    found = training.validate()
    assert training.validate() == found
    return found.loss, found.accuracy, found.metrics["largest_output"], *losses, training.step()


BACKWARDS = f"{__name__}:backwards"
MEASURED = list(itertools.product(["mlp", BACKWARDS], ["one_more_than_a_batch", "fewer_than_ranks"], [0, 2]))


@pytest.mark.in_turn
@pytest.mark.parametrize(("model", "data", "steps"), MEASURED)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_without_samples_take_part_in_measuring(pool, model, data, steps, transport):
    """The last batch has one sample, or there are fewer samples than ranks; also before the first step."""
    settings = {"data": f"{__name__}:{data}", "model": model, "batch": 50, "metric": f"{__name__}:largest_output"}
    settings |= {"dim": 16, "depth": 3} if model == "mlp" else {}
    [wanted] = pool.run(measure, 1, configuration(**settings), steps, timeout=50)
    config = configuration(shard="parameters", ranks=3, **settings)
    for found in pool.run(measure, 3, config, steps, transport=transport, timeout=50):
        assert found == pytest.approx(wanted, rel=1e-12, abs=0)


def begin_with_few_samples(comms, config):
    training = build(config, comms)
    training.loader.load_state_dict({"epoch": 0, "batch": 3})
    before = torch.get_rng_state()
    losses = [training.step() for _ in range(3)]
    return losses, torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("model", [BACKWARDS, f"{__name__}:again"])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_run_may_go_on_with_a_batch_of_fewer_samples_than_ranks(pool, transport, model):
    """Before the first step no rank knows in which order the others use their units."""
    settings = {"data": f"{__name__}:one_more_than_a_batch", "model": model, "batch": 333}
    [(wanted, _)] = pool.run(begin_with_few_samples, 1, configuration(**settings), timeout=50)
    config = configuration(shard="parameters", ranks=3, **settings)
    for found, nothing_drawn in pool.run(begin_with_few_samples, 3, config, transport=transport, timeout=50):
        assert found == pytest.approx(wanted, rel=1e-12, abs=0) and nothing_drawn


def fails_on_one_rank(outputs, targets):
    if len(targets) == 1:
        raise ValueError("one sample is not enough")
    return 0.0


class FailsForOne(nn.Sequential):
    """Fails in the middle of a forward without gradients, if it is given a single sample."""

    def forward(self, inputs):
        hidden = self[0](inputs)
        if len(inputs) == 1 and not torch.is_grad_enabled():
            raise ValueError("a single sample")
        return self[1](torch.tanh(hidden))


def fails_for_one():
    return FailsForOne(nn.Linear(64, 12), nn.Linear(12, 10))


def measure_and_fail(comms, config):
    training = build(config, comms)
    before = training.step()
    found = training.validate()
    return before, found.loss, found.accuracy is None, sorted(found.failures), training.step()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_fails_on_one_rank_while_measuring_does_not_stop_the_others(pool, transport):
    settings = {"data": f"{__name__}:one_more_than_a_batch", "batch": 50, "ranks": 3, "shard": "parameters"}
    own = {"model": BACKWARDS, "metric": f"{__name__}:fails_on_one_rank"}
    results = pool.run(measure_and_fail, 3, configuration(**settings, **own), transport=transport, timeout=50)
    for before, loss, no_accuracy, failures, after in results:
        assert (failures, no_accuracy) == (["fails_on_one_rank"], False) and loss > 0 and after != before
    own = {"model": f"{__name__}:fails_for_one"}
    results = pool.run(measure_and_fail, 3, configuration(**settings, **own), transport=transport, timeout=50)
    for before, loss, _, failures, after in results:
        assert loss is None and failures == ["accuracy", "loss"] and after != before


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED = [
    ({"shard": "parameters"}, "--shard parameters: one rank has no other rank to share with; try --ranks 2"),
    (
        {"shard": "parameters", "dp": 2, "pp": 2},
        "--shard parameters: each rank of a pipeline has layers of its own.* tr",
    ),
    (
        {"shard": "parameters", "pp": 2},
        "--shard parameters: each rank of a pipeline .*; try --shard optimizer",
    ),
    ({"shard": "weights", "ranks": 2}, "--shard weights: did you mean 'parameters'"),
    ({"shard": "gradients", "ranks": 2, "prefetch": 0}, "--prefetch 0 is for --shard parameters; add that"),
    ({"ranks": 2, "keep_parameters": True}, "--keep-parameters is for --shard parameters; add that"),
    ({"ranks": 2, "replicas": 2}, "--replicas 2 is for --shard parameters; add that"),
    ({"shard": "parameters", "ranks": 3, "replicas": 2}, "3 ranks cannot be cut into 2 equal groups; try --ranks 2"),
    ({"shard": "parameters", "ranks": 2, "prefetch": -1}, "--prefetch -1: must be"),
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


def refused_optimizer(comms, shard, optimizer):
    with pytest.raises(ConfigError) as caught:
        build(configuration(shard=shard, ranks=2, optimizer=optimizer), comms)
    return str(caught.value)


@pytest.mark.parametrize("shard", SHARDED)
def test_an_optimizer_of_ones_own_class_is_refused_by_name(pool, shard):
    for words in pool.run(refused_optimizer, 2, shard, f"{__name__}:of_my_own"):
        assert f"--optimizer {__name__}:of_my_own returned Own, which is none of torch's own" in words


def test_an_optimizer_that_looks_at_whole_parameters_is_refused_before_ranks_are_started():
    with pytest.raises(ConfigError, match=r"--optimizer adafactor looks at whole parameters.* try --optimizer adamw"):
        check(configuration(shard="parameters", ranks=2, optimizer="adafactor"))


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
