"""mp.Pipeline beside one process: measuring, answering, its state, clipping, recomputing, own programs."""

import copy

import pytest
import torch
from tests.pipeline.oracle import batch, far, gpt, layers_of_its_own, mlp, whole_batch, wrong_gradients
from torch import nn
from torch.nn.functional import mse_loss

import microparallel as mp
from microparallel.models import cross_entropy
from microparallel.program import from_text
from microparallel.schedules import PIPELINES


def clear(pipe):
    for parameter in pipe.parameters():
        parameter.grad = None


# ── measuring and answering ─────────────────────────────────────────────────────────────────────────────────────────


def measures(comms, replicas):
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(layer for one in layers_of_its_own(5, 6, 6, 6, 6, 6, 6, 6, 3) for layer in (one, nn.Dropout(0.5)))
    )
    model = nn.Sequential(*(nn.Sequential(*model[index : index + 2]) for index in range(0, 16, 2)))
    plain = copy.deepcopy(model).eval()
    wrong = []
    for name in PIPELINES:
        whole = copy.deepcopy(model)
        whole[1].eval()  # as one would for a layer that is to stay as it is
        pipe = mp.Pipeline(whole, comms, name, 4, cross_entropy, replicas=replicas)
        inputs, targets = batch("mlp", 8)
        pipe.step(inputs, targets)
        before = {at: parameter.grad.clone() for at, parameter in pipe.named_parameters()}
        modes = [module.training for module in pipe.own_layers.modules()]
        drawn = torch.get_rng_state()
        for samples in (8, 3, 1, 9):
            inputs, targets = batch("mlp", samples, seed=1)
            expected = plain(inputs).detach()
            if far(pipe.evaluate(inputs, targets), cross_entropy(expected, targets), 1e-12):
                wrong.append(f"{name}: evaluate of {samples}")
            answer = pipe.predict(inputs)
            if (answer is not None) != pipe._has_last or (answer is not None and far(answer, expected, 1e-12)):
                wrong.append(f"{name}: predict of {samples}")
        if modes != [module.training for module in pipe.own_layers.modules()]:
            wrong.append(f"{name}: modes")
        if not torch.equal(drawn, torch.get_rng_state()):
            wrong.append(f"{name}: random numbers were drawn")
        if any(not torch.equal(parameter.grad, before[at]) for at, parameter in pipe.named_parameters()):
            wrong.append(f"{name}: gradients")
    return wrong


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_evaluate_and_predict_are_those_of_one_process_and_leave_all_as_it_was(pool, ranks, replicas):
    assert pool.run(measures, ranks, replicas, transport="shm", timeout=40) == [[]] * ranks


def measures_unevenly(comms):
    inputs, targets = batch("mlp", 7)
    expected = cross_entropy(mlp()(inputs), targets)
    pipe = mp.Pipeline(mlp(), comms, "1f1b", 4, cross_entropy, replicas=2)
    mine = slice(0, 6) if pipe.replica == 0 else slice(6, 7)
    found = [pipe.evaluate(inputs[mine], targets[mine]), pipe.evaluate(inputs[mine], targets[mine], samples=7)]
    found.append(pipe.evaluate(*((inputs, targets) if pipe.replica == 1 else ()), samples=7))
    return [far(one, expected, 1e-12) for one in found]


def test_replicas_may_measure_different_numbers_of_samples(pool):
    assert pool.run(measures_unevenly, 4, transport="shm", timeout=30) == [[False] * 3] * 4


# ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_statistics():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(8)]
    return nn.Sequential(*blocks).double()


def states(comms):
    wrong = []
    for label, build in (("gpt", gpt), ("mlp", mlp), ("statistics", with_statistics)):
        for name, replicas in (("1f1b", 1), ("zbv", 2), ("interleaved", 2)):
            model = build()
            whole = copy.deepcopy(model.state_dict())
            pipe = mp.Pipeline(model, comms, name, 2, replicas=replicas)
            gathered = pipe.whole_state_dict()
            if (gathered is not None) != (pipe._place == 0):
                wrong.append(f"{label}, {name}: gathered on another rank")
            if gathered is not None:
                if gathered.keys() != whole.keys():
                    wrong.append(f"{label}, {name}: names {gathered.keys() ^ whole.keys()}")
                if not all(
                    torch.equal(one, gathered[at]) and one.dtype == gathered[at].dtype for at, one in whole.items()
                ):
                    wrong.append(f"{label}, {name}: contents")
            other = {at: one + 1 for at, one in whole.items()}
            pipe.load_state_dict(other)
            if not all(torch.equal(one, other[at]) for at, one in pipe.state_dict().items()):
                wrong.append(f"{label}, {name}: loaded")
            if pipe.count_parameters() != sum(parameter.numel() for parameter in build().parameters()):
                wrong.append(f"{label}, {name}: {pipe.count_parameters()} parameters")
    return wrong


