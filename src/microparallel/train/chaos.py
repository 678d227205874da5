"""Break a training run on purpose, by a seed, and compare what comes out with a run that was left alone.

```
undisturbed   1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─ 7 ─ 8                                weights A
disturbed     1 ─ 2 ─ 3 ✗ rank 1 killed                                    started again by itself (--restarts)
                  2 ─ 3 ─ 4 ─ 5 ✗ launcher killed                          started again as a person would
                          4 ─ 5 ─ 6 ─ 7 ─ 8                                weights B: are they A, bit for bit?
```

The run that is disturbed is an ordinary `microparallel train`, in processes of its own; nothing in it knows of this.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from microparallel.errors import ConfigError, MicroparallelError
from microparallel.observe.folders import look
from microparallel.text import count
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import checkpoints
from microparallel.train.checkpoint_reader import Checkpoint, read_whole

KINDS = ("kill-rank", "kill-saving", "kill-launcher", "stop-rank", "full-disk", "corrupt", "kill-writer")
MARK = "MICROPARALLEL_CHAOS"  # in the environment of all that is started here, to find what is left of it
_LOOK = 0.005  # seconds between two looks at the run
_GONE_AFTER = 5.0  # seconds in which a world ends whose launcher was killed
_FULL_FOR = 0.5  # seconds that the disk is full, or until the next fault
_MOST_SECONDS = 600.0

Progress = Callable[[str], None]


@dataclass
class Fault:
    """Something that goes wrong: what, once the run has come to which step, to which rank; and what it cost."""

    kind: str
    step: int
    rank: int
    done: str = ""  # what was done, in words; empty if there was no occasion
    lost: int | None = None  # steps that were done once more
    seconds: float | None = None  # until new ranks had done a step


@dataclass
class Outcome:
    """How a disturbed run ended beside the undisturbed one."""

    faults: list[Fault]
    starts: int  # of the command, the first one too
    steps: int
    same_losses: bool
    same_weights: bool
    largest_difference: float  # of weights and optimizer state
    left: list[str] = field(default_factory=list)  # what the run has left behind

    @property
    def survived(self) -> bool:
        """Whether nothing was lost, and nothing is left."""
        return self.same_losses and self.same_weights and not self.left


def plan(seed: int, faults: int, steps: int, ranks: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Draw what goes wrong, in the order of the steps; every kind comes once before one comes twice."""
    draw = random.Random(seed)
    chosen: list[str] = []
    while len(chosen) < faults:
        chosen += draw.sample([*kinds], len(kinds))
    places = sorted(draw.randrange(1, max(2, steps)) for _ in range(faults))
    return [Fault(kind, step, draw.randrange(ranks)) for kind, step in zip(chosen, places, strict=False)]


def chaos(
    arguments: Sequence[str],
    folder: Path,
    *,
    seed: int = 0,
    faults: int = 6,
    kinds: Sequence[str] = KINDS,
    timeout: float = 5.0,
    tell: Progress = lambda _: None,
) -> Outcome:
    """Train once undisturbed and once disturbed, in `folder`, and compare.

    Args:
        arguments: those of `microparallel train`, without --out, --resume and --restarts.
        folder: a new one, for both runs.
        seed: of the faults.
        faults: how many.
        kinds: of these.
        timeout: seconds after which ranks give up a rank that was stopped.
        tell: shown to people while it goes on.
    """
    for name in ("--out", "--resume", "--restarts"):
        if any(word == name or word.startswith(f"{name}=") for word in arguments):
            raise ConfigError(f"{name}: chaos chooses it itself; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    tell("training undisturbed")
    whole, broken = folder / "undisturbed", folder / "disturbed"
    environment = os.environ | {MARK: f"{os.getpid()}-{time.monotonic_ns()}"}
    shared_before = _shared_memory()
    summary = _undisturbed([*arguments, "--out", str(whole)], environment)
    planned = plan(seed, faults, summary["steps"], summary["ranks"], kinds)
    given = ["--out", str(broken), "--resume", "auto", "--restarts", str(len(planned) + 3)]
    command = _command([*arguments, *given, "--timeout", f"{timeout:g}"])
    run = Disturbed(command, broken, planned, environment, tell)
    starts = run.to_the_end()
    outcome = _compared(whole, broken, planned, starts, summary["steps"])
    outcome.left += _processes_left(environment[MARK])
    outcome.left += [f"/dev/shm/{name}" for name in sorted(_shared_memory() - shared_before)]
    outcome.left += [str(path) for path in broken.rglob(".*") if path.name != ".gitignore"]
    return outcome


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "microparallel", "train", *arguments, "--json"]


