"""A pipeline that cannot be, or that breaks: every rank stops soon, and the text says where and on what."""

import os
import re
import time

import pytest
import torch
from tests.pipeline.oracle import batch, mlp
from torch import nn
from torch.nn.functional import mse_loss

import microparallel as mp
from microparallel.errors import CommsError, RankFailed, StageError, UsageError
from microparallel.models import cross_entropy
from microparallel.program import from_text
from microparallel.schedules import build

SOON = 5.0


class Moody(nn.Module):
    """A layer that, when its time comes, does something else than in its dry run."""

    def __init__(self, deed, passes):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.deed, self.left = deed, passes

    def forward(self, inputs):
        outputs = self.linear(inputs)
        if inputs.device.type == "meta":
            return outputs
        self.left -= 1
        if self.left >= 0:
            return outputs
        if self.deed == "raises":
            raise ValueError("out of paper")
        if self.deed == "dies":
            os._exit(3)
        if self.deed == "raises in backward":
            return Fragile.apply(outputs)
        if self.deed == "dtype":
            return outputs.float()
        if self.deed == "no gradient":
            return outputs.detach()
        return outputs[:, :4]


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no way back")


def broken(comms, deed, schedule, replicas, report):
    """Train until the second rank's stage misbehaves on its third micro-batch; others may return their errors."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5), Moody(deed, 2), nn.Linear(5, 5), nn.Linear(5, 5)][: comms.world_size // replicas + 1]
    layers = nn.Sequential(*layers, *(nn.Linear(5, 5) for _ in range(4 - len(layers)))).double()
    places = comms.world_size // replicas
    balance = [1] * (places - 1) + [5 - places]
    pipe = mp.Pipeline(layers, comms, schedule, 4, mse_loss, balance, replicas=replicas)
    inputs, _ = batch("mlp", 8)
    try:
        pipe.step(inputs, inputs)
    except Exception as error:
        if report and comms.rank != 1:
            return type(error), str(error)
        raise
    return None, ""


def ready(comms):
    pass


def ends_soon(pool, *case, ranks=3, **world):
    pool.run(ready, ranks, timeout=50, **world)  # new ranks, which a busy machine may start slowly
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(broken, ranks, *case, timeout=30, **world)
    assert time.monotonic() - began < SOON
    return caught.value


@pytest.fixture
def warm(any_pool):
    """Ranks that are there already, so that only what happens in them takes time."""
    any_pool.run(_nothing, 4)
    return any_pool


def _nothing(comms):
    return comms.rank


DEEDS = {
    "raises": r"StageError: rank 1, stage 1, forward of micro-batch 2 on float64\[2, 5\]: ValueError: out of paper",
    "raises in backward": (
        r"StageError: rank 1, stage 1, backward of micro-batch 2 on float64\[2, 5\]: ArithmeticError: no way back"
    ),
    "shape": (
        r"StageError: rank 1, stage 1, forward of micro-batch 2 on float64\[2, 5\]: returned float64\[2, 4\], "
        r"and its dry run float64\[2, 5\]"
    ),
    "dtype": r"forward of micro-batch 2 on float64\[2, 5\]: returned float32\[2, 5\], and its dry run float64\[2, 5\]",
    "no gradient": r"and its dry run float64\[2, 5\]: tensors need gradients \[False\]; freeze",
    "dies": r"rank 1 exited with code 3",
}


@pytest.mark.in_turn
@pytest.mark.parametrize("deed", DEEDS)
def test_a_stage_that_breaks_is_named_and_all_ranks_stop_soon(warm, deed):
    error = ends_soon(warm, deed, "1f1b", 1, False)
    assert error.rank == 1
    assert re.search(DEEDS[deed], str(error)), str(error)


@pytest.mark.parametrize("deed", ["raises", "dies"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_it_is_the_same_for_other_schedules(pool, deed, schedule):
    pool.run(_nothing, 4)
    assert ends_soon(pool, deed, schedule, 1, False, transport="shm").rank == 1


def test_among_replicas_the_rank_is_that_of_the_world(pool):
    pool.run(_nothing, 4)
    error = ends_soon(pool, "raises", "1f1b", 2, False, ranks=4, transport="shm")
    assert error.rank in (1, 3)
    assert f"rank {error.rank}, stage 1, forward of micro-batch 2 on float64[2, 5]" in str(error)


def tells(comms, deed):
    """Rank 0 of two catches its own error and writes it into a file, before the parent ends it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 5), Moody(deed, 2)).double()
    pipe = mp.Pipeline(layers, comms, "gpipe", 4, mse_loss)
    inputs, _ = batch("mlp", 8)
    try:
        pipe.step(inputs, inputs)
    except CommsError as error:
        return type(error).__name__, getattr(error, "ranks", ()), str(error)
    except StageError:
        comms.close()  # goes away, and does not say why
        return "StageError", (), ""


def test_the_others_say_whom_they_waited_for_and_what_for(any_pool):
    (kind, ranks, text), _ = any_pool.run(tells, 2, "raises", timeout=30)
    assert kind == "PeerLost"
    assert ranks == (1,)
    assert "rank 1 went away during the pipeline's" in text
    assert "on rank 0" in text
    assert (
        "receive from rank 1 of the gradient of the output of G0.0 (stage.micro-batch)" in text
        or "send to rank 1" in text
    )


# ── what cannot be ──────────────────────────────────────────────────────────────────────────────────────────────────


def asks(comms, make, *arguments):
    """The error on every rank, where all of them see it."""
    try:
        make(comms, *arguments)
    except UsageError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def pipeline(comms, options, layers=9):
    return mp.Pipeline(mlp(depth=layers), comms, **options)


