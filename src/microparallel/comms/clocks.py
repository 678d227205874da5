"""One clock for all ranks: how far each one's is from rank 0's, and how sure that is."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch

from microparallel.comms.comms import Comms
from microparallel.comms.notes import gather_json

_ROUNDS = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def offset_from_rank_0(comms: Comms) -> tuple[float, float]:
    """How much to add to this rank's clock to have rank 0's, and how wrong that may be; every rank calls this.

    Processes of one machine read the same clock (`time.perf_counter`, which is the kernel's monotonic one). Between
    machines, a message goes there and back: the other's clock was read somewhere in between, and in the quickest of
    several rounds that is narrowest.
    """
    machines = gather_json(_machine(), comms)
    measured = [0.0, 0.0]
    for rank in range(1, comms.world_size):
        if machines[rank] == machines[0]:
            continue
        if comms.rank == 0:
            _answer(comms, rank)
        elif comms.rank == rank:
            measured = _ask(comms)
    return measured[0], measured[1]


def _machine() -> str:
    """A name that two processes share if, and only if, they read the same clock."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def _answer(comms: Comms, rank: int) -> None:
    for _ in range(_ROUNDS):
        comms.recv_tensor(1, rank, torch.float64)
        comms.send_tensor(torch.tensor([time.perf_counter()], dtype=torch.float64), rank)


def _ask(comms: Comms) -> list[float]:
    rounds = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        comms.send_tensor(torch.zeros(1, dtype=torch.float64), 0)
        theirs = float(comms.recv_tensor(1, 0, torch.float64))
        ended = time.perf_counter()
        rounds.append((ended - begun, theirs - (begun + ended) / 2))
    there_and_back, offset = min(rounds)
    return [offset, there_and_back / 2]
