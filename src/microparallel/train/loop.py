"""Train to the end: steps, measurements, checkpoints, a folder that says what happened; and an early stop if asked."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.comms.wire import gather_json
from microparallel.errors import MicroparallelError, UsageError
from microparallel.files.atomic import write_atomically
from microparallel.simulator.fitted import predicted
from microparallel.text import count
from microparallel.trace import Trace
from microparallel.train import checkpoint
from microparallel.train.build import build
from microparallel.train.config import TrainConfig
from microparallel.train.logs import Logs
from microparallel.train.metrics import Validation
from microparallel.train.progress import Display, display_for
from microparallel.train.run_folder import RunFolder
from microparallel.train.training import Training

_SECONDS_BETWEEN_QUESTIONS = 0.3  # whether to stop
_MOST_STEPS_BETWEEN_QUESTIONS = 1000
_WARM_UP = 3  # steps before the first that is recorded: buckets are arranged, memory is taken
_STEPS = 10  # that are recorded
_IN_PARTS = {
    "optimizer": "optimizer",
    "gradients": "optimizer and gradients",
    "parameters": "optimizer, gradients and parameters",
}


def train_on_rank(comms: Comms, config: TrainConfig, resume: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Run one rank of a training run, and return its summary (the same on every rank, but for the folder).

    Rank 0 writes the run's folder: `config.out`, or the folder that `resume` names.
    """
    config = config.resolved()
    training = build(config, comms)
    with contextlib.ExitStack() as stack:
        stack.callback(training.close)
        display = stack.enter_context(contextlib.closing(display_for(comms.rank, quiet)))
        folder = None
        if comms.rank == 0:
            folder = stack.enter_context(
                RunFolder.create(config.out, config) if resume is None else RunFolder.open(resume)
            )
            stack.callback(folder.remove_if_nothing_happened)
            stack.push(folder.point_to_flight(comms.flight.folder))
        if resume is not None:
            _go_on_from_latest(training, resume, display)
            if folder is not None:
                folder.truncate_metrics(after_step=training.steps_done)
                folder.write_config(config)  # it may go on with more steps, or other ranks
        logs = None
        if folder is not None:
            logs = stack.enter_context(contextlib.closing(Logs(folder.path, config, training.steps_done, display.note)))
        return _Run(training, config, folder, display, logs).to_the_end()


def _checkpoints_of(folder: RunFolder | None, comms: Comms) -> Path:
    """Where all ranks write checkpoints: rank 0 alone has the run's folder, and tells the others where it is."""
    told = gather_json(None if folder is None else str(folder.checkpoints.absolute()), comms)[0]
    return Path(told) if folder is None else folder.checkpoints


class _Run:
    """One rank's way through a run; rank 0 also has the folder and the logs."""

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        folder: RunFolder | None,
        display: Display,
        logs: Logs | None = None,
    ) -> None:
        self._logs = logs
        self._training = training
        self._config = config
        self._folder = folder
        self._checkpoints = _checkpoints_of(folder, training.comms)
        self._display = display
        self._total = training.total_steps
        self._validate_every = config.validate_every or training.loader.length or self._total
        self._apart = config.average_every or 1  # steps after which the ranks' models are the same again
        self._validation: Validation | None = None
        self._samples = 0
        self._warned: set[str] = set()  # of what there was a warning
        self._saved_at = training.steps_done  # nothing new to save yet
        self._saved = training.steps_done > 0  # whether there is a checkpoint

    def to_the_end(self) -> dict[str, Any]:
        training = self._training
        self._display.start(_description(training, self._config), training.steps_done, self._total)
        started, first_step = time.monotonic(), training.steps_done
        stopped = False
        with StopTogether(training.comms) as stop, Tracing(self._config, training, self._folder, self._total) as trace:
            while training.steps_done < self._total and not stopped:
                trace.before_step()
                training.comms.flight.at_step(training.steps_done)
                self._step()
                stopped = training.steps_done < self._total and self._together() and stop.agreed()
            training.come_together()
            self._save()
        seconds = time.monotonic() - started
        self._display.close()
        if training.steps_done == first_step:
            self._display.note(f"nothing left to do after {first_step} steps; --steps or --epochs makes the run longer")
        if stopped:
            self._display.note(f"stopped after step {training.steps_done} of {self._total}; {self._how_to_go_on()}")
        else:
            self._validate()
        return self._summary(seconds, stopped)

    def _how_to_go_on(self) -> str:
        folder = self._folder.path if self._folder is not None else "RUN"
        return f"go on with: microparallel train --resume {folder}"

    def _step(self) -> None:
        training = self._training
        begun = time.monotonic()
        loss = training.step()
        seconds = time.monotonic() - begun
        done = training.steps_done
        self._samples += training.last_samples
        speed = training.last_samples / seconds
        record = {"step": done, "epoch": training.loader.epoch, "loss": loss, "samples_per_second": round(speed, 1)}
        self._record(record | _scaling(training))
        self._display.step(done, loss, speed, training.loss_scale)
        if not math.isfinite(loss):
            self._warn("step", f"the loss of step {done} is {loss}; a smaller --lr may help")
        if self._config.save_every is not None and self._due(self._config.save_every):
            self._save()
        if self._due(self._validate_every) and done < self._total:
            self._validate()

    def _warn(self, about: str, text: str) -> None:
        """Show a warning, unless there was one about the same before."""
        if about not in self._warned:
            self._warned.add(about)
            self._display.warn(text)

    def _together(self) -> bool:
        """Whether all ranks have the same model now; otherwise there is nothing yet that could be measured or saved."""
        return self._training.steps_done % self._apart == 0

    def _due(self, every: int) -> bool:
        """Whether now is the first time that ranks are together since a multiple of that many steps."""
        return self._together() and self._training.steps_done % every < self._apart

    def _validate(self) -> None:
        if not self._saved and self._training.data.validation is not None:
            self._save()  # what was trained is safe before the model is measured for the first time
        self._validation = self._training.validate()
        if self._validation is None:
            return
        self._record({"step": self._training.steps_done, **self._validation.record})
        self._display.validation(self._validation)
        for name, reason in self._validation.failures.items():
            self._warn(f"validation {name}", f"validation {name} is left out, since it failed: {reason}")

    def _save(self) -> None:
        """Save a checkpoint, to which every rank contributes, if there is anything new to save."""
        training = self._training
        if training.steps_done == self._saved_at:
            return
        self._saved_at, self._saved = training.steps_done, True
        training.save(self._checkpoints, keep=self._config.keep)

    def _record(self, record: dict[str, Any]) -> None:
        if self._folder is not None:
            self._folder.append_metrics(record)
        if self._logs is not None:
            self._logs.write(record)

    def _summary(self, seconds: float, stopped: bool) -> dict[str, Any]:
        training = self._training
        identical = training.replicas_are_identical()
        summary: dict[str, Any] = {
            "model": self._config.model,
            "data": training.data.description,
            "strategy": self._config.strategy,
            "ranks": training.comms.world_size,
            **_layout(self._config),
            "precision": self._config.precision,
            **_scaling(training),
            "device": str(training.comms.device),
            "parameters": training.parameters,
            "steps": training.steps_done,
            "stopped_early": stopped,
            "loss": training.last_loss,
            **(self._validation or Validation(None, None)).record,
            "seconds": round(seconds, 3),
            "samples_per_second": round(self._samples / seconds, 1) if self._samples else None,
            "replicas_identical": identical,
            "torch": torch.__version__,
            "folder": str(self._folder.path) if self._folder is not None else None,
        }
        if self._folder is not None:
            self._folder.write_summary(summary)
        if not identical:
            raise MicroparallelError("the ranks' weights differ at the end of the run: this is a bug, please report it")
        return summary


