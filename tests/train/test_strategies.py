"""A rank that is slow on purpose: the others wait for it, learn the same, and the trace says so."""

import json

import pytest
from torch import nn

from microparallel.trace import Trace
from microparallel.trace.parts import parts
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train


def run(pool, out, **changes):
    settings = {"out": str(out), "dim": 96, "depth": 8, "batch": 256, "steps": 8, "trace": True}
    config = TrainConfig(**settings | changes).resolved()
    transport = config.transport if config.transport != "auto" else "gloo"
    return pool.run(train, config.world_size, config, None, True, timeout=50, transport=transport)[0]


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"pp": 2}], ids=["ddp", "pipeline"])
def test_others_wait_for_a_slow_rank(pool, tmp_path, layout):
    run(pool, tmp_path / "plain", **layout)
    run(pool, tmp_path / "slow", slow_rank="1=6x", **layout)
    assert losses(tmp_path / "slow") == losses(tmp_path / "plain")
    trace = Trace.from_json((tmp_path / "slow" / "trace.json").read_text())
    assert trace.ranks == 2 and trace.about["model"] == "mlp"
    quick = 0
    for step in trace.steps:
        first, second = parts(trace.step(step))
        quick += first.waiting > second.waiting
    assert quick > len(trace.steps) / 2  # it is rank 0 that waits, but in a step in which the machine did other things
    assert json.loads((tmp_path / "slow" / "trace-chrome.json").read_text())["traceEvents"]


@pytest.mark.parametrize("layout", [{"ranks": 3}, {"dp": 2, "pp": 2}], ids=["ddp", "pipelines"])
def test_a_slow_link_changes_nothing_but_time(pool, tmp_path, layout):
    """Not even the order in which three ranks' gradients are added: the algorithm is the one without it."""
    settings = layout | {"transport": "shm", "dim": 32, "steps": 4}
    run(pool, tmp_path / "plain", **settings)
    run(pool, tmp_path / "slow", slow_link="0-1=1ms,1Gbit 1-2=500us", **settings)
    assert losses(tmp_path / "slow") == losses(tmp_path / "plain")


def test_a_forward_is_recorded_by_the_models_own_name(pool, tmp_path):
    run(pool, tmp_path / "run", ranks=1, steps=3, dim=8)
    trace = Trace.from_json((tmp_path / "run" / "trace.json").read_text())
    assert "forward of FullMLP" in {event.name for event in trace.events}


def test_every_layer_is_slowed_down():
    from microparallel.train.strategies import slow_down_model

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    slow_down_model(model, 2.0)
    hooked = [module for module in model.modules() if module._forward_hooks]
    assert [type(module).__name__ for module in hooked] == ["Linear", "ReLU", "Linear"]
