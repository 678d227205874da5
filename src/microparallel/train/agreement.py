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


class Agreement:
    """Catches Ctrl-C, SIGTERM and SIGHUP on each rank, and lets the ranks agree what to do after a step.

    To agree costs an all-reduce, so the ranks do not ask after every step: rank 0 says how many steps take a moment.

    Args:
        comms: the ranks.
        save_due: asked on rank 0 alone, whether it is time to save.
    """

    def __init__(self, comms: Comms, save_due: Callable[[], bool]) -> None:
        self._comms = comms
        self._save_due = save_due
        self._stop_wanted = False
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
        if self._steps_since < self._steps_until_question:
            return Decision()
        seconds_a_step = (time.monotonic() - self._asked) / self._steps_since
        moment = min(_MOST_STEPS_BETWEEN_QUESTIONS, max(1, int(_SECONDS_BETWEEN_QUESTIONS / max(seconds_a_step, 1e-6))))
        first = self._comms.rank == 0
        ours = torch.tensor([int(self._stop_wanted), int(first and self._save_due()), moment if first else 0])
        stop, save, self._steps_until_question = (int(number) for number in self._comms.all_reduce(ours, op="max"))
        self._asked, self._steps_since = time.monotonic(), 0
        return Decision(bool(stop), bool(save))

    def _want_stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stop_wanted = True
