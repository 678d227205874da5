"""A slow wire: carries each frame from one tap device to the other, so many seconds later. Run inside the switch.

The kernel's own way to do so (netem) is not in every kernel.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 65536


def open_tap(name: str) -> int:
    """The file through which the frames of a tap device come and go; makes the device."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def carry(one: int, other: int, delay: float) -> None:
    """Carry frames both ways for ever. All wait equally long, so they leave in the order in which they came."""
    on_the_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for tap in select.select([one, other], [], [], pause)[0]:
            due = time.monotonic() + delay
            on_the_way.append((due, other if tap == one else one, os.read(tap, _FRAME)))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, to, frame = on_the_way.popleft()
            with contextlib.suppress(OSError):  # the device is down: a wire that is cut loses what it carries
                os.write(to, frame)


if __name__ == "__main__":
    taps = [open_tap(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    carry(*taps, float(sys.argv[3]))
