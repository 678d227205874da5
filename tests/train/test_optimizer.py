"""Any optimizer, schedule and clipping: what one process learns, on any number of ranks, and after a resume."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from tests.pairwise import every
from torch import nn

import microparallel as mp
from microparallel.errors import ConfigError
from microparallel.train import checkpoint
from microparallel.train.config import OPTIMIZERS, TrainConfig, optimizer_names
from microparallel.train.loop import train_on_rank as train
from microparallel.train.optimizer import LearningRate, build_learning_rate, build_optimizer

STEPS = 5


def configuration(out, **changes):
    settings = {
        **{"out": str(out), "model": f"{__name__}:layers", "data": "digits", "batch": 700, "steps": STEPS},
        **{"precision": "float64", "lr": 0.01, "validate_every": 100},
    }
    return TrainConfig(**settings | changes).resolved()


def layers():
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Dropout(0), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10))


def without_biases():
    """Muon takes matrices only."""
    return nn.Sequential(nn.Linear(64, 12, bias=False), nn.Tanh(), nn.Linear(12, 10, bias=False))


def with_dropout():
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 10))


def in_two_groups(model, lr):
    """No decay of biases, which also learn more slowly; on a rank without biases, the second group is empty."""
    parameters = dict(model.named_parameters())
    biases = [one for name, one in parameters.items() if name.endswith("bias")]
    others = [one for name, one in parameters.items() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": lr / 2}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def restarts(steps):
    return lambda step: 0.5 ** (step % 3)


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def losses(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def saved(folder, step=STEPS):
    return checkpoint.load(Path(folder) / "checkpoints" / f"step-{step:08d}")


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """What one process learns; each configuration is run once."""

    @functools.cache
    def run_once(settings):
        out = tmp_path_factory.mktemp("runs") / "alone"
        run(pool, configuration(out, **dict(settings)))
        return out

    return lambda **settings: run_once(tuple(settings.items()))


LAYOUTS = [{"ranks": 2}, {"ranks": 4}, {"pp": 2}, {"dp": 2, "pp": 2, "microbatches": 3}]
OWN = {"optimizer": f"{__name__}:in_two_groups", "schedule_lr": f"{__name__}:restarts", "warmup": 2}


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "RMSprop", "momentum": 0.5, "schedule_lr": "cosine", "warmup": 0.4},
        {"optimizer": "NAdam", "clip": 0.02, "weight_decay": 0.1},
        {"clip": 0.1, **OWN},
    ],
    ids=["rmsprop, cosine", "nadam, clip, weight decay", "own optimizer and schedule, clip"],
)
def test_any_layout_learns_what_one_process_learns(pool, alone, tmp_path, settings, layout):
    run(pool, configuration(tmp_path / "run", **settings, **layout))
    out = alone(**settings)
    assert losses(tmp_path / "run") == pytest.approx(losses(out), rel=1e-11)
    ours, theirs = saved(tmp_path / "run"), saved(out)
    for name, tensor in theirs.model.items():
        torch.testing.assert_close(ours.model[name], tensor, rtol=1e-9, atol=1e-11)
    groups = [[group["params"] for group in one.optimizer_state["param_groups"]] for one in (ours, theirs)]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("optimizer", every(3, sorted(optimizer_names())))
def test_every_optimizer_of_torch_goes_on_bit_for_bit(pool, tmp_path, optimizer):
    model = f"{__name__}:{'without_biases' if optimizer == 'muon' else 'with_dropout'}"
    settings = {"optimizer": optimizer, "ranks": 2, "precision": "float32", "steps": 4, "model": model, "clip": 0.5}
    run(pool, configuration(tmp_path / "whole", **settings))
    run(pool, configuration(tmp_path / "parts", **settings | {"steps": 2}))
    run(pool, configuration(tmp_path / "parts", **settings), tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(set(losses(tmp_path / "whole"))) == 4


def test_groups_of_parameters_go_on_in_any_layout(pool, alone, tmp_path):
    """The pipelines' optimizers are saved as one, with its groups; then data parallelism, then one process."""
    folder = tmp_path / "run"
    run(pool, configuration(folder, **OWN, steps=2, dp=2, pp=2))
    run(pool, configuration(folder, **OWN, steps=3, ranks=3), folder)
    run(pool, configuration(folder, **OWN, steps=4, pp=3), folder)
    run(pool, configuration(folder, **OWN), folder)
    assert losses(folder) == pytest.approx(losses(alone(**OWN)), rel=1e-11)


