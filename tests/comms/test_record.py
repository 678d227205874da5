"""`mp.record`: what the ranks of any program did, on one clock."""

import json
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.conftest import GpuPool
from torch import nn
from torch.nn.modules import module as torch_modules

import microparallel as mp
from microparallel.observe import Activity, ObservedCall
from microparallel.observe.flight_recorder import NoEntry
from microparallel.program import AllGather, AllReduce, Forward, Parameters
from microparallel.trace.parts import parts


def steps(comms, count):
    torch.manual_seed(0)
    model = mp.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), comms, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.MSELoss()
    for _ in range(count):
        optimizer.zero_grad()
        loss_fn(model(torch.ones(4, 8)), torch.ones(4, 2)).backward()
        optimizer.step()


def recorded_training(comms):
    steps(comms, 1)
    with mp.record(comms, model="small") as recorder:
        steps(comms, 2)
    steps(comms, 1)
    return recorder.trace


def doubt_of(pool):
    """How far clocks may be apart on one machine: not at all, but for the time in which a GPU answers."""
    return 1e-3 if isinstance(pool, GpuPool) else 0


def test_a_data_parallel_program(any_pool):
    first, second = any_pool.run(recorded_training, 2, timeout=30)
    assert first == second  # every rank has all of it
    assert first.ranks == 2 and first.about == {"model": "small"} and first.steps == [0, 1]
    assert first.clock_error <= doubt_of(any_pool)  # one machine, one clock
    for rank, events in enumerate(first.by_rank):
        names = [event.name for event in events if event.computes]
        backward = [f"B{bucket}.{rank}" for bucket in (2, 1, 0)]  # one of each bucket
        assert names == [f"F0:3.{rank}", "forward of MSELoss", *backward, "S"] * 2
        reduced = [event for event in events if isinstance(event.op, AllReduce)]
        assert len(reduced) >= 4 and all(event.bytes > 0 and event.group == (0, 1) for event in reduced)
        # What was back before the rank came to wait for it was not waited for.
        waited = [event for event in events if event.kind == "collective" and event.waited is not None]
        assert all(event.asked <= event.waited <= event.end for event in waited)
    numbers = [
        [(event.number, event.name) for event in events if event.kind == "collective"] for events in first.by_rank
    ]
    assert numbers[0] == numbers[1]  # the same calls, in the same order


def straggler(comms):
    comms.barrier()
    with mp.record(comms) as recorder:
        if comms.rank == 1:
            time.sleep(0.1)
        comms.all_reduce(torch.ones(4))
    return recorder.trace


def test_whoever_waits_for_a_straggler_does_not_communicate(any_pool):
    traces = [any_pool.run(straggler, 2, timeout=30)[0]]
    while (most := max(busy_part(trace) for trace in traces)) < 0.98 and len(traces) < 5:  # a rank may lose its core
        traces.append(any_pool.run(straggler, 2, timeout=30)[0])
    assert all(event.place.startswith("test_record.py:") for event in traces[0].events)
    assert all(parts(trace)[0].waiting >= 0.09 for trace in traces)
    assert 0.98 <= most <= 1


def busy_part(trace):
    """Of a step of rank 0, the part in which it waited or communicated."""
    quick, _ = parts(trace)
    return (quick.waiting + quick.communicating) / quick.step


def messages(comms):
    pair = comms.group([0, 2])
    with mp.record(comms) as recorder:
        if comms.rank == 0:
            for _ in range(2):
                pair.send_tensor(torch.ones(3), 1)
        if comms.rank == 2:
            for _ in range(2):
                pair.recv_tensor((3,), 0)
    return recorder.trace


def test_messages_of_a_smaller_group(pool, tmp_path):
    trace = pool.run(messages, 3, timeout=30)[0]
    assert [(event.rank, event.kind, event.peer, event.number) for event in trace.events] == [
        (0, "send", 2, 0),
        (0, "send", 2, 1),
        (2, "receive", 0, 0),
        (2, "receive", 0, 1),
    ]
    trace.to_chrome(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(entry["ph"] == "X" for entry in entries) == 4
    arrows = [entry for entry in entries if entry["ph"] in "sf"]
    assert [(arrow["ph"], arrow["pid"]) for arrow in arrows] == [("s", 0), ("f", 2)] * 2


def cut_short(comms):
    before = len(torch_modules._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), mp.record(comms) as recorder:
        raise ZeroDivisionError
    with pytest.raises(mp.errors.UsageError, match="block has ended"):
        recorder.trace  # noqa: B018
    return comms.observers, len(torch_modules._global_forward_pre_hooks) - before


def test_a_block_that_raises_leaves_nothing_behind(pool):
    assert pool.run(cut_short, 2, timeout=30) == [([], 0)] * 2


def recomputing(comms):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    with mp.record(comms) as recorder:
        inputs = torch.ones(2, 4, requires_grad=True)
        torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False).sum().backward()
        with torch.no_grad():
            layer(inputs)
    return [(event.kind, event.name) for event in recorder.trace.events]


