"""Train to the end: steps, measurements, checkpoints, a folder that says what happened; and an early stop if asked."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import ConfigError, GradientError, MicroparallelError
from microparallel.files.state_memory import HeldStates, newest
from microparallel.settings import declared
from microparallel.text import count
from microparallel.train import checkpoint
from microparallel.train.agreement import Agreement, Decision
from microparallel.train.alike import require_same_data, require_same_run_everywhere
from microparallel.train.build import build
from microparallel.train.checkpoint_writer import Writer
from microparallel.train.config import OF_PARAMETERS, TrainConfig, read_config
from microparallel.train.copies import Copies
from microparallel.train.logs import Logs
from microparallel.train.metrics import Validation
from microparallel.train.progress import Display, display_for
from microparallel.train.run_folder import AUTO, RunFolder
from microparallel.train.saving import Saving
from microparallel.train.stragglers import Slow, Stragglers, columns_of
from microparallel.train.tracing import Tracing
from microparallel.train.training import Training
from microparallel.world.connect import DEFAULT_TIMEOUT

_IN_PARTS = {
    "optimizer": "optimizer",
    "gradients": "optimizer and gradients",
    "parameters": "optimizer, gradients and parameters",
}


def train_on_rank(
    comms: Comms,
    config: TrainConfig,
    resume: Path | str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run one rank of a training run, and return its summary: the same on every rank, but for the folder.

    If the run was stopped early, it also says whether this rank itself was told to (`told_to_stop`); all stop together.

    Rank 0 writes the run's folder: `config.out`, or the folder that `resume` names. With `resume="auto"` the run in
    `config.out` goes on if there is one, and otherwise begins. If an earlier attempt of the same launch has left a
    state in memory that is newer than the checkpoints, the run goes on from that.
    """
    config = config.resolved()
    if comms.world_size < config.world_size:  # not as many processes as before could be started
        config = _with_fewer_ranks(config, comms.world_size)
    held = comms.held_states
    in_memory = held is not None and newest(held.slots) is not None
    shares = _shares_of_run(config, held if in_memory else None, comms)
    # There may have been other ranks when the run began.
    config = config.with_shares(shares if resume == AUTO else None)
    require_same_run_everywhere(config, comms)
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(contextlib.closing(display_for(comms.rank, quiet)))
        folder = _on_first(comms, lambda: stack.enter_context(_open(config, resume, in_memory)))
        if folder is not None:
            stack.callback(folder.remove_if_nothing_happened)
            stack.push(folder.point_to_flight(comms.flight.folder))
        checkpoints, goes_on = _told_by_first(comms, folder, resume, in_memory)
        training = build(config, comms)
        stack.callback(training.close)
        require_same_data(training.made_of, comms)
        copies = None
        if not config.wait_for_saves:
            # Others wait for rank 0 while it waits for the writer: it gives up first.
            writer = Writer((config.timeout or DEFAULT_TIMEOUT) / 2, display.warn)
            # One slot will do where a state that was cut off sends nobody back to the disk.
            copies = Copies.into_memory(comms, training.contents, writer, slots=2 if config.restarts else 1)
        if copies is not None:
            copies.if_all_fails(checkpoints, config.keep, config.keep_every, None, asdict(config))
        if goes_on:
            _go_on_from_latest(training, checkpoints, copies, display)
            if folder is not None:
                folder.truncate_metrics(after_step=training.steps_done)
        if folder is not None:
            folder.write_config(config)  # it may go on with more steps, or other ranks
        logs = None
        if folder is not None:
            logs = stack.enter_context(contextlib.closing(Logs(folder.path, config, training.steps_done, display.note)))
        saving = stack.enter_context(Saving(training, config, checkpoints, display, copies))
        return _Run(training, config, folder, saving, display, logs).to_the_end()


def _with_fewer_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """The same run with as many ranks as could be started; what so many cannot have is left out."""
    left_out: dict[str, Any] = {}
    replicas = ranks // (config.layout[1] if config.is_pipeline else 1)
    if config.shard is not None and replicas == 1:
        left_out |= dict.fromkeys(("shard", *OF_PARAMETERS))
    elif ranks % (config.replicas or 1):
        left_out |= {"replicas": None}
    if config.is_pipeline:
        left_out |= {"dp": replicas}
    return replace(config, ranks=ranks, **left_out).resolved()


def _shares_of_run(config: TrainConfig, held: HeldStates | None, comms: Comms) -> int | None:
    """Into how many shares the run in this folder, or in memory, cuts each batch: rank 0 tells. None without a run."""
    run: dict[str, Any] = {}
    if comms.rank == 0 and held is not None and held.arguments is not None:
        run = held.arguments["run"]
    elif comms.rank == 0 and config.out is not None and (Path(config.out) / "config.toml").exists():
        with contextlib.suppress(ConfigError):  # which is refused when the folder is opened
            run = read_config(Path(config.out) / "config.toml")
    shares: int | None = gather_json(run.get("shares"), comms)[0]
    return shares


