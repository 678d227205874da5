"""Any number of ranks learns exactly what one process learns."""

import functools

import pytest
import torch
from tests.pairwise import every, sampled

from microparallel.train.build import build
from microparallel.train.config import TrainConfig

WORLDS = (["shm", "gloo"], [1, 2, 3, 4])
RELATIVE = {"float32": 1e-6, "float64": 1e-12}


def learn(comms, config):
    """Twenty steps of a rank: its losses and its weights."""
    training = build(config, comms)
    losses = [training.step() for _ in range(20)]
    return losses, torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


def configuration(model, **changes):
    """Batches that no number of ranks divides, and epochs so short that the last, smaller batch comes several times."""
    settings = {
        "mlp": {"batch": 211, "dim": 32, "depth": 16},  # 1438 samples: batches of 211, the last of 172
        "gpt": {"batch": 7, "dim": 32, "depth": 2, "heads": 2, "context": 16},
    }[model]
    return TrainConfig(
        **{"model": model, "steps": 20, "optimizer": "sgd", "momentum": 0.9, "lr": 0.02, "schedule_lr": "constant"}
        | settings
        | changes
    ).resolved()


@pytest.fixture(scope="module")
def learn_alone(pool):
    """What one process learns; each configuration is run once."""
    return functools.cache(lambda config: pool.run(learn, 1, config, timeout=50)[0])


@pytest.mark.parametrize(("transport", "ranks", "model", "dtype"), sampled(*WORLDS, ["mlp", "gpt"], [*RELATIVE]))
def test_the_single_process_is_the_oracle(pool, learn_alone, model, dtype, transport, ranks):
    wanted, wanted_weights = learn_alone(configuration(model, precision=dtype))
    strategy = {"strategy": "naive", "ranks": ranks}
    config = configuration(model, precision=dtype, **strategy)
    results = pool.run(learn, ranks, config, transport=transport, timeout=50)
    for losses, weights in results:
        assert losses == pytest.approx(wanted, rel=RELATIVE[dtype], abs=0)
        assert torch.equal(weights, results[0][1])  # bit-identical on every rank
        torch.testing.assert_close(weights, wanted_weights, rtol=0, atol=RELATIVE[dtype] * 10)
    assert wanted[-1] < wanted[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("transport", "ranks"), [("nccl", 1), ("gloo", 2), ("gloo", 3)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_the_same_on_a_gpu(pool, model, dtype, transport, ranks):
    settings = {"precision": dtype, "device": "cuda"}
    world = {"transport": transport, "device": "cuda", "timeout": 50}
    [(wanted, wanted_weights)] = pool.run(learn, 1, configuration(model, **settings), **world | {"transport": "gloo"})
    results = pool.run(learn, ranks, configuration(model, ranks=ranks, strategy="naive", **settings), **world)
    for losses, weights in results:
        assert losses == pytest.approx(wanted, rel=RELATIVE[dtype], abs=0)
        assert torch.equal(weights.cpu(), results[0][1].cpu())
        torch.testing.assert_close(weights.cpu(), wanted_weights.cpu(), rtol=0, atol=RELATIVE[dtype] * 10)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adaptive_optimizers_in_float64(pool, learn_alone, optimizer):
    changes = {"precision": "float64", "optimizer": optimizer, "momentum": 0.0, "lr": 0.001}
    wanted, wanted_weights = learn_alone(configuration("mlp", **changes))
    results = pool.run(learn, 3, configuration("mlp", ranks=3, **changes), transport="shm", timeout=50)
    for losses, weights in results:
        assert losses == pytest.approx(wanted, rel=1e-11, abs=0)
        torch.testing.assert_close(weights, wanted_weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", ["hooks", "ddp", "torch-ddp"])
def test_other_strategies_agree_too(pool, learn_alone, strategy):
    wanted, _ = learn_alone(configuration("mlp", precision="float64"))
    config = configuration("mlp", precision="float64", strategy=strategy, ranks=3)
    for losses, _ in pool.run(learn, 3, config, timeout=50):
        assert losses == pytest.approx(wanted, rel=1e-12, abs=0)


def tail_smaller_than_the_world(comms, strategy):
    """1438 samples in batches of 479: the last batch of each epoch has a single sample."""
    config = configuration("mlp", batch=479, precision="float64", strategy=strategy, ranks=comms.world_size)
    training = build(config, comms)
    return [training.step() for _ in range(9)]


@pytest.mark.parametrize("strategy", every(2, ["ddp", "naive", "hooks", "torch-ddp"]))
def test_a_rank_may_have_no_samples_at_all(pool, strategy):
    [wanted] = pool.run(tail_smaller_than_the_world, 1, "single", timeout=50)
    for losses in pool.run(tail_smaller_than_the_world, 4, strategy, timeout=50):
        assert losses == pytest.approx(wanted, rel=1e-12, abs=0)
