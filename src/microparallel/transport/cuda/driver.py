"""The calls of CUDA's driver by which processes share memory of one GPU, and keep their streams in order.

torch's own sharing (`torch.multiprocessing`) counts who holds each tensor, in a file, and keeps memory for that. Here a
whole allocation is shared once, and read again and again.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch

from microparallel.errors import CommsError

HANDLE_BYTES = 64
_BUFFER_ID, _START, _SIZE, _CAN_BE_SHARED = 7, 11, 12, 13  # CU_POINTER_ATTRIBUTE_…
_ON_FIRST_USE = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_FOR_THE_GPU = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_CAN_USE_MARKS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_thread = threading.local()


class Allocation(NamedTuple):
    """A piece of GPU memory as the driver handed it out: many tensors may lie in it.

    Attributes:
        identity: a number that no other allocation of this process ever has: an address may come again.
        start: its first address.
        size: in bytes.
        can_be_shared: whether another process can be given a handle to it.
    """

    identity: int
    start: int
    size: int
    can_be_shared: bool


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _Answers:
    """Where the driver writes what it is asked of an address; each thread has its own."""

    def __init__(self) -> None:
        self.identity, self.start = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        self.size, self.can_be_shared = ctypes.c_size_t(), ctypes.c_int()
        places = (self.identity, self.start, self.size, self.can_be_shared)
        self.places = (ctypes.c_void_p * 4)(*map(ctypes.addressof, places))
        self.questions = (ctypes.c_int * 4)(_BUFFER_ID, _START, _SIZE, _CAN_BE_SHARED)


def allocation_at(address: int) -> Allocation | None:
    """The allocation that holds an address; None if there is none any more."""
    answers = getattr(_thread, "answers", None)
    if answers is None:
        answers = _thread.answers = _Answers()
    if _driver().cuPointerGetAttributes(4, answers.questions, answers.places, ctypes.c_ulonglong(address)):
        return None
    if not answers.identity.value:
        return None
    return Allocation(
        answers.identity.value, answers.start.value, answers.size.value, bool(answers.can_be_shared.value)
    )


def share(start: int) -> bytes:
    """A handle by which other processes can open the allocation that begins at an address."""
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_ulonglong(start)), "share memory of the GPU")
    return bytes(handle)


class Opened:
    """An allocation of another process, as this one reads it: `bytes` is all of it."""

    def __init__(self, handle: bytes, size: int, device: torch.device) -> None:
        address = ctypes.c_ulonglong()
        shared = _Handle.from_buffer_copy(handle)
        _check(
            _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), shared, _ON_FIRST_USE),
            "open another process's memory of the GPU",
        )
        self._address = address.value
        # torch and others read this: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }
        self.bytes: torch.Tensor = torch.as_tensor(self, device=device)

    def close(self) -> None:
        """Let go of the memory; nothing on the GPU may still read it."""
        del self.bytes
        _driver().cuIpcCloseMemHandle(ctypes.c_ulonglong(self._address))  # the other process may be gone


def put_marks(stream: int, count: int, operations: int) -> None:
    """Let a stream wait for words and write words, as told by `count` operations that lie at an address."""
    code = _driver().cuStreamBatchMemOp_v2(stream, count, operations, 0)
    if code:
        _check(code, "let the GPU wait for another process")


def can_put_marks(device: torch.device) -> bool:
    """Whether streams of this GPU can wait for words in memory."""
    answer = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(answer), _CAN_USE_MARKS, ctypes.c_int(device.index))
    return not code and bool(answer.value)


def register(address: int, size: int) -> int:
    """Let the GPU use memory of the host; returns where it lies for the GPU."""
    here, there = ctypes.c_void_p(address), ctypes.c_ulonglong()
    _check(_driver().cuMemHostRegister_v2(here, ctypes.c_size_t(size), _FOR_THE_GPU), "use memory of the host")
    _check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(there), here, 0), "use memory of the host")
    return there.value


def unregister(address: int) -> None:
    """The GPU uses this memory of the host no longer."""
    _driver().cuMemHostUnregister(ctypes.c_void_p(address))


def use(device: torch.device) -> None:
    """Let this thread make calls for a GPU: the driver's calls are for the device that a thread uses."""
    if getattr(_thread, "device", None) != device:
        torch.cuda.set_device(device)
        _thread.device = device


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuStreamBatchMemOp_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    return library


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(name))
        reason = (name.value or b"").decode("ascii", "replace")
        raise CommsError(f"CUDA's driver cannot {what}: {reason} (error {code}); choose transport='gloo'")
