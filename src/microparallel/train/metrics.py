"""What is measured on held-back data: the loss, the accuracy where there is something to count, metrics of one's own.

Every rank measures its share. A value is a mean over samples, or (sum, count); over all batches of all ranks it is the
total sum over the total count, so that any number of ranks measures the same. What cannot be measured is left out, with
a line that says why: it never costs the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import ConfigError
from microparallel.models.loss import sum_and_count
from microparallel.train import user_code

LOSS, ACCURACY = "loss", "accuracy"
_IGNORED = -100  # the class that torch's cross-entropy passes over
_LONGEST_REASON = 200  # letters

Metric = Callable[[Any, Any], Any]  # (outputs, targets) → the mean over the samples of a batch, or (sum, count)


@dataclass(frozen=True)
class Validation:
    """How well a model does on data it has not learnt from; None where there is nothing to count, or it failed.

    Attributes:
        loss: of all samples.
        accuracy: the share of right answers.
        metrics: the user's own, by name.
        failures: for each of these that failed, by its name, what it raised.
    """

    loss: float | None
    accuracy: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, float | None]:
        """All values, under the names they have in metrics.jsonl."""
        values = {LOSS: self.loss, ACCURACY: self.accuracy, **self.metrics}
        return {f"validation_{name}": value for name, value in values.items()}


def load_metrics(specs: str | None) -> dict[str, Metric]:
    """The user's metrics, named as `my_module:f my_module:g`, by the names of the functions."""
    metrics: dict[str, Metric] = {}
    for spec in (specs or "").split():
        name = spec.partition(":")[2]
        if name in (LOSS, ACCURACY, *metrics):
            raise ConfigError(f"--metric {spec}: there is a metric called {name!r} already; rename the function")
        metrics[name] = user_code.load(spec, "metric")
    return metrics


class Measurement:
    """One rank's sums while it goes through the held-back data."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        names = (LOSS, ACCURACY, *metrics)
        self._sums = {name: [0.0, 0.0] for name in names}  # a sum, and what it counts
        self._failures: dict[str, str] = {}

    def attempt(self, names: Sequence[str], what: Callable[[], Any]) -> Any:
        """Call a function that the named values depend on; if it raises, none of them can be told."""
        try:
            return what()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST_REASON] + user_code.line_of(error)
            for name in names:
                self._failures.setdefault(name, reason)
            return None

    def outputs(self, forward: Callable[[], Any]) -> Any:
        """Call the model, on which everything depends."""
        return self.attempt([*self._sums], forward)

    def add(self, outputs: Any, targets: Any, samples: int, loss: Callable[[], Any]) -> None:
        """Measure one batch: outputs as the model returned them."""
        self._add(LOSS, lambda: _pair(loss(), samples))
        self._add(ACCURACY, lambda: right_answers(outputs, targets))
        for name, metric in self._metrics.items():
            self._add(name, lambda metric=metric: _pair(metric(outputs, targets), samples))  # type: ignore[misc]

    def _add(self, name: str, measure: Callable[[], tuple[Any, float] | None]) -> None:
        found = self.attempt([name], lambda: _floats(measure()))
        if found is not None:
            self._sums[name][0] += found[0]
            self._sums[name][1] += found[1]

    def over_all_ranks(self, comms: Comms) -> Validation:
        """Add up what all ranks have measured; every rank must call it."""
        table = torch.tensor(
            [[*sums, float(name in self._failures)] for name, sums in self._sums.items()], dtype=torch.float64
        )
        comms.all_reduce(table)
        failures: dict[str, str] = {}
        if bool(table[:, 2].any()):
            for theirs in gather_json(self._failures, comms):
                failures = {**theirs, **failures}
        values = {
            name: total / count if count and not failed else None
            for name, (total, count, failed) in zip(self._sums, table.tolist(), strict=True)
        }
        own = {name: values[name] for name in self._metrics}
        return Validation(values[LOSS], values[ACCURACY], own, failures)


def right_answers(outputs: Any, targets: Any) -> tuple[int, int] | None:
    """Count right answers and all answers; None where outputs are no classes that could be compared with the targets.

    Of an object or dict with `logits`, these are compared if there is one class for each sample. (A language model's
    are those of the next token, in an order that only the model knows.)
    """
    if not isinstance(outputs, torch.Tensor):
        outputs = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        if not (isinstance(outputs, torch.Tensor) and outputs.dim() == 2):
            return None
    comparable = isinstance(targets, torch.Tensor) and not targets.is_floating_point() and outputs.dim() > 0
    if not comparable or outputs.shape[:-1] != targets.shape:
        return None
    counted = targets != _IGNORED
    return int((outputs.argmax(-1) == targets)[counted].sum()), int(counted.sum())


def _pair(value: Any, samples: int) -> tuple[Any, float]:
    if isinstance(value, tuple | list):
        return sum_and_count(tuple(value), samples)
    return float(value) * samples, float(samples)


def _floats(found: tuple[Any, float] | None) -> tuple[float, float] | None:
    return None if found is None else (float(found[0]), float(found[1]))
