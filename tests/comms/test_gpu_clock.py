"""What a GPU did when, on the host's clock: with a GPU that is made up, and with a real one."""

import contextlib
import threading

import pytest
import torch
from tests.conftest import ON_ONE_GPU

import microparallel as mp
from microparallel.comms import gpu_clock, record
from microparallel.comms.gpu_clock import GpuClock
from microparallel.comms.record import Recorder
from microparallel.comms.work_queue import QueuedWork
from microparallel.observe import observer

CPU = torch.device("cpu")


class Gpu:
    """A GPU that is made up: it works for as long as it is told, stream by stream, behind a host with a clock.

    It stands for `torch.cuda` and for `time`. Its own clock began at another moment, and is too fast.
    """

    def __init__(self, drift=1.0, width=(1e-5,)):
        self.host = 100.0
        self.synchronized = 0
        self._drift = drift
        self._widths = list(width)
        self._default = Stream(self)
        self._of_thread = threading.local()
        self.streams = [self._default]

    # time

    def perf_counter(self):
        return self.host

    # torch.cuda

    def Stream(self, device):
        self.streams.append(Stream(self))
        return self.streams[-1]

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self)

    def current_stream(self, device=None):
        return getattr(self._of_thread, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self._of_thread.stream = stream
        yield
        self._of_thread.stream = before

    def synchronize(self, device):
        self.synchronized += 1
        self.host = max(self.host, *(stream.free for stream in self.streams))

    # what it does

    def work(self, seconds):
        """Give this thread's stream something to do; the host goes on."""
        stream = self.current_stream()
        stream.free = max(stream.free, self.host) + seconds

    def answer(self):
        """The host waits for an event; later ones take as long as the last that was given."""
        self.host += self._widths.pop(0) if len(self._widths) > 1 else self._widths[0]

    def shown(self, moment):
        """What the GPU's own clock shows, in milliseconds."""
        return 1e3 * self._drift * (moment + 5000)


class Stream:
    def __init__(self, gpu):
        self.free = gpu.host

    def wait_stream(self, other):
        self.free = max(self.free, other.free)


class Event:
    def __init__(self, gpu):
        self._gpu = gpu

    def record(self):
        self.at = max(self._gpu.current_stream().free, self._gpu.host)

    def synchronize(self):
        self._gpu.answer()

    def elapsed_time(self, later):
        return self._gpu.shown(later.at) - self._gpu.shown(self.at)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu(drift=1.001)
    monkeypatch.setattr(gpu_clock, "time", gpu)
    return gpu


def test_moments_are_those_of_the_gpu_on_the_host_s_clock_without_drift(gpu):
    clock = GpuClock(CPU, gpu)
    clock.begin()
    begun = gpu.host
    synchronized = gpu.synchronized
    moments = []
    for _ in range(3):
        gpu.work(10.0)
        moments.append(clock.now())
    assert gpu.synchronized == synchronized and gpu.host == begun  # nothing has waited
    clock.end()
    seconds = [clock.seconds(moment) - begun for moment in moments]
    assert seconds == pytest.approx([10, 20, 30], abs=2e-5)  # a clock with drift would be 30 ms off
    assert clock.seconds(3.5) == 3.5


def test_the_quickest_answer_is_the_anchor(monkeypatch):
    gpu = Gpu(width=(0.01, 0.02, 1e-6, 0.01))
    monkeypatch.setattr(gpu_clock, "time", gpu)
    clock = GpuClock(CPU, gpu)
    clock.begin()
    assert clock.doubt == pytest.approx(5e-7)
    event, moment = clock._first
    assert moment == pytest.approx(100.03, abs=1e-5) and event.at == pytest.approx(100.03)


class NcclWork:
    """Takes half a second on a stream of its own."""

    def __init__(self, gpu, nccl):
        nccl.free = max(nccl.free, gpu.current_stream().free, gpu.host) + 0.5
        self._ended, self._gpu = nccl.free, gpu

    def wait(self):
        stream = self._gpu.current_stream()
        stream.free = max(stream.free, self._ended)


def test_works_of_nccl_are_followed_on_a_stream_beside(gpu):
    clock = GpuClock(CPU, gpu)
    clock.begin()
    begun, nccl = gpu.host, gpu.Stream(CPU)
    gpu.work(1.0)
    spans = [clock.follow([NcclWork(gpu, nccl)], group=(0, 1)) for _ in range(2)]
    gpu.work(2.0)  # the caller's stream goes on
    clock.end()
    found = [clock.seconds(moment) - begun for span in spans for moment in span]
    assert found == pytest.approx([1.0, 1.5, 1.5, 2.0], abs=1e-4)


# ── recordings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def on_the_gpu(comms, gpu):
    """Let collectives run as on a GPU: the queue's thread has a stream, and each takes half a second of it."""
    queue = comms._group._queue
    append = queue.append
    communication = gpu.Stream(CPU)

    def append_with_streams(action, timeout=None, **about):
        called, ended = gpu.current_stream().free, []

        def act(deadline):
            stream = gpu.current_stream()
            stream.free = max(stream.free, called)
            action(deadline)
            gpu.work(0.5)
            ended.append(stream.free)

        def joined():
            stream = gpu.current_stream()
            stream.free = max(stream.free, *ended)

        return append(act, timeout, **(about | {"joined": joined}))

    queue.append = append_with_streams
    queue._begin = lambda: setattr(gpu._of_thread, "stream", communication)


honest = Recorder.__init__


def as_on_one_gpu(recorder, comms, **named):
    """What the ranks of these tests talk through stands for a GPU's memory."""
    honest(recorder, comms, **named)
    recorder._carriers = recorder._gpu


def recorded(comms, case, computes=3.0):
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_clock, "time", gpu)
        patch.setattr(record.Recorder, "__init__", as_on_one_gpu)
        if case == "late":  # the queue's thread was quicker than the recorder
            patch.setattr(QueuedWork, "watch", lambda self, begins, ended: None)
        on_the_gpu(comms, gpu)
        recorder = Recorder(comms, memory=False, gpu=GpuClock(CPU, gpu))
        recorder.start()
        synchronized, tensor = gpu.synchronized, torch.ones(3)
        gpu.work(1.0)
        if case == "waited for at once":
            comms.all_reduce(tensor)
        else:
            requests = [comms.all_reduce(tensor, async_op=True) for _ in range(2)]
            while not all(request._works[0].done for request in requests):
                threading.Event().wait(0.001)
            gpu.work(computes)
            for request in requests:
                request.wait()
        gpu.work(1.0)
        assert gpu.synchronized == synchronized  # a step never waits for the GPU
        recorder.stop()
        trace = recorder.gather({})
    del comms._group._queue.append, comms._group._queue._begin
    first = min(event.asked for event in trace.events)  # the GPU had computed for a second
    return [
        [
            None if moment is None else round(moment - first, 3)
            for moment in (event.asked, event.start, event.end, event.waited)
        ]
        for event in trace.by_rank[comms.rank]
    ]


