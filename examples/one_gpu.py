"""Processes that share one GPU add up a tensor: through main memory, and where it lies.

Question   What does an all-reduce cost between processes on one GPU, and what of it is needed?
Look at    the three times. gloo carries every byte to main memory and back. By hand, each process
           opens the others' memory on the GPU (CUDA IPC) and adds there; but its host waits for
           the GPU three times. The library does the same, and no host waits.
Try        python examples/one_gpu.py --ranks 4      each adds a quarter: who waits for whom?
           python examples/one_gpu.py --size 0.004   4 KB: what is left when bytes cost nothing?
           and leave out a `meet()` in `add_by_hand`: is the sum still right, each time?
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe


class Handle(ctypes.Structure):
    """What the driver gives for an allocation; another process can open it."""

    _fields_ = (("words", ctypes.c_ubyte * 64),)


def require(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver refuses: error {code}")


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """A handle to the allocation in which a tensor lies, and where in it: 72 bytes."""
    cuda, handle = ctypes.CDLL("libcuda.so.1"), Handle()
    base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    address = ctypes.c_ulonglong(tensor.data_ptr())
    require(cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address))
    require(cuda.cuIpcGetMemHandle(ctypes.byref(handle), base))
    offset = address.value - base.value
    return torch.tensor(list(bytes(handle) + offset.to_bytes(8, "little")), dtype=torch.uint8)


class Borrowed:
    """A tensor of another process, where it lies."""

    def __init__(self, lent: torch.Tensor, length: int) -> None:
        cuda, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong()
        words = bytes(lent.cpu().tolist())
        handle = Handle.from_buffer_copy(words[:64])
        require(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, 1))
        start = address.value + int.from_bytes(words[64:], "little")
        described = {"shape": (length,), "typestr": "<f4", "data": (start, False), "version": 3}
        self.__cuda_array_interface__ = described


def add_by_hand(comms: mp.Comms, tensors: list[torch.Tensor]) -> None:
    """All-reduce in two phases; `tensors[rank]` is this rank's own, the others are borrowed."""

    def meet() -> None:
        torch.cuda.synchronize()  # the host waits for the GPU,
        comms.barrier()  # and then for the others' hosts

    slices = [tensor.tensor_split(comms.world_size) for tensor in tensors]
    others = [other for other in range(comms.world_size) if other != comms.rank]
    meet()  # all have computed what is to be added
    for other in others:
        slices[comms.rank][comms.rank] += slices[other][comms.rank]
    meet()  # all slices are sums
    for other in others:
        slices[comms.rank][other].copy_(slices[other][other])
    meet()  # nobody reads any more: the tensors may change


def median_of(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[3:])


def measured(comms: mp.Comms, length: int, rounds: int) -> tuple[float, float]:
    """Seconds by gloo, and by hand."""
    own = torch.empty(length, device=comms.device)
    lent = comms.all_gather(lend(own))
    tensors = [
        own if rank == comms.rank else torch.as_tensor(Borrowed(handle, length), device=comms.device)
        for rank, handle in enumerate(lent)
    ]
    own.fill_(comms.rank + 1.0)
    add_by_hand(comms, tensors)
    if not bool((own == sum(range(comms.world_size + 1))).all()):
        raise RuntimeError("the sum by hand is wrong")
    own.zero_()
    gloo = median_of(lambda: dist.all_reduce(own, group=comms.process_group), rounds)
    by_hand = median_of(lambda: add_by_hand(comms, tensors), rounds)
    comms.barrier()  # nobody frees what another still reads
    return gloo, by_hand


def by_the_library(comms: mp.Comms, length: int, rounds: int) -> float:
    own = torch.zeros(length, device=comms.device)
    return median_of(lambda: comms.all_reduce(own), rounds)


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes on the GPU (default 2)")
    parser.add_argument("--size", type=float, default=25.0, help="megabytes of the tensor (default 25)")
    parser.add_argument("--rounds", type=int, default=30, help="all-reduces of each kind (default 30)")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks must be at least 2")
    if not 0.001 <= options.size <= 4000:
        parser.error("--size must be from 0.001 to 4000 megabytes")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    length, how = int(options.size * 1e6 / 4), {"device": "cuda", "timeout": 300}
    try:
        results = mp.launch(measured, options.ranks, length, options.rounds, transport="gloo", **how)
        library = mp.launch(by_the_library, options.ranks, length, options.rounds, transport="cuda", **how)
    except (mp.errors.UsageError, mp.errors.LaunchError) as failure:
        sys.exit(getattr(failure, "refusal", None) or str(failure))  # a refusal needs no traceback

    gloo, by_hand = (max(times) for times in zip(*results, strict=True))  # the slowest rank's
    rows = {"gloo, through main memory": gloo, "by hand, hosts wait": by_hand, "the library": max(library)}
    print(f"an all-reduce of {options.size:g} MB between {options.ranks} processes on one GPU\n")
    for name, seconds in rows.items():
        print(f"{name:<28}{seconds * 1e3:>10.3f} ms")
    print(f"\nconclusion: where the tensor lies, by hand, it takes {by_hand / gloo:.2f} of gloo's time,")
    print(f"            and {max(library) / gloo:.3f} if no host waits for the GPU")


if __name__ == "__main__":
    main()
