"""Record some steps of a run, for `microparallel report`."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from microparallel.comms.record import Recorder
from microparallel.errors import UsageError
from microparallel.files.atomic import write_atomically
from microparallel.simulator.fitted import predicted
from microparallel.trace import Trace
from microparallel.train.config import TrainConfig
from microparallel.train.run_folder import RunFolder
from microparallel.train.training import Training

_WARM_UP = 3  # steps before the first that is recorded: buckets are arranged, memory is taken
_STEPS = 10  # that are recorded


class Tracing:
    """Records ten steps of a run, after its first ones; of a shorter run, its last.

    Attributes:
        clock_error: how far apart the ranks' clocks may be in what was recorded; None if nothing was.
    """

    def __init__(self, config: TrainConfig, training: Training, folder: RunFolder | None, total: int) -> None:
        self._wanted = bool(config.trace)
        self._training = training
        self._folder = folder
        self._about: dict[str, Any] = {"model": config.model, "strategy": config.strategy, "batch": config.batch}
        self._first = min(training.steps_done + _WARM_UP, max(training.steps_done, total - 1))
        self._recorder: Recorder | None = None
        self.clock_error: float | None = None

    def before_step(self) -> None:
        """Begin to record, or end it, if this is the step for it; every rank calls this."""
        done = self._training.steps_done
        if self._wanted and done == self._first:
            self._about["first step"] = done
            self._recorder = Recorder(self._training.comms)
            self._recorder.start()
        if done == self._first + _STEPS:
            self._finish()

    def _finish(self) -> None:
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        recorder.stop()
        self.clock_error = recorder.gather(self._about).clock_error
        if self._folder is not None:
            write_atomically(self._folder.trace_file, recorder.trace.to_json().encode())
            recorder.trace.to_chrome(self._folder.chrome_file)
            self._predict(self._folder, recorder.trace)

    def _predict(self, folder: RunFolder, measured: Trace) -> None:
        """Write what the simulator makes of a typical step, for the report to draw over the measured one."""
        full = [number for number in measured.steps if any(measured.step(number).compute)]
        by_length = sorted(full, key=lambda number: measured.step(number).makespan)
        try:
            typical = predicted(measured.step(by_length[len(by_length) // 2]))
        except (UsageError, IndexError):  # not every program is one that can be simulated
            return
        write_atomically(folder.predicted_file, typical.to_json().encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._recorder is not None:  # after an error the ranks no longer talk: nothing can be gathered
            self._recorder.stop()
