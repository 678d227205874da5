"""A recorded step has exactly the operations of its program, on each rank and lane, one for one."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.program import Join, Lane, lane, to_text

LAYERS, WIDTH = 4, 8


def operations(trace, rank, which):
    """What a rank did, in the order in which it came to it."""
    mine = [event for event in trace.events if event.rank == rank and event.lane is which]
    return [str(event.op) for event in sorted(mine, key=lambda event: event.asked)]


def differences(trace, program):
    """Where a trace is not what its program says; a Join is nothing to be done, but an order that must be kept."""
    mp.verify(program)
    found = [wrong for rank, ops in enumerate(program.ranks) for wrong in broken_joins(trace, rank, ops)]
    for rank, ops in enumerate(program.ranks):
        for which in Lane:
            meant = [str(op) for op in ops if lane(op) is which and not isinstance(op, Join)]
            done = operations(trace, rank, which)
            if meant != done:
                found.append(f"rank {rank}, {which}: meant {meant}, did {done}")
    return found


def broken_joins(trace, rank, ops):
    events = {str(event.op): event for event in trace.events if event.rank == rank}
    for place, op in enumerate(ops):
        if isinstance(op, Join):
            before = [events[name].end for name in map(str, ops[:place]) if name in events]
            after = [events[name].asked for name in map(str, ops[place:]) if name in events]
            if before and after and max(before) > min(after):
                yield f"rank {rank}: what stands behind Join {place} began {max(before) - min(after)} s too early"


# ── data parallelism ────────────────────────────────────────────────────────────────────────────────────────────────


def replicas(comms, kind, overlap):
    """Three steps, each beside the program of it: the first learns the order of the gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    norm = [nn.BatchNorm1d(WIDTH)] if kind == "buffers and weights" else []
    model = mp.DataParallel(nn.Sequential(*layers[:2], *norm, *layers[2:]), comms, bucket_mb=3e-4, overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatches = 3 if kind == "accumulation" else 1
    weights = {"weight": comms.rank + 1.0} if norm else {"weight": 1.0, "total": float(comms.world_size)}
    programs = []
    with mp.record(comms) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            with model.weighted(**weights):
                programs.append(model.program(microbatches))
                for number in range(microbatches):
                    with model.no_sync() if number < microbatches - 1 else nullcontext():
                        model(torch.ones(comms.rank + 2, WIDTH)).sum().backward()
            optimizer.step()
    steps = [recorder.trace.step(number) for number in range(3)]
    wrong = [one for step, program in zip(steps, programs, strict=True) for one in differences(step, program)]
    return wrong, [to_text(program) for program in programs]


@pytest.mark.parametrize("kind", ["plain", "accumulation", "buffers and weights"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one after another"])
def test_a_data_parallel_step(any_pool, kind, overlap):
    for wrong, (first, *later) in any_pool.run(replicas, 2, kind, overlap, timeout=50):
        assert not wrong
        assert ":order" in first and not any(":order" in text for text in later)
        assert (":buffers" in first) == (":weights" in first) == (kind == "buffers and weights")
        assert ("B0.4" in later[0]) == (kind == "accumulation")
        assert ("=" in later[0].partition("rank 0")[2]) == (not overlap or kind == "buffers and weights")


def accumulated(comms):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    batches = [(torch.ones(2, WIDTH), torch.ones(2, WIDTH))] * 2
    program = model.program(2, samples=True, loss=True)
    with mp.record(comms) as recorder:
        mp.accumulated_step(model, batches, nn.functional.mse_loss)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return differences(recorder.trace, program)


def test_an_accumulated_step_counts_samples_first_and_sums_the_loss_last(pool):
    assert pool.run(accumulated, 2, transport="shm", timeout=50) == [[], []]


def buffers_of_nothing(comms):
    module = nn.Linear(WIDTH, WIDTH)
    module.register_buffer("empty", torch.zeros(0))
    model = mp.DataParallel(module, comms)
    program = model.program()
    with mp.record(comms) as recorder:
        model(torch.ones(2, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return differences(recorder.trace, program), ":buffers" in to_text(program)


def test_buffers_of_nothing_are_not_sent(pool):
    assert pool.run(buffers_of_nothing, 2, transport="shm", timeout=50) == [([], False)] * 2


def models_side_by_side(comms):
    """Two models on one Comms, whose buckets have the same names; a layer that raises; a backward for inputs alone."""
    one, other = (mp.DataParallel(nn.Linear(WIDTH, size), comms, overlap=True) for size in (WIDTH, 4 * WIDTH))
    one.requires_grad_(True)
    with mp.record(comms) as recorder:
        for _ in range(8):
            (one(torch.ones(2, WIDTH)).sum() + other(torch.ones(2, WIDTH)).sum()).backward()
    return [(event.number, event.name, event.bytes) for event in recorder.trace.events if event.kind == "collective"]


def test_two_models_keep_their_operations_apart(pool):
    for calls in pool.run(models_side_by_side, 2, transport="shm", timeout=50):
        half = len(calls) // 2
        assert sorted(calls[:half]) == sorted(calls[half:])  # both ranks count alike
        assert len({size for _, name, size in calls if name == "*U0@dp"}) == 2


def begun_in_the_middle(comms):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    with model.no_sync():
        model(torch.ones(2, WIDTH)).sum().backward()
    torch.autograd.grad(model(torch.ones(2, WIDTH, requires_grad=True)).sum(), list(model.parameters()))
    with mp.record(comms) as recorder:
        model(torch.ones(2, WIDTH)).sum().backward()
    return [event.name for event in recorder.trace.events if event.rank == 0 and event.computes]


def test_micro_batches_are_counted_whether_anybody_looks_or_not(pool):
    assert pool.run(begun_in_the_middle, 2, transport="shm", timeout=50) == [["F0:1.2", "B0.2"]] * 2


def frozen(comms):
    model = mp.DataParallel(nn.Linear(WIDTH, WIDTH), comms)
    model.requires_grad_(False)
    inputs = torch.ones(2, WIDTH, requires_grad=True)
    with mp.record(comms) as recorder:
        model(inputs).sum().backward()
    return inputs.grad is not None, [event.kind for event in recorder.trace.by_rank[comms.rank] if event.computes]


def test_a_backward_for_the_inputs_alone_follows_nothing(pool):
    assert pool.run(frozen, 2, transport="shm", timeout=50) == [(True, ["forward", "backward"])] * 2


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stages(comms, schedule, count, tied):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if tied:
        layers[-1].weight = layers[0].weight
    loss_fn = nn.functional.mse_loss
    pipe = mp.Pipeline(layers, comms, schedule, microbatches=3, loss_fn=loss_fn, replicas=count)
    batch = torch.ones(6, WIDTH), torch.zeros(6, WIDTH)
    pipe.step(*batch)
    with mp.record(comms) as recorder:
        pipe.step(*batch)
    _, traced = pipe.traced_step(*batch)
    recorded = [event for event in recorder.trace.events if event.kind != "other" or "!" in event.name]
    assert len(recorded) == len(recorder.trace.events)
    return [*differences(recorder.trace, pipe.program), *differences(traced, pipe.program)], to_text(pipe.program)


@pytest.mark.parametrize(
    ("schedule", "ranks", "count", "tied"),
    [("1f1b", 2, 1, False), ("1f1b", 4, 2, True), ("zbv", 2, 1, True), ("interleaved", 4, 2, False)],
    ids=["1f1b", "dp × pp, tied weights", "shared on one rank", "dp × pp, several stages on a rank"],
)
def test_a_pipelines_step(any_pool, schedule, ranks, count, tied):
    for wrong, text in any_pool.run(stages, ranks, schedule, count, tied, timeout=50):
        assert not wrong
        assert ":loss@world" in text
        assert (":samples@dp" in text) == (count > 1)
        assert (":tied0@pp" in text) == (tied and schedule == "1f1b")


def test_a_step_that_does_something_else_is_noticed():
    program = mp.schedules.data_parallel_step(2, 2)
    trace = mp.simulate(program)
    assert not differences(trace, program)
    assert differences(mp.Trace(trace.events[:-1], program), program)
    assert differences(trace, mp.schedules.data_parallel_step(2, 2, loss=True))


class Fragile(nn.Module):
    broken = True

    def forward(self, inputs):
        if Fragile.broken:
            raise RuntimeError("broken")
        return inputs


def after_an_error(comms):
    pipe = mp.Pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile()), comms, "gpipe", 2, nn.functional.mse_loss)
    batch = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
    with mp.record(comms) as recorder:
        for Fragile.broken in (True, False):
            recorder.step += 1
            with pytest.raises(mp.StageError) if Fragile.broken else nullcontext():
                pipe.step(*batch)
        nn.Linear(2, 2)(torch.ones(1, 2))
    seen = [event.name for event in recorder.trace.step(2).events if event.computes]
    return seen[0], seen[-1]


def test_a_step_after_one_that_failed_is_recorded_whole(pool):
    assert pool.run(after_an_error, 1, transport="shm", timeout=50) == [("F0.0", "forward of Linear")]


def many_buckets(comms):
    """Sums over replicas that are several calls each, of which early ones may be back before later ones leave."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.ReLU())
    loss_fn = nn.functional.mse_loss
    pipe = mp.Pipeline(layers, comms, "1f1b", 2, loss_fn, balance=[4, 1], replicas=2, bucket_mb=1e-6)
    batch = torch.ones(4, WIDTH), torch.zeros(4, WIDTH)
    pipe.step(*batch)
    _, trace = pipe.traced_step(*batch)
    sizes = {event.name: event.bytes for event in trace.events if event.rank == 0 and event.name.startswith("*U")}
    return differences(trace, pipe.program), sizes


def test_a_sum_of_several_calls_is_one_operation_and_one_of_nothing_is_none(any_pool):
    for wrong, sizes in any_pool.run(many_buckets, 4, timeout=50):
        assert not wrong
        assert sizes["*U0@dp"] > 4 * 4 * WIDTH * WIDTH  # all of its eight tensors
