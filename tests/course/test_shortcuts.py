"""Accumulation is one large batch; averaging parameters is that only for SGD, every step."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import microparallel as mp
from microparallel.comms.message_group import count_messages
from microparallel.data_parallel import replicas_are_identical

STEPS = 6
# Who has how many of 12 samples, in micro-batches: alike, uneven, with an empty one, with a rank that has none.
SHARES = {
    "alike": [[2, 2, 2], [2, 2, 2]],
    "uneven": [[1, 4, 2], [3, 1, 1]],
    "different numbers": [[5], [1, 1, 2], [3]],
    "empty": [[0, 4, 0], [], [7, 1, 0]],
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (12,), generator=generator)


def make_optimizer(name, model):
    return {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
    }[name]()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def alone(optimizer_name):
    """What one process learns from whole batches: losses and weights."""
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


def micro_batches(comms, sizes, step):
    """This rank's part of a batch that is dealt out in the order of the ranks."""
    start = sum(map(sum, sizes[: comms.rank]))
    inputs, targets = (part[start : start + sum(sizes[comms.rank])] for part in batch(step))
    return list(zip(inputs.split(sizes[comms.rank]), targets.split(sizes[comms.rank]), strict=True))


def sum_over_classes(outputs, targets):
    """A sum over the samples that are not of class 0, and how many these are."""
    counted = targets > 0
    return cross_entropy(outputs[counted], targets[counted], reduction="sum"), counted.sum()


def counting(comms, shares):
    """Two steps with a loss that counts; beside each other the loss, the gradients, and what went wrong."""
    model = mp.DataParallel(make_model(), comms)
    found = []
    for step in range(2):
        model.zero_grad()
        loss = mp.course.accumulated_step(model, micro_batches(comms, shares, step), sum_over_classes)
        found.append((loss.item(), torch.cat([one.grad.flatten() for one in model.parameters()]).clone()))
    with pytest.raises(mp.errors.UsageError, match=r"call optimizer.zero_grad\(\) first"):
        mp.course.accumulated_step(model, micro_batches(comms, shares, 0), sum_over_classes)
    model.zero_grad()
    loss = mp.course.accumulated_step(model, micro_batches(comms, shares, 0), lambda outputs, _: (0 * outputs.sum(), 0))
    assert loss.isnan() and not any(one.grad.any() for one in model.parameters())
    return found


@pytest.mark.parametrize("name", SHARES)
def test_a_loss_may_be_a_sum_and_a_count(pool, name):
    shares = SHARES[name]
    for found in pool.run(counting, len(shares), shares, timeout=50):
        for step, (loss, gradients) in enumerate(found):
            model, (inputs, targets) = make_model(), batch(step)
            total, count = sum_over_classes(model(inputs), targets)
            (total / count).backward()
            assert loss == pytest.approx((total / count).item(), rel=1e-12)
            wanted = torch.cat([one.grad.flatten() for one in model.parameters()])
            torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)


def test_steps_that_weigh_by_samples_refuse_a_sum_and_a_count(comms_alone):
    for step in (mp.course.naive_data_parallel_step, mp.course.ddp_step):
        with pytest.raises(mp.errors.UsageError, match=r"use mp.course.accumulated_step \(train: --strategy ddp\)"):
            step(make_model(), comms_alone, *batch(0), sum_over_classes)


@pytest.fixture
def comms_alone():
    with mp.connect("gloo", device="cpu") as comms:
        yield comms


def accumulating(comms, cases):
    found = []
    for sizes, optimizer_name, counted in cases:
        model = mp.DataParallel(make_model(), comms)
        optimizer = make_optimizer(optimizer_name, model)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            mine = micro_batches(comms, sizes, step) if sizes[comms.rank] else []
            loss = mp.course.accumulated_step(model, mine, cross_entropy, samples=None if counted else 12)
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, weights(model)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_accumulation_is_one_large_batch(pool, ranks):
    shares = [sizes for sizes in SHARES.values() if len(sizes) == ranks]
    cases = [(sizes, name, counted) for sizes in shares for name in ("sgd", "adam") for counted in (True, False)]
    results = pool.run(accumulating, ranks, cases, timeout=50)
    for case, *of_ranks in zip(cases, *results, strict=True):
        losses, wanted = alone(case[1])
        for ours, learnt in of_ranks:
            assert ours == pytest.approx(losses, rel=1e-12, abs=0), case
            torch.testing.assert_close(learnt, wanted, rtol=0, atol=1e-12)
            assert torch.equal(learnt, of_ranks[0][1])


