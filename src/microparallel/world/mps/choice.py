"""Which MPS daemon the ranks of a world are to have: one of their own, one that runs already, or none.

Ranks read the daemon's folder from their environment when they first use CUDA. So it is decided before they start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import torch

from microparallel.errors import ConfigError, UsageError
from microparallel.settings import MPS
from microparallel.text import count, did_you_mean

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
NOWHERE = "/nonexistent"  # as a daemon's folder: CUDA finds none there, and goes without
_USUAL_PIPES = Path("/tmp/nvidia-mps")  # where CUDA looks if the environment names no folder
_ANSWER = 5.0  # seconds that the control program may take


class Daemon(Enum):
    """Which daemon ranks have, or are to have."""

    OWN = "one that the launcher starts for them"
    GIVEN = "the one that their environment leads to"
    NONE = "none"
    ANY = "whatever there is: they do not share a GPU"


def choose(mps: str, transport: str, device: str, ranks: int, gpus: int, *, given: bool, can_start: bool) -> Daemon:
    """Which daemon a world is to have; raises a `UsageError` where "on" cannot be.

    Args:
        mps: "auto", "on" or "off".
        transport: of the world; see `connect`.
        device: of the world; see `connect`.
        ranks: how many there will be.
        gpus: how many torch sees.
        given: whether a daemon runs already where the ranks would look for it.
        can_start: whether the control program is here.
    """
    if mps not in MPS:
        raise UsageError(f"mps {mps!r}: {did_you_mean(mps, MPS)}")
    if mps == "off":
        return Daemon.NONE
    if mps == "on":
        if obstacle := _obstacle(transport, device, ranks, gpus, can_start=given or can_start):
            raise UsageError(f"mps 'on' cannot work here: {obstacle}, or choose 'auto', which goes without")
        return Daemon.GIVEN if given else Daemon.OWN
    if ranks <= gpus or not on_gpus(transport, device, ranks, gpus):
        return Daemon.ANY
    if given:
        return Daemon.GIVEN
    return Daemon.OWN if can_start else Daemon.ANY


def on_gpus(transport: str, device: str, ranks: int, gpus: int) -> bool:
    """Whether ranks compute on GPUs, as far as that is known before they have met."""
    if not gpus or device == "cpu":
        return False
    if device == "cuda" or transport in ("cuda", "nccl"):
        return True
    return transport == "auto" and (ranks <= gpus or gpus == 1)  # they will choose nccl or cuda


def _obstacle(transport: str, device: str, ranks: int, gpus: int, *, can_start: bool) -> str | None:
    if not gpus:
        return "torch sees no GPU; install a build of torch for it"
    if not on_gpus(transport, device, ranks, gpus):
        return (
            f"with device {device!r}, transport {transport!r} and {count(gpus, 'GPU')} {count(ranks, 'rank')} compute "
            "on the CPU; choose device 'cuda'"
        )
    if not can_start:
        return f"the program {CONTROL} is not on the PATH; install it (it comes with NVIDIA's driver)"
    return None


def require_as_given(mps: str) -> None:
    """Raise a `ConfigError` if `--mps` asks for what cannot be changed: here no ranks are started."""
    given = given_daemon(os.environ)
    if mps == "on" and given is None:
        raise ConfigError(
            "--mps on: no MPS daemon runs here, and one is started only for ranks that this command starts itself (not "
            f"with --ranks 1, torchrun or Slurm); leave it out, or start one before them: {CONTROL} -d"
        )
    if mps == "off" and given is not None:
        raise ConfigError(
            f"--mps off: the environment leads to the MPS daemon of {given}; set {PIPES}={NOWHERE} before these ranks "
            "start"
        )


# ── what there is ───────────────────────────────────────────────────────────────────────────────────────────────────


def gpus_here() -> int:
    """How many GPUs torch sees; asking for no more than their number leaves this process without CUDA."""
    return torch.cuda.device_count()


def control_program() -> str | None:
    """The path of the program that starts and ends daemons; None where there is none."""
    return shutil.which(CONTROL)


def given_daemon(environment: Mapping[str, str]) -> Path | None:
    """The folder of a daemon that runs already, and that processes with this environment would use; None if none does.

    A folder that the environment names is the user's choice, whoever started the daemon. In the usual folder only one
    of this user's or of root's counts: the server of another user would let this one wait.
    """
    named = environment.get(PIPES)
    folder = Path(named) if named else _USUAL_PIPES
    with contextlib.suppress(OSError):
        if not named and (folder / f"{CONTROL}.pid").stat().st_uid not in (0, os.geteuid()):
            return None
        if folder.is_dir() and (_runs(folder) or _answers(folder)):
            return folder
    return None


def _runs(folder: Path) -> bool:
    try:
        os.kill(int((folder / f"{CONTROL}.pid").read_text(encoding="ascii")), 0)
    except PermissionError:  # it is another user's
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _answers(folder: Path) -> bool:
    """Whether the daemon answers: from inside of a container its process number means nothing."""
    program = control_program()
    if program is None:
        return False
    try:
        asked = subprocess.run(
            [program],
            input=b"get_server_list\n",
            env=os.environ | {PIPES: str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