def _undisturbed(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    result = subprocess.run(
        _command([*arguments, "--quiet"]), env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise ConfigError(f"the run fails without being disturbed: {result.stderr.strip() or result.stdout.strip()}")
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


# ── disturbing ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Open:
    """A fault that the run has not recovered from: new ranks must have done a step."""

    fault: Fault
    since: float
    reached: int  # the step that the run had come to
    ranks: set[int]  # processes that ran then
    step: int | None = None  # the last that was seen since there are others

    def is_over(self, step: int, ranks: dict[int, int]) -> bool:
        if not ranks or self.ranks & {*ranks.values()}:
            return False
        if self.step is not None and step > self.step:
            self.fault.seconds = time.monotonic() - self.since
            self.fault.lost = max(0, self.reached - self.step)
            return True
        self.step = step
        return False


class Disturbed:
    """A run that is disturbed, and started again as often as need be.

    Args:
        command: which trains, and goes on with the run in the folder if there is one.
        folder: the run's.
        faults: in the order of their steps; what was done, and what it cost, is written into them.
        environment: of the command; what it holds under `MARK` tells its processes from others.
        tell: shown to people while it goes on.
    """

    def __init__(
        self, command: list[str], folder: Path, faults: list[Fault], environment: dict[str, str], tell: Progress
    ) -> None:
        self._command = command
        self._folder = folder
        self._faults = faults
        self._environment = environment
        self._tell = tell
        self._open: list[_Open] = []  # done, and not yet recovered from
        self._undo: tuple[float, Callable[[], None]] | None = None

    def to_the_end(self) -> int:
        """Run until it ends in order; returns how often it was started."""
        deadline = time.monotonic() + _MOST_SECONDS
        waiting = [*self._faults]
        with (self._folder.parent / "disturbed.log").open("wb") as log:
            for start in itertools.count(1):
                # A session of its own: Ctrl-C here does not reach it by itself.
                process = subprocess.Popen(
                    self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
                )
                try:
                    while process.poll() is None:
                        self._look(waiting, process, deadline)
                        time.sleep(_LOOK)
                finally:
                    _end(process, self._environment[MARK])
                if process.returncode == 0:
                    return start
                if start > len(self._faults) + 3:
                    raise MicroparallelError(
                        f"the disturbed run does not come to its end; what it printed is in {log.name}"
                    )
        raise AssertionError("itertools.count ends")  # pragma: no cover

    def _look(self, waiting: list[Fault], process: subprocess.Popen[bytes], deadline: float) -> None:
        if time.monotonic() > deadline:
            raise MicroparallelError(f"the disturbed run takes more than {_MOST_SECONDS:g} s")
        step, ranks = self._step(), self._ranks()
        for one in [*self._open]:
            if one.is_over(step, ranks):
                self._open.remove(one)
        due = bool(waiting) and step >= waiting[0].step
        if self._undo is not None and (due or time.monotonic() > self._undo[0]):
            _, undo = self._undo
            self._undo = None
            undo()
        if due:
            fault = waiting[0]
            if self._do(fault, process, ranks):
                waiting.pop(0)
                if fault.kind not in ("full-disk", "kill-writer"):  # which end no rank
                    self._open.append(_Open(fault, time.monotonic(), step, {*ranks.values()}))
                self._tell(f"step {step}: {fault.done}")

    def _step(self) -> int:
        """The last step that the run has written down."""
        with contextlib.suppress(OSError, ValueError):
            lines = (self._folder / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        return 0

    def _ranks(self) -> dict[int, int]:
        """The processes of the ranks that run now, by rank."""
        flight = self._folder / "flight"
        found = look(flight.resolve()).values() if flight.exists() else ()
        return {one.rank: one.pid for one in found if one.state == "running"}

    def _saved(self) -> dict[int, Path]:
        with contextlib.suppress(OSError):
            return checkpoints(self._folder / "checkpoints")
        return {}

    def _do(self, fault: Fault, process: subprocess.Popen[bytes], ranks: dict[int, int]) -> bool:
        """Let something go wrong; returns whether there was an occasion."""
        if fault.rank not in ranks:
            return False
        pid = ranks[fault.rank]
        saved = self._saved()
        if fault.kind == "kill-saving" and not any((self._folder / "checkpoints").glob(".step-*-writing")):
            return False
        if fault.kind == "corrupt" and len(saved) < 2:
            return False
        writers = _writers(ranks.get(0))
        if fault.kind == "kill-writer" and not writers:
            return False
        if fault.kind == "kill-launcher":
            os.kill(process.pid, signal.SIGKILL)
            fault.done = "the launcher was killed"
        elif fault.kind == "corrupt":  # with the launcher goes what is in memory, so the disk is needed
            _flip_a_byte(saved[max(saved)])
            os.kill(process.pid, signal.SIGKILL)
            fault.done = "the newest checkpoint was damaged and the launcher was killed"
        elif fault.kind == "kill-writer":
            for writer in writers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(writer, signal.SIGKILL)
            fault.done = "the process that writes checkpoints was killed"
        elif fault.kind == "stop-rank":
            os.kill(pid, signal.SIGSTOP)
            fault.done = f"rank {fault.rank} was stopped"
        elif fault.kind == "full-disk":
            self._fill_disk(ranks)
            fault.done = "the disk was full for a moment"
        else:
            os.kill(pid, signal.SIGKILL)
            fault.done = f"{'in saving, ' if fault.kind == 'kill-saving' else ''}rank {fault.rank} was killed"
        return True

    def _fill_disk(self, ranks: dict[int, int]) -> None:
        """Let every write of the ranks to a file fail, as on a full disk, for a while."""
        limits = {}
        for pid in (*ranks.values(), *_writers(ranks.get(0))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[pid][1]))

        def undo() -> None:
            for pid, limit in limits.items():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        self._undo = time.monotonic() + _FULL_FOR, undo


def _writers(first: int | None) -> list[int]:
    """The processes that write checkpoints for rank 0."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{first}/task/{first}/children").read_text(encoding="ascii").split()
        return [int(pid) for pid in children if b"checkpoint_writer" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return []


def _flip_a_byte(folder: Path) -> None:
    [first, *_] = sorted(folder.glob("part-*.safetensors"))
    with first.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Wait until nothing of a run is left; end what is, if this program is interrupted."""
    if process.poll() is None:
        process.kill()
        process.wait()
    deadline = time.monotonic() + _GONE_AFTER
    while (left := _processes_left(mark)) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    for line in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[1]), signal.SIGKILL)
    if left:
        raise MicroparallelError(f"{_GONE_AFTER:g} s after its launcher had ended, there was still {', '.join(left)}")


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _compared(whole: Path, broken: Path, faults: list[Fault], starts: int, steps: int) -> Outcome:
    first, second = (checkpoint.latest(run / "checkpoints")[0] for run in (whole, broken))
    pairs = [*zip(_tensors(first), _tensors(second), strict=True)]
    largest = max((_difference(one, other) for one, other in pairs), default=0.0)
    return Outcome(
        faults,
        starts,
        steps,
        same_losses=_losses(whole) == _losses(broken),
        same_weights=first.step == second.step and all(torch.equal(one, other) for one, other in pairs),
        largest_difference=largest,
    )


def _tensors(found: Checkpoint) -> Iterator[torch.Tensor]:
    for _, tensor in sorted(found.model.items()):
        yield tensor
    for _, state in sorted(read_whole(found.stored_optimizer).get("state", {}).items()):
        yield from (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _losses(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each line: a step that was lost or done twice shows here."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def _processes_left(mark: str) -> list[str]:
    """The processes that still have this run's mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(f"process {path.name}")
    return found


def _shared_memory() -> set[str]:
    with contextlib.suppress(OSError):
        return {path.name for path in Path("/dev/shm").iterdir()}
    return set()


def in_words(outcome: Outcome) -> str:
    """What came of it, in one line."""
    faults = count(sum(bool(fault.done) for fault in outcome.faults), "fault")
    ended = f"{faults}, {count(outcome.starts, 'start')} of the command, {outcome.steps} steps"
    if outcome.left:
        return f"{ended}: it has left {', '.join(outcome.left)}"
    if outcome.survived:
        return f"{ended}: losses and weights are those of the undisturbed run, bit for bit; nothing is left behind"
    return f"{ended}: it is not what the undisturbed run is; largest difference {outcome.largest_difference:.1e}"
