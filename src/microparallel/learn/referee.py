"""The referee: a process of its own that asks an exercise's grader, so that the runner never meets a learner's code.

It reads requests from its parent, one JSON object a line, and answers with the steps as they are done and the verdict.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from microparallel.learn.catalogue import find_exercise
from microparallel.learn.verdict import Step, Verdict, Wrong


def main(requests_fd: int, answers_fd: int, lifeline_fd: int) -> None:
    """Judge until the parent hangs up."""
    threading.Thread(target=_end_with_parent, args=(lifeline_fd,), daemon=True).start()
    from microparallel.world.nursery import NEEDED, Nursery, can_fork

    # It imports torch while this process does.
    nursery = Nursery([*NEEDED, "microparallel.learn.sitting"]) if sys.platform == "linux" else None
    from microparallel.world import Pool

    if nursery is not None and not can_fork():
        nursery.close()
        nursery = None
    with Pool(nursery) as pool, open(requests_fd) as requests, open(answers_fd, "w") as answers:
        for line in requests:
            request = json.loads(line)
            verdict = judge(request["exercise"], Path(request["file"]), pool, lambda step: _tell(answers, step=step))
            _tell(answers, verdict=verdict.to_dict())
    if nursery is not None:
        nursery.close()


def judge(name: str, file: Path, pool: Any, tell: Callable[[dict[str, Any]], None] = lambda _: None) -> Verdict:
    """Let the grader of an exercise look at a file."""
    from microparallel.learn.exam import Exam

    start = time.monotonic()
    verdict = Verdict(name, passed=False)

    def note(step: Step) -> None:
        verdict.steps.append(step)
        tell({"title": step.title, "passed": step.passed, "note": step.note})

    try:
        check = importlib.import_module(find_exercise(name).grader).check
        check(Exam(file, pool, note))
        verdict.passed = True
    except Wrong as wrong:
        verdict.message = str(wrong)
    except Exception:
        verdict.message = "the grader itself failed, which is our fault and not yours:\n" + traceback.format_exc()
    verdict.seconds = time.monotonic() - start
    return verdict


def _tell(answers: IO[str], **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _end_with_parent(lifeline_fd: int) -> None:
    """Wait for the pipe whose other end only the parent holds; when it closes, nobody needs an answer any more."""
    os.read(lifeline_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
