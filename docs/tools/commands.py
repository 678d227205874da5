"""Runs the commands of a page, in a folder that holds what a reader's has.

Quick commands are forked from a process that has imported torch already, and so are the ranks that they or torchrun
start; `fresh=True` runs everything as a reader would, in new interpreters.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE))

from pages import words_of

_PATIENCE = 120.0


@dataclass(frozen=True)
class Done:
    """What came of a command: its exit code, and what it printed, with the folders of this machine left out."""

    code: int
    output: str
    seconds: float


class Folder:
    """An empty folder with copies of the labs, where the commands of one page run one after another."""

    def __init__(self, folder: Path, *, fork_server: Any = None) -> None:
        self.folder = folder / "course"
        self.folder.mkdir()
        shutil.copytree(ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        self._fork_server = fork_server
        self._runtime = folder / "run"  # where ranks leave their last words
        self._runtime.mkdir()

    def run(self, command: str, patience: float = _PATIENCE) -> Done:
        """Run one command."""
        before = time.monotonic()
        code, output = self._warm(command, patience) if self._can_fork(command) else self._shell(command, patience)
        return Done(code, self._without_places(output), time.monotonic() - before)

    def _can_fork(self, command: str) -> bool:
        words = words_of(command)
        if self._fork_server is None or not words:
            return False
        if words[0] == "torchrun":
            return _by_torchrun(words) is not None
        return words[0] == "microparallel" or (words[0] == "python" and len(words) > 1 and words[1].endswith(".py"))

    def _environment(self) -> dict[str, str]:
        foreign = ("PYTEST", "TORCHELASTIC", "OMP_NUM_THREADS")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return inherited | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "80",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "PYTHONUNBUFFERED": "1",
            "XDG_RUNTIME_DIR": str(self._runtime),
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks the name server who it is whenever ranks meet
        }

    def _shell(self, command: str, patience: float) -> tuple[int, str]:
        """In a shell of its own; whatever it leaves running ends with it."""
        printed = self._runtime / "printed"
        with printed.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _ended(process, patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return code, printed.read_text(encoding="utf-8", errors="replace")

    def _warm(self, command: str, patience: float) -> tuple[int, str]:
        printed = self._runtime / "printed"
        printed.write_bytes(b"")
        words = words_of(command) or []
        ranks, own = _by_torchrun(words) or (0, words)
        program = program_of(own, printed)
        with meeting_of(ranks) as environments:
            with contextlib.chdir(self.folder):
                processes = [
                    self._fork_server.fork([program], pass_fds=[], env=self._environment() | variables)
                    for variables in environments
                ]
            code = max((_ended(process, patience) for process in processes), key=abs)
        return code, printed.read_text(encoding="utf-8", errors="replace")

    def _without_places(self, output: str) -> str:
        for real, shown in ((self.folder, "/home/you/course"), (ROOT, "/home/you/microparallel")):
            output = output.replace(str(real), shown)
        return output


def _by_torchrun(words: list[str]) -> tuple[int, list[str]] | None:
    """How many ranks torchrun would start on this machine, and what each would run; None if it is asked for more."""
    match = re.fullmatch(r"--nproc-per-node=(\d+)", words[1]) if len(words) > 2 and words[0] == "torchrun" else None
    if match is None:
        return None
    own = words[3:] if words[2] == "-m" else ["python", *words[2:]]
    return (int(match[1]), own) if own[0] == "microparallel" or own[-1].endswith(".py") else None


@contextlib.contextmanager
def meeting_of(ranks: int) -> Iterator[list[dict[str, str]]]:
    """The variables that torchrun gives to each rank, while there is a store at which they meet; 0: a process alone."""
    if not ranks:
        yield [{}]
        return
    import torch

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [torchrun_s_environment(rank, ranks, store.port) for rank in range(ranks)]
    del store


def torchrun_s_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of one rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    counts = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"], ranks)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    every = numbers | counts | meeting | {"TORCHELASTIC_RUN_ID": "forks", "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in every.items()}


def _ended(process: Any, patience: float) -> int:
    """How a process ended; it is ended, and all that it started, when it takes too long."""
    try:
        return int(process.wait(patience))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise TimeoutError(f"it had not ended after {patience:.0f} seconds") from None


def program_of(words: list[str], *files: Path) -> str:
    """What a process that was forked runs to be the process of this command."""
    call = f"import commands; commands.become({words!r}, *{list(map(str, files))!r})"
    return f"import sys; sys.path.append({str(HERE)!r}); {call}"


def become(words: list[str], printed: str, errors: str = "") -> None:
    """Go on as the process that would have run this command: called in a process that was forked for it."""
    for number, file in ((1, printed), (2, errors or printed)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.remove(str(HERE))
    start_in_forks()
    if words[0] == "microparallel":
        from microparallel.cli import main

        sys.argv = words
        main()
    sys.argv = words[1:]
    sys.path.insert(0, str(Path(words[1]).resolve().parent))
    try:
        runpy.run_path(words[1], run_name="__main__")
    except Exception as error:
        _show_as_usual(error)
        sys.exit(1)


def _show_as_usual(error: Exception) -> None:
    """Print a traceback without the frames that are there because this process was forked."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        frame = frame.tb_next
    traceback.print_exception(error.with_traceback(frame))


def start_in_forks() -> None:
    """Let what this process starts be forked from a child of it that is as warm as it is itself."""
    from microparallel.learn import checking
    from microparallel.world import fork_server, rank_process

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        fork_server.run_and_end(lambda: fork_server.serve(theirs, ()))
    theirs.close()
    forks = forking(fork_server.ForkServer.of_process(ours, fork_server.Fork(child)))
    rank_process.subprocess = checking.subprocess = fork_server.subprocess = forks


def forking(fork_server: Any) -> Any:
    """What looks like the module `subprocess`, and forks interpreters from a fork server."""

    def start(command: list[str], *, stdout: int | None = None, pass_fds: Sequence[int] = (), **settings: Any) -> Any:
        program = command[-1] if "-c" in command else _module(command)
        if stdout != subprocess.PIPE:
            return fork_server.fork([program], pass_fds=pass_fds, **settings)
        ours, theirs = os.pipe()
        into = f"import os; os.dup2({theirs}, 1); os.dup2({theirs}, 2); os.close({theirs})\n"
        process = fork_server.fork([into + program], pass_fds=[*pass_fds, theirs], **settings)
        os.close(theirs)
        process.stdout = os.fdopen(ours, "rb")
        return process

    return SimpleNamespace(**vars(subprocess) | {"Popen": start})


def _module(command: list[str]) -> str:
    """What `python -um MODULE …` runs. A referee starts ranks of its own, or rather what they are forked from."""
    name, *arguments = command[command.index("-um") + 1 :]
    family = f"sys.path.append({str(HERE)!r}); import commands; commands.start_in_forks()\n" * name.endswith("referee")
    run = f"sys.argv = {[name, *arguments]!r}; runpy.run_module({name!r}, run_name='__main__')"
    return f"import runpy, sys\n{family}sys.modules.pop({name!r}, None); {run}"
