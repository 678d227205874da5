"""A real Slurm on this machine: munged, slurmctld and slurmd of Debian's packages, on loopback, in a folder of its own.

The daemons are children of this process, which ends them; the system ends them if this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CORES = 4  # as Slurm counts them; the machine may have fewer
_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_SECONDS_TO_START = 20

# A job that is started again waits until its first credential has expired: two minutes, if it is not said.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
BatchStartTimeout=10
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def what_is_missing() -> str | None:
    """Why there can be no Slurm here, in one line; None if there can."""
    missing = [name for name in DAEMONS if find(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm"
    return None if os.getuid() == 0 else "needs root: Slurm's daemons start tasks as their users"


def find(name: str) -> str | None:
    """Where a daemon is: some are on root's path alone."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """One node that takes jobs, from when it is made until `close`.

    Args:
        folder: an empty one, with a short path: it holds a socket.
        programs: a folder whose programs the jobs find first.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        configuration = folder / "slurm.conf"
        self.environment = _without_slurm(os.environ) | {
            "SLURM_CONF": str(configuration),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        controller, node = _free_ports(2)
        host = socket.gethostname().partition(".")[0]
        configuration.write_text(
            CONFIGURATION.format(host=host, controller=controller, node=node, user="root", folder=folder, cores=CORES)
        )
        try:
            files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
            files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
            self._start(
                "munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())
            )
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self.wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T").stdout, _SECONDS_TO_START)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.printed").open("wb") as printed:
            process = subprocess.Popen(
                [find(name) or name, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                preexec_fn=_end_with_parent,
            )
        self._daemons.append(process)

    def run(
        self, *command: str | Path, folder: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run srun, sbatch or another of Slurm's commands to its end."""
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(self, script: Path, *arguments: str, folder: Path, flags: tuple[str, ...] = ()) -> int:
        """Hand a script to sbatch; returns the number of the job."""
        done = self.run("sbatch", *flags, script, *arguments, folder=folder)
        match = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert match is not None, done.stderr
        return int(match[1])

    def state(self, job: int) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode and more."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: int, *states: str, seconds: float) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        self.wait_until(lambda: self.state(job).get("JobState") in states, seconds)
        return self.state(job)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Look again and again until it is so; a TimeoutError says what the daemons have printed."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                printed = [file.read_text()[-2000:] for file in sorted(self._folder.glob("*.printed"))]
                raise TimeoutError("\n".join([f"not within {seconds:g} s; the daemons say:", *printed]))
            time.sleep(0.2)

    def close(self) -> None:
        """End all jobs, and then the daemons."""
        if len(self._daemons) == len(DAEMONS):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", timeout=10)
                self.wait_until(lambda: not self.run("squeue", "--noheader").stdout.strip(), 30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("SLURM_", "SRUN_", "SBATCH_"))}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
