"""Stop between two steps: Ctrl-C reaches one rank, and all must stop after the same step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from microparallel.comms import Comms

_SECONDS_BETWEEN_QUESTIONS = 0.3
_MOST_STEPS_BETWEEN_QUESTIONS = 1000


class StopTogether:
    """Catches Ctrl-C and SIGTERM, and lets the ranks agree when to stop.

    Asking costs a message, so it is not done after every step: rank 0 says how many steps make up a moment.
    """

    def __init__(self, comms: Comms) -> None:
        self._comms = comms
        self._wanted = False
        self._steps_until_question = 1
        self._asked = time.monotonic()
        self._steps_since = 0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopTogether:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._want)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether to stop after this step: the same answer on every rank."""
        self._steps_since += 1
        if self._steps_since < self._steps_until_question:
            return False
        seconds_a_step = (time.monotonic() - self._asked) / self._steps_since
        moment = min(_MOST_STEPS_BETWEEN_QUESTIONS, max(1, int(_SECONDS_BETWEEN_QUESTIONS / max(seconds_a_step, 1e-6))))
        ours = torch.tensor([int(self._wanted), moment if self._comms.rank == 0 else 0])
        stop, self._steps_until_question = (int(number) for number in self._comms.all_reduce(ours, op="max"))
        self._asked, self._steps_since = time.monotonic(), 0
        return bool(stop)

    def _want(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._wanted = True