def test_state_has_the_names_of_the_whole_model_and_can_be_loaded(pool):
    assert pool.run(states, 4, transport="shm", timeout=30) == [[]] * 4


def missing(comms):
    pipe = mp.Pipeline(mlp(), comms, "1f1b", 2)
    with pytest.raises(
        mp.errors.UsageError,
        match=r"load_state_dict: layers\.\d\.weight is missing; it needs the state of the whole model",
    ):
        pipe.load_state_dict({})
    piece = mp.models.ShardedMLP(5, 4, rank=comms.rank, world_size=comms.world_size)
    return list(mp.Pipeline.of_stage(piece, comms).state_dict()) == list(piece.state_dict())


def test_state_that_is_missing_is_named_and_a_stages_own_state_has_its_own_names(pool):
    assert pool.run(missing, 2, transport="shm") == [True, True]


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def clipped(comms, replicas):
    wrong = []
    inputs, targets = batch("gpt", 8)
    for name in ("1f1b", "zbv"):
        for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            for most in (0.2, 1e3):
                whole = gpt(dtype)
                cross_entropy(whole(inputs), targets).backward()
                norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), most)
                wanted = {at: parameter.grad for at, parameter in whole.named_parameters(remove_duplicate=False)}
                pipe = mp.Pipeline(gpt(dtype), comms, name, 4, cross_entropy, replicas=replicas)
                pipe.step(inputs, targets)
                if far(pipe.clip_grad_norm_(most), norm, near):
                    wrong.append(f"{name}, {most}: norm")
                wrong += [f"{name}, {most}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted, near)]
    return wrong


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_gradients_are_clipped_as_torch_clips_them(pool, ranks, replicas):
    assert pool.run(clipped, ranks, replicas, transport="shm", timeout=40) == [[]] * ranks


def accumulated(comms, replicas):
    wrong = []
    for name in ("gpipe", "interleaved", "zb-h1", "dualpipev"):
        model = gpt()
        pipe = mp.Pipeline(copy.deepcopy(model), comms, name, 2, cross_entropy, replicas=replicas)
        for number in range(3):
            inputs, targets = batch("gpt", 8, seed=number)
            cross_entropy(model(inputs), targets).backward()
            share = slice(pipe.replica * 8 // replicas, (pipe.replica + 1) * 8 // replicas)
            pipe.step(inputs[share], targets[share])
            wanted = {at: parameter.grad for at, parameter in model.named_parameters(remove_duplicate=False)}
            wrong += [f"{name}, step {number}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
        if not pipe.replicas_are_identical():
            wrong.append(f"{name}: replicas")
        for parameter in (*pipe.parameters(), *model.parameters()):
            parameter.grad.zero_()  # and not None
        inputs, targets = batch("gpt", 8, seed=9)
        _, wanted = whole_batch(model, inputs, targets)
        pipe.step(inputs[share], targets[share])
        wrong += [f"{name}, after zeros: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
    return wrong


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2), (2, 2)])
def test_gradients_accumulate_until_they_are_set_to_zero(pool, ranks, replicas):
    assert pool.run(accumulated, ranks, replicas, transport="shm", timeout=40) == [[]] * ranks


def saved_bytes(function):
    """The most bytes that autograd keeps for the backward at once."""
    now, most = [0], [0]

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor
            now[0] += tensor.nbytes
            most[0] = max(most[0], now[0])

        def __del__(self):
            now[0] -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        function()
    return most[0]


def recomputed(comms):
    wrong = []
    inputs, targets = batch("gpt", 8)
    loss, wanted = whole_batch(gpt(), inputs, targets)
    for name in ("gpipe", "1f1b", "zb-h1", "zbv", "dualpipev"):
        bytes_of = {}
        for recompute in (False, True):
            pipe = mp.Pipeline(gpt(), comms, name, 4, cross_entropy, recompute=recompute)
            losses = []
            bytes_of[recompute] = saved_bytes(
                lambda pipe=pipe, losses=losses: losses.append(pipe.step(inputs, targets))
            )
            if far(losses[0], loss, 1e-12):
                wrong.append(f"{name}: loss")
            wrong += [f"{name}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
        if bytes_of[True] >= bytes_of[False] / (3 if name == "gpipe" else 1):
            wrong.append(f"{name}: {bytes_of}")
    return wrong


def test_recomputing_gives_the_same_gradients_with_less_memory(pool):
    assert pool.run(recomputed, 2, transport="shm", timeout=40) == [[]] * 2


# ── randomness ──────────────────────────────────────────────────────────────────────────────────────────────────────


def with_dropout(comms, name, recompute, replicas):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Tanh()).double() for _ in range(8)]
    pipe = mp.Pipeline(layers, comms, name, 4, mse_loss, recompute=recompute, replicas=replicas)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    torch.manual_seed(7 + comms.rank)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        inputs, _ = batch("mlp", 8, torch.float64, seed=number)
        losses.append(float(pipe.step(inputs, inputs.flip(1))))
        optimizer.step()
    return losses, {at: one.tolist() for at, one in pipe.state_dict().items()}


