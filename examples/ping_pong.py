"""Two processes throw a tensor back and forth: what does a message cost?

Question   How long does a message take from one rank to another, and what does that depend on?
Look at    the time one way. While messages are small it hardly changes: that is latency. Then it
           grows with their size: that is bandwidth. The last column is made of those two alone:
           time = latency + size / bandwidth.
Try        python examples/ping_pong.py --rounds 100    steadier numbers
           python examples/ping_pong.py --device cuda   tensors on the GPU: is it faster now?
           and let rank 1 send before it receives: who waits for whom?
"""

import argparse
import statistics
import sys
import time

import torch

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe

SIZES = [4 * 4**power for power in range(12)]  # bytes: 4 B, 16 B, 64 B, ... 16 MiB


def play(comms: mp.Comms, rounds: int) -> list[float]:
    """Return the seconds one way for each size. Both processes run this function; only their rank differs."""
    seconds = []
    for size in SIZES:
        thrown = torch.randint(256, (size,), dtype=torch.uint8, device=comms.device)
        times = []
        for _ in range(rounds + 2):
            begun = time.perf_counter()
            if comms.rank == 0:
                comms.send_tensor(thrown, dest=1)
                caught = comms.recv_tensor((size,), src=1, dtype=torch.uint8)
            else:
                caught = comms.recv_tensor((size,), src=0, dtype=torch.uint8)
                comms.send_tensor(caught, dest=0)
            if comms.device.type == "cuda":
                torch.cuda.synchronize()  # a GPU receives in the background: stop the clock when it is done
            times.append(time.perf_counter() - begun)
        if comms.rank == 0 and not torch.equal(thrown, caught):
            raise RuntimeError(f"a message of {size} bytes came back changed")
        # There and back is two messages. The first rounds warm up; the median ignores the odd interruption.
        seconds.append(statistics.median(times[2:]) / 2)
    return seconds


def readable(size: float) -> str:
    if size < 1024:
        return f"{size:.0f} B"
    return f"{size / 2**10:.0f} KiB" if size < 2**20 else f"{size / 2**20:.0f} MiB"


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="throws and returns of each size (default 40)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the tensors live")
    parser.add_argument(
        "--transport", choices=["auto", "shm", "gloo", "nccl"], default="auto", help="what carries them"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    where = {"device": options.device, "transport": options.transport}
    try:
        results = mp.launch(play, 2, options.rounds, **where, timeout=30 + options.rounds / 5)
    except (mp.errors.UsageError, mp.errors.LaunchError) as failure:
        sys.exit(getattr(failure, "refusal", None) or str(failure))  # a refusal needs no traceback

    seconds = results[0]  # rank 0 starts each round, so its clock sees all of it
    latency = statistics.median(taken for size, taken in zip(SIZES, seconds, strict=True) if size <= 1024)
    growth = seconds[SIZES.index(1024)] / seconds[0]  # would be 256 if a message cost as much as its bytes
    if growth > 64 or seconds[-1] < 2 * latency:
        sys.exit(f"no latency and bandwidth to be seen: is the machine busy? one way, in seconds: {seconds}")
    bandwidth = SIZES[-1] / (seconds[-1] - latency)  # bytes per second
    predicted = [latency + size / bandwidth for size in SIZES]
    print(f"{'message':>10}{'one way':>14}{'bandwidth':>18}{'predicted':>14}")
    for size, taken, guess in zip(SIZES, seconds, predicted, strict=True):
        speed = size / taken / 2**20
        print(f"{readable(size):>10}{taken * 1e6:>11,.0f} us{speed:>12,.2f} MiB/s{guess * 1e6:>11,.0f} us")

    misses = [max(taken / guess, guess / taken) for taken, guess in zip(seconds, predicted, strict=True)]
    print(f"\nlatency {latency * 1e6:,.0f} us (up to 1 KiB), bandwidth {bandwidth / 2**20:,.0f} MiB/s (at 16 MiB);")
    print(f"what these two numbers predict is typically off by a factor of {statistics.median(misses):.2f}\n")
    print(f"conclusion: a message below {readable(latency * bandwidth)} is mostly latency, so send few large ones:")
    print(f"            from 4 B to 1 KiB, 256 times the bytes took {growth:.1f} times as long")


if __name__ == "__main__":
    main()
