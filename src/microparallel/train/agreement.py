"""What all ranks must decide alike between two steps: whether to stop, and whether it is time to save.

Ctrl-C may reach one rank only, and only rank 0 looks at the clock; but all ranks must stop, or save, after the same
step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from microparallel.comms import Comms

_SECONDS_BETWEEN_QUESTIONS = 0.3
_MOST_STEPS_BETWEEN_QUESTIONS = 1000
# Ctrl-C; what `kill`, Slurm and torchrun send; what a terminal sends that is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Decision:
    """What all ranks do after this step."""

    stop: bool = False
    save: bool = False
    copy: bool = False  # into memory


class Agreement:
    """Catches Ctrl-C, SIGTERM and SIGHUP on each rank, and lets the ranks agree what to do after a step.

    A second Ctrl-C is not caught.

    To agree costs an all-reduce, so the ranks do not ask after every step: rank 0 says how many steps take a moment.

    Args:
        comms: the ranks.
        save_due: asked on rank 0 alone, whether it is time to save.
        copy_every: asked on rank 0 alone, after how many steps the state is copied into memory; 0 for never. It is told
            how many seconds a step takes.
        answer: some numbers of this rank, none of them negative and on each rank as many, that all ranks are told with
            each question.
        hear: told what all ranks have answered, by rank.

    Attributes:
        told_to_stop: whether a signal has reached this rank.
    """

    def __init__(
        self,
        comms: Comms,
        save_due: Callable[[], bool],
        copy_every: Callable[[float], int] = lambda _seconds: 0,
        answer: Callable[[], list[int]] = list,
        hear: Callable[[list[list[int]]], None] = lambda _answers: None,
    ) -> None:
        self._comms = comms
        self._save_due = save_due
        self._ask_copy_every = copy_every
        self._answer, self._hear = answer, hear
        self._copy_every = 0
        self._since_copy = 0  # steps
        self.told_to_stop = False
        self._steps_until_question = 1
        self._asked = time.monotonic()
        self._steps_since = 0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._handlers[number] = signal.signal(number, self._want_stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def after_step(self) -> Decision:
        """What to do after this step: the same answer on every rank, all of which ask."""
        self._steps_since += 1
        stop = save = False
        if self._steps_since >= self._steps_until_question:
            stop, save = self._ask()
        self._since_copy += 1
        copy = 0 < self._copy_every <= self._since_copy
        if copy or save:
            self._since_copy = 0
        return Decision(stop, save, copy)

    def _ask(self) -> tuple[bool, bool]:
        """Whether to stop, and to save; also agree when the next question is, and how often to copy."""
        seconds_a_step = (time.monotonic() - self._asked) / self._steps_since
        moment = min(_MOST_STEPS_BETWEEN_QUESTIONS, max(1, int(_SECONDS_BETWEEN_QUESTIONS / max(seconds_a_step, 1e-6))))
        first = self._comms.rank == 0
        said_by_first = [int(self._save_due()), moment, self._ask_copy_every(seconds_a_step)] if first else [0, 0, 0]
        own = self._answer()
        before, after = self._comms.rank * len(own), (self._comms.world_size - 1 - self._comms.rank) * len(own)
        said = [int(self.told_to_stop), *said_by_first, *[0] * before, *own, *[0] * after]
        told = self._comms.all_reduce(torch.tensor(said, device="cpu"), op="max").tolist()
        stop, save, self._steps_until_question, self._copy_every, *answers = told
        self._hear([answers[len(own) * rank : len(own) * (rank + 1)] for rank in range(self._comms.world_size)])
        self._asked, self._steps_since = time.monotonic(), 0
        return bool(stop), bool(save)

    def _want_stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        again = self.told_to_stop and number == signal.SIGINT
        self.told_to_stop = True
        if again:  # a person who does not want to wait until this step is done, and saved
            raise KeyboardInterrupt
