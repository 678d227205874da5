"""What a GPU's driver says about its utilisation, and why that number flatters.

nvidia-smi comes with every driver, so there is nothing to install. With NVML's own Python package (nvidia-ml-py) the
thread that asks again and again would still be ours, and a question that is never answered could not be ended, where
nvidia-smi is a process that can.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from statistics import fmean
from types import TracebackType
from typing import NamedTuple

from microparallel.errors import UsageError

_FIRST_SAMPLE = 10.0  # seconds: a driver that no process uses has to wake up
_TIME_TO_END = 2.0


class Sample(NamedTuple):
    """What nvidia-smi said at one moment."""

    percent: float  # of the time just before, in which some kernel ran
    mebibytes: float | None  # of the GPU's memory in use, by all processes; None where the driver does not tell


class GpuMeter:
    """Ask nvidia-smi again and again, while a block runs, how busy a GPU is.

    Where there is no nvidia-smi or it does not answer, nothing is measured and `problem` says why.

    Attributes:
        samples: what was measured while the block ran.
        problem: why nothing was measured; None if nothing stood in the way.

    Example:
        ```python
        with GpuMeter() as meter:
            for inputs, targets in batches:
                pipe.step(inputs, targets)
        print(meter.mean, meter.explain())
        ```
    """

    def __init__(self, index: int = 0, interval: float = 0.05) -> None:
        """Choose what to measure.

        Args:
            index: the GPU, as nvidia-smi counts them.
            interval: seconds between samples. The driver looks anew only several times a second, so measure for
                some seconds.
        """
        if index < 0 or not interval >= 0.001:
            raise UsageError(f"GpuMeter(index={index}, interval={interval}): index from 0, interval from 0.001 s")
        self.samples: list[Sample] = []
        self.problem: str | None = None
        self._command = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu,memory.used",
            "--format=csv,noheader,nounits",
            "-lms",
            str(round(interval * 1000)),
            "-i",
            str(index),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._answered = threading.Event()
        self._measuring = False

    @property
    def mean(self) -> float | None:
        """The mean utilisation in percent while the block ran; None if nothing was measured."""
        return fmean(sample.percent for sample in self.samples) if self.samples else None

    @staticmethod
    def explain() -> str:
        """Why the number flatters, in one line."""
        return (
            "NVML counts the share of time in which at least one kernel ran, however small: not how much of the GPU "
            "was used; and the ranks that share a GPU add up to one number."
        )

    def __enter__(self) -> GpuMeter:
        """Start nvidia-smi, and begin when it has answered: what happened before is not the block's."""
        self.samples, self.problem = [], None
        self._answered.clear()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,  # where nvidia-smi is a script, what it starts is ended with it
            )
        except OSError as error:
            self.problem = f"nvidia-smi cannot be run: {error.strerror or error}"
            return self
        try:
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
            self._answered.wait(_FIRST_SAMPLE)
            self._measuring = True
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._measuring = False
        self._end()
        if not self.samples and self.problem is None:
            self.problem = "nvidia-smi gave no sample in this time; measure for longer"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        last, numbers = "it said nothing", 0
        for line in process.stdout:
            last = line.strip() or last
            sample = _parse(line)
            numbers += sample is not None
            if sample is not None and self._measuring:
                self.samples.append(sample)
            self._answered.set()
        if not numbers:
            self.problem = f"nvidia-smi gave no numbers: {last}"
        self._answered.set()

    def _end(self) -> None:
        """End nvidia-smi and the thread that reads it; nothing of them is left."""
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGTERM)  # it has not been waited for, so the number is still its own
            process.wait(_TIME_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if reader is not None:
            reader.join()
        if process.stdout is not None:
            process.stdout.close()


def _parse(line: str) -> Sample | None:
    """Read `62, 1024`; a word instead of a number, such as `[N/A]`, says nothing."""
    percent, _, mebibytes = (part.strip() for part in line.partition(","))
    if not percent.isdigit():
        return None
    return Sample(float(percent), float(mebibytes) if mebibytes.isdigit() else None)
