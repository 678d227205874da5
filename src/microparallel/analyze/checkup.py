"""What a machine has, which transports work on it, and what stands in the way."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from microparallel.bench.messages import MessageTime, ping_pong
from microparallel.errors import MicroparallelError
from microparallel.text import show_seconds, show_size
from microparallel.topology import available_cores
from microparallel.world import Pool
from microparallel.world.mps import choice
from microparallel.world.mps.daemon import MpsDaemon

SIZES = (4 << 10, 4 << 20)
_OLDEST_TORCH = (2, 9)


@dataclass(frozen=True)
class TransportCheck:
    """Whether a transport works here, and how fast; or why it does not."""

    name: str
    works: bool
    detail: str
    times: list[MessageTime]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong or slow here, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class MpsCheck:
    """Whether ranks that share a GPU have NVIDIA's MPS here; or why they take turns."""

    works: bool
    detail: str


def facts(version: str, mps: MpsCheck | None = None) -> dict[str, str]:
    """The versions and the machine, in the order in which a person would ask."""
    gpus = [
        f"{torch.cuda.get_device_name(index)} ({show_size(torch.cuda.get_device_properties(index).total_memory)})"
        for index in range(torch.cuda.device_count())
    ]
    return {
        "microparallel": version,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": str(available_cores()),
        "GPUs": ", ".join(gpus) or "none",
        **({} if mps is None else {"MPS": mps.detail}),
    }


def check_mps(progress: Callable[[str], None] = lambda _: None) -> MpsCheck | None:
    """Look for a daemon, or start one and use the GPU through it; None where there is no GPU."""
    if not choice.gpus_here():
        return None
    progress("trying MPS")
    given, program = choice.given_daemon(os.environ), choice.control_program()
    if given is not None:
        return MpsCheck(True, f"a daemon runs in {given}, and ranks use it")
    if program is None:
        return MpsCheck(False, f"{choice.CONTROL} is not on the PATH")
    try:
        MpsDaemon(program).close()
    except (MicroparallelError, OSError) as error:
        return MpsCheck(False, f"does not work: {error}")
    return MpsCheck(True, "works: ranks that share a GPU get a daemon of their own, and compute at once")


def check_transports(pool: Pool, progress: Callable[[str], None] = lambda _: None) -> list[TransportCheck]:
    """Try each transport with two ranks, in the order in which "auto" would choose on a CPU."""
    checks = []
    for name in ("shm", "gloo", "nccl"):
        progress(f"trying {name}")
        try:
            times: list[MessageTime] = pool.run(ping_pong, 2, SIZES, transport=name, timeout=60)[0]
        except MicroparallelError as error:
            checks.append(TransportCheck(name, False, str(error).partition("\n")[0], []))
        else:
            small, large = times
            detail = f"{show_seconds(small.seconds)} for 4 KiB one way, {show_size(large.bytes_per_second)}/s at 4 MiB"
            checks.append(TransportCheck(name, True, detail, times))
    return checks


def problems(checks: list[TransportCheck], mps: MpsCheck | None = None) -> list[Problem]:
    """What is wrong or slow on this machine, each with its fix."""
    found = []
    if mps is not None and not mps.works:
        what = "without MPS, several ranks on one GPU take turns by time slices"
        found.append(Problem(what, f"{mps.detail}; the program comes with NVIDIA's driver"))
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        found.append(Problem(f"torch {torch.__version__} is older than 2.9", "install torch 2.9 or newer"))
    if sys.platform == "win32":
        found.append(Problem("Windows has no process groups", "use WSL, the Windows Subsystem for Linux"))
    if not any(check.works for check in checks):
        found.append(
            Problem("no transport works", "read the reasons above; a firewall may block the loopback interface")
        )
    if available_cores() < 2:
        found.append(Problem("there is one core", "ranks will take turns: results are right, speeds mean nothing"))
    if "OMP_NUM_THREADS" in os.environ:
        threads = os.environ["OMP_NUM_THREADS"]
        found.append(
            Problem(f"OMP_NUM_THREADS={threads} is set", "unset it, so that each rank gets its share of cores")
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        found.append(Problem(f"only {files} files may be open", "raise it with `ulimit -n 4096` before many ranks"))
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        fix = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME, before using torchrun on several machines"
        found.append(Problem(f"this machine's own name {socket.gethostname()!r} has no address", fix))
    return found
