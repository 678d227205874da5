"""A pipeline in a trace of the run: its operations, its messages, and where the time went."""

import pytest
import torch
from torch.nn import functional

import microparallel as mp
from microparallel.performance.fitted import fit_step, predicted
from microparallel.program import WORLD, AllReduce, Free, Named, OptimizerStep, Recv, Send, halves
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
