"""When a run saves, and what becomes of it when a save fails.

```
begin ─▶ save 0 ─▶ steps … ─▶ save ─▶ steps … ─▶ save ─▶ … ─▶ save at the end
         │                    └ T seconds ┘
         └ measures C, the seconds that a save holds the steps up
```

A checkpoint costs C seconds every T seconds, and a failure costs the work since the last one, T/2 on average. With M
seconds between failures, a run loses C/T + T/(2M) of its time, which is least at T = √(2CM) (J. W. Young, 1974). Here T
is that, but at least so long that saving takes 2 % of the time at the most.

The steps wait for a copy in memory alone, and a process of its own writes (`copies.py`), as long as there is memory for
copies and all ranks are on one machine. Where a launcher holds that memory there are copies between the saves, too,
as many as take 5 % of the time (1 % in a run that is not started again): after a failure, ranks that are started again
go on from the newest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from microparallel.comms.wire import gather_json
from microparallel.errors import CheckpointError
from microparallel.text import count, show_seconds
from microparallel.train.checkpoint import Ranks
from microparallel.train.checkpoint_folder import best_of, checkpoints, clear_leftovers, mark_best, remove_all_but
from microparallel.train.config import TrainConfig
from microparallel.train.copies import Copies
from microparallel.train.progress import Display
from microparallel.train.training import Training

_MOST_TIME = 0.02  # the part of a run's time that saving may take
_TRY_AGAIN = 10.0  # seconds after a save that failed
_MOST_TIME_FOR_COPIES = {True: 0.05, False: 0.01}  # whether ranks are started again → the part of a run's time
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
        copies: in memory, from which checkpoints are written; None to write them while the steps wait.
    """

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        checkpoints: Path,
        display: Display,
        copies: Copies | None = None,
    ) -> None:
        self._copies = copies
        self._copy_cost = 0.0  # seconds, of the last few
        self._copy_every: int | None = None  # steps, as last said
        self._on_its_way = False  # to the disk: whether the writer may be busy with the last save
        self._training = training
        self._config = config
        self._checkpoints = checkpoints
        self._display = display
        self._by_the_clock = config.save_every is None  # otherwise the loop counts steps
        self._cost = 0.0  # seconds for which a save holds up the steps, of the last few
        self._interval: float | None = None  # seconds from save to save
        self._next = time.monotonic() + _FIRST_OF_RESUMED if self._by_the_clock else math.inf
        self.newest = self._newest_on_disk()  # the step saved last; None if there is none yet
        self.failure: str | None = None  # of the last try
        self._best = gather_json(best_of(checkpoints)[1], training.comms)[0] if self.newest else math.inf
        self._begun, self._spent = time.monotonic(), 0.0  # seconds that saves have taken since then

    def _newest_on_disk(self) -> int | None:
        """The step whose checkpoint the run has: an earlier one than it goes on from, if that state was in memory."""
        done = self._training.steps_done
        if not done:
            return None
        saved = (step for step in checkpoints(self._checkpoints) if step <= done)
        newest: int | None = gather_json(max(saved, default=None), self._training.comms)[0]
        return newest

    def at_start(self) -> None:
        """Save before the first step: a model that cannot be stored is known at once, and what a save costs, too.

        What an attempt before this one was saving when it was killed is removed: there may be nothing more to save.
        """
        if self._training.comms.rank == 0:
            with contextlib.suppress(OSError):
                clear_leftovers(self._checkpoints)
        if self.newest is None:
            held_up = self._write()
            self._settle()
            self._choose_interval(held_up)

    def due(self) -> bool:
        """Whether it is time, by this process's clock; the ranks agree by asking rank 0.

        While the writer is still busy with the last save it is not: the steps would wait for it.
        """
        self._hear_from_writer()
        busy = self._copies is not None and not self._copies.writer.finished()
        return time.monotonic() >= self._next and not busy

    def save(self, *, must_work: bool = False) -> None:
        """Save if there is anything new; a save that fails is a warning, and is tried again, unless it must work.

        A state that is handed to the writer counts as saved; whether it was is known later.
        """
        if self._training.steps_done == self.newest:
            return
        in_its_time = time.monotonic() >= self._next
        try:
            cost = self._write()
        except CheckpointError as error:
            if must_work:
                raise
            self._has_failed(str(error))
            return
        if self._copies is None:
            self._has_worked()
        self._choose_interval(cost, again=in_its_time)

    def _has_failed(self, error: str) -> None:
        if self.failure is None:
            self._display.warn(f"{error}; training goes on, and the save is tried again")
        self.failure = error
        if self._by_the_clock:
            self._next = time.monotonic() + _TRY_AGAIN

    def _has_worked(self) -> None:
        if self.failure is not None:
            self._display.note(f"step {self.newest} is saved, after saves that had failed")
            self.failure = None

    def finish(self) -> None:
        """Return when the state after the last step is on the disk; raise, on every rank, if it cannot be."""
        self.save(must_work=True)
        try:
            self._settle()
        except CheckpointError:  # once more, from the ranks themselves
            self._write_from_ranks()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let what is being written come to its end, unless somebody is in a hurry."""
        if self._copies is not None:
            self._copies.close(at_once=isinstance(error, KeyboardInterrupt))

    def is_best(self, loss: float) -> bool:
        """Whether the validation has never been as good; rank 0 decides, and every rank asks."""
        return bool(gather_json(loss < self._best, self._training.comms)[0])

    def keep_best(self, loss: float) -> None:
        """Keep the checkpoint of this step, if there is one, until a better one comes."""
        if self.newest != self._training.steps_done:
            return
        self._best = loss
        config = self._config
        if self._training.comms.rank == 0 and self._copies is not None:
            path = self._checkpoints / f"step-{self.newest:08d}"
            self._copies.writer.keep_best(path, loss, config.keep, config.keep_every, self._was_not_kept)
        elif self._training.comms.rank == 0:
            try:
                mark_best(self._checkpoints / f"step-{self.newest:08d}", loss)
                remove_all_but(config.keep, self._checkpoints, self.newest, config.keep_every)
            except CheckpointError as error:
                self._display.warn(str(error))
                self._was_not_kept()

    def _was_not_kept(self) -> None:
        """The best is again the one that is marked on the disk."""
        self._best = best_of(self._checkpoints)[1]

    def _write(self) -> float:
        """Save, and return the seconds for which that has held up the steps."""
        begun = time.monotonic()
        if self._copies is not None:
            self._copies.writer.wait()
            self._hear_from_writer()
        # Where a step is not taken whose loss is not finite, the loop has looked.
        finite = self._config.on_nan != "ignore" or self._training.has_finite_weights()
        if self._copied(finite) and self._copies is not None:
            self._copies.write(self._checkpoints, self._config.keep, self._config.keep_every)
            self._on_its_way = True
        else:
            self._write_from_ranks(finite)
        self.newest = self._training.steps_done
        seconds = time.monotonic() - begun
        self._spent += seconds
        return seconds

    def _write_from_ranks(self, finite: bool = True) -> None:
        """Let each rank write its part, while all of them wait."""
        config = self._config
        self._training.save(self._checkpoints, keep=config.keep, keep_every=config.keep_every, finite=finite)

    # ── copies in memory ────────────────────────────────────────────────────────────────────────────────────────

    def copy(self, look: Callable[[], None] = lambda: None) -> None:
        """Copy the state into memory, for ranks that are started again; first `look` whether it is good."""
        self._copied(finite=True, look=look)

    def copy_every(self, seconds_a_step: float) -> int:
        """After how many steps there is time for a copy, asked on rank 0; 0 where copies are of no use."""
        if self._copies is None or not self._copies.outlives_ranks:
            return 0
        restarts = self._config.restarts > 0
        steps = max(1, math.ceil(self._copy_cost / (_MOST_TIME_FOR_COPIES[restarts] * max(seconds_a_step, 1e-6))))
        if restarts and self._copy_cost and (self._copy_every is None or not 0.3 < steps / self._copy_every < 3):
            self._copy_every = steps
            self._display.note(
                f"copying the state into memory every {count(steps, 'step')}, as a copy takes "
                f"{show_seconds(self._copy_cost)}: a restart goes on from there"
            )
        return steps

    def forget_copies(self) -> None:
        """What is in memory is wrong, so go on from the disk."""
        if self._copies is not None:
            self._copies.forget()

    def _copied(self, finite: bool, look: Callable[[], None] = lambda: None) -> bool:
        """Copy the state into memory; if that is not possible, there are no more copies from now on."""
        if self._copies is None:
            return False
        begun = time.monotonic()
        look()
        try:
            self._copies.copy(finite=finite)
        except CheckpointError as error:
            self._copies.give_up()
            self._copies = None
            self._display.note(f"{error}; steps wait from now on until a save is on the disk")
            return False
        seconds = time.monotonic() - begun
        self._copy_cost = (self._copy_cost + seconds) / 2 if self._copy_cost else seconds
        return True

    def _hear_from_writer(self) -> None:
        """Learn, on rank 0, what became of the state that was handed over last."""
        if self._copies is None:
            return
        if (failure := self._copies.writer.take_failure()) is not None:
            self._on_its_way = False
            self._has_failed(failure)
        elif self._on_its_way and self._copies.writer.reading is None:
            self._on_its_way = False
            self._has_worked()

    def _settle(self) -> None:
        """Wait for the writer; every rank raises if a state could not be written."""
        if self._copies is not None:
            Ranks(self._training.comms).on_first(self._require_written)
            self._on_its_way = False
            self._has_worked()

    def _require_written(self) -> None:
        """Wait, on rank 0, until what was handed over last is on the disk; a CheckpointError if it cannot be."""
        assert self._copies is not None
        self._copies.settle()
        if self.failure is not None and not self._on_its_way:  # its failure was heard of before
            raise CheckpointError(self.failure)

    def affordable(self) -> bool:
        """Whether one more save than is due stays within 2 % of the time; rank 0 decides, and every rank asks."""
        mine = self._spent <= _MOST_TIME * (time.monotonic() - self._begun)
        return bool(gather_json(mine, self._training.comms)[0])

    def _choose_interval(self, cost: float, *, again: bool = False) -> None:
        """Go by what the last few saves have cost; rank 0 says so at first, and `again` when that changes much.

        A save for a validation, or the last one, is no reason to say it again: the run may end before it matters.
        """
        if not self._by_the_clock:
            return
        self._cost = cost = (self._cost + cost) / 2 if self._cost else cost
        interval = young_interval(cost, self._config.mtbf * 3600)
        if self._interval is None or (again and not 0.3 < interval / self._interval < 3):
            self._interval = interval
            self._display.note(
                f"saving every {show_seconds(interval)}: Young's √(2CM), as a save costs C = {show_seconds(cost)} "
                f"and a failure is expected every M = {self._config.mtbf:g} h"
            )
        self._next = time.monotonic() + interval
