"""A pipeline in a recording of the run: its operations, its messages, and where the time went."""

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
    return recorder.recording, pipe.program


@pytest.mark.parametrize(("schedule", "ranks", "replicas"), [("1f1b", 2, 1), ("zbv", 2, 1), ("gpipe", 4, 2)])
def test_a_recording_has_the_programs_operations(pool, schedule, ranks, replicas):
    recording, program = pool.run(recorded, ranks, schedule, replicas, timeout=30)[0]
    for rank, (spans, ops) in enumerate(zip(recording.by_rank, program.ranks, strict=True)):
        place = rank % (ranks // replicas)
        own = program.ranks[place]  # each pipeline counts its own micro-batches
        assert [span.name for span in spans if span.computes] == [*(str(op) for op in own if halves(op)), "SGD"]
        assert sum(span.kind == "send" for span in spans) == sum(isinstance(op, Send) for op in ops)
        received = [span for span in spans if span.kind == "receive"]
        assert [span.peer for span in received] == [op.source for op in ops if isinstance(op, Recv)]
        assert any(span.kind == "collective" for span in spans)  # the loss is told to all
    sent = {(span.rank, span.peer, span.number): span.start for span in recording.spans if span.kind == "send"}
    for place, span in enumerate(recording.spans):
        if span.kind == "receive":  # waiting ends when its message was sent, or when it began to wait
            assert recording.begun[place] == max(span.start, sent[span.peer, span.rank, span.number])
    for mine in parts(recording):
        added = mine.computing + mine.communicating + mine.waiting + mine.other
        assert added == pytest.approx(mine.step)
