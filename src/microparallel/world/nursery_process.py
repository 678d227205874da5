"""A process that has imported torch already and forks: ranks that start in a moment instead of in seconds.

Run by `Nursery`, which asks for a rank with one message: a program as `python -c` takes it, the variables of its
environment and its folder, together with its output, its errors and the files it shares with its parent.

    parent ──── "start" ────▶ nursery
       │                         │ fork
       │                     in between   ends at once, so that its child goes to the next ancestor who takes orphans
       │                         │ fork
       └──── adopts ────────▶ the rank    a child of the parent, who can wait for it as for any other
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


def main(parent: socket.socket, modules: Sequence[str]) -> None:
    """Import what ranks will need, and fork one for every message."""
    for module in modules:
        name, _, function = module.partition(":")
        imported = importlib.import_module(name)
        if function:
            getattr(imported, function)()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"only a process with a single thread may be forked, and after importing {modules} this has {threads}")
    gc.freeze()  # so that ranks do not copy what they share with this process by merely looking at it
    program = _wait_for_work(parent)
    if program is not None:
        sys.modules["__main__"] = types.ModuleType("__main__")
        run_and_end(lambda: exec(program, sys.modules["__main__"].__dict__))


def run_and_end(function: Callable[[], Any]) -> NoReturn:
    """Run a function as all that a process does, and end the process without taking its interpreter apart.

    A fork shares its memory with its parent as long as it does not write there. An interpreter that ends frees every
    object of every module, torch's among them, and so copies all of that memory: 0.3 s for a rank that did nothing.
    """
    code = 0
    try:
        function()
    except SystemExit as ended:
        if ended.code is not None:
            code = ended.code if isinstance(ended.code, int) else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _wait_for_work(parent: socket.socket) -> str | None:
    """Fork for every message that comes. Returns in a rank, with its program, and when the parent has ended."""
    while True:
        message, files, _, _ = socket.recv_fds(parent, 2**20, 8)
        if not message:
            return None
        if os.fork() == 0:
            rank = os.fork()
            if rank == 0:
                parent.close()
                return _prepare(files, **json.loads(message))
            os.setpgid(rank, rank)
            parent.send(str(rank).encode())
            os._exit(0)
        for file in files:
            os.close(file)
        os.wait()
        parent.send(b"it is yours")


def _prepare(files: list[int], program: str, places: list[int], environment: dict[str, str], folder: str) -> str:
    """Make this process what a fresh one would have been: its folder, its environment, its files in their places."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    above = max(*places, *files) + 1  # a place may be taken by a file that has yet to be moved
    for offset, file in enumerate(files):
        os.dup2(file, above + offset)
        os.close(file)
    for offset, place in enumerate(places):
        os.dup2(above + offset, place)
        os.close(above + offset)
    sys.argv = ["-c"]
    return program


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
