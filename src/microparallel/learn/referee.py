"""The referee: a process of its own that asks an exercise's grader, so that the runner never meets a learner's code.

It reads requests from its parent, one JSON object a line, and answers with the steps as they are done and the verdict.
After each it ends the ranks, and whatever else the learner's code has started: the next check begins anew.
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
from pathlib import Path
from typing import IO, Any

from microparallel.errors import LaunchError, RankFailed, RanksTimedOut
from microparallel.learn.catalogue import find_exercise
from microparallel.learn.verdict import Step, Verdict, Wrong
from microparallel.observe.processes import children

_LONGEST = 4000  # characters of a message
_MOST_ROUNDS = 200  # of ending children, each of which ends one generation


def main(requests_fd: int, answers_fd: int, lifeline_fd: int) -> None:
    """Judge until the parent hangs up."""
    threading.Thread(target=_end_with_parent, args=(lifeline_fd,), daemon=True).start()
    from microparallel.world.fork_server import NEEDED, ForkServer, can_fork, take_orphans

    # It imports torch while this process does.
    fork_server = ForkServer([*NEEDED, "microparallel.learn.exam"]) if sys.platform == "linux" else None
    from microparallel.world import Pool

    if fork_server is not None and not can_fork():
        fork_server.close()
        fork_server = None
    keep = () if fork_server is None else (fork_server.pid,)
    if sys.platform == "linux":
        take_orphans(True)
    with Pool(fork_server) as pool, open(requests_fd) as requests, open(answers_fd, "w") as answers:
        for line in requests:
            request = json.loads(line)
            teller = _Teller(answers, request["number"])
            verdict = judge(request["exercise"], Path(request["file"]), pool, teller.step)
            if sys.platform == "linux":
                _end_children(keep)
            teller.say(verdict=verdict.to_dict())
    if fork_server is not None:
        fork_server.close()


def _end_children(keep: Container[int]) -> None:
    """End every child of this process but those to keep.

    This process adopts orphans, so that what a child leaves behind becomes its child, too, until none is left.
    """
    for _ in range(_MOST_ROUNDS):
        found = [pid for pid in children(os.getpid()) if pid not in keep]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def judge(name: str, file: Path, pool: Any, tell: Callable[[dict[str, Any]], None] = lambda _: None) -> Verdict:
    """Let the grader of an exercise look at a file."""
    from microparallel.learn.exam import Exam

    start = time.monotonic()
    verdict = Verdict(name, passed=False)

    def note(step: Step) -> None:
        verdict.steps.append(step)
        tell({"title": step.title, "passed": step.passed, "note": step.note})

    try:
        exercise = find_exercise(name)
        check = importlib.import_module(exercise.grader).check
        check(Exam(file, pool, note, exercise.on_deadlocks))
        verdict.passed = True
    except Wrong as wrong:
        verdict.message = _cut(str(wrong))
    except LaunchError as error:
        if not isinstance(error, RankFailed | RanksTimedOut):
            raise  # ranks cannot be started any more: whoever asked must start another referee
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


class _Teller:
    """Says what belongs to one request."""

    def __init__(self, answers: IO[str], number: str) -> None:
        self._answers, self._number = answers, number

    def say(self, **message: Any) -> None:
        self._answers.write(json.dumps({"number": self._number, **message}) + "\n")
        self._answers.flush()

    def step(self, step: dict[str, Any]) -> None:
        self.say(step=step)


def _end_with_parent(lifeline_fd: int) -> None:
    """Wait for the pipe whose other end only the parent holds; when it closes, nobody needs an answer any more."""
    os.read(lifeline_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
