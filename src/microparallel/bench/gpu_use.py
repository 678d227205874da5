"""How a benchmark's ranks use their GPU: the memory of each rank, and how busy the GPU is.

Both are taken of one method at a time, after the timed steps, when it is alone on the GPU. torch knows what its tensors
take. NVML, which belongs to the driver, knows the rest: what a whole process has, and the share of the time in which
some kernel ran. That share is of all ranks together, and says nothing about how much of the GPU a kernel used.
"""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import torch

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.text import show_size
from microparallel.topology.nvml import Nvml, NvmlError, NvmlGpu

_WATCHED = 1.5  # seconds of steps: NVML looks anew only a few times a second
_INTERVAL = 0.02
_NOT_YET = 0.4  # of the samples, from the first on: they tell of the time before
_WARM_UP = 2  # steps: the second finds the optimizer's state, and buckets in their order
_MOST_STEPS = 1000
_PATIENCE = 5.0  # seconds for an answer of NVML's


@dataclass(frozen=True)
class Gpu:
    """What was seen of the ranks' GPU.

    Attributes:
        name: its kind.
        mps: whether ranks compute through MPS; None if NVML does not say.
        process_bytes: what each rank's process has on it at the end, CUDA's own part included; None: it is not known.
        problem: why NVML does not say something.
    """

    name: str
    mps: bool | None
    process_bytes: tuple[int | None, ...]
    problem: str | None = None


@dataclass(frozen=True)
class GpuUse:
    """What one method takes of the GPU, when it is alone there.

    Attributes:
        bytes: the most that torch's tensors took in a step, on each rank.
        percent_busy: of the time, some kernel of some rank ran; None if NVML does not say.
    """

    bytes: tuple[int, ...]
    percent_busy: float | None


class Steps(Protocol):
    """Something whose steps can be done."""

    def step(self) -> None:
        """Do one step; all ranks call this."""


def use_of(comms: Comms, make: Callable[[], Steps], seconds: float) -> GpuUse | None:
    """Make a method anew, and see what it takes of the GPU; all ranks call this. None where ranks are on the CPU.

    Args:
        comms: the ranks.
        make: makes it.
        seconds: what a step of it takes, the same number on all ranks.
    """
    device = comms.device
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    method = make()
    for _ in range(_WARM_UP):
        method.step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    method.step()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device) - before
    comms.barrier()
    with Watched(_this_gpu(device) if comms.rank == 0 else None) as watched:
        for _ in range(min(_MOST_STEPS, max(_WARM_UP, math.ceil(_WATCHED / seconds)))):
            method.step()
        torch.cuda.synchronize(device)
    told: list[list[Any]] = gather_json([most, watched.mean], comms)
    if (close := getattr(method, "close", None)) is not None:
        close()
    return GpuUse(tuple(int(taken) for taken, _ in told), told[0][1])


def gpu_of(comms: Comms) -> Gpu | None:
    """What is to be seen of the ranks' GPU now; all ranks call this, and get what rank 0 sees of all but memory."""
    if comms.device.type != "cuda":
        return None
    mine: int | None = None
    mps, problem = None, None
    try:
        gpu = _gpu_by_nvml(comms.device)
        mps = gpu.has_mps
        processes = gpu.bytes_of_processes
        mine = processes.get(os.getpid())
        if mine is None:
            problem = "NVML does not know this process by its number, as in a container"
    except NvmlError as error:
        problem = f"NVML: {error}"
    told = gather_json([mine, mps, problem], comms)
    name = torch.cuda.get_device_name(comms.device)
    return Gpu(name, told[0][1], tuple(taken for taken, _, _ in told), told[0][2])


class Watched:
    """Within this block a thread asks NVML again and again how busy a GPU is.

    Args:
        gpu: the GPU; None: nobody asks.
        interval: seconds between two questions.

    Attributes:
        mean: of the answers, in percent, when the block has ended; None if there were none.
    """

    def __init__(self, gpu: NvmlGpu | None, interval: float = _INTERVAL) -> None:
        self.mean: float | None = None
        self._gpu = gpu
        self._interval = interval
        self._answers: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="microparallel asks NVML", daemon=True)

    def __enter__(self) -> Watched:
        """Begin to ask."""
        if self._gpu is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask no longer."""
        self._ends.set()
        if self._gpu is None:
            return
        self._thread.join(_PATIENCE)
        answers = list(self._answers)  # a driver that does not answer may still have the thread
        counted = answers[int(_NOT_YET * len(answers)) :]
        self.mean = fmean(counted) if counted else None

    def _ask(self) -> None:
        assert self._gpu is not None
        try:
            while not self._ends.wait(self._interval):
                self._answers.append(self._gpu.percent_busy)
        except NvmlError:
            return


def _gpu_by_nvml(device: torch.device) -> NvmlGpu:
    return Nvml().gpu(str(torch.cuda.get_device_properties(device).uuid))


def _this_gpu(device: torch.device) -> NvmlGpu | None:
    try:
        return _gpu_by_nvml(device)
    except NvmlError:
        return None


# ── in reports ──────────────────────────────────────────────────────────────────────────────────────────────────────


class WithUse(Protocol):
    """A row that may tell of the GPU."""

    @property
    def use(self) -> GpuUse | None:
        """What the method takes of the GPU."""


def show_busy(row: WithUse) -> str:
    """The share of the time in which the GPU was busy, for people."""
    use = row.use
    return "–" if use is None or use.percent_busy is None else f"{use.percent_busy:.0f} %"


def show_bytes(row: WithUse) -> str:
    """The memory of the rank that takes most, for people."""
    return "–" if row.use is None else show_size(float(f"{max(row.use.bytes):.3g}"))
