"""A pipeline whose replicas keep the optimizer's state in parts trains as one process does."""

from dataclasses import replace

import pytest
import torch
from tests.pipeline.oracle import batch, far, gpt, mlp
from torch import nn

import microparallel as mp
from microparallel.data_parallel.sharding import GradientInParts
from microparallel.errors import ProgramError, RankFailed, StageError, UsageError
from microparallel.models import cross_entropy
from microparallel.program import AllGather, OptimizerStep, Parameters
from microparallel.schedules import PIPELINES, build, with_sums
from microparallel.verifier.findings import DifferentWeights, NotUpdated

MODELS = {"mlp": mlp, "gpt": gpt}
OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


def share(tensors, replica, replicas):
    """A replica's samples of a batch."""
    length = len(tensors[0]) // replicas
    return [one[replica * length : (replica + 1) * length] for one in tensors]


def different_weights(pipe, model, relative=1e-12):
    wanted = dict(model.named_parameters(remove_duplicate=False))
    return [name for name, one in pipe.named_parameters() if far(one, wanted[name], relative)]


# ── beside one process ──────────────────────────────────────────────────────────────────────────────────────────────


def trains(comms, kind, schedule, replicas, clip=None, by="element", relative=1e-12, **options):
    """Three steps of each optimizer; what is not as in one process."""
    torch.set_num_threads(1)
    wrong = []
    for name, (optimizer_class, settings) in OPTIMIZERS.items():
        model = MODELS[kind]().to(comms.device)
        pipe = mp.Pipeline(
            MODELS[kind](), comms, schedule, 2, cross_entropy, replicas=replicas, shard="optimizer", **options
        )
        reference = optimizer_class(model.parameters(), **settings)
        optimizer = mp.ShardedOptimizer(pipe.parameters(), optimizer_class, comms, by=by, **settings)
        for number in range(3):
            inputs, targets = (one.to(comms.device) for one in batch(kind, 4 * replicas, seed=number))
            reference.zero_grad()
            wanted = cross_entropy(model(inputs), targets)
            wanted.backward()
            optimizer.zero_grad()
            loss = pipe.step(*share((inputs, targets), pipe.replica, replicas))
            if far(loss.cpu(), wanted.cpu(), relative):
                wrong.append(f"{name}: loss {number}")
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                if far(pipe.clip_grad_norm_(clip).cpu(), norm.cpu(), relative):
                    wrong.append(f"{name}: norm {number}")
            reference.step()
            optimizer.step()
        wrong += [f"{name}: {what}" for what in different_weights(pipe, model, relative)]
        if not pipe.replicas_are_identical():
            wrong.append(f"{name}: replicas differ")
    return wrong


@pytest.mark.parametrize(
    ("kind", "schedule", "ranks", "replicas", "options"),
    [
        ("gpt", "1f1b", 4, 2, {"clip": 0.05}),
        ("mlp", "gpipe", 3, 3, {"clip": 0.05}),
        ("mlp", "interleaved", 4, 2, {"bucket_cap_mb": 1e-4}),
        ("gpt", "zb-h1", 4, 2, {"by": "parameter"}),
        ("gpt", "zbv", 4, 2, {"clip": 0.05, "recompute": True}),
        ("gpt", "interleaved", 2, 2, {"by": "parameter", "bucket_cap_mb": 1e-4}),
        ("mlp", "1f1b", 2, 1, {"clip": 0.05}),
    ],
    ids=["tied", "one stage", "interleaved", "zero bubble", "shared on one rank", "all on one rank", "one replica"],
)
def test_it_trains_as_one_process(any_pool, kind, schedule, ranks, replicas, options):
    assert any_pool.run(trains, ranks, kind, schedule, replicas, timeout=50, **options) == [[]] * ranks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "schedule"), [("gpt", "1f1b"), ("gpt", "zbv"), ("mlp", "interleaved")])
def test_it_trains_as_one_process_on_a_gpu(pool, kind, schedule):
    options = {"clip": 0.05, "relative": 1e-9, "transport": "gloo", "device": "cuda", "timeout": 200}
    assert pool.run(trains, 4, kind, schedule, 2, **options) == [[]] * 4


