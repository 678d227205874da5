"""torch's clip_grad_norm_ on a pipeline's parameters is refused; otherwise its gradients are tensors like any other."""

import copy
import io
import math

import pytest
import torch
from tests.pipeline.oracle import batch, far, gpt, mlp, whole_batch, wrong_gradients
from torch import nn

import microparallel as mp
from microparallel.models import cross_entropy

LINE = (
    r"the norm of this rank's gradients is that of its own layers, not of the whole pipeline; to clip, call "
    r"pipe\.clip_grad_norm_ on every rank; the norm of one gradient is parameter\.grad\.norm\(\)"
)


def stepped(comms, schedule, replicas=1, build=mlp, **options):
    """A pipeline after a step, and the loss and gradients of one process."""
    torch.set_num_threads(1)
    pipe = mp.Pipeline(build(), comms, schedule, 2, cross_entropy, replicas=replicas, **options)
    inputs, targets = batch("gpt" if build is gpt else "mlp", 4)
    mine = slice(pipe.replica * 4 // replicas, (pipe.replica + 1) * 4 // replicas)
    pipe.step(inputs[mine], targets[mine])
    return pipe, (inputs[mine], targets[mine]), whole_batch(build(), inputs, targets)[1]


def refuses(comms, schedule, replicas):
    pipe, _, gradients = stepped(comms, schedule, replicas, gpt)
    ways = [(foreach, kind) for foreach in (None, True, False) for kind in (2.0, math.inf)]
    for foreach, kind in ways:
        with pytest.raises(mp.errors.UsageError, match=f"^{LINE}$"):
            nn.utils.clip_grad_norm_(pipe.parameters(), 0.01, kind, foreach=foreach)
    with pytest.raises(mp.errors.UsageError, match=LINE):
        nn.utils.get_total_norm([one.grad for one in pipe.parameters() if one.grad is not None])
    wrong = wrong_gradients(pipe.named_parameters(), gradients)  # no refusal has changed them
    wrong += [name for name, one in pipe.named_parameters() if far(one.grad.norm(), gradients[name].norm(), 1e-12)]
    whole = nn.ParameterList(gpt().parameters())
    for one, gradient in zip(whole, whole_batch_gradients(gpt), strict=True):
        one.grad = gradient
    if far(pipe.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(whole, 0.01), 1e-12):
        wrong.append("the norm")
    return wrong


def whole_batch_gradients(build):
    model, (inputs, targets) = build(), batch("gpt", 4)
    cross_entropy(model(inputs), targets).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize(("schedule", "ranks", "replicas"), [("1f1b", 2, 1), ("zb-h1", 2, 1), ("zbv", 4, 2)])
def test_it_is_refused_in_one_line(pool, schedule, ranks, replicas):
    """Of a model with tied weights; `pipe.clip_grad_norm_` then does what torch's does in one process."""
    assert pool.run(refuses, ranks, schedule, replicas, transport="shm", timeout=40) == [[]] * ranks


def on_one_rank(comms, replicas):
    pipe, _, gradients = stepped(comms, "1f1b", replicas)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return far(nn.utils.clip_grad_norm_(pipe.parameters(), 0.01), norm, 1e-12)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_pipeline_of_one_rank_is_clipped_by_torch(pool, replicas):
    assert pool.run(on_one_rank, replicas, replicas, transport="shm", timeout=30) == [False] * replicas


def is_like_any_other(comms):
    pipe, _, gradients = stepped(comms, "1f1b")
    name, parameter = next(pipe.named_parameters())
    file = io.BytesIO()
    torch.save(parameter.grad, file)
    file.seek(0)
    copies = [copy.deepcopy(parameter.grad), torch.load(file), parameter.grad.clone(), parameter.grad * 1]
    copies.append(copy.deepcopy({"kept": parameter.grad})["kept"])
    return [type(one) is torch.Tensor and not far(one, gradients[name], 1e-12) for one in copies]


def test_copies_of_a_gradient_are_plain_tensors_also_in_a_file(pool):
    assert pool.run(is_like_any_other, 2, transport="shm", timeout=30) == [[True] * 5] * 2


def trains(comms, schedule, replicas):
    """Steps that add to earlier gradients, which are removed or set to zero, with optimizers of torch's."""
    wrong = []
    for make in (
        lambda given: torch.optim.AdamW(given, lr=0.01),
        lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
        lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    ):
        pipe, mine, _ = stepped(comms, schedule, replicas, gpt)
        alone, whole = gpt(), batch("gpt", 4)
        cross_entropy(alone(whole[0]), whole[1]).backward()
        optimizer, other = make(pipe.parameters()), make(alone.parameters())
        for number in range(3):
            pipe.step(*mine)  # beside those that are there
            cross_entropy(alone(whole[0]), whole[1]).backward()
            pipe.clip_grad_norm_(0.5)
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            for one in (optimizer, other):
                one.step()
                one.zero_grad(set_to_none=number != 1)
        weights = alone.state_dict()
        wrong += [f"{name} with {other}" for name, one in pipe.named_parameters() if far(one, weights[name], 1e-9)]
    return wrong


@pytest.mark.parametrize(("schedule", "ranks", "replicas"), [("zb-h1", 2, 1), ("1f1b", 4, 2)])
def test_optimizers_train_as_in_one_process(pool, schedule, ranks, replicas):
    assert pool.run(trains, ranks, schedule, replicas, transport="shm", timeout=40) == [[]] * ranks


def keeps(comms):
    """Where the buckets' memory is in each of four steps; a gradient of the third step is kept over the fourth."""
    pipe, mine, _ = stepped(comms, "1f1b", 2)
    places = [pipe._column.buckets[0].buffer.data_ptr()]
    for number in range(3):
        pipe.zero_grad()
        pipe.step(*mine)
        places.append(pipe._column.buckets[0].buffer.data_ptr())
        if number == 1:
            held = next(pipe.parameters()).grad
            before = held.clone()
            for parameter in pipe.parameters():
                parameter.data.mul_(2)
    return len(set(places[:3])), places[3] != places[2], torch.equal(held, before)


def test_buckets_are_used_again_unless_a_gradient_is_kept(pool):
    assert pool.run(keeps, 4, transport="shm", timeout=30) == [(1, True, True)] * 4