IMPOSSIBLE = [
    (
        {"layers": 1},
        "PartitionError",
        "2 stages need at least 2 layers, and this model has 1; use fewer ranks or stages a rank",
    ),
    ({"layers": 3, "schedule": "zbv"}, "PartitionError", "4 stages need at least 4 layers, and this model has 3"),
    ({"schedule": "1f1c"}, "UsageError", "there is no schedule '1f1c'; did you mean '1f1b'?"),
    ({"schedule": "ddp"}, "UsageError", "schedule='ddp' is no pipeline; choose one of naive, gpipe, 1f1b"),
    ({"schedule": "gpipe", "stages_per_rank": 2}, "UsageError", "schedule 'gpipe' does not take stages_per_rank"),
    ({"microbatches": 0}, "UsageError", "microbatches=0: schedule '1f1b' needs at least 1 micro-batch"),
    ({"schedule": build("gpipe", 3, 2)}, "UsageError", "program 'gpipe' is for 3 ranks, and this pipeline has 2"),
    ({"schedule": mp.collectives.build("ring", 2)}, "ProgramError", "a pipeline runs a training step"),
    ({"schedule": build("ddp", 2)}, "ProgramError", "sums buckets; write one pipeline, and ask for replicas="),
    ({"replicas": 3}, "UsageError", "replicas=3: 2 ranks cannot be shared out evenly among that many pipelines"),
    ({"replicas": 0}, "UsageError", "replicas=0: 2 ranks cannot be shared out evenly"),
    ({"balance": [4, 4]}, "PartitionError", "balance=[4, 4] adds up to 8 layers, and this model has 9"),
    ({"balance": "even"}, "UsageError", 'balance="even": choose one of "auto", "parameters", "time"'),
    (
        {"balance": "time"},
        "PartitionError",
        'balance="time" measures the layers on a micro-batch: pass one as example=',
    ),
]


def all_impossible(comms):
    found = []
    for options, _, _ in IMPOSSIBLE:
        options = dict(options)
        layers = options.pop("layers", 9)
        found.append(asks(comms, pipeline, options, layers))
    return found


def test_what_cannot_be_made_is_refused_on_every_rank_with_the_fix(pool):
    for found in pool.run(all_impossible, 2, transport="shm", timeout=30):
        for (options, kind, words), (got, text) in zip(IMPOSSIBLE, found, strict=True):
            assert got == kind, (options, got, text)
            assert words in text


def test_a_program_that_is_wrong_is_refused(pool):
    text = "program wrong\ngoal: training step of 2 stages, 1 micro-batch\nrank 0: F0.0\nrank 1: F1.0 B1.0"
    for kind, words in pool.run(asks, 2, pipeline, {"schedule": from_text(text)}, transport="shm"):
        assert kind == "Miscounted"  # a ProgramError
        assert "B0.0" in words or "backward" in words


def steps(comms, case):
    inputs, targets = batch("mlp", 8)
    options = {"microbatches": 4, "loss_fn": cross_entropy}
    if case == "no loss_fn" or case == "no loss_fn to evaluate":
        options["loss_fn"] = None
    if case == "not a scalar":
        options["loss_fn"] = lambda outputs, _: outputs.sum(1)
    pipe = mp.Pipeline(mlp(), comms, **options)
    match case:
        case "more micro-batches than samples":
            pipe.step(inputs[:3], targets[:3])
        case "no inputs":
            pipe.step(None, targets)
        case "no targets":
            pipe.step(inputs)
        case "no inputs to predict":
            pipe.predict()
        case "targets of another length":
            pipe.step(inputs, targets[:6])
        case "inputs without targets":
            pipe.step(inputs, samples=8)
        case "targets without inputs":
            pipe.step(None, targets, samples=8)
        case "no loss_fn to evaluate":
            pipe.evaluate(inputs, targets)
        case "inputs of no use":
            pipe.step("words", targets)
        case "inputs of another width":
            pipe.step(inputs[:, :3], targets)
        case "no targets to evaluate":
            pipe.evaluate(inputs)
        case _:
            pipe.step(inputs, targets)


REFUSED = {
    "more micro-batches than samples": (
        0,
        "4 micro-batches of a batch of 3 samples: use microbatches=3 or fewer, a larger batch, or step(…, allow_fewer",
    ),
    "no inputs": (0, "step: rank 0 has the first stage, and was given no inputs"),
    "no targets": (1, "step: rank 1 has the last stage, and was given no targets"),
    "no inputs to predict": (0, "predict: rank 0 has the first stage, and was given no inputs"),
    "no targets to evaluate": (1, "evaluate: rank 1 has the last stage, and was given no targets"),
    "targets of another length": (1, "rank 1 was given 6 targets, and the batch has 8"),
    "inputs without targets": (1, "rank 1 has the last stage, and was given no targets"),
    "targets without inputs": (1, "rank 1 was given 8 targets, and the batch has 0"),
    "no loss_fn": (None, "this pipeline has no loss_fn; pass loss_fn= to mp.Pipeline"),
    "no loss_fn to evaluate": (None, "this pipeline has no loss_fn; pass loss_fn= to mp.Pipeline"),
    "not a scalar": (1, "loss_fn returned a tensor of shape [2]; it must return the mean over the samples, one number"),
    "inputs of no use": (0, "inputs is a str with no tensor in it"),
    "inputs of another width": (0, "the dry run of stage 0 on float64[2, 3] failed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_cannot_be_is_refused_and_the_first_cause_is_told(pool, case):
    rank, words = REFUSED[case]
    pool.run(ready, 2, transport="shm", timeout=50)
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(steps, 2, case, transport="shm", timeout=20)
    assert rank is None or caught.value.rank == rank, str(caught.value)
    assert caught.value.refusal is not None, str(caught.value)
    assert words in caught.value.refusal
    assert time.monotonic() - began < 10