def same(one, other, *, exactly):
    """Losses and weights; a backward in halves adds in another order than a whole one, which recomputing does."""
    if exactly:
        return one == other
    weights = [[torch.tensor(run[1][name], dtype=torch.float64) for name in sorted(one[1])] for run in (one, other)]
    return one[0] == pytest.approx(other[0], rel=1e-12) and all(
        torch.allclose(mine, theirs, rtol=1e-12, atol=1e-14) for mine, theirs in zip(*weights, strict=True)
    )


def twice(comms):
    wrong, first = [], set()
    for name in ("1f1b", "zbv"):
        for replicas in (1, 2):
            runs = [with_dropout(comms, name, recompute, replicas) for recompute in (False, False, True)]
            if runs[0] != runs[1]:
                wrong.append(f"{name} × {replicas}: not reproducible")
            if not same(runs[0], runs[2], exactly=name == "1f1b"):
                wrong.append(f"{name} × {replicas}: recomputed with other random numbers")
            first.add(tuple(runs[0][0]))
    return wrong if len(first) == 4 else [*wrong, "dropout does nothing"]


def test_dropout_is_reproducible_from_the_seed(pool):
    assert pool.run(twice, 4, transport="shm", timeout=40) == [[]] * 4


def statistics_of_one_process(comms):
    """Each micro-batch is normalised by itself: one process that takes them one after another learns the same."""
    inputs, targets = batch("mlp", 8)[0], batch("mlp", 8, seed=1)[0]
    model = with_statistics()
    pipe = mp.Pipeline(copy.deepcopy(model), comms, "1f1b", 4, mse_loss)
    found = pipe.step(inputs, targets)
    losses = [mse_loss(model(inputs[at : at + 2]), targets[at : at + 2]) / 4 for at in range(0, 8, 2)]
    sum(losses).backward()
    wanted = {at: parameter.grad for at, parameter in model.named_parameters()}
    wrong = wrong_gradients(pipe.named_parameters(), wanted)
    wrong += [at for at, one in pipe.state_dict().items() if far(one, model.state_dict()[at], 1e-12)]
    return [*wrong, "loss"] if far(found, sum(losses), 1e-12) else wrong


def test_batch_norm_sees_micro_batches(pool):
    assert pool.run(statistics_of_one_process, 2, transport="shm") == [[]] * 2


# ── where to cut, and programs of one's own ─────────────────────────────────────────────────────────────────────────

