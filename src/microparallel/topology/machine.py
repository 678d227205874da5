"""The machine: how many cores and how much memory this process may use, and how many cores each rank gets."""

from __future__ import annotations

import os
from pathlib import Path

from microparallel.errors import ConfigError

# What a process of ours that will import torch has in its environment, unless the user says otherwise.
BEFORE_TORCH = {
    # OpenMP's threads wait for each other in a loop. That is quickest on an idle machine; but as soon as any other
    # program wants a core, they wait a whole time slice for a thread that is not running, at every operation.
    "OMP_WAIT_POLICY": "PASSIVE",
    # torch's C++ code would say of each connection that no name server knows ::ffff:127.0.0.1 (error -3).
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

MOST_RANKS_PER_CORE = 64  # far beyond what is of use; past it a machine only swaps


def available_cores() -> int:
    """The cores this process may run on, also inside a container with a smaller share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _container_cores() or cores))


def require_cores(ranks: int, given: str) -> None:
    """Refuse more ranks than this machine can possibly run; `given` is how the user asked for them."""
    from microparallel.text import count  # here: `microparallel --help` imports this module, and as little as it can

    if ranks > MOST_RANKS_PER_CORE * (cores := available_cores()):
        raise ConfigError(
            f"{given}: this machine has {count(cores, 'core')}, "
            f"and more than {MOST_RANKS_PER_CORE} ranks a core cannot work; try {cores}"
        )


def threads_per_rank(ranks_on_this_machine: int) -> int:
    """An equal share of the cores; ranks that outnumber the cores get one thread each."""
    return max(1, available_cores() // ranks_on_this_machine)


def _container_cores(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    try:
        quota, period = limit_file.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def total_memory(system: Path = Path("/proc/meminfo")) -> int | None:
    """The bytes of memory this machine has; None where the system does not say."""
    return _of_the_machine(system, "MemTotal")


def available_memory(system: Path = Path("/proc/meminfo"), container: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes that programs may still take without swapping, also inside a container; None if unknown."""
    found = [_of_the_machine(system, "MemAvailable"), _of_the_container(container)]
    amounts = [amount for amount in found if amount is not None]
    return max(0, min(amounts)) if amounts else None


def _of_the_machine(file: Path, name: str) -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in file.read_text(encoding="ascii").splitlines())
        return int(rows[name].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _of_the_container(folder: Path) -> int | None:
    try:
        limit, used = (int((folder / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # "max" stands for no limit
        return None
    return limit - used