def _open(config: TrainConfig, resume: Path | str | None, in_memory: bool) -> RunFolder:
    """The folder of a new run, or of the one that goes on; locked. A state in memory is of the run that goes on."""
    if resume is None:
        return RunFolder.create(config.out, config)
    if resume != AUTO:
        folder = RunFolder.open(resume)
        folder.take()
        return folder
    if config.out is not None and in_memory:
        return RunFolder.take_up(config.out, config)
    if config.out is None or not (Path(config.out) / "config.toml").exists():
        return RunFolder.create(config.out, config)
    folder = RunFolder.open(config.out)
    folder.take()
    require_same_run(config, folder)
    return folder


def _on_first(comms: Comms, action: Callable[[], RunFolder]) -> RunFolder | None:
    """Do it on rank 0; what it refuses, every rank refuses."""
    folder, refusal = None, None
    if comms.rank == 0:
        try:
            folder = action()
        except ConfigError as error:
            refusal = str(error)
    if (told := gather_json(refusal, comms)[0]) is not None:
        raise ConfigError(told)
    return folder


def _told_by_first(
    comms: Comms, folder: RunFolder | None, resume: Path | str | None, in_memory: bool
) -> tuple[Path, bool]:
    """Where all ranks write checkpoints, and whether they go on from one: rank 0 tells, which has the run's folder."""
    mine = None
    if folder is not None:
        nothing = not in_memory and not any(folder.checkpoints.glob("step-*"))
        begins = resume is None or (resume == AUTO and nothing)
        mine = [str(folder.checkpoints.absolute()), not begins]
    told, goes_on = gather_json(mine, comms)[0]
    return Path(told) if folder is None else folder.checkpoints, goes_on