class Thrice(nn.Module):
    """A model of four layers, of which the first, the second and the last have one weight in common."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(4))
        self.layers[1].weight = self.layers[3].weight = self.layers[0].weight

    def pipeline_layers(self):
        return self.layers

    def forward(self, inputs):
        return nn.Sequential(*self.layers)(inputs)


def shares_thrice(comms, schedule, shard):
    torch.set_num_threads(1)
    model = Thrice()
    # zbv gives rank 0 the stages 0 and 3, and rank 1 the stages 1 and 2.
    pipe = mp.Pipeline(list(Thrice().layers), comms, schedule, 2, nn.functional.mse_loss, replicas=2, shard=shard)
    settings = {"lr": 0.1, "momentum": 0.9}
    reference = torch.optim.SGD(model.parameters(), **settings)
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, **settings)
    for number in range(2):
        inputs, _ = batch("mlp", 8, seed=number)
        for one in (reference, optimizer):
            one.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        pipe.step(*share((inputs, inputs), pipe.replica, 2))
        reference.step()
        optimizer.step()
    whole = pipe.whole_state_dict()
    wrong = (
        [] if whole is None else [name for name, one in model.state_dict().items() if far(whole[name[7:]], one, 1e-12)]
    )
    return wrong, pipe.replicas_are_identical()


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_parameter_that_stages_of_one_rank_and_of_others_share(pool, shard):
    assert pool.run(shares_thrice, 4, "zbv", shard, transport="shm", timeout=50) == [([], True)] * 4


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PADDING = -100


def sum_and_count(outputs, targets):
    flat = outputs.flatten(0, 1), targets.flatten()
    return nn.functional.cross_entropy(*flat, ignore_index=PADDING, reduction="sum"), (targets != PADDING).sum()


def mean_over_tokens(outputs, targets):
    total, count = sum_and_count(outputs, targets)
    return total / count


def counts(comms, weighted):
    """Two batches whose gradients add up, counted by tokens: what came before is not scaled with what comes."""
    torch.set_num_threads(1)
    model = gpt()
    pipe = mp.Pipeline(
        gpt(), comms, "1f1b", 2, mean_over_tokens if weighted else sum_and_count, replicas=2, shard="optimizer"
    )
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, lr=0.1)
    wrong = []
    for number in range(2):
        inputs, targets = batch("gpt", 8, seed=number)
        for sample in range(8):
            targets[sample, 5 - sample // 2 :] = PADDING
        wanted = mean_over_tokens(model(inputs), targets)
        wanted.backward()
        mine = share((inputs, targets), pipe.replica, 2)
        more = {"weight": mine[1] != PADDING} if weighted else {}
        if far(pipe.step(*mine, **more), wanted, 1e-12):
            wrong.append(f"loss {number}")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.step()
    return wrong + different_weights(pipe, model)


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "count"])
def test_gradients_that_are_counted_and_that_add_up(pool, weighted):
    assert pool.run(counts, 4, weighted, transport="shm", timeout=50) == [[]] * 4


def uneven(comms, counts):
    """Replicas with different numbers of samples, one of them with none."""
    torch.set_num_threads(1)
    model = mlp()
    pipe = mp.Pipeline(mlp(), comms, "1f1b", 3, cross_entropy, replicas=len(counts), shard="optimizer")
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.AdamW, comms, lr=0.01)
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = sum(counts[: pipe.replica])
    wrong = []
    for number in range(2):
        inputs, targets = batch("mlp", sum(counts), seed=number)
        reference.zero_grad()
        optimizer.zero_grad()
        wanted = cross_entropy(model(inputs), targets)
        wanted.backward()
        mine = slice(start, start + counts[pipe.replica])
        given = (inputs[mine], targets[mine]) if counts[pipe.replica] else ()
        if far(pipe.step(*given, samples=sum(counts), allow_fewer=True), wanted, 1e-12):
            wrong.append(f"loss {number}")
        reference.step()
        optimizer.step()
    return wrong + different_weights(pipe, model), pipe.replicas_are_identical()


@pytest.mark.parametrize(("ranks", "counts"), [(4, (3, 1)), (4, (0, 2)), (2, (5, 0))], ids=str)
def test_replicas_with_different_numbers_of_samples(pool, ranks, counts):
    assert pool.run(uneven, ranks, counts, transport="shm", timeout=50) == [([], True)] * ranks


# ── parameters and gradients ────────────────────────────────────────────────────────────────────────────────────────


class WithUnused(nn.Module):
    """A layer that uses only one of its two weights."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 5, dtype=torch.float64)
        self.unused = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, inputs):
        return self.used(inputs)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5, dtype=torch.float64), WithUnused(), nn.Tanh(), nn.Linear(5, 5).double())


