"""An MPS daemon of the launcher's own, in a folder that only its user can read.

No setting of the GPU is changed, and no other program is concerned: who does not have this daemon's folder in its
environment does not use it. Two worlds at once have two daemons.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from microparallel.errors import LaunchError
from microparallel.world.mps import client, guard
from microparallel.world.mps.choice import LOGS, NOWHERE, PIPES

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LONGEST = 60  # characters of the folder: those of a socket's path, about 100, must suffice for the daemon's sockets
_TIME_TO_END = 15.0  # seconds: longer than the guard takes at most
_FIRST_CLIENT = 60.0  # seconds: the driver may have to wake up


class MpsDaemon:
    """A daemon that runs until `close`, or until this process ends.

    Attributes:
        environment: variables that make a process use this daemon.

    Raises:
        LaunchError: it does not start, or programs cannot use it; says why.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="mp-mps-", dir=_short_folder()))  # mode 0700
        try:
            pipes, logs = self._folder / "pipe", self._folder / "log"
            for folder in (pipes, logs):
                folder.mkdir(mode=0o700)
            self.environment = {PIPES: str(pipes), LOGS: str(logs), **_gpus_by_name()}
            self._start_guard()
            use_gpus(self.environment, with_context=True)
        except BaseException:
            self.close()
            raise

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self._program, str(self._folder)],
            stdin=subprocess.PIPE,  # no rank inherits this end: its closing tells the guard that the launcher has ended
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | self.environment,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        with self._guard.stdout as said:
            answer = said.read()
        if answer != guard.RUNS:
            raise LaunchError(f"the MPS daemon did not start: {answer.decode('utf-8', 'replace').strip()}")

    def close(self) -> None:
        """End the daemon; all its clients should have ended."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            try:
                self._guard.wait(_TIME_TO_END)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
            if self._guard.returncode:  # the guard was killed, so nobody has asked the daemon
                guard.ask_to_quit(self._program, os.environ | self.environment)
        shutil.rmtree(self._folder, ignore_errors=True)


def use_gpus(changes: Mapping[str, str], *, with_context: bool) -> list[str]:
    """The names of the GPUs that a process finds which has these variables in its environment.

    Raises:
        LaunchError: it cannot use them; says why.
    """
    command = [sys.executable, "-I", "-S", client.__file__, *(["context"] if with_context else [])]
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | changes,
            timeout=_FIRST_CLIENT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the first program under MPS got no answer within {_FIRST_CLIENT:g} s") from None
    if ran.returncode:
        reason = (ran.stderr.decode("utf-8", "replace").splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise LaunchError(f"the GPU cannot be used: {reason}")
    return ran.stdout.decode().split()


def _gpus_by_name() -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES with names in place of numbers, where that variable is set.

    The daemon numbers the GPUs that it sees anew. "2" would be another GPU to it than to the ranks, or none.
    """
    visible = os.environ.get(_VISIBLE)
    if visible is None or all(one.strip().startswith(("GPU-", "MIG-")) for one in visible.split(",")):
        return {}
    return {_VISIBLE: ",".join(use_gpus({PIPES: NOWHERE}, with_context=False))}


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder.encode()) <= _LONGEST else "/tmp"
