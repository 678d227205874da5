"""When a run saves, and what becomes of it when a save fails.

```
begin ─▶ save 0 ─▶ steps … ─▶ save ─▶ steps … ─▶ save ─▶ … ─▶ save at the end
         │                    └ T seconds ┘
         └ measures C, the seconds that a save holds the steps up
```

A checkpoint costs C seconds every T seconds, and a failure costs the work since the last one, T/2 on average. With M
seconds between failures, a run loses C/T + T/(2M) of its time, which is least at T = √(2CM) (J. W. Young, 1974). Here T
is that, but at least so long that saving takes 2 % of the time at the most.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from microparallel.comms.wire import gather_json
from microparallel.errors import CheckpointError
from microparallel.text import show_seconds
from microparallel.train.checkpoint_folder import best_of, mark_best, remove_all_but
from microparallel.train.config import TrainConfig
from microparallel.train.progress import Display
from microparallel.train.training import Training

_MOST_TIME = 0.02  # the part of a run's time that saving may take
_TRY_AGAIN = 10.0  # seconds after a save that failed
_FIRST_OF_RESUMED = 10.0  # seconds after which a run that goes on saves for the first time: then it knows the cost


def young_interval(cost: float, between_failures: float) -> float:
    """Seconds from one save to the next: Young's √(2CM), but at least so long that saving takes 2 % at the most."""
    return max(math.sqrt(2 * cost * between_failures), cost / _MOST_TIME)


class Saving:
    """One rank's part in the saves of a run; every rank calls `save` after the same steps.

    Args:
        training: what is saved.
        config: how often, and how many are kept.
        checkpoints: the folder, which all ranks see.
        display: where rank 0 says what it does.
    """

    def __init__(self, training: Training, config: TrainConfig, checkpoints: Path, display: Display) -> None:
        self._training = training
        self._config = config
        self._checkpoints = checkpoints
        self._display = display
        self._by_the_clock = config.save_every is None  # otherwise the loop counts steps
        self._interval: float | None = None  # seconds from save to save
        self._next = time.monotonic() + _FIRST_OF_RESUMED if self._by_the_clock else math.inf
        self.newest: int | None = None if training.steps_done == 0 else training.steps_done  # the step saved last
        self.failure: str | None = None  # of the last try
        self._best = gather_json(best_of(checkpoints)[1], training.comms)[0] if self.newest else math.inf
        self._begun, self._spent = time.monotonic(), 0.0  # seconds that saves have taken since then

    def at_start(self) -> None:
        """Save before the first step: a model that cannot be stored is known at once, and what a save costs, too."""
        if self.newest is None:
            self._choose_interval(self._write())

    def due(self) -> bool:
        """Whether it is time, by this process's clock; the ranks agree by asking rank 0."""
        return time.monotonic() >= self._next

    def save(self, *, must_work: bool = False) -> None:
        """Save if there is anything new; a save that fails is a warning, and is tried again, unless it must work."""
        if self._training.steps_done == self.newest:
            return
        try:
            cost = self._write()
        except CheckpointError as error:
            if must_work:
                raise
            if self.failure is None:
                self._display.warn(f"{error}; training goes on, and the save is tried again")
            self.failure = str(error)
            if self._by_the_clock:
                self._next = time.monotonic() + _TRY_AGAIN
            return
        if self.failure is not None:
            self._display.note(f"step {self.newest} is saved, after saves that had failed")
            self.failure = None
        self._choose_interval(cost)

    def is_best(self, loss: float | None) -> bool:
        """Whether the validation has never been as good."""
        return loss is not None and loss < self._best

    def keep_best(self, loss: float) -> None:
        """Keep the checkpoint of this step, if there is one, until a better one comes."""
        if self.newest != self._training.steps_done:
            return
        self._best = loss
        if self._training.comms.rank == 0:
            try:
                mark_best(self._checkpoints / f"step-{self.newest:08d}", loss)
                remove_all_but(self._config.keep, self._checkpoints, self.newest, self._config.keep_every)
            except CheckpointError as error:
                self._display.warn(str(error))

    def _write(self) -> float:
        """Save, and return the seconds for which that has held up the steps."""
        begun = time.monotonic()
        config = self._config
        finite = config.on_nan != "ignore" or self._training.has_finite_weights()  # otherwise the loop has looked
        keeping = {"keep": config.keep, "keep_every": config.keep_every, "finite": finite}
        self._training.save(self._checkpoints, **keeping)
        self.newest = self._training.steps_done
        seconds = time.monotonic() - begun
        self._spent += seconds
        return seconds

    def affordable(self) -> bool:
        """Whether one more save than is due stays within 2 % of the time; rank 0 decides, and every rank asks."""
        mine = self._spent <= _MOST_TIME * (time.monotonic() - self._begun)
        return bool(gather_json(mine, self._training.comms)[0])

    def _choose_interval(self, cost: float) -> None:
        """Go by what the last save has cost; rank 0 says so at first, and when that changes much."""
        if not self._by_the_clock:
            return
        interval = young_interval(cost, self._config.mtbf * 3600)
        if self._interval is None or not 0.3 < interval / self._interval < 3:
            self._interval = interval
            self._display.note(
                f"saving every {show_seconds(interval)}: Young's √(2CM), as a save costs C = {show_seconds(cost)} "
                f"and a failure is expected every M = {self._config.mtbf:g} h"
            )
        self._next = time.monotonic() + interval
