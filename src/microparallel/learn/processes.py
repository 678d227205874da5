"""Ranks of an exam that are processes of their own, for exercises in which ranks have random numbers or are killed.

```
grader          exam.run_in_processes(body, ranks, …)        in the referee's process
  └── processes   run_in_process: the sandbox, one for each rank
        └── body(load, comms, …): loads the learner's file and calls its functions
```

Most exercises run on threads (exam.py), where a deadlock is seen at once and all that ranks do is written down. Threads
share their random numbers, and die together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from microparallel.comms import Comms
from microparallel.errors import PeerGone, PeerLost
from microparallel.learn.learner import Failure, Learner, load_file, raised
from microparallel.learn.sandbox import Sandbox, trusted
from microparallel.learn.verdict import NotAllowed


class LearnerFailed(Exception):
    """The learner's code raised in a rank of its own; carries what the exam says about it to the referee."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class LearnersComms:
    """A rank's Comms, as the learner's code gets it: its calls are not refused by the sandbox."""

    def __init__(self, comms: Comms) -> None:
        self._comms = comms

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comms, name)
        return functools.partial(_call, found) if callable(found) else found


def _call(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with trusted():
        return method(*arguments, **named)


def run_in_process(comms: Comms, body: Callable[..., Any], file: str, *arguments: Any) -> Any:
    """Run a grader's `body(load, comms, *arguments)` as this rank; `load()` loads the learner's file.

    What the body gives to the learner to call, such as callbacks, has to say itself that it is `trusted`.
    """
    with Sandbox() as sandbox:
        try:
            result = body(lambda: Learner(load_file(file), file), LearnersComms(comms), *arguments)
            if sandbox.refused:  # the learner's code caught the refusal
                raise NotAllowed(sandbox.refused[0])
        except (PeerLost, PeerGone):
            raise  # another rank has failed, and is named
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise LearnerFailed(raised(comms.rank, error, file)) from None
    return result