@pytest.mark.parametrize("case", ["in the background", "late"])
def test_collectives_are_booked_on_the_stream_that_does_them(warm_ranks, case):
    for events in warm_ranks.run(recorded, 2, case, transport="shm", device="cpu", timeout=20):
        assert events == [[0, 0, 0.5, None], [0, 0.5, 1.0, None]]  # asked, start, end, waited


def test_the_gpu_waits_for_what_the_host_had_done_before(warm_ranks):
    """Though no host has waited: its stream did, when it had computed for 0.2 s."""
    case = "in the background", 0.2
    for events in warm_ranks.run(recorded, 2, *case, transport="shm", device="cpu", timeout=20):
        assert events == [[0, 0, 0.5, 0.2], [0, 0.5, 1.0, 0.5]]


def test_a_collective_that_is_waited_for_runs_on_its_caller_s_stream(warm_ranks):
    for events in warm_ranks.run(recorded, 2, "waited for at once", transport="shm", device="cpu", timeout=20):
        assert events == [[0, 0, 0.5, 0]]


def busy_for(seconds, device):
    """Keep this thread's stream at work for so long, more or less."""
    torch.cuda._sleep(int(seconds * 1e3 * torch.cuda.get_device_properties(device).clock_rate))


def recorded_over_gloo(comms):
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patch:
        for module in (gpu_clock, observer):
            patch.setattr(module, "time", gpu)
        recorder = Recorder(comms, memory=False, gpu=GpuClock(CPU, gpu))
        recorder.start()
        gpu.work(1.0)
        gpu.synchronize(CPU)  # the tensor is copied to main memory
        request = comms.all_reduce(torch.ones(3), async_op=True)
        gpu.work(3.0)
        request.wait()
        recorder.stop()
        trace = recorder.gather({})
    [event] = trace.by_rank[comms.rank]
    return event.end - event.asked


def test_what_the_host_carries_ends_on_the_host_s_clock(warm_ranks):
    for seconds in warm_ranks.run(recorded_over_gloo, 2, transport="gloo", device="cpu", timeout=20):
        assert abs(seconds) < 0.01  # and not when the GPU has done what it was given meanwhile


def recorded_on_a_gpu(comms):
    large = torch.ones(2**24, device=comms.device)
    for _ in range(3):
        comms.all_reduce(large, async_op=True).wait()
    comms.barrier()
    with mp.record(comms) as recorder:
        busy_for(0.02, comms.device)
        request = comms.all_reduce(large, async_op=True)
        busy_for(0.05, comms.device)
        request.wait()
        torch.cuda.synchronize(comms.device)
    return [
        (event.asked, event.start, event.end, event.waited)
        for event in recorder.trace.by_rank[comms.rank]
        if event.bytes == large.nbytes
    ], recorder.trace.clock_error


@ON_ONE_GPU
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["cuda"])
def test_on_a_gpu_communication_is_seen_beside_computation(warm_ranks, transport):
    for [(asked, start, end, waited)], error in warm_ranks.run(
        recorded_on_a_gpu, 2, transport=transport, device="cuda", timeout=100
    ):
        assert asked <= start < end  # the host had asked while the GPU was busy for 20 ms
        assert start - asked < 0.04 and error < 0.005
        assert waited is None or waited - asked > 0.03  # the caller's stream computed for 50 ms more