def test_gradients_are_clipped_by_the_norm_of_all_of_them(pool, tmp_path):
    """With plain SGD, a step of size lr × clip."""
    settings = {"optimizer": "sgd", "clip": 0.001, "lr": 1.0, "steps": 2, "save_every": 1, "schedule_lr": "constant"}
    for number, layout in enumerate([{}, {"ranks": 2}, {"dp": 2, "pp": 2}]):
        out = tmp_path / str(number)
        run(pool, configuration(out, **settings, **layout))
        before, after = (saved(out, step).model for step in (1, 2))
        moved = math.sqrt(sum(float((after[name] - tensor).square().sum()) for name, tensor in before.items()))
        assert moved == pytest.approx(0.001, rel=1e-4)  # as torch does: norm + 1e-6


def test_the_names_of_torch_are_those_that_are_known_without_it():
    assert set(OPTIMIZERS) <= optimizer_names().keys()
    assert not {"lbfgs", "sparseadam", "optimizer"} & optimizer_names().keys()


def test_options_reach_the_optimizer():
    model = nn.Linear(2, 2)
    config = TrainConfig(optimizer="SGD", momentum=0.5, weight_decay=0.25, lr=0.125).resolved()
    [group] = build_optimizer(config, model).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.125, 0.5, 0.25)
    [group] = build_optimizer(TrainConfig(optimizer="AdamW").resolved(), model).param_groups
    assert group["weight_decay"] == 0.01  # torch's own default
    with pytest.raises(ConfigError, match="--optimizer muon cannot train this model: Muon only supports 2D"):
        build_optimizer(TrainConfig(optimizer="muon").resolved(), model)


def no_optimizer(model, lr):
    return [model, lr]


def no_schedule(steps):
    return 3


def bad_schedule(steps):
    return lambda step: math.nan


def test_what_ones_own_functions_return_is_checked():
    own = {"model": "mine:make", "data": "digits"}
    with pytest.raises(ConfigError, match=r"no_optimizer returned list: return a torch\.optim\.Optimizer"):
        build_optimizer(TrainConfig(**own, optimizer=f"{__name__}:no_optimizer").resolved(), nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="no_schedule returned int: return a function from the step"):
        build_learning_rate(TrainConfig(**own, schedule_lr=f"{__name__}:no_schedule").resolved(), 5)
    with pytest.raises(mp.errors.UsageError, match="--schedule-lr returned nan for step 0: return a finite number"):
        build_learning_rate(TrainConfig(**own, schedule_lr=f"{__name__}:bad_schedule").resolved(), 5)


@pytest.mark.parametrize(
    ("schedule", "warmup", "wanted"),
    [
        ("constant", None, [8, 8, 8, 8]),
        ("constant", 2, [4, 8, 8, 8]),
        ("linear", None, [8, 8, 16 / 3, 8 / 3]),  # a tenth of 4 steps is at least 1
        ("linear", 0, [8, 6, 4, 2]),
        ("linear", 0.5, [4, 8, 8, 4]),
        ("cosine", 0, [8, 4 * (1 + math.sqrt(0.5)), 4, 4 * (1 - math.sqrt(0.5))]),
        ("cosine", 2, [4, 8, 8, 4]),
        (lambda step: 0.5**step, None, [8, 4, 2, 1]),
        (lambda step: 0.5**step, 2, [4, 4, 2, 1]),
    ],
)
def test_learning_rates(schedule, warmup, wanted):
    rate = LearningRate(schedule, 4, warmup)
    assert [rate.at(step, 8.0) for step in range(4)] == pytest.approx(wanted)
    assert rate.at(4, 8.0) >= 0  # a run that was made shorter