def frozen_and_unused(comms):
    """Unused parameters keep no gradient, so weight decay leaves them alone; freezing makes other buckets."""
    torch.set_num_threads(1)
    model, mine = layers(), layers()
    settings = {"lr": 0.01, "weight_decay": 0.5}
    pipe = mp.Pipeline(mine, comms, "1f1b", 2, nn.functional.mse_loss, replicas=2, shard="optimizer")
    reference = torch.optim.AdamW(model.parameters(), **settings)
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.AdamW, comms, **settings)
    wrong = []
    for number in range(4):
        for one in (model, mine):
            one[0].requires_grad_(number not in (1, 2))
            one[3].bias.requires_grad_(number < 2)
        inputs, _ = batch("mlp", 8, seed=number)
        reference.zero_grad(set_to_none=number != 2)
        optimizer.zero_grad(set_to_none=number != 2)
        reference.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs).backward()
        pipe.step(*share((inputs, inputs), pipe.replica, 2))
        names = dict(pipe.named_parameters())
        wrong += [f"{number} {name}" for name, one in names.items() if (one.grad is None) != no_gradient(model, name)]
        reference.step()
        optimizer.step()
        wrong += [f"{number} {name}" for name in different_weights(pipe, model)]
    return wrong, pipe.replicas_are_identical()


def no_gradient(model, name):
    return dict(model.named_parameters())[name].grad is None


def test_frozen_and_unused_parameters(pool):
    assert pool.run(frozen_and_unused, 4, transport="shm", timeout=50) == [([], True)] * 4


def handles_gradients(comms):
    """Removing gradients, in every way; a step that fails keeps earlier ones; what would lose some is refused."""
    torch.set_num_threads(1)
    inputs, targets = batch("mlp", 8)
    model = mlp()
    fails = []
    pipe = mp.Pipeline(
        mlp(), comms, "1f1b", 2, lambda *both: cross_entropy(*both) * (1 // (not fails)), replicas=2, shard="optimizer"
    )
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, lr=0.1)
    mine = share((inputs, targets), pipe.replica, 2)
    removals = [
        pipe.zero_grad,
        optimizer.zero_grad,
        lambda: pipe.zero_grad(set_to_none=False),
        lambda: [setattr(parameter, "grad", None) for parameter in pipe.parameters()],
    ]
    for remove in removals:
        pipe.step(*mine)
        assert all(isinstance(one.grad, GradientInParts) for one in pipe.parameters())
        remove()
        assert all(one.grad is None for one in pipe.parameters())
    cross_entropy(model(inputs), targets).backward()
    for one in pipe.parameters():
        one.grad = torch.ones_like(one)  # of a loss of the user's own, on every replica
    for one in model.parameters():
        one.grad += 1
    pipe.step(*mine)
    fails.append(True)
    with pytest.raises(StageError, match="ZeroDivisionError"):
        pipe.step(*mine)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.step()
    return different_weights(pipe, model)


def test_gradients_in_parts_are_removed_and_added_to(pool):
    assert pool.run(handles_gradients, 2, transport="shm", timeout=50) == [[]] * 2


