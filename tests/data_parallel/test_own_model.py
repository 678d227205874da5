"""What people do with a wrapped model beside training it: keep gradients, compile, copy, save, convert, call it with
other parameters."""

import copy
import gc
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import microparallel as mp
from microparallel.data_parallel import replicas_are_identical

WIDTH = 6


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def share(comms, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + comms.rank)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def averages(comms, seed):
    """What every rank must find in `grad`: computed by each for itself, on a copy of the plain model."""
    plain = layers()
    plain(share(comms, seed)).pow(2).mean().backward()
    return [comms.all_reduce_mean(gradient.clone()) for gradient in gradients(plain)]


# ── gradients that are kept ─────────────────────────────────────────────────────────────────────────────────────────


def keep(comms, views, bucket_cap_mb):
    """Five steps, whose gradients are kept: as they are, as views of them, and as other objects on the same memory."""
    model = mp.DataParallel(layers(), comms, bucket_cap_mb, gradient_as_bucket_view=views)
    kept = []
    for step in range(5):
        model.zero_grad()
        model(share(comms, step)).pow(2).mean().backward()
        found = gradients(model)
        kept.append([found, [one.view(-1) for one in found], [one.detach() for one in found]][step % 3])
    wanted = [averages(comms, step) for step in range(5)]
    return [
        all(torch.allclose(one.view(-1), other.view(-1)) for one, other in zip(mine, whole, strict=True))
        for mine, whole in zip(kept, wanted, strict=True)
    ]


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4], ids=["one bucket", "buckets"])
def test_gradients_that_were_kept_stay_as_they_are(any_pool, bucket_cap_mb):
    assert any_pool.run(keep, 2, False, bucket_cap_mb, timeout=50) == [[True] * 5] * 2


def test_views_of_the_buckets_are_overwritten_as_torch_does_with_the_same_option(pool):
    for right in pool.run(keep, 2, True, 25, transport="shm", timeout=50):
        assert right[-1] and not all(right)


