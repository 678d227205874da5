"""The guard: a small process that starts an MPS daemon, and ends it when the launcher has ended, however that happens.

    launcher ─── stdin, which only the launcher can write to ───▶ guard
             ◀── stdout: "runs", or why the daemon does not ────

At the end of its input the guard asks the daemon to quit, kills it if it does not, and removes its folder. It adopts
the processes that the daemon leaves behind, so a process number that it kills belongs to the daemon or its server. It
has a session of its own, as the daemon has: Ctrl-C and a terminal that closes reach neither.

It needs the standard library alone, and runs by its path: importing the package would take longer than its work.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

RUNS = b"runs"
_TAKE_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_START, _ANSWER, _END = 20.0, 5.0, 5.0  # seconds for the daemon to start, to answer, and to end once it was asked to
_POLL = 0.01


def main(program: str, folder: str) -> None:
    """Start the daemon, wait until the launcher has closed its end of the pipe, and end the daemon."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which the daemon must not inherit as ignored
        signal.signal(number, lambda *_: None)
    os.chdir("/")
    ctypes.CDLL(None).prctl(_TAKE_ORPHANS, 1, 0, 0, 0)
    try:
        problem = start(program, Path(folder))
        with contextlib.suppress(OSError):  # the launcher may be gone
            os.write(1, problem.encode() or RUNS)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for output in (1, 2):
            os.dup2(nowhere, output)
        while not problem and os.read(0, 1):
            pass
    finally:
        end(program, Path(folder))


def start(program: str, folder: Path) -> str:
    """Start the daemon, which inherits none of this process's files; returns why it does not run, or nothing."""
    with (folder / "said").open("w+b") as said:
        try:
            status = subprocess.run(
                [program, "-d"], stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=_START, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{program} -d had not started its daemon after {_START:g} s"
        except OSError as error:
            return f"{program} cannot be run: {error.strerror}"
        said.seek(0)
        words = " ".join(said.read().decode("utf-8", "replace").split())
    return f"{program} -d exited with code {status}{': ' * bool(words)}{words}" if status else ""


def end(program: str, folder: Path) -> None:
    """End the daemon and its server, and remove the folder."""
    ask_to_quit(program)
    deadline = time.monotonic() + _END
    while _has_children():
        if time.monotonic() > deadline:
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(_POLL)
    shutil.rmtree(folder, ignore_errors=True)


def ask_to_quit(program: str, environment: dict[str, str] | None = None) -> None:
    """Ask the daemon to quit, with whoever still uses the GPU through it ended after a second."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [program],
            input=b"quit -t 1\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_ANSWER,
            check=False,
        )


def _has_children() -> bool:
    """Whether any child is left, after taking note of those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(process.name))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