def converted(comms):
    """Another dtype, and another state, between steps."""
    torch.set_num_threads(1)
    model = mlp(torch.float32)
    pipe = mp.Pipeline(mlp(torch.float32), comms, "1f1b", 2, cross_entropy, replicas=2, shard="optimizer")
    settings = {"lr": 0.1, "momentum": 0.9}
    reference = torch.optim.SGD(model.parameters(), **settings)
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, **settings)
    wrong = []
    for number in range(3):
        if number == 1:
            with pytest.raises(UsageError, match=r"which do not outlive that parameters are frozen, unfrozen or conv"):
                pipe.to(torch.float64)
            pipe.zero_grad()
            pipe.to(torch.float64)
            model.to(torch.float64)
            for one in reference.state.values():
                one["momentum_buffer"] = one["momentum_buffer"].double()
        if number == 2:
            state = mlp(depth=9).state_dict()
            model.load_state_dict(state)
            pipe.load_state_dict(state)
        inputs, targets = batch("mlp", 8, torch.float64 if number else torch.float32, seed=number)
        reference.zero_grad()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        pipe.step(*share((inputs, targets), pipe.replica, 2))
        reference.step()
        optimizer.step()
        wrong += [f"{number} {name}" for name in different_weights(pipe, model, 1e-6)]
    return wrong, {str(one.dtype) for one in pipe.parameters()}, pipe.replicas_are_identical()


def test_another_dtype_and_another_state(pool):
    for wrong, dtypes, identical in pool.run(converted, 4, transport="shm", timeout=50):
        assert (wrong, dtypes, identical) == ([], {"torch.float64"}, True)


def saves(comms, by):
    """The state is that of torch's own optimizer of this rank's parameters, and goes on in another pipeline."""
    torch.set_num_threads(1)
    wrong = []
    model = gpt()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    pipe = optimizer = None
    for number in range(3):
        before = None if pipe is None else (pipe.state_dict(), optimizer.state_dict())
        if number < 2:
            pipe = mp.Pipeline(gpt(), comms, "1f1b", 2, cross_entropy, replicas=2, shard="optimizer")
            optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.AdamW, comms, lr=0.01, by=by)
        if number == 1:
            pipe.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
        inputs, targets = batch("gpt", 8, seed=number)
        reference.zero_grad()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        pipe.step(*share((inputs, targets), pipe.replica, 2))
        reference.step()
        optimizer.step()
        wrong += [f"{number} {name}" for name in different_weights(pipe, model)]
    wanted = dict(model.named_parameters(remove_duplicate=False))
    state = optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(pipe.named_parameters()):
        for key, value in reference.state[wanted[name]].items():
            if far(state[index][key], value, 1e-12):
                wrong.append(f"{key} of {name}")
    parts = optimizer.state_parts()["state"]
    kept = sum(one["exp_avg"].tensor.numel() for one in parts.values())
    return wrong, kept / sum(one.numel() for one in pipe.parameters())


@pytest.mark.parametrize("by", ["element", "parameter"])
def test_the_optimizers_state_is_whole_and_its_parts_are_halves(pool, by):
    found = pool.run(saves, 4, by, transport="shm", timeout=50)
    assert [wrong for wrong, _ in found] == [[]] * 4
    for place in (0, 1):
        one, other = found[place][1], found[place + 2][1]
        assert one + other == pytest.approx(1) and 0.3 < one < 0.7


def whole_gradients(comms, replicas):
    """A sharded optimizer of a pipeline whose gradients are whole: replicas of a stage share its state."""
    torch.set_num_threads(1)
    model = gpt()
    pipe = mp.Pipeline(gpt(), comms, "1f1b", 2, cross_entropy, replicas=replicas)
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.AdamW, comms, lr=0.01)
    for number in range(2):
        inputs, targets = batch("gpt", 8, seed=number)
        reference.zero_grad()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        pipe.step(*share((inputs, targets), pipe.replica, replicas))
        reference.step()
        optimizer.step()
    return different_weights(pipe, model), pipe.replicas_are_identical()


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (2, 1)])
def test_a_sharded_optimizer_of_whole_gradients(pool, ranks, replicas):
    assert pool.run(whole_gradients, ranks, replicas, transport="shm", timeout=50) == [([], True)] * ranks


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def misuses(comms, case):
    shard = {"gradients": "gradients", "word": "states"}.get(case, "optimizer")
    pipe = mp.Pipeline(mlp(), comms, "1f1b", 2, cross_entropy, replicas=2, shard=shard)
    inputs, targets = share(batch("mlp", 8), pipe.replica, 2)
    if case == "parameters":
        given = list(pipe.parameters())[: 2 if comms.rank else None]
        mp.ShardedOptimizer(given, torch.optim.SGD, comms, lr=0.1)
    pipe.step(inputs, targets)
    if case == "clip":
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
    if case in ("frozen", "by"):
        next(iter(pipe.parameters())).requires_grad_(case != "frozen")
        if case == "by":
            mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, by="parameter", lr=0.1)
        pipe.step(inputs, targets)
    for name in ("SGD", "AdamW"):
        if case.startswith(name):
            getattr(torch.optim, name)(pipe.parameters(), lr=0.1, foreach=case.endswith("foreach") or None).step()
    if case == "fused":
        torch.optim.AdamW(pipe.parameters(), lr=0.1, fused=True).step()


