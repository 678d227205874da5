"""How a GPU is used: who asks NVML and when, and what reports show of it."""

import threading

import pytest
import torch
from tests.conftest import ON_ONE_GPU

from microparallel.bench.gpu_use import Gpu, GpuUse, Watched, gpu_of, use_of
from microparallel.bench.report import _gpu_lines, gpu_columns
from microparallel.topology.nvml import NvmlError


class Device:
    """Says 0 % at first, then 50 %; or nothing any more."""

    def __init__(self, silent_after=10**9):
        self.asked, self.silent_after, self.often = 0, silent_after, threading.Event()

    @property
    def percent_busy(self):
        self.asked += 1
        if self.asked > 10:
            self.often.set()
        if self.asked > self.silent_after:
            self.often.set()
            raise NvmlError("it has gone")
        return 0.0 if self.asked <= 2 else 50.0


def test_what_came_before_the_block_is_not_counted():
    device = Device()
    with Watched(device, interval=0.001) as watched:
        device.often.wait(10)
    asked = device.asked
    assert watched.mean == 50
    assert not any(thread.name == "microparallel asks NVML" for thread in threading.enumerate())
    assert device.asked == asked


def test_nobody_is_asked_where_there_is_nobody_and_silence_ends_the_questions():
    with Watched(None) as watched:
        pass
    assert watched.mean is None
    device = Device(silent_after=0)
    with Watched(device, interval=0.001) as watched:
        device.often.wait(10)
    assert watched.mean is None


def on_the_cpu(comms):
    return use_of(comms, lambda: pytest.fail("nothing is to be made"), 1.0), gpu_of(comms)


def test_on_the_cpu_nothing_is_measured(pool):
    assert pool.run(on_the_cpu, 2) == [(None, None)] * 2


class Row:
    def __init__(self, use):
        self.use = use


def test_columns_are_there_where_something_was_seen():
    assert gpu_columns([Row(None), Row(None)]) == []
    rows = [Row(GpuUse((1_500_000_000, 2_000_000_000), 61.6)), Row(GpuUse((1_000, 1_000), None)), Row(None)]
    memory, busy = gpu_columns(rows)
    assert [memory.cell(row) for row in rows] == ["2 GB", "1 KB", "–"]
    assert [busy.cell(row) for row in rows] == ["62 %", "–", "–"]


def test_the_headline_tells_of_the_gpu():
    assert _gpu_lines(None) == []
    assert _gpu_lines(Gpu("Some GPU", True, (3_000_000_000, 4_000_000_000))) == [
        "Some GPU, with MPS; by NVML, at the end the ranks' processes had 3 GB, 4 GB"
    ]
    found = _gpu_lines(Gpu("Some GPU", None, (None, None), "NVML: it is not there"))
    assert found == ["Some GPU, it is not known whether with MPS", "(NVML: it is not there)"]


class Multiplies:
    """Keeps 64 MB, and takes 64 MB more while it steps."""

    def __init__(self, device):
        self.kept = torch.ones(2**24, device=device)

    def step(self):
        self.kept.mul(2).sum()


def memory_of_a_method(comms):
    beside = torch.ones(2**26, device=comms.device)  # what others keep does not count
    use = use_of(comms, lambda: Multiplies(comms.device), 0.001)
    del beside
    return use, gpu_of(comms)


@ON_ONE_GPU
def test_a_method_s_own_memory_is_counted_on_every_rank(warm_ranks):
    (use, gpu), other = warm_ranks.run(memory_of_a_method, 2, device="cuda", transport="gloo")
    assert (use, gpu) == other
    assert len(use.bytes) == 2 and all(2**27 <= taken < 2**27 + 2**22 for taken in use.bytes)
    assert use.percent_busy is None or 0 < use.percent_busy <= 100
    assert gpu.name and len(gpu.process_bytes) == 2
