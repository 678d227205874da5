"""A program that uses the GPUs in the least way, and prints their names (UUIDs), one a line; or an error of the driver.

Given an argument, it also makes a context, as every program does that computes. Under MPS this starts the server, and
shows whether ranks could do the same. It runs in a process of its own: the launcher must stay without CUDA, and an MPS
that does not work makes errors that last as long as the process. It imports nothing that takes long.
"""

import ctypes
import sys
import uuid


def main(with_context: bool) -> None:
    """Print a line for each GPU; end with the driver's word for what is wrong."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(f"CUDA's driver cannot be loaded: {error}")

    def call(function: str, *arguments: object) -> None:
        if status := getattr(cuda, function)(*arguments):
            name = ctypes.c_char_p()
            cuda.cuGetErrorName(status, ctypes.byref(name))
            sys.exit(f"{(name.value or b'an unknown error').decode()} ({status}) in {function}")

    call("cuInit", 0)
    gpus = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(gpus))
    for gpu in range(gpus.value):
        number = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetUuid", number, gpu)
        print(f"GPU-{uuid.UUID(bytes=bytes(number))}")
    if with_context:
        call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 0)


if __name__ == "__main__":
    main(len(sys.argv) > 1)
