"""For how much a micro-batch counts: means over tokens with uneven padding, beside one process."""

import copy

import pytest
import torch
from tests.pipeline.oracle import batch as mlp_batch
from tests.pipeline.oracle import far, gpt, mlp, wrong_gradients
from torch.nn.functional import cross_entropy

import microparallel as mp
from microparallel.errors import RankFailed

PADDING = -100


def padded(samples=8, seed=0):
    """Tokens, and targets most of whose tokens are padding in the last samples; one sample has only padding."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(11, (samples, 5), generator=generator) for _ in range(2))
    for sample in range(samples):
        targets[sample, max(0, 5 - sample) :] = PADDING
    return inputs, targets


def mean_over_tokens(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def mean_or_zero(outputs, targets):
    """A mean over no tokens is nan."""
    return mean_over_tokens(outputs, targets) if (targets != PADDING).any() else outputs.sum() * 0


def sum_and_count(outputs, targets):
    total = cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (targets != PADDING).sum()


def weighs(comms, replicas, schedules):
    torch.set_num_threads(1)
    model = gpt()
    losses = [mean_over_tokens(model(inputs), targets) for inputs, targets in (padded(), padded(seed=1))]
    sum(losses).backward()
    wanted = {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)}
    wrong = []
    for name in schedules:
        for way in ("weight", "count"):
            loss_fn = mean_or_zero if way == "weight" else sum_and_count
            pipe = mp.Pipeline(gpt(), comms, name, 4, loss_fn, replicas=replicas)
            for number, expected in enumerate(losses):  # the gradients of both batches add up
                inputs, targets = padded(seed=number)
                mine = slice(pipe.replica * 8 // replicas, (pipe.replica + 1) * 8 // replicas)
                more = {"weight": targets[mine] != PADDING} if way == "weight" else {}
                if far(pipe.evaluate(inputs[mine], targets[mine], **more), expected, 1e-12):
                    wrong.append(f"{name}, {way}: evaluate")
                more |= {"samples": 8} if number else {}
                if far(pipe.step(inputs[mine], targets[mine], **more), expected, 1e-12):
                    wrong.append(f"{name}, {way}: loss")
            wrong += [f"{name}, {way}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
        by_samples = mp.Pipeline(gpt(), comms, name, 4, mean_or_zero, replicas=replicas)
        inputs, targets = padded()
        if not far(by_samples.step(inputs[mine], targets[mine]), losses[0], 1e-3):
            wrong.append(f"{name}: the case is too easy")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "replicas", "schedules"), [(2, 1, ["gpipe", "1f1b", "zb-h1"]), (4, 2, ["1f1b", "zbv"])]
)
def test_a_mean_over_tokens_is_that_of_one_process(pool, ranks, replicas, schedules):
    assert pool.run(weighs, ranks, replicas, schedules, transport="shm", timeout=40) == [[]] * ranks


def counts_nothing(comms):
    inputs, targets = padded()
    pipe = mp.Pipeline(gpt(), comms, "1f1b", 4, sum_and_count)
    loss = pipe.step(inputs, torch.full_like(targets, PADDING))
    return bool(loss.isnan()), any(bool(one.grad.any()) for one in pipe.parameters() if one.grad is not None)


def test_a_batch_of_padding_has_no_loss_and_no_gradient(pool):
    assert pool.run(counts_nothing, 2, transport="shm") == [(True, False)] * 2


def weighs_wrongly(comms, case):
    inputs, targets = padded()
    loss_fns = {"both": sum_and_count, "three": lambda outputs, _: (outputs.sum(), 1, 2)}
    pipe = mp.Pipeline(gpt(), comms, "1f1b", 4, loss_fns.get(case, mean_over_tokens))
    pipe.step(inputs, targets, weight={"three": None, "short": torch.ones(3)}.get(case, torch.ones(8)))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("both", "loss_fn returned (sum, count), and step was given weight=: leave out one of them"),
        ("three", "it must return the mean over the samples, one number, or (sum, count)"),
        ("short", "rank 1 was given 3 weights, and the batch has 8"),
    ],
)
def test_what_cannot_be_weighed_is_refused(pool, case, words):
    with pytest.raises(RankFailed) as caught:
        pool.run(weighs_wrongly, 2, case, transport="shm", timeout=20)
    assert words in str(caught.value.refusal)


# ── as a module ─────────────────────────────────────────────────────────────────────────────────────────────────────


def like_a_module(comms, replicas):
    inputs, targets = mlp_batch("mlp", 8)
    pipe = mp.Pipeline(mlp(torch.float32), comms, "1f1b", 4, mp.models.cross_entropy, replicas=replicas)
    mine = slice(pipe.replica * 8 // replicas, (pipe.replica + 1) * 8 // replicas)
    pipe.step(inputs[mine].float(), targets[mine])
    wrong = []
    pipe.zero_grad(set_to_none=False)
    if any(one.grad is None or one.grad.any() for one in pipe.parameters()):
        wrong.append("gradients are not zero")
    pipe.zero_grad()
    if any(one.grad is not None for one in pipe.parameters()):
        wrong.append("gradients are not None")
    if pipe.eval() is not pipe or any(module.training for module in pipe.own_layers[0].modules()):
        wrong.append("not in evaluation mode")
    if not all(module.training for module in pipe.train().own_layers[0].modules()):
        wrong.append("not in training mode")
    whole = copy.deepcopy(mlp())
    whole.float().double()  # as the pipeline's parameters are rounded
    loss = mp.models.cross_entropy(whole(inputs), targets)
    loss.backward()
    if pipe.to(torch.float64) is not pipe or any(one.dtype != torch.float64 for one in pipe.parameters()):
        wrong.append("to")
    if far(pipe.step(inputs[mine], targets[mine]), loss, 1e-12):
        wrong.append("loss in float64")
    wanted = {name: one.grad for name, one in whole.named_parameters()}
    wrong += wrong_gradients(pipe.named_parameters(), wanted)
    with pytest.raises(mp.errors.UsageError, match=r"^to: rank \d is on cpu, and its layers with it"):
        pipe.to("meta")
    return wrong


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_a_pipeline_has_the_methods_of_a_module(pool, ranks, replicas):
    assert pool.run(like_a_module, ranks, replicas, transport="shm", timeout=30) == [[]] * ranks
