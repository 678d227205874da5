"""Ping-pong: how long does a message take from one rank to another?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microparallel.comms import Comms
from microparallel.errors import UsageError


@dataclass(frozen=True)
class MessageTime:
    """The time a message of this size takes one way."""

    size: int  # bytes
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """How fast the bytes move, latency included."""
        return self.size / self.seconds


def ping_pong(comms: Comms, sizes: Sequence[int], repeats: int = 30) -> list[MessageTime]:
    """Send messages from rank 0 to rank 1 and back; returns the median time one way, on both ranks alike."""
    if comms.world_size < 2:
        raise UsageError(f"ping-pong needs 2 ranks, and this world has {comms.world_size}")
    return [MessageTime(size, _time(comms, size, repeats)) for size in sizes]


def _time(comms: Comms, size: int, repeats: int) -> float:
    ball = torch.zeros(size, dtype=torch.uint8, device=comms.device)
    rounds = []
    for _ in range(repeats + 3):  # the first few warm the connection up
        begun = time.perf_counter()
        if comms.rank == 0:
            comms.send_tensor(ball, dest=1)
            ball = comms.recv_tensor((size,), src=1, dtype=torch.uint8)
        elif comms.rank == 1:
            ball = comms.recv_tensor((size,), src=0, dtype=torch.uint8)
            comms.send_tensor(ball, dest=0)
        if ball.is_cuda:
            torch.cuda.synchronize(ball.device)
        rounds.append(time.perf_counter() - begun)
    median = torch.tensor(statistics.median(rounds[3:]) / 2, dtype=torch.float64)
    return comms.broadcast(median, src=0).item()