def _go_on_from_latest(training: Training, resume: Path, display: Display) -> None:
    """Load the newest checkpoint that is whole: the same on every rank."""
    found, warnings = checkpoint.latest(resume / "checkpoints", training.comms)
    for warning in warnings:
        display.note(f"warning: {warning}")
    if remark := training.load(found):
        display.note(remark)


def _description(training: Training, config: TrainConfig) -> str:
    ranks = training.comms.world_size
    where = count(ranks, "rank")
    if config.is_pipeline:
        where = f"dp {config.dp} × pp {config.pp}, {config.schedule}, {config.microbatches} micro-batches"
    if config.shard is not None:
        where = f"{where}, {_IN_PARTS[config.shard]} in parts"
        if (config.replicas or 1) > 1:
            where = f"{where}, {config.replicas} times"
    precision = "" if config.precision == "float32" else f", {config.precision}"
    if config.compress is not None:
        where = f"{where}, gradients compressed by {config.compress}"
    return (
        f"{config.model}, {training.parameters:,} parameters; {config.strategy} on {where}, "
        f"{training.comms.device.type}{precision}\n{training.data.description}"
    )


def _scaling(training: Training) -> dict[str, Any]:
    """The scale of the loss, and how many steps were not taken, in a run in float16."""
    scale = training.loss_scale
    return {} if scale is None else {"loss_scale": scale.value, "skipped_steps": scale.skipped}


def _layout(config: TrainConfig) -> dict[str, Any]:
    """How a pipeline was arranged, and what was kept in parts, for the summary."""
    shard: dict[str, Any] = {} if config.shard is None else {"shard": config.shard}
    if (config.replicas or 1) > 1:
        shard["replicas"] = config.replicas
    if config.compress is not None:
        shard["compress"] = config.compress
    if not config.is_pipeline:
        return shard
    return shard | {name: getattr(config, name) for name in ("dp", "pp", "schedule", "microbatches")}


# ── stopping: Ctrl-C may reach one rank only, and all must stop after the same step ───────────────────────────────────


class StopTogether:
    """Catches Ctrl-C and SIGTERM on each rank, and lets the ranks agree when to stop.

    To agree costs an all-reduce, so the ranks do not ask after every step: rank 0 says how many steps take a moment.
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


# ── recording some steps, for `microparallel report` ──────────────────────────────────────────────────────────────────


class Tracing:
    """Records ten steps of a run, after its first ones; of a shorter run, its last."""

    def __init__(self, config: TrainConfig, training: Training, folder: RunFolder | None, total: int) -> None:
        self._wanted = bool(config.trace)
        self._training = training
        self._folder = folder
        self._about: dict[str, Any] = {"model": config.model, "strategy": config.strategy, "batch": config.batch}
        self._first = min(training.steps_done + _WARM_UP, max(training.steps_done, total - 1))
        self._recorder: Recorder | None = None

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
        recorder.gather(self._about)
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
