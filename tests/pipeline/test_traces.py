"""A real run does exactly what its program says, in its order, and holds no more than the program promises."""

import contextlib
import gc
import weakref

import pytest
import torch
from tests.pipeline.oracle import batch, mlp
from torch import nn
from torch.nn.functional import mse_loss

import microparallel as mp
from microparallel.models import cross_entropy
from microparallel.program import Join, Lane, lane, peak_activations
from microparallel.schedules import PIPELINES


def traces(comms, replicas, microbatches):
    torch.set_num_threads(1)
    wrong = []
    inputs, targets = batch("mlp", 8)
    for name in PIPELINES:
        for count in microbatches:
            pipe = mp.Pipeline(mlp(), comms, name, count, cross_entropy, replicas=replicas)
            loss, trace = pipe.traced_step(inputs, targets)
            if not torch.equal(loss, pipe.step(inputs, targets)):
                wrong.append(f"{name}, {count}: another loss when it is traced")
            if trace.program != pipe.program:
                wrong.append(f"{name}, {count}: another program")
            for rank, (events, ops) in enumerate(zip(trace.by_rank, pipe.program.ranks, strict=True)):
                for one in Lane:
                    asked = sorted(events, key=lambda event: event.asked)  # in the order in which it was asked for
                    done = [str(event.op) for event in asked if event.lane is one]
                    planned = [str(op) for op in ops if lane(op) is one and not isinstance(op, Join)]
                    if done != planned:
                        wrong.append(f"{name}, {count}, rank {rank}, {one}: {done} and not {planned}")
            peaks = [peak_activations(ops) for ops in pipe.program.ranks]
            if trace.peak_activations != peaks or pipe.most_activations != peaks[comms.rank]:
                wrong.append(f"{name}, {count}: {pipe.most_activations} of {peaks} activations")
            sends = [sum(event.messages for event in events if event.kind == "send") for events in trace.by_rank]
            simulated = mp.simulate(pipe.program, mp.Costs(transport=comms.transport_name))
            if (
                sends != pipe.program.messages_sent()
                or trace.messages_sent != simulated.messages_sent
                or not all(event.end >= event.start for event in trace.events)
            ):
                wrong.append(f"{name}, {count}: messages, or times")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "replicas", "microbatches"), [(1, 1, (3,)), (3, 1, (1, 4)), (4, 1, (8,)), (4, 2, (4,))]
)
def test_a_trace_has_the_programs_operations_in_its_order(pool, ranks, replicas, microbatches):
    assert pool.run(traces, ranks, replicas, microbatches, transport="shm", timeout=50) == [[]] * ranks


def fewer(comms):
    """A batch with fewer samples than micro-batches has a shorter program, and replicas may differ."""
    inputs, targets = batch("mlp", 3)
    pipe = mp.Pipeline(mlp(), comms, "1f1b", 4, cross_entropy, replicas=comms.world_size // 2)
    _, trace = pipe.traced_step(inputs, targets, allow_fewer=True)
    done = [[str(event.op) for event in events] for events in trace.compute]
    planned = [
        [str(op) for op in ops if lane(op) is Lane.COMPUTE and not isinstance(op, Join)] for ops in trace.program.ranks
    ]
    return done == planned and trace.program.goal.microbatches == 3 * comms.world_size // 2


def test_a_step_of_fewer_samples_has_a_trace(pool):
    assert pool.run(fewer, 2, transport="shm") == [True] * 2
    assert pool.run(fewer, 4, transport="shm") == [True] * 4


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Watched(nn.Module):
    """A layer that knows how many of its outputs' graphs are alive."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.alive, self.most = weakref.WeakSet(), 0

    def forward(self, inputs):
        outputs = torch.tanh(self.linear(inputs))
        if outputs.device.type != "meta":
            node = Mark()
            outputs.grad_fn.metadata["mark"] = node  # as long as the graph
            self.alive.add(node)
            self.most = max(self.most, len(self.alive))
        return outputs


class Mark:
    pass


class SavedBytes:
    """The bytes that autograd keeps for backward passes, now and at most."""

    def __init__(self):
        self.now = self.most = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept[0])

    def _keep(self, tensor):
        kept = [tensor]
        if not isinstance(tensor, nn.Parameter) and tensor.device.type != "meta":
            kept.append(_Holder(self, tensor.nbytes))
        return kept


class _Holder:
    def __init__(self, count, size):
        self.count, self.size = count, size
        count.now += size
        count.most = max(count.most, count.now)

    def __del__(self):
        self.count.now -= self.size


def held(comms, name, microbatches, count_bytes=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    watched = [Watched() for _ in range(8 if name in ("zbv", "dualpipev", "interleaved") else 4)]
    pipe = mp.Pipeline(watched, comms, name, microbatches, mse_loss)
    inputs = torch.randn(2 * microbatches, 32)
    saved = SavedBytes()
    gc.disable()  # nothing may wait for the collector of cycles
    try:
        # What is saved through a hook keeps itself alive until its node has run, which a split backward may not need.
        with saved.hooks if count_bytes else contextlib.nullcontext():
            pipe.step(inputs, inputs)
        left = saved.now
        layers = [layer for layer in watched if any(layer is module for module in pipe.own_layers)]
        return (
            pipe.most_activations,
            sum(layer.most for layer in layers),
            saved.most,
            left,
            [len(layer.alive) for layer in layers],
        )
    finally:
        gc.enable()


def test_1f1b_holds_4_micro_batches_where_gpipe_holds_32(pool):
    gpipe = pool.run(held, 4, "gpipe", 32, transport="shm", timeout=30)
    one_f_one_b = pool.run(held, 4, "1f1b", 32, transport="shm", timeout=30)
    assert [count for count, *_ in gpipe] == [32] * 4
    assert [count for count, *_ in one_f_one_b] == [4, 3, 2, 1]
    # Graphs that are really alive, and the bytes that autograd keeps for them.
    assert [graphs for _, graphs, *_ in gpipe] == [32] * 4
    assert [graphs for _, graphs, *_ in one_f_one_b] == [4, 3, 2, 1]
    for (_, _, many, *_), (_, _, few, *_), kept in zip(gpipe, one_f_one_b, [4, 3, 2, 1], strict=True):
        assert few * 32 == many * kept
    for _, _, _, left, alive in gpipe + one_f_one_b:
        assert left == 0
        assert not any(alive)


@pytest.mark.parametrize("name", ["naive", "zb-h1", "zb-h2"])
def test_graphs_are_let_go_when_the_program_says_so(pool, name):
    for count, graphs, _, _, alive in pool.run(held, 4, name, 8, False, transport="shm", timeout=30):
        assert graphs == count
        assert not any(alive)


def drawn(comms):
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = mp.Pipeline(layers, comms, "1f1b", 2, torch.nn.functional.mse_loss)
    _, trace = pipe.traced_step(torch.ones(4, 4), torch.zeros(4, 4))
    return [event.duration for event in trace.events if event.name.startswith("!")]


def test_to_forget_a_value_takes_no_time(pool):
    for durations in pool.run(drawn, 2, transport="shm", timeout=30):
        assert durations and not any(durations)
