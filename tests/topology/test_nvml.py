"""Asking NVML: with a library that answers, one that does not, and none."""

import ctypes

import pytest

from microparallel.topology import nvml
from microparallel.topology.nvml import Nvml, NvmlError


class Library:
    """Answers as the driver's library does; `processes` are (number, bytes), by kind."""

    def __init__(self, processes=None, busy=37, code=0):
        self.processes = processes or {}
        self.busy, self.code = busy, code
        self.asked_for = []
        self.nvmlErrorString = lambda _: b"Driver Not Loaded"  # a function whose attributes can be set, as ctypes has
        self.calls = 0

    def nvmlInit_v2(self):
        return self.code

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.asked_for.append(name)
        handle._obj.value = 17
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, found):
        assert handle.value == 17
        found._obj.gpu = self.busy
        return 0

    def _list(self, kind, count, found):
        self.calls += 1
        there = self.processes.get(kind, [])
        room, count._obj.value = count._obj.value, len(there)
        if room < len(there):
            return 7
        for place, (pid, size) in enumerate(there):
            found[place].pid, found[place].bytes = pid, size
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, found):
        return self._list("compute", count, found)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle, count, found):
        return self._list("mps", count, found)


def test_a_gpu_is_found_by_the_name_that_torch_has_for_it():
    library = Library()
    for name in ("0a1b", "GPU-0a1b", "MIG-2c"):
        Nvml(library).gpu(name)
    assert library.asked_for == [b"GPU-0a1b", b"GPU-0a1b", b"MIG-2c"]


def test_how_busy_a_gpu_is_and_what_processes_have_there():
    library = Library({"compute": [(number, number * 10) for number in range(1, 20)] + [(99, 2**64 - 1)]})
    gpu = Nvml(library).gpu("x")
    assert gpu.percent_busy == 37
    assert gpu.bytes_of_processes == {number: number * 10 for number in range(1, 20)} | {99: None}
    assert library.calls == 2  # once to be told how many there are
    assert not gpu.has_mps
    assert Nvml(Library({"mps": [(5, 1)]})).gpu("x").has_mps


def test_what_does_not_answer_says_why(monkeypatch):
    with pytest.raises(NvmlError, match=r"nvmlInit_v2: Driver Not Loaded \(error 9\)"):
        Nvml(Library(code=9))
    monkeypatch.delattr(Library, "nvmlDeviceGetMPSComputeRunningProcesses_v3")
    with pytest.raises(NvmlError, match="has no nvmlDeviceGetMPSComputeRunningProcesses_v3"):
        _ = Nvml(Library()).gpu("x").has_mps

    def nothing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    with pytest.raises(NvmlError, match=r"there is no libnvidia-ml.so.1, which comes with NVIDIA's driver"):
        nvml.Nvml()
