"""All attempts of a training in one folder, killed again and again, held against the one that was left alone.

Every attempt must do what the undisturbed run does, step by step: its samples and losses must be the same, bit for bit,
and it may not begin before a step whose checkpoint was complete. What the learner's files look like does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from microparallel.learn.exam import Exam
from microparallel.learn.graders._killing import SAMPLES, Kill, Log, Plan, Row, cut_power, read_log
from microparallel.learn.verdict import Wrong
from microparallel.text import count

_NEVER = 10**6
_MOST_OPERATIONS = 10  # of a rank's save, before each of which it is killed
_SECONDS = 15.0  # for an attempt, which needs a tenth of one
_REMOVALS = ("os.remove", "os.rmdir")
Rows = Sequence[Sequence[Row]]


@dataclass(frozen=True)
class Training:
    """What an exercise trains, and what it knows of it.

    Args:
        attempt: a body for `Exam.run_in_processes`, which takes a `Plan`; each rank returns its model's tensors.
        ranks: how many there are.
        steps: of the whole run.
        save_every: how many steps.
        require_right: refuses an undisturbed run, given what every rank did and returned.
        waits: whether no rank may begin the step after a save before the checkpoint is complete.
        explanation: the mistake after which ranks that should go on from a saved step do what was found, in words.
    """

    attempt: Callable[..., list[torch.Tensor]]
    ranks: int
    steps: int
    save_every: int
    require_right: Callable[[Sequence[Log], Sequence[Sequence[torch.Tensor]]], None]
    explanation: Callable[[Rows, int], str | None]
    waits: bool = False


@dataclass
class History:
    """All attempts so far, in one folder."""

    exam: Exam
    place: Path
    training: Training
    kills: int = 0
    done_twice: int = 0  # steps
    _saved: int = 0  # a checkpoint of this step is complete: no attempt may begin before it
    _begun: tuple[int, int] = (0, 0)  # the newest step with a save after which a rank has gone on, and that rank
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
        """Run without a kill, and without saving."""
        logs, weights = self.undisturbed("alone", _NEVER)
        self.training.require_right(logs, weights)
        self._right, self._weights = [log.rows for log in logs], weights[0]

    def learn_what_a_save_does(self) -> None:
        """Run without a kill, and save: this must change nothing, and leaves files."""
        logs, _ = self.undisturbed("saving", self.training.save_every)
        for rank, log in enumerate(logs):
            for row, right in zip(log.rows, self._right[rank], strict=False):
                if row != right:
                    what = "samples" if row.samples != right.samples else "loss"
                    raise Wrong(
                        f"saving changes the training: with save_every={self.training.save_every} and without a kill, "
                        f"the {what} of rank {rank} in step {row.step} is not the one without saving. A save must "
                        "change nothing"
                    )
        self._logs_of_saving = logs
        sizes = [file.stat().st_size for file in (self.place / "saving").rglob("*") if file.is_file()]
        if not any(sizes):
            steps = count(self.training.steps, "step")
            raise Wrong(f"after {steps} with save_every={self.training.save_every} there is no file in the folder")
        self._largest = max(sizes)
        (self.place / "killed").mkdir()

    def undisturbed(self, name: str, save_every: int) -> tuple[list[Log], list[list[torch.Tensor]]]:
        """Run without a kill, in a new folder: what every rank did, and what it returned."""
        (self.place / name).mkdir()
        plan = Plan(str(self.place / name), str(self.place / f"{name}.log"), self.training.steps, save_every)
        try:
            results = self.exam.run_in_processes(self.training.attempt, self.training.ranks, plan, timeout=_SECONDS)
        except Wrong as trouble:
            if (together := _written_together(self._logs(plan))) is not None:
                raise Wrong(f"{together}\n  {trouble}") from None
            raise
        if results is None:
            raise Wrong("a rank was killed, and not by this check: did your code do that?")
        return self._logs(plan), results

    def _logs(self, plan: Plan) -> list[Log]:
        return [read_log(plan.log, rank) for rank in range(self.training.ranks)]

    def kills_in_a_save(self) -> Iterator[Kill]:
        """In the middle of a file, before each operation on files, and just after a file was opened."""
        template = 3 * self.training.save_every  # whose save shows what a save does: there are older checkpoints then
        for rank in range(self.training.ranks):
            operations = [what for what, _, draws in self._logs_of_saving[rank].operations if draws == template]
            if rank == 0 or operations:
                yield Kill(rank, "bytes", self._largest // 2)
            for number, what in enumerate(operations[:_MOST_OPERATIONS]):
                yield Kill(rank, "operation", number)
                if what == "open":
                    yield Kill(rank, "operation", number, opened=True)

    # ── killed ──────────────────────────────────────────────────────────────────────────────────────────────────

    def survive(self, kills: Sequence[Kill], power_cut: Kill, *, between: str, saving: str) -> None:
        """Three steps of the check: kills between two saves, in a save, and the power cut and what is left to the end.

        Args:
            kills: those between two saves.
            power_cut: where the power is cut, after all kills in a save.
            between: what the check says of its first step.
            saving: and of the second.
        """
        saves = [*self.kills_in_a_save()]
        # What a kill has spoiled is seen in the attempt after it, which ends with the next kill.
        with self.exam.step(between) as notes:
            for kill in (*kills, saves[0]):
                self.attempt(kill)
            notes.append(self.in_short(len(kills)))
        with self.exam.step(saving) as notes:
            for kill in saves[1:]:
                self.attempt(kill)
            self.attempt(power_cut, power_cut=True)
            notes.append(self.in_short(len(saves)))
        last = "after a power cut, too; and at the end the weights are those of the undisturbed run"
        with self.exam.step(last) as notes:
            self.to_the_end()
            notes.append(f"{count(self.kills, 'kill')}, {count(self.training.steps, 'step')}, bit for bit")

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
                    true = f"as in the undisturbed run of {count(self.training.steps, 'step')}"
                    raise Wrong(f"the weights of rank {rank} at the end are not {true}: {_apart(found, right)}")

    def in_short(self, kills: int) -> str:
        """What has happened since this was last asked, in which there were so many kills."""
        steps, self.done_twice = self.done_twice, 0
        return f"{count(kills, 'kill')}, {count(steps, 'step')} done once more"

    def _run(self, kill: Kill | None) -> list[list[torch.Tensor]] | None:
        training, log = self.training, str(self.place / f"{self.kills}.log")
        plan = Plan(str(self.place / "killed"), log, training.steps, training.save_every, kill)
        trouble, results = None, None
        try:
            results = self.exam.run_in_processes(self.training.attempt, self.training.ranks, plan, timeout=_SECONDS)
        except Wrong as wrong:
            trouble = wrong
        logs = self._logs(plan)
        self._require_right(logs, trouble)
        self.kills += results is None
        reached = max((log.rows[-1].step for log in self._last_logs if log.rows), default=0)
        begins = [log.begins for log in logs if log.begins is not None]
        self.done_twice += max(0, reached - min(begins, default=reached))
        self._synced |= {one for log in logs for one in log.synced}
        went_on = set[int].intersection(*(log.went_on for log in logs))
        self._saved = max([self._saved, *(step for step in went_on if step % self.training.save_every == 0)])
        begun = [(step, rank) for rank, log in enumerate(logs) for step in log.went_on]
        self._begun = max([self._begun, *(one for one in begun if one[0] % self.training.save_every == 0)])
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
                if 0 <= saved < self.training.steps and (words := self.training.explanation(rows, saved)) is not None:
                    raise Wrong(f"{self._after()} {words}\n{self._place(deviates, begins)}")
        if len(set(known)) > 1:
            raise Wrong(self._ranks_differ(begins))
        if deviates is not None:
            raise Wrong(f"{self._after()} {self._unknown(deviates)}\n{self._place(deviates, begins)}")
        if known and known[0] < self._saved:
            raise Wrong(self._lost(known[0]))
        if self.training.waits and known and known[0] < self._begun[0]:
            step, rank = self._begun
            raise Wrong(
                f"{_in_words(self._last, bool(self._power_lost))}, and rank {rank} had begun step {step + 1} already: "
                f"all ranks wait until the checkpoint of step {step} is complete. The next attempt begins after step "
                f"{known[0]}"
            )
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
            return f"  rank {rank} reports step {found.step}; there are {self.training.steps}"
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
            return f"save after every {self.training.save_every} steps, and begin train with the newest checkpoint"
        assert self._last.rank is not None  # all are killed between two saves only
        done = [
            what
            for what, _, draws in self._last_logs[self._last.rank].operations
            if draws % self.training.save_every == 0
        ]
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
            "at this moment no complete checkpoint has the name that the next attempt looks for. os.replace changes "
            "from the old to the new one in a single operation"
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
    rank = "Every rank" if kill.rank is None else f"Rank {kill.rank}"
    if kill.when == "bytes":
        return f"{rank} was killed while it wrote a file of the checkpoint, after {kill.number:,} bytes"
    if kill.when == "operation":
        when = "just after it had opened a file" if kill.opened else f"before operation {kill.number + 1} on files"
        return f"{rank} was killed in a save, {when}"
    when = {"draw": "when it asked for samples", "backward": "in backward", "report": "after a report"}[kill.when]
    return f"{rank} was killed {when}"


def _written_together(logs: Sequence[Log]) -> str | None:
    """Which file several ranks have opened to write it, in the same save."""
    opened = [{(name, draws) for what, name, draws in log.operations if what == "open"} for log in logs]
    for one, other in itertools.combinations(range(len(logs)), 2):
        for name, draws in sorted(opened[one] & opened[other]):
            return (
                f"in step {draws} ranks {one} and {other} both write a file {name}, so several ranks write the same "
                "file: let one of them write it, or give each a file of its own"
            )
    return None


def require_each_step(logs: Sequence[Log], steps: int) -> None:
    """Refuse an undisturbed run that does not report every step once."""
    for rank, log in enumerate(logs):
        found = [row.step for row in log.rows]
        if found != [*range(1, steps + 1)]:
            first = next((at for at, step in enumerate(found) if step != at + 1), len(found))
            said = f"reports step {found[first]}" if first < len(found) else "reports no more"
            raise Wrong(
                f"without any kill, rank {rank} {said} where step {first + 1} should follow: report(step, loss) once "
                f"after each step, from 1 to {steps}"
            )


def require_each_sample(logs: Sequence[Log], steps: int, steps_an_epoch: int) -> None:
    """Refuse an undisturbed run of whole epochs in which a sample is not used once in each."""
    for first in range(0, steps, steps_an_epoch):
        epoch = range(first, first + steps_an_epoch)
        used = [sample for step in epoch for log in logs for sample in log.rows[step].samples]
        if sorted(used) != [*range(SAMPLES)]:
            missing = sorted(set(range(SAMPLES)) - {*used})
            twice = sorted({sample for sample in used if used.count(sample) > 1})
            everybody = "both ranks" if len(logs) == 2 else f"all {len(logs)} ranks"
            raise Wrong(
                f"without any kill, steps {first + 1} to {epoch[-1] + 1} are an epoch, and {everybody} together should "
                f"use each sample once: not used {missing}, used more than once {twice}"
            )


def _first_difference(found: Rows, right: Rows) -> tuple[int, Row] | None:
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


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other)


def _apart(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.shape != other.shape:
        return "they have other shapes"
    return f"the largest difference is {(one - other).abs().max().item():.2g}"
