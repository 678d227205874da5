"""Break a training run on purpose, by a seed, and compare what comes out with a run that was left alone.

```
undisturbed   1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─ 7 ─ 8                                weights A
disturbed     1 ─ 2 ─ 3 ✗ rank 1 killed                                    started again by itself (--restarts)
                  2 ─ 3 ─ 4 ─ 5 ✗ launcher killed                          started again as a person would
                          4 ─ 5 ─ 6 ─ 7 ─ 8                                weights B: are they A, bit for bit?
```

The run that is disturbed is an ordinary `microparallel train`, in processes of its own; nothing in it knows of this.
With `fewer-ranks` it goes on with another number of ranks, as if a machine had been lost and come back: then sums are
made in another order, and what is compared may differ by 1e-12, in float64.
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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from microparallel.errors import ConfigError, MicroparallelError
from microparallel.observe.flight_file import Snapshot, read
from microparallel.observe.folders import look
from microparallel.observe.processes import ask_for_stack, state_of
from microparallel.text import count
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import checkpoints
from microparallel.train.checkpoint_reader import Checkpoint, read_whole
from microparallel.train.run_folder import RunFolder

KINDS = (
    "kill-rank",
    "kill-backward",
    "kill-call",
    "kill-saving",
    "kill-launcher",
    "kill-writer",
    "stop-rank",
    "full-disk",
    "corrupt",
)
FEWER = "fewer-ranks"  # only if it is asked for: it changes the last bits
ROUNDING = 1e-12  # by which weights and losses may differ if the number of ranks has changed, in float64
MARK = "MICROPARALLEL_CHAOS"  # in the environment of all that is started here, to find what is left of it
_LOOK = 0.005  # seconds between two looks at the run
_GONE_AFTER = 5.0  # seconds in which a world ends whose launcher was killed
_FULL_FOR = 0.5  # seconds that the disk is full, or until the next fault
_MOST_SECONDS = 600.0
# Of temporary files: those of ranks that died, for `microparallel why`, for a day; what torch has compiled.
_MAY_STAY = (f"microparallel-{os.getuid()}", "torchinductor_")
_LAST_LINES = 10
_STOPPED_AFTER = 0.1  # seconds in which a process stops that was told to

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
    tolerance: float = 0.0  # by which losses and weights that count as the same may differ
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
    with tempfile.TemporaryDirectory() as temporary:
        environment = os.environ | {MARK: f"{os.getpid()}-{time.monotonic_ns()}", "TMPDIR": temporary}
        environment.pop("XDG_RUNTIME_DIR", None)  # flight files lie there otherwise
        shared_before = _shared_memory()
        summary = _undisturbed([*arguments, "--out", str(whole)], environment)
        planned = plan(seed, faults, summary["steps"], summary["ranks"], kinds)
        given = ["--out", str(broken), "--resume", "auto", "--restarts", str(len(planned) + 3)]
        command = _command([*arguments, *given, "--timeout", f"{timeout:g}"])
        others = _other_ranks(summary) if FEWER in kinds else []
        run = Disturbed(command, broken, planned, environment, tell, others)
        starts = run.to_the_end()
        outcome = _compared(whole, broken, planned, starts, summary["steps"], ROUNDING if others else 0.0)
        outcome.left += _processes_left(environment[MARK])
        outcome.left += [f"/dev/shm/{name}" for name in sorted(_shared_memory() - shared_before)]
        outcome.left += [str(path) for path in broken.rglob(".*") if path.name != ".gitignore"]
        outcome.left += [str(path) for path in Path(temporary).iterdir() if not path.name.startswith(_MAY_STAY)]
    return outcome


def _other_ranks(summary: dict[str, Any]) -> list[list[str]]:
    """The flags of each number of ranks, or of pipelines, with which the run can go on; its own come last."""
    flag, most = ("--dp", summary["dp"]) if "pp" in summary else ("--ranks", summary["ranks"])
    least = 2 if "shard" in summary else 1  # as one rank has nobody to share with
    if most <= least:
        raise ConfigError(f"--kinds {FEWER}: the run cannot have fewer {'pipelines' if flag == '--dp' else 'ranks'}")
    if summary["precision"] != "float64":
        raise ConfigError(
            f"--kinds {FEWER}: with other ranks, sums in {summary['precision']} are rounded in another way; "
            "to compare them, add --precision float64"
        )
    return [[flag, str(number)] for number in range(least, most + 1)]


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
        others: flags for each number of ranks with which the run can go on; those that it begins with come last.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        faults: list[Fault],
        environment: dict[str, str],
        tell: Progress,
        others: Sequence[list[str]] = (),
    ) -> None:
        self._command = command
        self._others = others
        self._chosen = len(others) - 1
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
                    [*self._command, *self._flags_of_ranks()],
                    env=self._environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
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
                    printed = "".join(Path(log.name).read_text(errors="replace").splitlines(True)[-_LAST_LINES:])
                    raise MicroparallelError(f"the disturbed run does not come to its end; it printed last:\n{printed}")
        raise AssertionError("itertools.count ends")  # pragma: no cover

    def _look(self, waiting: list[Fault], process: subprocess.Popen[bytes], deadline: float) -> None:
        if time.monotonic() > deadline:
            raise MicroparallelError(f"the disturbed run takes more than {_MOST_SECONDS:g} s")
        step, flights = RunFolder(self._folder).last_step(), self._flights()
        ranks = {rank: one.pid for rank, (_, one) in flights.items()}
        for one in [*self._open]:
            if one.is_over(step, ranks):
                self._open.remove(one)
        if self._undo is not None and time.monotonic() > self._undo[0]:
            self._empty_disk()
        for fault in [fault for fault in waiting if step >= fault.step]:  # for the first there may be no occasion yet
            if (act := self._occasion(fault, process, flights)) is not None:
                self._empty_disk()
                fault.done = act()
                waiting.remove(fault)
                if fault.kind not in ("full-disk", "kill-writer"):  # which end no rank
                    self._open.append(_Open(fault, time.monotonic(), step, {*ranks.values()}))
                self._tell(f"step {step}: {fault.done}")
                break

    def _flights(self) -> dict[int, tuple[Path, Snapshot]]:
        """The flight files of the ranks that run now, by rank, and what is in them."""
        flight = self._folder / "flight"
        found = look(flight.resolve()).items() if flight.exists() else ()
        return {one.rank: (path, one) for path, one in found if one.state == "running"}

    def _saved(self) -> dict[int, Path]:
        with contextlib.suppress(OSError):
            return checkpoints(self._folder / "checkpoints")
        return {}

    def _flags_of_ranks(self) -> list[str]:
        return self._others[self._chosen] if self._others else []

    def _occasion(
        self, fault: Fault, process: subprocess.Popen[bytes], flights: dict[int, tuple[Path, Snapshot]]
    ) -> Callable[[], str] | None:
        """What lets this go wrong now, and says in words what it did; None if there is no occasion."""
        if not flights:
            return None
        rank = sorted(flights)[fault.rank % len(flights)]  # there may be fewer than the run began with
        path, found = flights[rank]
        kill = _killing(found.pid, f"rank {rank} was killed")
        kill_launcher = _killing(process.pid, "the launcher was killed")
        if fault.kind == "kill-rank":
            return kill
        if fault.kind == "kill-backward":
            stack = ask_for_stack(path, found.pid, timeout=_STOPPED_AFTER)
            in_backward = any(place.function in ("backward", "_engine_run_backward") for place in stack)
            return (lambda: f"in backward, {kill()}") if in_backward else None
        if fault.kind == "kill-call":
            call = _stopped_in_call(path, found.pid)
            return None if call is None else lambda: f"in {call}, {kill()}"
        if fault.kind == "kill-saving":
            saving = any((self._folder / "checkpoints").glob(".step-*-writing"))
            return (lambda: f"in saving, {kill()}") if saving else None
        if fault.kind == "kill-writer":
            writers = _writers(flights[0][1].pid if 0 in flights else None)
            return _killing(writers[0], "the process that writes checkpoints was killed") if writers else None
        if fault.kind == "corrupt":
            saved = self._saved()
            if len(saved) < 2:
                return None

            def corrupt() -> str:  # with the launcher goes what is in memory, so the disk is needed
                _flip_a_byte(saved[max(saved)])
                return f"the newest checkpoint was damaged and {kill_launcher()}"

            return corrupt
        if fault.kind == FEWER:

            def lose() -> str:
                self._chosen = (self._chosen + 1 + fault.rank % (len(self._others) - 1)) % len(self._others)
                return f"{kill_launcher()}, and the run went on with {' '.join(self._flags_of_ranks())}"

            return lose
        if fault.kind == "stop-rank":
            return _killing(found.pid, f"rank {rank} was stopped", signal.SIGSTOP)
        if fault.kind == "full-disk":
            return lambda: self._fill_disk([one.pid for _, one in flights.values()])
        return kill_launcher

    def _fill_disk(self, ranks: list[int]) -> str:
        """Let every write of the ranks to a file fail, as on a full disk, for a while."""
        limits = {}
        for pid in (*ranks, *(writer for rank in ranks for writer in _writers(rank))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, limits[pid][1]))

        def undo() -> None:
            for pid, limit in limits.items():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        self._undo = time.monotonic() + _FULL_FOR, undo
        return "the disk was full for a moment"

    def _empty_disk(self) -> None:
        """There is room again."""
        if self._undo is not None:
            _, undo = self._undo
            self._undo = None
            undo()


def _killing(pid: int, words: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], str]:
    """Send this signal to a process, if it still runs, and say so in these words."""

    def kill() -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return words

    return kill


def _stopped_in_call(flight_file: Path, pid: int) -> str | None:
    """The call to other ranks that a rank is in, which is stopped there; None, and nothing is stopped, if in none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + _STOPPED_AFTER
        while state_of(pid)[0] == "running" and time.monotonic() < deadline:
            time.sleep(_LOOK / 10)
        now = read(flight_file)
        calls = [] if now is None else [record.name for record in now.records if record.waits]
        if calls and state_of(pid)[0] == "stopped":
            return calls[-1]
        os.kill(pid, signal.SIGCONT)
    return None


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