class _Run:
    """One rank's way through a run; rank 0 also has the folder and the logs."""

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        folder: RunFolder | None,
        saving: Saving,
        display: Display,
        logs: Logs | None = None,
    ) -> None:
        self._logs = logs
        self._training = training
        self._config = config
        self._folder = folder
        self._display = display
        self._total = training.total_steps
        self._validate_every = config.validate_every or training.loader.length or self._total
        self._apart = config.average_every or 1  # steps after which the ranks' models are the same again
        self._validation: Validation | None = None
        self._samples = 0
        self._warned: set[str] = set()  # of what there was a warning
        self._saving = saving
        columns = columns_of(training.comms.world_size, config.pp or 1)
        self._stragglers = Stragglers(columns, self._say_who_is_slow)

    def to_the_end(self) -> dict[str, Any]:
        training = self._training
        self._display.start(_description(training, self._config), training.steps_done, self._total)
        self._saving.at_start()
        started, first_step = time.monotonic(), training.steps_done
        decision = Decision()
        agreement = Agreement(
            training.comms, self._saving.due, self._saving.copy_every, self._stragglers.answer, self._stragglers.hear
        )
        with agreement, Tracing(self._config, training, self._folder, self._total) as trace:
            while training.steps_done < self._total and not decision.stop:
                trace.before_step()
                training.comms.flight.at_step(training.steps_done)
                self._step()
                if training.steps_done < self._total and self._together():
                    decision = agreement.after_step()
                    if decision.save and not decision.stop:
                        self._save()
                    elif decision.copy and not decision.stop:
                        self._saving.copy(self._compare_replicas)
            training.come_together()
            self._save(must_work=True)
            self._saving.finish()
        seconds = time.monotonic() - started
        self._display.close()
        if training.steps_done == first_step:
            self._display.note(f"nothing left to do after {first_step} steps; --steps or --epochs makes the run longer")
        if decision.stop:
            self._display.note(f"stopped after step {training.steps_done} of {self._total}; {self._how_to_go_on()}")
        else:
            self._validate()
        summary = self._summary(seconds, decision.stop, trace.clock_error)
        return summary | {"told_to_stop": agreement.told_to_stop} if decision.stop else summary

    def _how_to_go_on(self) -> str:
        folder = self._folder.path if self._folder is not None else "RUN"
        return f"go on with: microparallel train --resume {folder}"

    def _step(self) -> None:
        training = self._training
        begun, waited = time.monotonic(), training.comms.flight.waited
        try:
            loss = training.step()
        except GradientError:
            self._saving.forget_copies()  # there may be weights in memory that are no numbers
            raise
        seconds = time.monotonic() - begun
        self._stragglers.after_step(seconds, training.comms.flight.waited - waited, training.own_samples)
        done = training.steps_done
        self._samples += training.last_samples
        speed = training.last_samples / seconds
        record = {"step": done, "epoch": training.loader.epoch, "loss": loss, "samples_per_second": round(speed, 1)}
        self._record(record | _scaling(training))
        self._display.step(done, loss, speed, training.loss_scale)
        if not math.isfinite(loss):
            left_out = ", and the step was left out" if self._config.on_nan == "skip" else ""
            self._warn("step", f"the loss of step {done} is {loss}{left_out}; a smaller --lr may help")
        if self._config.check_replicas is not None and self._due(self._config.check_replicas):
            self._compare_replicas()
        if self._config.save_every is not None and self._due(self._config.save_every):
            self._save()
        if self._due(self._validate_every) and done < self._total:
            self._validate()

    def _say_who_is_slow(self, slow: list[Slow], before: list[int], work: list[float]) -> None:
        """Warn of ranks that the others wait for, and say when they do so no longer."""
        for one in slow:
            if one.rank not in before:
                self._display.warn(str(one))
        ranks = [one.rank for one in slow]
        for rank in before:
            if rank not in ranks:
                self._display.note(f"rank {rank} is no longer slow")
        self._record({"step": self._training.steps_done, "slow_ranks": ranks, "own_work": [round(t, 6) for t in work]})

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
        if not self._saving.newest and self._training.data.validation is not None:
            self._save()  # what was trained is safe before the model is measured for the first time
        self._validation = self._training.validate()
        if self._validation is None:
            return
        self._record({"step": self._training.steps_done, **self._validation.record})
        self._display.validation(self._validation)
        for name, reason in self._validation.failures.items():
            self._warn(f"validation {name}", f"validation {name} is left out, since it failed: {reason}")
        loss = self._validation.loss
        if loss is not None and self._saving.is_best(loss):
            if self._saving.newest != self._training.steps_done and self._saving.affordable():
                self._save()
            self._saving.keep_best(loss)

    def _save(self, *, must_work: bool = False) -> None:
        """Save a checkpoint, to which every rank contributes, if there is anything new and good to save."""
        if self._saving.newest == self._training.steps_done:
            return
        if self._config.on_nan != "ignore" and not self._training.has_finite_weights():
            self._saving.forget_copies()
            self._training.require_finite_weights()
        self._compare_replicas()
        self._look_after_folder()
        self._saving.save(must_work=must_work)

    def _compare_replicas(self) -> None:
        """With --check-replicas: no state is kept, on the disk or in memory, in which ranks differ."""
        if self._config.check_replicas is None:
            return
        difference = self._training.find_difference()
        if difference is not None:
            self._saving.forget_copies()
            raise MicroparallelError(
                f"after step {self._training.steps_done} the weights of {difference} are not what the other ranks "
                "have: a bit may have flipped in memory; the last checkpoint is from before, so go on with --resume"
            )

    def _look_after_folder(self) -> None:
        if self._folder is None:
            return
        try:
            if self._folder.make_again_if_removed():
                self._display.warn(f"{self._folder.path} was removed while the run goes on; it is made again")
        except OSError as error:
            self._warn("folder", f"{self._folder.path} is gone, and cannot be made again: {error.strerror or error}")

    def _record(self, record: dict[str, Any]) -> None:
        if self._folder is not None and (error := self._folder.append_metrics(record)) is not None:
            reason = error.strerror or error
            self._warn("metrics", f"cannot write {self._folder.metrics_file}: {reason}; tried again with each line")
        if self._logs is not None:
            self._logs.write(record)

    def _summary(self, seconds: float, stopped: bool, clock_error: float | None) -> dict[str, Any]:
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
            **({"left_out": training.left_out} if training.left_out else {}),
            "loss": training.last_loss,
            **(self._validation or Validation(None, None)).record,
            "seconds": round(seconds, 3),
            "samples_per_second": round(self._samples / seconds, 1) if self._samples else None,
            "replicas_identical": identical,
            **({"clock_error": clock_error} if clock_error else {}),  # several hosts have several clocks
            "torch": torch.__version__,
            "folder": str(self._folder.path) if self._folder is not None else None,
        }
        if self._folder is not None:
            self._folder.write_summary(summary)
        if not identical:
            raise MicroparallelError("the ranks' weights differ at the end of the run: this is a bug, please report it")
        return summary


def require_same_run(config: TrainConfig, folder: RunFolder) -> None:
    """Refuse to go on with the run in a folder under settings that would change its course."""
    values = read_config(folder.config_file)
    for name, one in declared(TrainConfig).items():
        value = getattr(config, name)
        if name == "shares" and value == config.layout[0] > values.get(name, value):
            continue  # there are more ranks than shares, which each needs one
        if not one.setting.may_change and name != "out" and value != values.get(name, value):
            raise ConfigError(
                f"{one.given(value)} would change the run in {folder.path}, which began with {values.get(name)}; "
                "leave it out, or choose another --out"
            )


def _go_on_from_latest(training: Training, checkpoints: Path, copies: Copies | None, display: Display) -> None:
    """Load the newest state that is whole, in memory or on the disk: the same on every rank."""
    warnings: list[str] = []
    found = None if copies is None else copies.newest_state(checkpoints)
    if found is None:
        found, warnings = checkpoint.latest(checkpoints, training.comms)
    for warning in warnings:
        display.warn(warning)
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
