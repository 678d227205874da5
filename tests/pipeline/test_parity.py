"""Every schedule against one process that sees the whole batch: losses, all gradients, and the weights after it."""

import functools

import pytest
import torch
from tests.pipeline.oracle import MODELS, RELATIVE, batch, far, wrong_gradients

import microparallel as mp
from microparallel.models import cross_entropy
from microparallel.program import peak_activations
from microparallel.schedules import PIPELINES

STEPS = 2
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003),
}
SUBJECTS = [
    *((kind, samples, torch.float64, "sgd") for kind in MODELS for samples in (8, 11, 12)),
    ("mlp", 11, torch.float32, "sgd"),
    ("gpt", 11, torch.float32, "sgd"),
    ("mlp", 12, torch.float64, "adam"),
]


@functools.cache
def alone(kind, samples, dtype, optimizer, depth):
    """What one process learns: for each step the loss and the gradients, and the weights in the end."""
    model = MODELS[kind](dtype, depth)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    steps = []
    for number in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(kind, samples, dtype, seed=number)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        named = model.named_parameters(remove_duplicate=False)
        steps.append((loss.item(), {name: parameter.grad.clone() for name, parameter in named}))
        optimizer.step()
    return steps, model.state_dict()


def failures(pool, ranks, cases, **world):
    """What differs on any rank from one process; a rank has at most two stages, and a model no more than it takes."""
    (replicas,) = {case[3] for case in cases}
    depth = max(3, 2 * ranks // replicas)
    references = {subject: alone(*subject, depth) for subject in SUBJECTS}
    found = pool.run(everything_that_fails, ranks, cases, references, depth, timeout=55, **world)
    return [what for wrong in found for what in wrong]


def shares(samples, replicas, uneven):
    """Where each replica's samples begin and end; unevenly, the second has none, and the rest are not alike."""
    if uneven:
        ends = [samples // 3, samples // 3, samples - 1, samples][:replicas]
        ends[-1] = samples
    else:
        ends = [samples * (index + 1) // replicas for index in range(replicas)]
    return list(zip([0, *ends], ends, strict=False))


def differences(comms, subject, reference, depth, name, microbatches, replicas=1, uneven=False):
    """Train a pipeline as `alone` does, and name what is not the same."""
    kind, samples, dtype, optimizer = subject
    steps, weights = reference
    pipe = mp.Pipeline(MODELS[kind](dtype, depth), comms, name, microbatches, cross_entropy, replicas=replicas)
    optimizer = OPTIMIZERS[optimizer](pipe.parameters())
    begin, end = shares(samples, replicas, uneven)[comms.rank // (comms.world_size // replicas)]
    for number, (loss, gradients) in enumerate(steps):
        optimizer.zero_grad()
        mine = [whole[begin:end] if end > begin else None for whole in batch(kind, samples, dtype, seed=number)]
        found = pipe.step(*mine, samples=samples if uneven else None, allow_fewer=uneven)
        if far(found, torch.tensor(loss, dtype=torch.float64), RELATIVE[dtype]):
            yield f"loss of step {number}: {float(found)} and not {loss}"
        yield from (
            f"{what} in step {number}" for what in wrong_gradients(pipe.named_parameters(), gradients, RELATIVE[dtype])
        )
        optimizer.step()
    tolerance = RELATIVE[dtype] if optimizer.__class__ is torch.optim.SGD else 1e-7  # Adam divides by small numbers
    yield from (f"final {at}" for at, one in pipe.state_dict().items() if far(one, weights[at], tolerance))
    if not pipe.replicas_are_identical():
        yield "replicas, or copies of a tied weight, from each other"
    promised = peak_activations(pipe.program.ranks[comms.rank])
    if not uneven and pipe.most_activations != promised:
        yield f"{pipe.most_activations} activations, and the program has {promised}"


def everything_that_fails(comms, cases, references, depth):
    torch.set_num_threads(1)
    return [
        f"{name}, {microbatches} micro-batches of {subject}{' unevenly' * uneven}: {what}"
        for subject, name, microbatches, replicas, uneven in cases
        for what in differences(comms, subject, references[subject], depth, name, microbatches, replicas, uneven)
    ]


def cases_of_one_pipeline(kind):
    for name in PIPELINES:
        for microbatches, samples in ((1, 8), (2, 8), (4, 8), (8, 8), (4, 11)):
            yield (kind, samples, torch.float64, "sgd"), name, microbatches, 1, False
        yield (kind, 11, torch.float32, "sgd"), name, 3, 1, False
        if kind == "mlp":
            yield (kind, 12, torch.float64, "adam"), name, 8, 1, False


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parity_with_one_process(pool, ranks, kind):
    cases = list(cases_of_one_pipeline(kind))
    assert not failures(pool, ranks, cases, transport="shm")


@pytest.mark.parametrize("ranks", [2, 4])
def test_parity_over_gloo(pool, ranks):
    subjects = [(kind, 11, torch.float64, "sgd") for kind in MODELS]
    cases = [(subject, name, 4, 1, False) for name in PIPELINES for subject in subjects]
    assert not failures(pool, ranks, cases)


# ── replicas ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cases_of_replicas(replicas):
    for name in PIPELINES:
        for kind in MODELS:
            yield (kind, 12, torch.float64, "sgd"), name, 3, replicas, False
            if replicas > 1:
                yield (kind, 11, torch.float64, "sgd"), name, 4, replicas, True
    yield ("mlp", 12, torch.float64, "adam"), "1f1b", 2, replicas, False


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 4), (2, 4), (4, 4), (2, 2)])
def test_parity_of_replicas(pool, replicas, ranks):
    cases = list(cases_of_replicas(replicas))
    assert not failures(pool, ranks, cases, transport="shm")


def test_parity_of_replicas_over_gloo(pool):
    cases = [case for case in cases_of_replicas(2) if case[1] in ("1f1b", "zbv")]
    assert not failures(pool, 4, cases)