def _compared(
    whole: Path, broken: Path, faults: list[Fault], starts: int, steps: int, tolerance: float = 0.0
) -> Outcome:
    first, second = (checkpoint.latest(run / "checkpoints")[0] for run in (whole, broken))
    pairs = [*zip(_tensors(first), _tensors(second), strict=True)]
    largest = max((_difference(one, other) for one, other in pairs), default=0.0)
    return Outcome(
        faults,
        starts,
        steps,
        same_losses=_are_alike(_losses(whole), _losses(broken), tolerance),
        same_weights=first.step == second.step
        and (all(torch.equal(one, other) for one, other in pairs) or largest <= tolerance),
        largest_difference=largest,
        tolerance=tolerance,
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


def _are_alike(first: list[tuple[int, float]], second: list[tuple[int, float]], tolerance: float) -> bool:
    if tolerance == 0 or len(first) != len(second):
        return first == second
    return all(a == b and abs(x - y) <= tolerance for (a, x), (b, y) in zip(first, second, strict=True))


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
    if outcome.survived and outcome.tolerance:
        return (
            f"{ended}: losses and weights are those of the undisturbed run within {outcome.tolerance:g} (largest "
            f"difference {outcome.largest_difference:.1e}); nothing is left behind"
        )
    if outcome.survived:
        return f"{ended}: losses and weights are those of the undisturbed run, bit for bit; nothing is left behind"
    return f"{ended}: it is not what the undisturbed run is; largest difference {outcome.largest_difference:.1e}"