def synchronisations(comms):
    """How many messages and bytes four micro-batches take, and how many one takes."""
    found = []
    for sizes in ([[1] * 4] * 3, [[4]] * 3):
        counted, counts = count_messages(comms)
        model = mp.DataParallel(make_model(), counted)
        mp.course.accumulated_step(model, micro_batches(comms, sizes, 0), cross_entropy, samples=12)
        before = replace(counts)  # in the first step the ranks also agree on an order
        mp.course.accumulated_step(model, micro_batches(comms, sizes, 1), cross_entropy, samples=12)
        found.append((counts.messages_sent - before.messages_sent, counts.bytes_sent - before.bytes_sent))
    return found


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_accumulation_sends_as_much_as_one_batch(pool, transport):
    parameters = make_model()
    size = sum(parameter.nbytes for parameter in parameters.parameters())
    for four, one in pool.run(synchronisations, 3, transport=transport, timeout=50):
        assert four == one
        assert one[0] == 2 * 4  # a bucket, and the loss: two rings of three ranks
        assert one[1] >= 4 / 3 * size


def averaging(comms, cases):
    found = []
    for sizes, optimizer_name, every in cases:
        if comms.rank:
            torch.manual_seed(7)
        model = make_model()
        with torch.no_grad():
            model[0].weight.add_(comms.rank)  # rank 0's is what counts
        together = mp.course.ParameterAveraging(model, comms, every=every)
        optimizer = make_optimizer(optimizer_name, model)
        moments = []
        for step in range(STEPS):
            [(inputs, targets)] = micro_batches(comms, sizes, step)
            optimizer.zero_grad()
            if len(targets):
                cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            averaged = together.after_step(samples=len(targets))
            moments.append((averaged, replicas_are_identical(model, comms)))
        together.average()
        assert replicas_are_identical(model, comms)
        found.append((weights(model), moments))
    return found


def test_averaging_parameters_is_averaging_gradients_for_sgd_every_step_and_for_nothing_else(pool):
    even, uneven, idle = [[4], [4], [4]], [[7], [2], [3]], [[8], [0], [4]]
    same = [(even, "sgd", 1), (uneven, "sgd", 1), (idle, "sgd", 1), (even, "momentum", 1)]
    other = [(even, "sgd", 2), (uneven, "sgd", 3), (even, "adam", 1), (even, "adam", 3)]
    [results, *_] = pool.run(averaging, 3, same + other, timeout=50)
    for (sizes, name, every), (learnt, moments) in zip(same + other, results, strict=True):
        distance = (learnt - alone(name)[1]).abs().max().item()
        if (sizes, name, every) in same:
            assert distance < 1e-14, (sizes, name, every)
        else:
            assert distance > 1e-5, (sizes, name, every)
        wanted = [step % every == 0 for step in range(1, STEPS + 1)]
        assert moments == [(time, time) for time in wanted]  # apart in between


def averages_what_is_there(comms):
    """Buffers, dtypes, frozen parameters, and ranks that count differently."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2).half())
    model[1].bias.requires_grad_(False)
    together = mp.course.ParameterAveraging(model, comms, every=5)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(comms.rank)
    together.after_step(samples=3 if comms.rank else 1)
    together.average()
    once = {name: tensor.flatten()[0].item() for name, tensor in model.state_dict().items()}
    together.average()  # nothing was learnt since
    assert {name: tensor.flatten()[0].item() for name, tensor in model.state_dict().items()} == once
    return once


def test_what_is_averaged(pool):
    for rank, found in enumerate(pool.run(averages_what_is_there, 2, timeout=50)):
        frozen, counts = found.pop("1.bias"), found.pop("0.num_batches_tracked")
        assert (frozen, counts) == (rank, 0)  # left alone; rank 0's
        assert set(found.values()) == {0.75}


def refusals(comms):
    model = make_model()
    wrapped = mp.DataParallel(model, comms)
    calls = [
        lambda: mp.course.accumulated_step(model, [batch(0)], cross_entropy),
        lambda: mp.course.accumulated_step(wrapped, [], cross_entropy),
        lambda: mp.course.ParameterAveraging(model, comms, every=0),
        lambda: mp.course.ParameterAveraging(model, comms, every=2.5),
        lambda: mp.course.ParameterAveraging(wrapped, comms, every=2),
        lambda: mp.course.ParameterAveraging(model, comms, every=2).after_step(samples=-1),
    ]
    messages = []
    for call in calls:
        with pytest.raises(mp.errors.UsageError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_what_makes_no_sense_is_refused_in_one_line(pool):
    wanted = ["pass mp.DataParallel", "no rank has a sample", "every=0", "every=2.5", "pass the model itself", "-1"]
    for messages in pool.run(refusals, 2, timeout=50):
        for message, words in zip(messages, wanted, strict=True):
            assert words in message and "\n" not in message
