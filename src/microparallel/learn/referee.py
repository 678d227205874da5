"""The referee: a process of its own that asks an exercise's grader, so that the runner never runs a learner's code.

It reads requests from the runner, one JSON object a line, and answers with the steps as they are done and the verdict.
After each request it ends the ranks, and whatever else the learner's code has started: the next check begins anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from microparallel.errors import LaunchError, RankFailed, RanksTimedOut
from microparallel.learn.catalogue import find_exercise
from microparallel.learn.verdict import Step, Verdict, Wrong
from microparallel.observe.processes import children

_LONGEST = 4000  # characters of a message
_MOST_GENERATIONS = 200  # of processes that leave children behind


def main(requests_fd: int, answers_fd: int, lifeline_fd: int) -> None:
    """Answer requests until the runner closes its end of the pipe."""
    threading.Thread(target=_end_with_parent, args=(lifeline_fd,), daemon=True).start()
    from microparallel.world.fork_server import NEEDED, ForkServer, can_fork, take_orphans

    # The fork server imports torch while this process does.
    modules = [*NEEDED, "microparallel.learn.exam", "microparallel.learn.sandbox:load"]
    fork_server = ForkServer(modules) if sys.platform == "linux" else None
    from microparallel.world import Pool

    if fork_server is not None and not can_fork():
        fork_server.close()
        fork_server = None
    keep = () if fork_server is None else (fork_server.pid,)
    if sys.platform == "linux":
        take_orphans(True)
    with Pool(fork_server) as pool, open(requests_fd) as requests, open(answers_fd, "w") as answers:
        for line in requests:
            _serve(json.loads(line), pool, answers, keep)
    if fork_server is not None:
        fork_server.close()


def _serve(request: dict[str, Any], pool: Any, answers: IO[str], keep: Container[int]) -> None:
    """Judge the file that a request names; every line of the answer has the request's number."""

    def answer(**message: Any) -> None:
        answers.write(json.dumps({"number": request["number"], **message}) + "\n")
        answers.flush()

    verdict = judge(request["exercise"], Path(request["file"]), pool, lambda step: answer(step=asdict(step)))
    if sys.platform == "linux":
        _end_children(keep)
    answer(verdict=verdict.to_dict())


def _end_children(keep: Container[int]) -> None:
    """End every child of this process but those to keep.

    This process adopts orphans: when a child ends, its own children become ours, and are ended in the next round.
    """
    for _ in range(_MOST_GENERATIONS):
        found = [pid for pid in children(os.getpid()) if pid not in keep]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def judge(name: str, file: Path, pool: Any, on_step: Callable[[Step], None] = lambda _: None) -> Verdict:
    """Let the grader of an exercise look at a file; `on_step` is called with each step as it is done."""
    from microparallel.learn.exam import Exam

    start = time.monotonic()
    verdict = Verdict(name, passed=False)

    def note(step: Step) -> None:
        verdict.steps.append(step)
        on_step(step)

    try:
        exercise = find_exercise(name)
        check = importlib.import_module(exercise.grader).check
        with contextlib.closing(Exam(file, pool, note, exercise.on_deadlocks)) as exam:
            check(exam)
        verdict.passed = True
    except Wrong as wrong:
        verdict.message = _cut(str(wrong))
    except LaunchError as error:
        if not isinstance(error, RankFailed | RanksTimedOut):
            raise  # ranks cannot be started any more: this process ends, and the runner starts another referee
        verdict.message = _our_fault()
    except Exception:
        verdict.message = _our_fault()
    finally:
        pool.replace_ranks()
    verdict.seconds = time.monotonic() - start
    return verdict


def _our_fault() -> str:
    return _cut("the grader itself failed, which is our fault and not yours:\n" + traceback.format_exc())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n… \n{text[-_LONGEST // 2 :]}"


def _end_with_parent(lifeline_fd: int) -> None:
    """Wait, in a thread, until the runner has ended, which closes its end of this pipe; then end this process group."""
    os.read(lifeline_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