COMPUTE_ONLY = """program mine
goal: training step of 4 stages, 3 micro-batches
rank 0: F0.0 F0.1 F0.2 F3.0 B3.0 F3.1 I3.1 F3.2 B3.2 W3.1 B0.0 I0.1 B0.2 W0.1
rank 1: F1.0 F2.0 F1.1 F2.1 F1.2 F2.2 I2.0 B1.0 B2.1 W2.0 B1.1 B2.2 B1.2
"""
WITH_MESSAGES = """program mine
goal: training step of 2 stages, 2 micro-batches
rank 0: F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 <G0.1@1 B0.1 B0.0
rank 1: <A0.0@0 F1.0 B1.0 >G0.0@0 <A0.1@0 F1.1 B1.1 >G0.1@0
"""
RELAY = """program relay
goal: training step of 2 stages, 2 micro-batches
rank 0: F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 B0.0 <G0.1@1 B0.1
rank 1: <A0.0@0 >A0.0@2 <A0.1@0 >A0.1@2 <G0.0@2 >G0.0@0 <G0.1@2 >G0.1@0
rank 2: <A0.0@1 F1.0 B1.0 >G0.0@1 <A0.1@1 F1.1 B1.1 >G0.1@1
"""
BACKWARDS = """program the last rank begins
goal: training step of 2 stages, 2 micro-batches
rank 0: F1.0 B1.0 F1.1 B1.1
rank 1: F0.0 F0.1 B0.0 B0.1
"""


def programs(comms, texts, replicas=1):
    inputs, targets = batch("mlp", 8)
    loss, wanted = whole_batch(mlp(), inputs, targets)
    wrong = []
    for text in texts:
        pipe = mp.Pipeline(mlp(), comms, from_text(text), loss_fn=cross_entropy, replicas=replicas)
        found, trace = pipe.traced_step(inputs, targets)
        wrong += [f"{pipe.program.name}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
        if far(found, loss, 1e-12) or far(pipe.evaluate(inputs, targets), loss, 1e-12):
            wrong.append(f"{pipe.program.name}: loss")
        if far(pipe.evaluate(inputs[:1], targets[:1]), cross_entropy(mlp()(inputs[:1]), targets[:1]), 1e-12):
            wrong.append(f"{pipe.program.name}: one sample")
        clear(pipe)
        first = pipe.step(inputs[:1], targets[:1], allow_fewer=True)
        if far(first, cross_entropy(mlp()(inputs[:1]), targets[:1]), 1e-12):
            wrong.append(f"{pipe.program.name}: a step of one sample")
        done = [str(event.op) for event in trace.compute[comms.rank]]
        if done != [str(op) for op in pipe.program.ranks[comms.rank] if str(op)[0] in "FBIW!"]:
            wrong.append(f"{pipe.program.name}: did {done}")
    return wrong


def test_a_program_of_ones_own_runs(pool):
    texts = [COMPUTE_ONLY, WITH_MESSAGES, BACKWARDS]
    assert pool.run(programs, 2, texts, transport="shm", timeout=30) == [[]] * 2
    assert pool.run(programs, 2, texts, timeout=30) == [[]] * 2
    assert pool.run(programs, 4, texts, replicas=2, transport="shm", timeout=30) == [[]] * 4


def test_a_rank_may_pass_on_what_it_does_not_use(pool):
    assert pool.run(programs, 3, [RELAY], transport="shm", timeout=30) == [[]] * 3


def cuts(comms):
    inputs, targets = batch("mlp", 8)
    loss, wanted = whole_batch(mlp(), inputs, targets)
    wrong, sizes = [], []
    for options in (
        {"balance": [1, 5, 3]},
        {"balance": "time", "example": inputs},
        {"balance": "parameters"},
        {"schedule": "interleaved", "stages_per_rank": 3},
        {"schedule": "interleaved", "stages_per_rank": 1, "balance": [7, 1, 1]},
        {"schedule": "zbv", "balance": [1, 1, 1, 4, 1, 1]},
    ):
        pipe = mp.Pipeline(mlp(), comms, microbatches=4, loss_fn=cross_entropy, **options)
        found = pipe.step(inputs, targets)
        wrong += [f"{options}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
        if far(found, loss, 1e-12):
            wrong.append(f"{options}: loss")
        sizes.append({index: len(stage.layers) for index, stage in pipe.stages.items()})
    return wrong, sizes


def test_stages_are_cut_as_the_caller_says(pool):
    found = pool.run(cuts, 3, transport="shm", timeout=30)
    assert [wrong for wrong, _ in found] == [[]] * 3
    for number, wanted in ((0, [1, 5, 3]), (3, [1] * 9), (4, [7, 1, 1]), (5, [1, 1, 1, 4, 1, 1])):
        stages = {index: size for _, sizes in found for index, size in sizes[number].items()}
        assert [stages[index] for index in range(len(wanted))] == wanted
    by_time = {index: size for _, sizes in found for index, size in sizes[1].items()}
    assert sum(by_time.values()) == 9
