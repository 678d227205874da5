"""`precision=` and `compress=` together: a step that is not taken leaves what ranks have not sent as it was."""

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.compression import parse

WIDTH = 12


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def batch(number, rank=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number))


def same(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def copied(model):
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def skips(comms, text, broken):
    """Steps of two backwards that are averaged; `broken`: in which step which backward of rank 1 overflows."""
    model = mp.DataParallel(layers(), comms, precision="fp16", compress=parse(text, smallest=1))
    model.loss_scale.value = 64.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        weights, waiting = copied(model), model.compression_state()["residuals"]
        optimizer.zero_grad()
        for number in range(2):
            factor = torch.inf if comms.rank == 1 and broken.get(step) == number else 1.0
            (model(batch(2 * step + number, comms.rank)).square().mean() * factor).backward()
        optimizer.step()
        kept = same(waiting, model.compression_state()["residuals"])
        found.append((same(weights, copied(model)), kept, model.loss_scale.value))
    finite = all(bool(one.isfinite().all()) for one in model.parameters())
    return found, finite and mp.data_parallel.replicas_are_identical(model, comms)


@pytest.mark.parametrize("text", ["topk:0.1", "powersgd:1", "int8:16"])
def test_an_overflow_skips_the_step_and_keeps_the_residual(pool, text):
    """On all ranks, also on the one whose gradients were finite; whichever backward of the step it was."""
    taken, first, second = (False, False), (True, True, 32.0), (True, True, 16.0)
    for found, fine in pool.run(skips, 2, text, {1: 0, 2: 1}, transport="shm", timeout=40):
        assert found == [(*taken, 64.0), first, second, (*taken, 16.0)]
        assert fine


def telescopes(comms, precision):
    """Weights and what waits, beside the gradients of one process in float32 at the same weights."""
    model = mp.DataParallel(layers(), comms, precision=precision, compress=parse("topk:0.1", smallest=1))
    if model.loss_scale is not None:
        model.loss_scale.value = 64.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at_first, total = copied(model), dict.fromkeys(copied(model), 0.0)
    for step in range(3):
        alone = layers()
        alone.load_state_dict(model.state_dict())
        for rank in range(comms.world_size):
            (alone(batch(step, rank)).square().mean() / comms.world_size).backward()
        optimizer.zero_grad()
        model(batch(step, comms.rank)).square().mean().backward()
        optimizer.step()
        total = {name: one + alone.get_parameter(name).grad for name, one in total.items()}
    waiting = {name: comms.all_reduce(one) for name, one in model.compression_state()["residuals"].items()}
    moved = {name: (at_first[name] - one) / 0.1 + waiting[name] for name, one in copied(model).items()}
    errors = [float((moved[name] - one).norm() / one.norm()) for name, one in total.items()]
    return max(errors), min(float(one.norm()) for one in waiting.values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_all_16_bit_gradients_are_sent_or_wait(pool, precision):
    for error, waiting in pool.run(telescopes, 2, precision, transport="shm", timeout=30):
        assert 1e-6 < error < 0.03
        assert waiting > 0


def leaves_early(comms):
    """Rank 1 has one step, rank 0 more: an overflow, and then gradients of zero, so that residuals alone are sent."""
    model = mp.DataParallel(layers(), comms, precision="fp16", compress=parse("topk:0.2", smallest=1))
    model.loss_scale.value = 64.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after_first = None
    with model.join():
        for factor in (1.0, torch.inf, 0.0, 0.0, 0.0)[: 1 if comms.rank else None]:
            optimizer.zero_grad()
            (model(batch(0, comms.rank)).square().mean() * factor).backward()
            optimizer.step()
            after_first = after_first or (copied(model), model.compression_state()["residuals"])
    weights, waiting = after_first
    wrong = []
    for name, one in copied(model).items():
        still = comms.all_reduce(model.compression_state()["residuals"][name])
        sent = (weights[name] - one) / 0.1
        if not torch.allclose(sent + still, comms.all_reduce(waiting[name]), atol=1e-5):
            wrong.append(name)
    return wrong, bool(sent.any())


def test_a_rank_that_has_run_out_of_data_sends_what_waits_once(pool):
    """It makes no optimizer's step, which would end the one that was skipped."""
    assert pool.run(leaves_early, 2, transport="shm", timeout=30) == [([], True)] * 2


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pipeline_skips(comms, schedule, text):
    """In the second step one gradient is infinite, of the first stage of the second replica."""
    pipe = mp.Pipeline(
        layers(),
        comms,
        schedule,
        2,
        nn.functional.mse_loss,
        replicas=2,
        precision="fp16",
        compress=parse(text, smallest=1),
    )
    pipe.loss_scale.value = 64.0
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    spoilt = next(pipe.parameters())
    found = []
    for step in range(3):
        weights, waiting = copied(pipe), pipe.compression_state()["residuals"]
        hook = spoilt.register_hook(lambda gradient: gradient * torch.inf) if step == 1 and comms.rank == 2 else None
        optimizer.zero_grad()
        for number in range(2):
            pipe.step(batch(2 * step + number, pipe.replica), batch(9, pipe.replica))
            if hook is not None:
                hook.remove()
        optimizer.step()
        kept = same(waiting, pipe.compression_state()["residuals"])
        found.append((same(weights, copied(pipe)), kept, pipe.loss_scale.value))
    return found, pipe.replicas_are_identical()


@pytest.mark.parametrize(("schedule", "text"), [("1f1b", "topk:0.1"), ("zb-h1", "powersgd:1")])
def test_an_overflow_on_one_stage_keeps_the_residuals_of_all(pool, schedule, text):
    wanted = [(False, False, 64.0), (True, True, 32.0), (False, False, 32.0)]
    assert pool.run(pipeline_skips, 4, schedule, text, transport="shm", timeout=40) == [(wanted, True)] * 4
