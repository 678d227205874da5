"""Kill and resume: one training, killed again and again, beside one that was left alone.

Every attempt is held against the undisturbed run, step by step: its samples and losses must be the same, bit for bit,
and it may not begin before a step whose checkpoint was complete. What the learner's files look like does not matter.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from microparallel.learn.exam import Exam
from microparallel.learn.graders._killing import SAMPLES, Kill, Log, Plan, Row, attempt, cut_power, read_log
from microparallel.learn.graders._resuming import BATCH, RANKS, TrueRun
from microparallel.learn.verdict import Wrong
from microparallel.text import count

_STEPS, _SAVE_EVERY, _NEVER = 60, 4, 10**6
_TEMPLATE = 3 * _SAVE_EVERY  # the step whose save shows what a save does: there are older checkpoints then
_MOST_OPERATIONS = 10  # of a rank's save, before each of which it is killed
_SECONDS = 15.0  # for an attempt, which needs a tenth of one
_BETWEEN_SAVES = (Kill(0, "draw", 2), Kill(0, "draw", 7), Kill(1, "backward", 7), Kill(0, "report", 7))
_REMOVALS = ("os.remove", "os.rmdir")
_TRUE = f"as in the undisturbed run of {count(_STEPS, 'step')}"


def check(exam: Exam) -> None:
    """The undisturbed run; kills between saves and in a save; a power cut, and the weights at the end."""
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
        history = _History(exam, Path(name))
        with exam.step("undisturbed: each sample once an epoch, and saving changes nothing"):
            history.learn_what_is_right()
        saves = [*history.kills_in_a_save()]
        # What a kill has spoiled is seen in the attempt after it, which ends with the next kill.
        with exam.step("killed between two saves, four times: the same samples and losses, bit for bit") as notes:
            for kill in (*_BETWEEN_SAVES, saves[0]):
                history.attempt(kill)
            notes.append(history.in_short(len(_BETWEEN_SAVES)))
        with exam.step("killed while it saves: the checkpoint before is still there") as notes:
            for kill in saves[1:]:
                history.attempt(kill)
            history.attempt(Kill(0, "draw", _SAVE_EVERY + 1), power_cut=True)
            notes.append(history.in_short(len(saves)))
        with exam.step("after a power cut, too; and at the end the weights are those of the undisturbed run") as notes:
            history.to_the_end()
            notes.append(f"{count(history.kills, 'kill')}, {count(_STEPS, 'step')}, bit for bit")


@dataclass
class _History:
    """All attempts so far, in one folder."""

    exam: Exam
    place: Path
    kills: int = 0
    done_twice: int = 0  # steps
    _saved: int = 0  # a checkpoint of this step is complete: no attempt may begin before it
    _last: Kill | None = None  # what has ended the last attempt
    _last_logs: list[Log] = field(default_factory=list)
    _power_lost: dict[str, bool] = field(default_factory=dict)  # files that the power cut has emptied
    _synced: set[tuple[int, ...]] = field(default_factory=set)
    _right: list[list[Row]] = field(default_factory=list)
    _weights: list[torch.Tensor] = field(default_factory=list)
    _logs_of_saving: list[Log] = field(default_factory=list)
    _largest: int = 0  # bytes of a file

    # ── undisturbed ─────────────────────────────────────────────────────────────────────────────────────────────

    def learn_what_is_right(self) -> None:
        """Run without a kill: once without saving, once with it."""
        logs, weights = self._undisturbed("alone", _NEVER)
        _require_whole_run(logs)
        if any(not _equal(one, other) for one, other in zip(weights[0], weights[1], strict=True)):
            raise Wrong(
                "without any kill, the ranks end with different weights: average the gradients, comms.all_reduce"
                '(parameter.grad, op="mean")'
            )
        self._right, self._weights = [log.rows for log in logs], weights[0]
        _require_learning(self._right)
        logs, weights = self._undisturbed("saving", _SAVE_EVERY)
        for rank, log in enumerate(logs):
            for row, right in zip(log.rows, self._right[rank], strict=False):
                if row != right:
                    what = "samples" if row.samples != right.samples else "loss"
                    raise Wrong(
                        f"saving changes the training: with save_every={_SAVE_EVERY} and without a kill, the {what} of "
                        f"rank {rank} in step {row.step} is not the one without saving. A save must change nothing"
                    )
        self._logs_of_saving = logs
        sizes = [file.stat().st_size for file in (self.place / "saving").rglob("*") if file.is_file()]
        if not any(sizes):
            raise Wrong(f"after {count(_STEPS, 'step')} with save_every={_SAVE_EVERY} there is no file in the folder")
        self._largest = max(sizes)
        (self.place / "killed").mkdir()

    def _undisturbed(self, name: str, save_every: int) -> tuple[list[Log], list[list[torch.Tensor]]]:
        (self.place / name).mkdir()
        plan = Plan(str(self.place / name), str(self.place / f"{name}.log"), _STEPS, save_every)
        results = self.exam.run_in_processes(attempt, RANKS, plan, timeout=_SECONDS)
        if results is None:
            raise Wrong("a rank was killed, and not by this check: did your code do that?")
        return [read_log(plan.log, rank) for rank in range(RANKS)], results

    def kills_in_a_save(self) -> Iterator[Kill]:
        """In the middle of a file, before each operation on files, and just after a file was opened."""
        for rank in range(RANKS):
            operations = [what for what, _, draws in self._logs_of_saving[rank].operations if draws == _TEMPLATE]
            if rank == 0 or operations:
                yield Kill(rank, "bytes", self._largest // 2)
            for number, what in enumerate(operations[:_MOST_OPERATIONS]):
                yield Kill(rank, "operation", number)
                if what == "open":
                    yield Kill(rank, "operation", number, opened=True)

    # ── killed ──────────────────────────────────────────────────────────────────────────────────────────────────

    def attempt(self, kill: Kill, power_cut: bool = False) -> None:
        """Call `train` until this kill, and look at what it has done."""
        self._run(kill)
        self._last, self._power_lost = kill, {}
        if power_cut:
            self._power_lost = cut_power(self.place / "killed", self._synced)

    def to_the_end(self) -> None:
        """Call `train` once more, without a kill."""
        results = self._run(None)
        for rank, weights in enumerate(results or []):
            for found, right in zip(weights, self._weights, strict=False):
                if not _equal(found, right):
                    raise Wrong(f"the weights of rank {rank} at the end are not {_TRUE}: {_apart(found, right)}")

    def in_short(self, kills: int) -> str:
        """What has happened since this was last asked, in which there were so many kills."""
        steps, self.done_twice = self.done_twice, 0
        return f"{count(kills, 'kill')}, {count(steps, 'step')} done once more"

    def _run(self, kill: Kill | None) -> list[list[torch.Tensor]] | None:
        number = self.kills
        plan = Plan(str(self.place / "killed"), str(self.place / f"{number}.log"), _STEPS, _SAVE_EVERY, kill)
        trouble, results = None, None
        try:
            results = self.exam.run_in_processes(attempt, RANKS, plan, timeout=_SECONDS)
        except Wrong as wrong:
            trouble = wrong
        logs = [read_log(plan.log, rank) for rank in range(RANKS)]
        self._require_right(logs, trouble)
        self.kills += results is None
        reached = max((log.rows[-1].step for log in self._last_logs if log.rows), default=0)
        begins = [log.begins for log in logs if log.begins is not None]
        self.done_twice += max(0, reached - min(begins, default=reached))
        self._synced |= {one for log in logs for one in log.synced}
        went_on = set[int].intersection(*(log.went_on for log in logs))
        self._saved = max([self._saved, *(step for step in went_on if step % _SAVE_EVERY == 0)])
        self._last_logs = logs
        return results

    # ── is it right? ────────────────────────────────────────────────────────────────────────────────────────────

    def _require_right(self, logs: Sequence[Log], trouble: Wrong | None) -> None:
        rows = [log.rows for log in logs]
        begins = [log.begins for log in logs]
        known = [begin for begin in begins if begin is not None]
        deviates = _first_difference(rows, self._right)
        if deviates is not None or len(set(known)) > 1:
            for saved in dict.fromkeys([self._saved, *known, *(begin + 1 for begin in known)]):
                if 0 <= saved < _STEPS and (words := _true_run().explanation(rows, saved)) is not None:
                    raise Wrong(f"{self._after()} {words}\n{self._place(deviates, begins)}")
        if len(set(known)) > 1:
            raise Wrong(self._ranks_differ(begins))
        if deviates is not None:
            raise Wrong(f"{self._after()} {self._unknown(deviates)}\n{self._place(deviates, begins)}")
        if known and known[0] < self._saved:
            raise Wrong(self._lost(known[0]))
        if trouble is not None:
            raise self._cannot_go_on(trouble) if self._last is not None else trouble

    def _after(self) -> str:
        if self._last is None:
            return "In the first attempt,"
        return f"{_in_words(self._last, bool(self._power_lost))}. In the next attempt,"

    def _place(self, row: tuple[int, Row] | None, begins: Sequence[int | None]) -> str:
        if row is None:
            return "  " + ", ".join(f"rank {rank} begins after step {begin}" for rank, begin in enumerate(begins))
        rank, found = row
        right = next((one for one in self._right[rank] if one.step == found.step), None)
        if right is None:
            return f"  rank {rank} reports step {found.step}; there are {_STEPS}"
        if found.samples != right.samples:
            samples = f"  step {found.step}: rank {rank} uses the samples {[*found.samples]}"
            return f"{samples}, and should use {[*right.samples]}"
        return f"  step {found.step}: the loss of rank {rank} is {found.loss:.12g}, and should be {right.loss:.12g}"

    def _unknown(self, row: tuple[int, Row]) -> str:
        rank, found = row
        right = next((one for one in self._right[rank] if one.step == found.step), None)
        if right is not None and found.samples != right.samples:
            return "other samples are used than in the undisturbed run: where in the epoch was it?"
        return (
            "the samples are right and the losses are not those of the undisturbed run. What does a step depend on? "
            "Weights, optimizer, schedule, and each rank's random numbers"
        )

    def _ranks_differ(self, begins: Sequence[int | None]) -> str:
        where = ", ".join(f"rank {rank} goes on from step {begin}" for rank, begin in enumerate(begins))
        if self._last is not None and self._last.when in ("operation", "bytes"):
            return (
                f"{_in_words(self._last)}. In the next attempt {where}: parts of two checkpoints. A checkpoint counts "
                "only when all ranks' parts are there; keep the one before until then"
            )
        return f"{self._after()} {where}: every rank goes on from the same checkpoint"

    def _lost(self, begin: int) -> str:
        gone = f"the next attempt goes on from step {begin}, though the checkpoint of step {self._saved} was complete"
        return f"{_in_words(self._last, bool(self._power_lost))}, and {gone}: {self._why_lost()}"

    def _cannot_go_on(self, trouble: Wrong) -> Wrong:
        if self._last is None or (not self._power_lost and self._last.when not in ("operation", "bytes")):
            return Wrong(f"{self._after()} {trouble}")
        words = (
            f"{_in_words(self._last, bool(self._power_lost))}, and the next attempt cannot go on: {self._why_lost()}"
        )
        return Wrong(f"{words}\n  {trouble}")

    def _why_lost(self) -> str:
        """What was wrong with the save, after a kill in it."""
        assert self._last is not None
        if self._power_lost:
            return self._not_synced()
        if self._last.when not in ("operation", "bytes"):
            return f"save after every {_SAVE_EVERY} steps, and let restore take the newest checkpoint"
        done = [what for what, _, draws in self._last_logs[self._last.rank].operations if draws % _SAVE_EVERY == 0]
        if any(what in _REMOVALS for what in done[: None if self._last.when == "bytes" else -1]):
            return (
                "the old checkpoint is deleted before the new one is complete. Keep the old one until the new one has "
                "its name; os.replace needs no deletion"
            )
        if self._last.when == "bytes" or self._last.opened:
            return (
                "the file is written in place, so what was in it is gone before the new bytes are there. Write aside, "
                "under another name, and give it its name with os.replace when it is complete"
            )
        return (
            "at this moment no complete checkpoint has the name that restore looks for. os.replace changes from the "
            "old to the new one in a single operation"
        )

    def _not_synced(self) -> str:
        names = ", ".join([*self._power_lost][:3])
        early = any(self._power_lost.values())
        but = " os.fsync was called before all was written: file.flush() comes first." if early else ""
        return (
            f"of {names} there is the name and no bytes, because nothing had brought them to the disk.{but} Write, "
            "flush, os.fsync(file.fileno()), and only then rename"
        )


def _in_words(kill: Kill | None, power_cut: bool = False) -> str:
    if kill is None:
        return "At the beginning"
    if power_cut:
        return "There was a power cut just after a save"
    rank = f"Rank {kill.rank}"
    if kill.when == "bytes":
        return f"{rank} was killed while it wrote a file of the checkpoint, after {kill.number:,} bytes"
    if kill.when == "operation":
        when = "just after it had opened a file" if kill.opened else f"before operation {kill.number + 1} on files"
        return f"{rank} was killed in a save, {when}"
    when = {"draw": "when it asked for samples", "backward": "in backward", "report": "after a report"}[kill.when]
    return f"{rank} was killed {when}"


def _first_difference(found: Sequence[Sequence[Row]], right: Sequence[Sequence[Row]]) -> tuple[int, Row] | None:
    """The rank and its first row that is not as in the undisturbed run."""
    rows = [(row.step, rank, row) for rank, mine in enumerate(found) for row in mine]
    rows += [
        (after.step, rank, replace(after))
        for rank, mine in enumerate(found)
        for before, after in itertools.pairwise(mine)
        if after.step != before.step + 1
    ]
    for step, rank, row in sorted(rows, key=lambda one: one[:2]):
        if not 1 <= step <= len(right[rank]) or right[rank][step - 1] != row:
            return rank, row
    return None


_true: list[TrueRun] = []


def _true_run() -> TrueRun:
    if not _true:
        _true.append(TrueRun(_STEPS))
    return _true[0]


def _require_whole_run(logs: Sequence[Log]) -> None:
    """Every step is reported once, and every sample is used once an epoch."""
    for rank, log in enumerate(logs):
        steps = [row.step for row in log.rows]
        if steps != [*range(1, _STEPS + 1)]:
            first = next((at for at, step in enumerate(steps) if step != at + 1), len(steps))
            said = f"reports step {steps[first]}" if first < len(steps) else "reports no more"
            raise Wrong(
                f"without any kill, rank {rank} {said} where step {first + 1} should follow: report(step, loss) once "
                f"after each step, from 1 to {_STEPS}"
            )
    for first in range(0, _STEPS, SAMPLES // (BATCH * RANKS)):
        epoch = range(first, first + SAMPLES // (BATCH * RANKS))
        used = [sample for step in epoch for log in logs for sample in log.rows[step].samples]
        if sorted(used) != [*range(SAMPLES)]:
            missing = sorted(set(range(SAMPLES)) - {*used})
            twice = sorted({sample for sample in used if used.count(sample) > 1})
            raise Wrong(
                f"without any kill, steps {first + 1} to {epoch[-1] + 1} are an epoch, and both ranks together should "
                f"use each sample once: not used {missing}, used more than once {twice}"
            )


def _require_learning(rows: Sequence[Sequence[Row]]) -> None:
    """The run is that of the exercise; an answer with other random numbers must at least learn something."""
    losses = [sum(same) / RANKS for same in zip(*([row.loss for row in mine] for mine in rows), strict=True)]
    third = len(losses) // 3
    if not sum(losses[-third:]) < 0.9 * sum(losses[:third]):
        raise Wrong(
            f"without any kill the loss does not fall: {losses[0]:.3g} in step 1, {losses[-1]:.3g} in step {_STEPS}. "
            "Is the training still the one of the exercise?"
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other)


def _apart(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.shape != other.shape:
        return "they have other shapes"
    return f"the largest difference is {(one - other).abs().max().item():.2g}"
