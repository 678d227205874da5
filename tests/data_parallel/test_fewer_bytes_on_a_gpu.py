"""Mixed precision and compression with tensors on a GPU; the same code on the CPU shows that these tests can fail."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import microparallel as mp

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
METHODS = ["bf16", "int8", "sign", "topk:0.2", "randomk:0.2", "powersgd:2", "topk:0.2+bf16"]
STEPS, OVERFLOW = 8, 3


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def samples(rank, step, device):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device), (inputs[:, :8] * 2).tanh().to(device)


def train(comms, wrap):
    """Train a model and return its losses, whether all ranks have the same weights, and its loss scale."""
    module = build().to(comms.device)
    model = wrap(module, comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = samples(comms.rank, step, comms.device)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        losses.append(loss.detach().cpu())
        overflows = step == OVERFLOW and comms.rank == comms.world_size - 1 and model.loss_scale is not None
        (loss * float("inf") if overflows else loss).backward()
        optimizer.step()
    weights = torch.cat([tensor.cpu().double().view(-1) for tensor in model.state_dict().values()])
    alike = all(torch.equal(weights, other) for other in comms.all_gather(weights))
    scale = model.loss_scale and (model.loss_scale.value, model.loss_scale.skipped)
    return torch.stack(comms.all_gather(torch.stack(losses))).mean(0).tolist(), alike, scale


def plain(module, comms):
    return mp.DataParallel(module, comms)


def in_precision(module, comms, precision, sharded):
    wrapper = mp.FullyShardedDataParallel if sharded else mp.DataParallel
    return wrapper(module, comms, precision=precision)


def compressed(module, comms, method):
    return mp.DataParallel(module, comms, compress=mp.compression.parse(method, smallest=0))


def train_all(comms, methods):
    """All contenders in one call: starting ranks on a GPU takes longer than training."""
    found = {"float32": train(comms, plain)}
    for precision in ("bf16", "fp16"):
        for sharded in (False, True):
            found[precision, sharded] = train(comms, lambda *given: in_precision(*given, precision, sharded))  # noqa: B023
    for method in methods:
        found[method] = train(comms, lambda *given: compressed(*given, method))  # noqa: B023
    return found


def check(found, methods):
    whole, _, _ = found["float32"]
    for precision in ("bf16", "fp16"):
        for sharded in (False, True):
            losses, alike, scale = found[precision, sharded]
            assert alike and losses != whole, (precision, sharded)
            assert losses[: OVERFLOW + 1] == pytest.approx(whole[: OVERFLOW + 1], rel=0.05), (precision, sharded)
            assert scale == ((2.0**15, 1) if precision == "fp16" else None)
    for method in methods:
        losses, alike, _ = found[method]
        assert alike and losses[0] == pytest.approx(whole[0], rel=1e-5), method
        assert losses[-1] < losses[0], method


@ON_A_GPU
@pytest.mark.parametrize(("ranks", "transport"), [(2, "gloo"), (1, "nccl")])
def test_on_a_gpu(pool, ranks, transport):
    methods = METHODS if ranks > 1 else []
    for found in pool.run(train_all, ranks, methods, transport=transport, device="cuda", timeout=200):
        check(found, methods)


def test_the_same_on_the_cpu(pool):
    for found in pool.run(train_all, 2, METHODS, transport="gloo", timeout=50):
        check(found, METHODS)


def pipelines(comms):
    """The losses of a pipeline in each precision, and the bytes of a step."""
    found = {}
    for precision in ("float32", "bf16", "fp16"):
        pipe = mp.Pipeline(build(), comms, "1f1b", 4, functional.mse_loss, precision=precision)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            losses.append(float(pipe.step(*samples(0, step, comms.device))))
            optimizer.step()
        found[precision] = losses, pipe.loss_scale and pipe.loss_scale.skipped
    return found


def check_pipelines(found):
    whole, _ = found["float32"]
    for precision in ("bf16", "fp16"):
        losses, skipped = found[precision]
        assert losses == pytest.approx(whole, rel=0.05) and losses != whole
        assert skipped == (0 if precision == "fp16" else None)


@ON_A_GPU
def test_pipelines_on_a_gpu(pool):
    for found in pool.run(pipelines, 2, transport="gloo", device="cuda", timeout=100):
        check_pipelines(found)


def test_pipelines_on_the_cpu(pool):
    for found in pool.run(pipelines, 2, transport="gloo", timeout=50):
        check_pipelines(found)
