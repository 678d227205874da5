"""Pipeline(compress_activations=…): stages send each other fewer bytes, and compute with what arrives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.test_what_runs_is_what_is_drawn import differences
from torch import nn

import microparallel as mp
from microparallel.compression import Cast, Int8, TopK
from microparallel.errors import UsageError
from microparallel.pipeline.activations import ActivationWire, as_activation_wire

WIDTH = 32


@pytest.mark.parametrize("compressor", [Cast(torch.bfloat16), Cast(torch.float16), Int8(16)], ids=str)
@given(shape=st.lists(st.integers(0, 5), max_size=3).map(tuple))
def test_what_arrives(compressor, shape):
    wire = ActivationWire(compressor)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        tensor = torch.randn(shape).mul(9).to(dtype)
        into = torch.empty_like(tensor)
        message, room = wire.message(tensor), wire.room(into)
        assert (message.dtype, message.shape) == (room.dtype, room.shape)
        found = wire.read(message, into)
        assert found.dtype == dtype and found.shape == tensor.shape
        if not dtype.is_floating_point:
            assert torch.equal(found, tensor)
        elif tensor.numel():
            error = {"int8-16": 1 / 127, "bf16": 2**-7, "fp16": 2**-10}[compressor.name]
            assert (found - tensor).abs().max() <= error * tensor.abs().max()


class Rounded(torch.autograd.Function):
    """What a boundary between two stages does to activations, and to their gradients."""

    @staticmethod
    def forward(ctx, tensor, dtype):
        ctx.dtype = dtype
        return tensor.to(dtype).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype).float(), None


def model():
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def step(comms, activations, schedule):
    pipe = mp.Pipeline(
        nn.Sequential(*model()), comms, schedule, 2, nn.functional.mse_loss, [2, 2], compress_activations=activations
    )
    loss, trace = pipe.traced_step(*batch())
    sent = sum(event.bytes for event in trace.events if event.rank == comms.rank and str(event.op).startswith(">"))
    evaluated = pipe.evaluate(*batch())
    found = {name: one.grad for name, one in pipe.named_parameters()}
    return float(loss), sent, differences(trace, pipe.program), found, float(evaluated)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_computes_with_what_arrives(any_pool, schedule):
    everyone = any_pool.run(step, 2, "bf16", schedule, timeout=50)
    alone = model()
    inputs, targets = batch()
    losses = []
    for part, answers in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        hidden = Rounded.apply(alone[1](alone[0](part)), torch.bfloat16)
        losses.append(nn.functional.mse_loss(alone[3](alone[2](hidden)), answers) / 2)
        losses[-1].backward()
        losses[-1] = losses[-1].detach()
    expected = {f"{index}.{name}": one.grad for index in (0, 2, 3) for name, one in alone[index].named_parameters()}
    for loss, sent, wrong, gradients, evaluated in everyone:
        assert not wrong
        assert loss == pytest.approx(float(sum(losses)), rel=1e-6) == evaluated
        assert sent == 2 * 8 * WIDTH
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_int8_sends_a_quarter_and_is_close(pool):
    plain = pool.run(step, 2, None, "1f1b", timeout=50)
    small = pool.run(step, 2, Int8(64), "1f1b", timeout=50)
    for (loss, sent, _, gradients, _), (close, fewer, wrong, others, _) in zip(plain, small, strict=True):
        assert not wrong and fewer == sent * (1 + 4 / 64) / 4
        assert close == pytest.approx(loss, rel=0.02)
        for name, gradient in gradients.items():
            assert (others[name] - gradient).norm() < 0.05 * gradient.norm()


def differ(comms):
    try:
        mp.Pipeline(nn.Sequential(*model()), comms, "gpipe", 2, compress_activations="bf16" if comms.rank else "int8")
    except UsageError as error:
        return str(error)


def test_ranks_that_disagree_are_refused(pool):
    for words in pool.run(differ, 2):
        assert "compress_activations=int8-256" in words and "compress_activations=bf16" in words


def test_other_methods_are_refused():
    with pytest.raises(UsageError, match=r"compress_activations=topk-0\.01: a stage needs every number"):
        as_activation_wire(TopK())
