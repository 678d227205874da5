"""What a GPU's driver knows of it: how busy it is, how much memory each process has there, whether MPS shares it.

NVML is a library that comes with every driver. It is called through ctypes, as NVIDIA's own Python package does, so
there is nothing to install. A process that asks need not use the GPU itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7  # there are more processes than there was room for
_NOT_SAID = 2**64 - 1  # in place of a number of bytes
_MORE = 8  # processes that may have come since they were counted


class NvmlError(Exception):
    """NVML is not here, or does not answer a question; the text says why."""


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """NVML, ready to be asked.

    Args:
        library: the loaded library; by default the driver's own.

    Raises:
        NvmlError: where there is none, or it cannot begin.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError:
            raise NvmlError(f"there is no {_LIBRARY}, which comes with NVIDIA's driver") from None
        self._ask("nvmlInit_v2")

    def gpu(self, identity: str) -> NvmlGpu:
        """The GPU with this UUID, with or without `GPU-` before it, as torch has it."""
        handle = ctypes.c_void_p()
        name = identity if identity.startswith(("GPU-", "MIG-")) else f"GPU-{identity}"
        self._ask("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
        return NvmlGpu(self, handle)

    def _ask(self, name: str, *arguments: Any, allowed: int = 0) -> int:
        """Call a function by its name; returns its code, which is 0 or the one that is allowed."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(f"this driver's NVML has no {name}") from None
        code = int(function(*arguments))
        if code not in (0, allowed):
            raise NvmlError(f"{name}: {self._words(code)}")
        return code

    def _words(self, code: int) -> str:
        try:
            function = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return f"{(function(code) or b'').decode('ascii', 'replace')} (error {code})"


class NvmlGpu:
    """One GPU, as NVML sees it: with all processes that use it."""

    def __init__(self, nvml: Nvml, handle: ctypes.c_void_p) -> None:
        self._nvml = nvml
        self._handle = handle

    @property
    def percent_busy(self) -> float:
        """The share of the time just before, in percent, in which at least one kernel ran."""
        found = _Utilisation()
        self._nvml._ask("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(found))
        return float(found.gpu)

    @property
    def bytes_of_processes(self) -> dict[int, int | None]:
        """What each process has in the GPU's memory, CUDA's own part included; None where the driver does not say.

        The numbers of processes are the system's. A container may number its own differently.
        """
        return {one.pid: None if one.bytes == _NOT_SAID else one.bytes for one in self._processes("Compute")}

    @property
    def has_mps(self) -> bool:
        """Whether there is a process that computes through MPS."""
        return bool(self._processes("MPSCompute"))

    def _processes(self, kind: str) -> list[_Process]:
        name = f"nvmlDeviceGet{kind}RunningProcesses_v3"
        room = 0
        while True:
            count = ctypes.c_uint(room)
            found = (_Process * max(1, room))()
            code = self._nvml._ask(name, self._handle, ctypes.byref(count), found, allowed=_INSUFFICIENT_SIZE)
            if code == 0:
                return list(found[: min(count.value, room)])
            room = count.value + _MORE
