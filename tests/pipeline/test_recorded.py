"""A pipeline in a trace of the run: its operations, its messages, and where the time went."""

import pytest
import torch
from torch.nn import functional

import microparallel as mp
from microparallel.analyze.what_if import changes
from microparallel.errors import ProgramError, UsageError
from microparallel.program import (
    WORLD,
    AllReduce,
    Free,
    Join,
    Named,
    OptimizerStep,
    Recv,
    Send,
    from_text,
    halves,
    is_meeting,
    to_text,
)
from microparallel.simulator.fitted import fit_step, predicted
from microparallel.trace import compare
from microparallel.trace.parts import parts


def recorded(comms, schedule, replicas):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    pipe = mp.Pipeline(layers, comms, schedule=schedule, microbatches=3, loss_fn=functional.mse_loss, replicas=replicas)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    inputs, targets = torch.ones(6, 4), torch.ones(6, 4)
    pipe.step(inputs, targets)
    with mp.record(comms) as recorder:
        pipe.step(inputs, targets)
        optimizer.step()
    return recorder.trace, pipe.program


@pytest.mark.parametrize(("schedule", "ranks", "replicas"), [("1f1b", 2, 1), ("zbv", 2, 1), ("gpipe", 4, 2)])
def test_a_recorded_step_has_the_programs_operations(pool, schedule, ranks, replicas):
    trace, program = pool.run(recorded, ranks, schedule, replicas, timeout=30)[0]
    for rank, (events, ops) in enumerate(zip(trace.by_rank, program.ranks, strict=True)):
        computed = [event.op for event in events if event.computes and not isinstance(event.op, Free)]
        assert computed == [*(op for op in ops if halves(op)), OptimizerStep()]
        assert [event.op for event in events if event.kind == "send"] == [op for op in ops if isinstance(op, Send)]
        received = [event for event in events if event.kind == "receive"]
        assert [(event.op, event.peer) for event in received] == [(op, op.source) for op in ops if isinstance(op, Recv)]
        assert AllReduce(Named("loss"), WORLD) in [event.op for event in events], rank  # the loss is told to all
    for mine in parts(trace):
        added = mine.computing + mine.communicating + mine.waiting + mine.other
        assert added == pytest.approx(mine.step)
    fitted = fit_step(trace)  # and is a pipeline again
    assert fitted.pipeline == ranks // replicas and fitted.replicas == replicas
    again = predicted(trace)
    for mine, theirs in zip(again.compute, trace.compute, strict=True):
        assert [event.op for event in mine] == [event.op for event in theirs if event.kind != "other"]


def data_parallel(comms, overlap):
    """A step of our own, and one of a loop that calls a Comms itself."""
    torch.manual_seed(0)
    model = mp.DataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), comms, 3e-4, overlap=overlap
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    with mp.record(comms) as recorder:
        mp.course.accumulated_step(model, [(torch.ones(2, 8), torch.ones(2, 8))] * 2, functional.mse_loss)
        optimizer.step()
        for _ in range(2):  # one model calls the same operations twice
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
        comms.all_reduce(torch.ones(100))
        comms.all_reduce(torch.ones(200))
        optimizer.step()
    return recorder.trace, model.program(2, samples=True, loss=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_program_of_a_recorded_step_is_the_one_that_was_followed(any_pool, overlap):
    trace, program = any_pool.run(data_parallel, 2, overlap, timeout=30)[0]
    found = trace.step(0).followed
    for mine, theirs in zip(found.ranks, program.ranks, strict=True):
        assert [op for op in mine if op != Join()] == [op for op in theirs if op != Join()]
    assert found.goal == program.goal
    mp.verify(found)
    assert "recorded · 2 ranks · 2 buckets" in mp.draw(trace.step(0), view="timeline")
    again = predicted(trace.step(0))
    rows = {row.name: row for row in compare(again, trace.step(0))}
    assert rows["messages sent"].one == rows["messages sent"].other > 0
    assert rows["bytes sent"].one == rows["bytes sent"].other > 0
    with pytest.raises(UsageError, match="3 steps"):
        _ = trace.followed


def test_what_no_program_can_say_is_observed(any_pool):
    trace, _ = any_pool.run(data_parallel, 2, True, timeout=30)[0]
    twice, loop = trace.step(1), trace.step(2)
    names = [str(op) for op in twice.followed.ranks[0]]
    assert names.count("F0:2.0") == names.count("*U0@dp") == 2
    seen = [op for op in loop.followed.ranks[0] if not isinstance(op, Join)]
    assert [str(op).partition("(")[0] for op in seen if is_meeting(op)] == ["all_reduce", "all_reduce"]
    assert from_text(to_text(loop.followed)) == loop.followed
    with pytest.raises(ProgramError, match="only observed"):
        mp.verify(loop.followed)
    for step in (twice, loop):
        fitted = fit_step(step)  # whatever the times are: no moment of a rank is given to two operations
        assert all(0 < work <= step.makespan * (1 + 1e-9) for work in fitted.work)
        assert max(fitted.work) <= fitted.makespan <= sum(fitted.costs.seconds.values())


def test_offers_about_buckets_look_at_buckets_alone():
    """A loss that is summed beside one bucket is no second bucket."""
    program = mp.schedules.data_parallel_step(1, 2, loss=True)
    names = {change.name for change in changes(fit_step(mp.simulate(program, mp.Costs(latency=0.1))))}
    assert "half the buckets" in names and "double buckets" not in names
    program = mp.schedules.data_parallel_step(2, 2, loss=True)
    assert "double buckets" in {change.name for change in changes(fit_step(mp.simulate(program)))}
