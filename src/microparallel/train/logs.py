"""Other places for a run's metrics, beside metrics.jsonl: TensorBoard and Weights & Biases, where installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from microparallel.errors import ConfigError
from microparallel.train.config import TrainConfig


class Log(Protocol):
    """Takes the numbers of a step."""

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write some numbers down, by name."""

    def close(self) -> None:
        """Write out what is left."""


class TensorBoard:
    """Event files in the run's folder; `tensorboard --logdir runs` shows them."""

    def __init__(self, folder: Path, config: TrainConfig, first_step: int) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step + 1 if first_step else None  # a resumed run writes later steps again
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write some numbers down, by name."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb with the name of the run's folder; a resumed run goes on in it."""

    def __init__(self, folder: Path, config: TrainConfig, first_step: int) -> None:  # noqa: ARG002
        import wandb  # type: ignore[import-not-found,unused-ignore]

        name = folder.absolute().name
        settings = {"id": name, "name": name, "dir": str(folder), "config": asdict(config), "resume": "allow"}
        self._run: Any = wandb.init(project="microparallel", **settings)

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write some numbers down, by name."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Write out what is left."""
        self._run.finish()


LOGS: dict[str, Callable[[Path, TrainConfig, int], Log]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def require_installed(names: str | None) -> None:
    """Refuse logs whose package is missing, with the command that installs it."""
    for name in (names or "").split():
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {name}: the package {name} is not installed; pip install {name}")


class Logs:
    """All logs of a run. One that fails, perhaps because a network is gone, is left out from there on."""

    def __init__(self, folder: Path, config: TrainConfig, first_step: int, note: Callable[[str], None]) -> None:
        self._note = note
        self._logs: dict[str, Log] = {}
        for name in (config.log or "").split():
            self._attempt(name, lambda name=name: self._open(name, folder, config, first_step))  # type: ignore[misc]

    def _open(self, name: str, folder: Path, config: TrainConfig, first_step: int) -> None:
        self._logs[name] = LOGS[name](folder, config, first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the finite numbers of a record of metrics.jsonl to each log."""
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, log in [*self._logs.items()]:
            self._attempt(name, lambda log=log: log.write(numbers, record["step"]))  # type: ignore[misc]

    def close(self) -> None:
        """Write out what is left."""
        for name, log in [*self._logs.items()]:
            self._attempt(name, log.close)

    def _attempt(self, name: str, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:
            self._logs.pop(name, None)
            reason = str(error).partition("\n")[0]
            self._note(f"warning: --log {name} failed ({type(error).__name__}: {reason}); metrics.jsonl has everything")