def test_a_forward_inside_a_backward_is_part_of_it(pool):
    (found,) = pool.run(recomputing, 1, timeout=30)
    assert found == [("forward", "forward of Linear"), ("backward", "backward"), ("forward", "forward of Linear")]


def other_peoples_program(comms):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    dist.barrier()
    with mp.record(comms) as recorder:
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(5))
        if comms.rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
    return recorder.trace


def test_a_torch_program_on_our_backend(pool):
    """It knows nothing of us: only the backend is ours."""
    trace = pool.run(other_peoples_program, 2, transport="shm", timeout=30)[0]
    for rank, events in enumerate(trace.by_rank):
        calls = [(event.kind, event.name, event.bytes) for event in events if not event.computes]
        message = ("send", "send(float32[2], dst=1, tag=0)", 8) if rank == 0 else (
            "receive", "recv(float32[2], src=0, tag=0)", 8
        )  # fmt: skip
        assert calls == [
            ("collective", "all_reduce(float32[15], op=SUM)", 60),  # DDP's bucket
            ("collective", "all_reduce(float32[5], op=SUM)", 20),
            message,
        ]
        assert all(event.place.startswith("test_record.py:") for event in events if not event.computes)


def late(comms, gradient):
    """Rank 1 goes on 0.3 s after rank 0 has computed all: then autograd calls what it was asked to, in order."""
    if comms.rank == 0:
        tell = lambda: comms.send_tensor(torch.ones(1), 1)  # noqa: E731
        torch.autograd.Variable._execution_engine.queue_callback(tell)
    else:
        comms.recv_tensor(1, 0)
        time.sleep(0.3)
    return gradient


def ddp_with_a_straggler(comms):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)  # a bucket for each layer
    for _ in range(2):  # DDP arranges its buckets after the first
        model(torch.ones(2, 512)).sum().backward()
    comms.barrier()
    with mp.record(comms) as recorder:
        loss = model(torch.ones(2, 512)).sum()
        loss.register_hook(lambda gradient: late(comms, gradient))
        loss.backward()
    return recorder.trace


def test_what_torchs_ddp_waits_for_inside_backward_is_waiting(pool):
    trace = pool.run(ddp_with_a_straggler, 2, transport="shm", timeout=30)[0]
    quick = trace.by_rank[0]
    first, last = [event for event in quick if event.kind == "collective"]
    [backward] = [event for event in quick if event.kind == "backward"]
    assert backward.start < first.asked < last.asked < first.waited <= last.waited
    assert last.waited < first.start  # for both from then on, long before rank 1 has come
    assert first.end <= last.end <= backward.end
    # Until rank 1 came, rank 0 had nothing to do, and it did not communicate either.
    waited, slow = parts(trace)
    assert waited.waiting > 0.1 and waited.backward < backward.duration - 0.1
    assert slow.backward > 0.3


def ddp_that_hides_a_bucket(comms):
    reduced = threading.Event()
    reduced.set()  # while buckets are still being arranged, the last layer has none of its own

    def average(_, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: (done.value()[0], reduced.set())[0])

    class Slow(torch.autograd.Function):
        """Its backward goes on when the bucket of the layer above it has been reduced."""

        @staticmethod
        def forward(_, inputs):
            return inputs.clone()

        @staticmethod
        def backward(_, gradient):
            assert reduced.wait(20)
            return gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)

        def forward(self, inputs):
            return self.last(Slow.apply(self.first(inputs)))

    model = nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1)
    model.register_comm_hook(None, average)
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
    reduced.clear()
    with mp.record(comms) as recorder:
        model(torch.ones(2, 512)).sum().backward()
    return recorder.trace


def test_what_has_ended_when_all_is_computed_was_not_waited_for(pool):
    trace = pool.run(ddp_that_hides_a_bucket, 2, transport="shm", timeout=30)[0]
    for events in trace.by_rank:
        first, *_ = [event for event in events if event.name.startswith("all_reduce(float32")]
        assert first.waited is None


