"""What ranks hold while they are recorded: parameters, gradients, optimizer state, and activations in bytes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import microparallel as mp
from microparallel.simulator.fitted import predicted

WIDTH, SAMPLES = 16, 4
LINEAR = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's parameters
OUTPUT = 4 * SAMPLES * WIDTH  # bytes of a layer's output for all samples


def linears(count):
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def data_parallel(comms, memory=True):
    torch.manual_seed(0)
    model = mp.DataParallel(nn.Sequential(*linears(3)), comms, bucket_cap_mb=1e-4, overlap=False)
    optimizer = torch.optim.Adam(model.parameters())
    with mp.record(comms, memory=memory) as recorder:
        for _ in range(2):
            model(torch.ones(SAMPLES, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.trace


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_data_parallel_step(pool, ranks):
    trace = pool.run(data_parallel, ranks, timeout=30)[0]
    for step in (0, 1):
        for held in trace.step(step).memory:
            assert held.peak_of("parameters") == held.peak_of("gradients") == 3 * LINEAR
            assert held.peak_of("optimizer") == 2 * 3 * LINEAR + 6 * 4  # and a number of steps for each tensor
            # The outputs of two layers are inputs of others; the third is the model's, and then there is the sum.
            assert held.peak_of("activations") == 3 * OUTPUT + 4
            assert held.kinds["activations"][-1][1] <= 4  # the sum, which the loop may still hold
    again = predicted(trace.step(1))
    assert again.peak_memory == pytest.approx(trace.step(1).peak_memory, abs=8)
    assert mp.Trace.from_json(trace.to_json()) == trace


def test_a_trace_without_sizes_has_no_memory(pool):
    trace = pool.run(data_parallel, 1, memory=False, timeout=30)[0]
    assert trace.sizes is None
    with pytest.raises(mp.errors.UsageError, match="does not say how large"):
        trace.step(0).memory  # noqa: B018


def pipeline(comms, schedule, recompute=False):
    torch.manual_seed(0)
    loss_fn = functional.mse_loss
    pipe = mp.Pipeline(linears(4), comms, schedule=schedule, microbatches=4, loss_fn=loss_fn, recompute=recompute)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(4 * SAMPLES, WIDTH)
    with mp.record(comms) as recorder:
        pipe.step(inputs, inputs)
        optimizer.step()
    return recorder.trace


@pytest.mark.parametrize(("schedule", "kept"), [("gpipe", (4, 4)), ("1f1b", (2, 1))])
def test_a_pipelines_step(pool, schedule, kept):
    """A rank holds as many micro-batches as its schedule says, each with what a stage keeps of it."""
    # In shared memory a message that was sent is let go at once; gloo keeps it until the step has ended.
    step = pool.run(pipeline, 2, schedule, transport="shm", timeout=30)[0].step(0)
    first, last = step.memory
    for held in (first, last):
        for kind in ("parameters", "gradients", "optimizer"):
            assert held.peak_of(kind) == 2 * LINEAR
        assert (
            held.kinds["activations"][-1][1] <= OUTPUT
        )  # when the optimizer begins, at most the last message's buffer
    # Stage 0 keeps two outputs. Stage 1 keeps its input, two outputs, and the loss: as it is, its weight, weighted.
    assert first.peak_of("activations") == kept[0] * 2 * OUTPUT
    assert last.peak_of("activations") == kept[1] * (3 * OUTPUT + 3 * 4)
    activations = [rank.peak_of("activations") for rank in predicted(step).memory]
    assert activations == [rank.peak_of("activations") for rank in step.memory]


def test_recomputing_keeps_what_crosses_the_boundaries(pool):
    first, last = pool.run(pipeline, 2, "gpipe", recompute=True, timeout=30)[0].step(0).memory
    assert first.peak_of("activations") == 4 * OUTPUT
    assert last.peak_of("activations") == 4 * (OUTPUT + 3 * 4)  # the input, and the loss


def two_models(comms):
    models = [mp.DataParallel(nn.Linear(4, 4), comms), mp.DataParallel(nn.Linear(8, 8), comms)]
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    with mp.record(comms) as recorder:
        for model, width in zip(models, (4, 8), strict=True):
            model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        models[0](torch.ones(2, 4)).sum().backward()  # and no step of an optimizer
    return recorder.trace


def test_what_is_not_clear_is_not_guessed(pool):
    trace = pool.run(two_models, 2, timeout=30)[0]
    with pytest.raises(mp.errors.UsageError, match=r"of one mp\.DataParallel or mp\.Pipeline"):
        trace.step(0).memory  # noqa: B018
    with pytest.raises(mp.errors.UsageError, match="size of optimizer in this step is not known: no optimizer made"):
        trace.step(1).memory  # noqa: B018


class Mapped(nn.Module):
    """`torch.func` refuses to work where there are hooks on saved tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(SAMPLES, WIDTH))

    def forward(self, inputs):
        return torch.vmap(self.layer)(inputs) * self.mask


def mapped(comms):
    model = mp.DataParallel(Mapped(), comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mp.record(comms) as recorder:
        model(torch.ones(SAMPLES, WIDTH)).sum().backward()
        optimizer.step()
    return recorder.trace


def test_buffers_and_the_batch_are_no_activations(pool):
    (held,) = pool.run(mapped, 1, timeout=30)[0].memory
    assert held.peak_of("activations") == OUTPUT + 4  # the mask is a buffer; what is multiplied by it is not needed