def keep_in_a_pipeline(comms):
    pipe = mp.Pipeline(layers(), comms, "gpipe", 1, nn.functional.mse_loss, replicas=2)
    targets, kept, copied = torch.zeros(4, 3, dtype=torch.float64), [], []
    for step in range(3):
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(share(comms, step), targets)
        kept += gradients(pipe)
        copied += [gradient.clone() for gradient in gradients(pipe)]
    return all(map(torch.equal, kept, copied)) and not torch.equal(kept[0], kept[-len(kept) // 3])


def test_replicas_of_a_pipeline_keep_them_as_well(pool):
    assert pool.run(keep_in_a_pipeline, 2, transport="shm", timeout=50) == [True, True]


def memory_of(comms):
    """Where the gradients lie in each of six steps: nobody keeps those of the first three."""
    model = mp.DataParallel(layers(), comms)
    places, kept = [], []
    for step in range(6):
        model.zero_grad()
        model(share(comms)).pow(2).mean().backward()
        places.append(model.module[0].weight.grad.data_ptr())
        if step >= 3:
            kept.append(model.module[0].weight.grad)
    return places[1:]  # after the first step buckets are made for the order that was seen


def test_memory_that_nobody_holds_is_used_again(pool):
    """In shared memory: gloo's own thread may hold a tensor a moment longer than the call."""
    for second, third, *kept in pool.run(memory_of, 2, transport="shm", timeout=50):
        assert second == third == kept[0]
        assert len(set(kept)) == 3


def accumulate(comms, set_to_none):
    """`zero_grad(set_to_none=False)`, and a bucket of which one gradient was dropped and the other is added to."""
    model = mp.DataParallel(layers(), comms)
    for step in range(3):
        model.zero_grad(set_to_none)
        model(share(comms, step)).pow(2).mean().backward()
    assert all(map(torch.allclose, gradients(model), averages(comms, 2)))
    model.module[3].weight.grad = None
    kept = model.module[0].weight.grad
    model(share(comms, 3)).pow(2).mean().backward()
    plain = [first + second for first, second in zip(averages(comms, 2), averages(comms, 3), strict=True)]
    plain[4] = averages(comms, 3)[4]
    # As torch's DDP, an average is added to again and averaged again, which leaves it as it is.
    assert all(map(torch.allclose, gradients(model), plain))
    assert kept is not None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_added_to(pool, set_to_none):
    pool.run(accumulate, 2, set_to_none, transport="shm", timeout=50)


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted:
    """A backend of torch.compile as its "eager" is, that keeps the operations of each graph it was given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, _):
        self.graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward


class Written(nn.Module):
    """A model of somebody's own, with keyword arguments and a dictionary of outputs."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, inputs, *, scale=1.0):
        return {"outputs": self.layers(inputs) * scale}


def compiled(comms, backend, make, inside):
    torch.compiler.reset()
    backend = Counted() if backend == "counted" else backend
    model = make()
    if inside:
        model = mp.DataParallel(torch.compile(model, backend=backend), comms)
    else:
        model = torch.compile(mp.DataParallel(model, comms), backend=backend)
    for step in range(3):
        model.zero_grad()
        outputs = model(share(comms, step))
        outputs = outputs["outputs"] if isinstance(outputs, dict) else outputs
        outputs.pow(2).mean().backward()
        assert all(map(torch.allclose, gradients(model), averages(comms, step)))
    model.eval()
    with torch.no_grad():
        model(share(comms))
    assert backend.graphs[0] if isinstance(backend, Counted) else True
    return len(backend.graphs) if isinstance(backend, Counted) else 0


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("make", [layers, Written])
def test_compiled_models_with_buffers(any_pool, make, inside):
    counts = any_pool.run(compiled, 2, "counted", make, inside, timeout=55)
    assert counts == [2] * 2  # in training and in evaluation: the model is one graph


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_by_other_backends(pool, backend, inside):
    pool.run(compiled, 2, backend, Written, inside, transport="shm", timeout=300)


def compiled_step(comms):
    """The whole step is compiled, backward too."""
    torch.compiler.reset()
    model = mp.DataParallel(layers(), comms)

    @torch.compile(backend="eager")
    def step(inputs):
        loss = model(inputs).pow(2).mean()
        loss.backward()
        return loss

    for number in range(3):
        model.zero_grad()
        step(share(comms, number))
        assert all(map(torch.allclose, gradients(model), averages(comms, number)))
    torch.compile(model, backend="eager", fullgraph=True)(share(comms))  # of the model inside


def test_a_compiled_step_is_the_same_step(pool):
    pool.run(compiled_step, 2, transport="shm", timeout=55)


def recorded(comms):
    torch.compiler.reset()
    model = torch.compile(mp.DataParallel(layers(), comms), backend="eager")
    with mp.record(comms) as recorder:
        for number in range(3):
            model(share(comms, number)).pow(2).mean().backward()
    return [str(event.op) for event in recorder.trace.events if event.rank == comms.rank and event.computes]


def test_a_compiled_model_is_recorded_as_one_that_is_not(pool):
    for rank, seen in enumerate(pool.run(recorded, 2, transport="shm", timeout=55)):
        assert seen == [f"F0:1.{rank}", f"B0.{rank}"] * 3


# ── copies, and files ───────────────────────────────────────────────────────────────────────────────────────────────


def train(comms, model, steps=2, seed=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(share(comms, seed + step)).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def copies(comms):
    model = mp.DataParallel(layers(), comms, 1e-4, check_finite=True)
    train(comms, model)
    if comms.rank == 0:
        copy.deepcopy(model)  # one rank may do this alone: nothing is sent
    other = copy.deepcopy(model)
    assert other.comms is comms and other.module is not model.module
    assert not {parameter.data_ptr() for parameter in other.parameters()} & {
        parameter.data_ptr() for parameter in model.parameters()
    }
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trained = train(comms, other, seed=2)
    assert all(map(torch.equal, model.parameters(), before))  # the first one is left alone
    assert all(map(torch.equal, trained, train(comms, model, seed=2)))  # and does the same, bit for bit
    assert replicas_are_identical(other, comms)
    del model
    gc.collect()
    train(comms, other)  # a copy does not need the first one


def test_a_copy_is_a_model_with_a_reducer_of_its_own(any_pool):
    any_pool.run(copies, 2, timeout=50)
    any_pool.run(copies, 1, timeout=50)


def average_weights(comms):
    model = mp.DataParallel(layers(), comms)
    average = AveragedModel(model)
    for step in range(3):
        train(comms, model, 1, step)
        average.update_parameters(model)
    assert all(torch.isfinite(parameter).all() for parameter in average.parameters())
    assert replicas_are_identical(average, comms)
    return average(share(comms)).shape == (4, 3)


def test_weights_are_averaged_over_steps(pool):
    assert pool.run(average_weights, 2, transport="shm", timeout=50) == [True, True]


def save(comms):
    model = mp.DataParallel(layers(), comms)
    train(comms, model)
    for write in (pickle.dumps, lambda one: torch.save(one, io.BytesIO()), copy.copy):
        with pytest.raises(mp.errors.UsageError, match=r"model\.state_dict\(\), or model\.module for"):
            write(model)
    with pytest.raises(mp.errors.UsageError, match=r"a Comms cannot be pickled: .* from mp\.launch or mp\.connect;"):
        pickle.dumps(comms)
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    return model.module, model.state_dict()


def test_the_module_inside_can_be_saved_and_returned(pool):
    (module, state), (other, _) = pool.run(save, 2, transport="shm", timeout=50)
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    layers().load_state_dict(state)


def wrapped(comms):
    return mp.DataParallel(layers(), comms)


def test_a_wrapped_model_that_is_returned_says_what_to_return_instead(pool):
    with pytest.raises(mp.errors.RankFailed, match=re.escape("model.state_dict(), or model.module")):
        pool.run(wrapped, 2, transport="shm", timeout=50)


# ── models that change after they were wrapped ──────────────────────────────────────────────────────────────────────


def add(comms):
    model = mp.DataParallel(layers(), comms)
    train(comms, model)
    nn.Linear(2, 2)  # somebody else's
    train(comms, model)
    model.module.append(nn.Linear(3, 3).double())
    for use in (lambda: model(share(comms)), model.program):
        for _ in range(2):
            with pytest.raises(mp.errors.UsageError, match=r"^DataParallel: parameter '4\.weight' was added"):
                use()
    del model.module[4]
    train(comms, model)
    model.module[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH).double())
    with pytest.raises(mp.errors.UsageError, match=r"'0\.weight' .*; change the model first, then wrap it$"):
        model(share(comms))


def test_a_parameter_that_is_added_after_wrapping_is_named(pool):
    pool.run(add, 2, transport="shm", timeout=50)


def convert(comms, views):
    """Another dtype, another layout: with gradients that stay, and with those that begin anew."""
    model = mp.DataParallel(layers().float(), comms, gradient_as_bucket_view=views)
    model(share(comms).float()).pow(2).mean().backward()
    model.double()
    model.zero_grad()
    model.load_state_dict(layers().state_dict())
    model(share(comms)).pow(2).mean().backward()
    assert all(map(torch.allclose, gradients(model), averages(comms, 0)))
    images = mp.DataParallel(nn.Conv2d(2, 3, 2).double(), comms, gradient_as_bucket_view=views)
    inputs = share(comms).reshape(-1, 2, 2, 3)
    for again in (False, True):
        images(inputs).pow(2).mean().backward()
        wanted = images.module.weight.grad.clone()
        images.module.to(memory_format=torch.channels_last)
        if again:
            images.zero_grad()
            images(inputs).pow(2).mean().backward()
            torch.testing.assert_close(images.module.weight.grad, wanted)
        images.zero_grad()


@pytest.mark.parametrize("views", [False, True])
def test_a_model_may_be_converted_after_wrapping(any_pool, views):
    any_pool.run(convert, 2, views, timeout=50)


def functional(comms):
    for module in (layers(), nn.Linear(WIDTH, 3).double()):
        model = mp.DataParallel(module, comms)
        state = dict(model.named_parameters())
        torch.func.functional_call(model, state, share(comms)).pow(2).mean().backward()
        kept = gradients(model)
        model.zero_grad()
        model(share(comms)).pow(2).mean().backward()
        assert all(map(torch.allclose, gradients(model), kept))
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
        found = torch.func.functional_call(model, zeros | buffers, share(comms), strict=True)
        assert not found.any() and model(share(comms)).any()
    assert model.weight is module.weight
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


def test_functional_call_takes_the_plain_models_names(pool):
    pool.run(functional, 2, transport="shm", timeout=50)