PARTS = "this gradient is in parts, of which each rank has one; to update, use mp.ShardedOptimizer"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gradients", "shard='gradients' would sum gradients after every micro-batch, and a pipeline adds up those of"),
        ("word", "Pipeline: shard='states'; choose None or 'optimizer'"),
        ("SGD", PARTS),
        ("SGD, foreach", PARTS),
        ("AdamW", PARTS),
        ("AdamW, foreach", PARTS),
        ("fused", PARTS),
        ("clip", PARTS),
        ("frozen", "there are gradients in parts of an earlier step, which do not outlive that parameters are frozen"),
        ("by", "or that an optimizer with another by= is made: call zero_grad() before that"),
        (
            "parameters",
            "the first [6, 5] on rank 0 and 2 parameters, the first [6, 5] on rank 1; give every rank the same",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(pool, case, words):
    with pytest.raises(RankFailed) as caught:
        pool.run(misuses, 2, case, transport="shm", timeout=20)
    assert words in str(caught.value.refusal)


# ── programs ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PIPELINES)
def test_the_programs_of_every_schedule(name):
    for ranks, microbatches in ((1, 1), (2, 3), (3, 2)):
        one = build(name, ranks, microbatches)
        for fewer in (None, {0: None}, {1: build(name, ranks, 1)}):
            for more in ({}, {"norm": True, "buffers": [0]}, {"shared": range(ranks)}, {"update": False}):
                ties = [[0, ranks - 1]] if ranks > 1 else []
                program = with_sums(one, 2, fewer=fewer, batch=0, ties=ties, level=1, **more)
                mp.verify(program)
                assert mp.program.from_text(mp.program.to_text(program)) == program
                assert "~" in mp.draw(program) or "update" in more
                assert mp.simulate(program).makespan > 0


def test_the_drawing():
    program = with_sums(build("1f1b", 2, 1), 2, ties=[[0, 1]], norm=True, level=1, fewer={1: None})
    rows = [str(row) for row in mp.program.to_text(program).splitlines()[3:]]
    sums = "*:presence0@dp = *:tied0@pp *:loss@world *:norm@world = S"
    assert rows[0].endswith(f"B0.0 !A0.0 !G0.0 %U0@dp {sums} ~T0@dp")
    assert rows[2] == f"rank 2: *:samples@dp = %U0@dp {sums} ~T0@dp"  # it has no samples
    assert with_sums(build("1f1b", 2, 1), level=1) == with_sums(build("1f1b", 2, 1))
    with pytest.raises(UsageError, match="level=2: choose 0 or 1; at level 2 gradients would leave after every"):
        with_sums(build("1f1b", 2, 1), 2, level=2)


def without(program, op, ranks):
    return replace(
        program,
        ranks=tuple(
            tuple(one for one in ops if one != op or rank not in ranks) for rank, ops in enumerate(program.ranks)
        ),
    )


def test_a_stage_that_is_not_gathered_or_not_updated_is_named():
    program = with_sums(build("1f1b", 2, 2), 2, level=1, fewer={1: None})
    with pytest.raises(DifferentWeights, match="rank 1 has updated its own part of T1 and does not have the others'"):
        mp.verify(without(program, AllGather(Parameters(1), "dp"), (1, 3)))
    with pytest.raises(NotUpdated, match="rank 3 keeps its part of T1 and never updates it"):
        mp.verify(without(without(program, OptimizerStep(), (3,)), AllGather(Parameters(1), "dp"), (1, 3)))
    with pytest.raises(ProgramError, match="rank 3 does ~T1@dp, which needs T1/"):
        mp.verify(without(program, OptimizerStep(), (3,)))
