"""How much memory there is, and how much of it can still be had: on the machine, and inside a container."""

from __future__ import annotations

from pathlib import Path


def total_memory(system: Path = Path("/proc/meminfo")) -> int | None:
    """The bytes of memory this machine has; None where nobody says."""
    return _of_the_machine(system, "MemTotal")


def available_memory(system: Path = Path("/proc/meminfo"), container: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes that programs may still take without swapping, also inside a container; None where nobody says."""
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
