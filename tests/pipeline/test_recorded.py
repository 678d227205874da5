"""A pipeline in a trace of the run: its operations, its messages, and where the time went."""

import pytest
import torch
from torch.nn import functional

import microparallel as mp
from microparallel.program import Recv, Send, halves
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
        place = rank % (ranks // replicas)
        own = program.ranks[place]  # each pipeline counts its own micro-batches
        assert [event.name for event in events if event.computes] == [*(str(op) for op in own if halves(op)), "SGD"]
        assert sum(event.kind == "send" for event in events) == sum(isinstance(op, Send) for op in ops)
        received = [event for event in events if event.kind == "receive"]
        assert [event.peer for event in received] == [op.source for op in ops if isinstance(op, Recv)]
        assert any(event.kind == "collective" for event in events)  # the loss is told to all
    sent = {(event.rank, event.peer, event.number): event.asked for event in trace.events if event.kind == "send"}
    for event in trace.events:
        if event.kind == "receive":  # waiting ends when its message was sent, or when it began to wait
            assert event.start == max(event.asked, sent[event.peer, event.rank, event.number])
    for mine in parts(trace):
        added = mine.computing + mine.communicating + mine.waiting + mine.other
        assert added == pytest.approx(mine.step)