def told_late(comms):
    """A thread waits for a gather and goes on, while another thread has yet to write down that the gather ended."""
    gather = Activity(AllGather(Parameters(0), "dp"), size=4, group=(0,))
    computation = Activity(Forward(0, 0))

    class Layer(nn.Module):
        def forward(self, inputs):
            (recorder,) = comms.observers
            recorder.begins(gather)
            recorder.waits(gather)
            gather.ended = time.perf_counter()
            recorder.begins(computation)
            thread = threading.Thread(target=recorder.ends, args=(gather,))
            thread.start()
            thread.join()
            recorder.ends(computation)
            return inputs

    with mp.record(comms) as recorder:
        Layer()(torch.ones(1))
    return recorder.trace


def test_a_computation_begins_when_what_its_thread_waited_for_has_ended(pool):
    gather, computation = sorted(pool.run(told_late, 1, timeout=30)[0].events, key=lambda event: event.computes)
    assert computation.name == "F0.0" and computation.asked >= gather.end


def ended_before_it_was_waited_for(comms):
    """Another thread has written down that a gather ended, just before a thread comes to wait for it."""
    gather = Activity(AllGather(Parameters(0), "dp"), size=4, group=(0,))
    computation = Activity(Forward(0, 0))

    class Layer(nn.Module):
        def forward(self, inputs):
            (recorder,) = comms.observers
            call = ObservedCall(NoEntry(), [recorder], gather)
            thread = threading.Thread(target=call.completes)
            thread.start()
            thread.join()
            call.waits()
            call.ends()
            recorder.begins(computation)
            recorder.ends(computation)
            return inputs

    with mp.record(comms) as recorder:
        Layer()(torch.ones(1))
    return recorder.trace


def test_a_computation_begins_when_what_had_ended_before_it_was_waited_for_has_ended(pool):
    trace = pool.run(ended_before_it_was_waited_for, 1, timeout=30)[0]
    gather, computation = sorted(trace.events, key=lambda event: event.computes)
    assert computation.name == "F0.0" and computation.asked >= gather.end
    assert gather.waited is None


def left_alone(comms):
    """A call that is begun in backward, and is waited for when the user says so."""
    weight = torch.ones(4, requires_grad=True)
    works = []
    weight.register_hook(lambda gradient: works.append(dist.all_reduce(gradient, async_op=True)))
    with mp.record(comms) as recorder:
        (weight * 2).sum().backward()
        time.sleep(0.05)
        works[0].wait()
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        future.wait()
    return recorder.trace


def test_what_a_program_waits_for_itself_is_booked_when_it_does(pool):
    trace = pool.run(left_alone, 2, transport="shm", timeout=30)[0]
    for events in trace.by_rank:
        kinds = [event.kind for event in events]
        assert sorted(kinds) == ["backward", "collective", "collective"]  # though no module was called
        backward = events[kinds.index("backward")]
        waited_for, left = [event for event in events if event.kind == "collective"]
        assert waited_for.waited >= backward.end + 0.05
        assert left.waited is None


def failing_backward(comms):
    def fail(_):
        raise ZeroDivisionError

    layer = nn.Linear(2, 2)
    with mp.record(comms) as recorder:
        loss = layer(torch.ones(1, 2)).sum()
        loss.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        layer(torch.ones(1, 2)).sum().backward()
    return [event.kind for event in recorder.trace.events]


def test_a_backward_that_fails_does_not_hide_what_follows(pool):
    assert pool.run(failing_backward, 1, timeout=30) == [["forward", "backward"] * 2]


def two_recordings(comms):
    def step():
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    first, second = mp.record(comms), mp.record(comms)
    one = first.__enter__()
    step()
    other = second.__enter__()
    step()
    first.__exit__(None, None, None)  # the one that began first ends first
    step()
    second.__exit__(None, None, None)
    step()
    return [[event.kind for event in recorder.trace.events if event.computes] for recorder in (one, other)]


def test_recordings_may_overlap(pool):
    (found,) = pool.run(two_recordings, 1, timeout=30)
    assert found == [["forward", "backward"] * 2] * 2


def nothing_left_behind(comms):
    engine = torch.autograd._engine_run_backward
    layer = nn.Linear(2, 2)
    with mp.record(comms):
        with pytest.raises(RuntimeError):
            layer(torch.ones(1, 3))
        layer(torch.ones(1, 2)).sum().backward()
    hooks = [*layer._forward_hooks, *layer._forward_hooks_always_called]
    return torch.autograd._engine_run_backward is engine, hooks


def test_torch_is_as_it_was(pool):
    assert pool.run(nothing_left_behind, 1, timeout=30) == [(True, [])]
