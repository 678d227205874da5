"""Every schedule against one process that sees the whole batch: losses, all gradients, and the weights after it."""

import functools

import pytest
import torch
from tests.pairwise import sample_and_whole
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
    references = {case[0]: alone(*case[0], depth) for case in cases}
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


# samples, micro-batches, dtype, optimizer
BATCHES = [*((8, microbatches, torch.float64, "sgd") for microbatches in (1, 2, 4, 8)), (11, 4, torch.float64, "sgd")]
BATCHES += [(11, 3, torch.float32, "sgd"), (12, 8, torch.float64, "adam")]
WORLDS = [("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4), ("gloo", 2), ("gloo", 4)]


def worth_it(world, kind, schedule, batch):
    return kind == "mlp" or batch[-1] != "adam"


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "-".join(map(str, world)))
@pytest.mark.parametrize("rows", sample_and_whole(WORLDS, MODELS, PIPELINES, BATCHES, possible=worth_it))
def test_parity_with_one_process(pool, world, rows):
    cases = [
        ((kind, samples, dtype, optimizer), name, microbatches, 1, False)
        for among, kind, name, (samples, microbatches, dtype, optimizer) in rows
        if among == world
    ]
    transport, ranks = world
    assert not failures(pool, ranks, cases, transport=transport)


# ── replicas ────────────────────────────────────────────────────────────────────────────────────────────────────────


# how many replicas, on how many ranks
LAYOUTS = [(1, 4), (2, 4), (4, 4), (2, 2)]
# samples, micro-batches, optimizer, whether replicas have unlike shares
SHARES = [(12, 3, "sgd", False), (11, 4, "sgd", True), (12, 2, "adam", False)]


def can_be_shared(world, layout, kind, schedule, share):
    alone = layout[0] == 1 and share[-1]
    return not alone and (kind == "mlp" or share[2] != "adam")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "{} on {}".format(*layout))
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(
    "rows", sample_and_whole(["shm", "gloo"], LAYOUTS, MODELS, PIPELINES, SHARES, possible=can_be_shared)
)
def test_parity_of_replicas(pool, transport, layout, rows):
    replicas, ranks = layout
    cases = [
        ((kind, samples, torch.float64, optimizer), name, microbatches, replicas, uneven)
        for carrier, among, kind, name, (samples, microbatches, optimizer, uneven) in rows
        if (carrier, among) == (transport, layout)
    ]
    assert not failures(pool, ranks, cases, transport=transport)
