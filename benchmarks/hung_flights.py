"""Record the flights that the exercise read-a-hang is graded with: real ranks that hang, of which one is to blame.

    python benchmarks/hung_flights.py                                   # all; writes learn/graders/hung_flights.json
    python benchmarks/hung_flights.py --only "is killed" --to one.json  # those whose name has that in it

Each run is let hang; what `microparallel why` would read of it then is kept, without what differs from run to run and
says nothing about the cause (process numbers, stacks, places of files).
"""

# ruff: noqa: D103  (the names of the runs say what goes wrong)

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

import microparallel as mp
from microparallel.learn.graders._flights import HungRun, to_text
from microparallel.observe.flight_file import Snapshot
from microparallel.observe.folders import FOLDER_VARIABLE, look

FILE = Path(mp.__file__).parent / "learn" / "graders" / "hung_flights.json"
_SETTLED = 0.3  # seconds for which every waiting rank has waited
_LIMIT = 20.0  # seconds for a run


def returns_early(comms: mp.Comms, culprit: int) -> None:
    """One rank has a batch less than the others."""
    for _ in range(3 if comms.rank == culprit else 4):
        comms.all_reduce(torch.ones(64))


def sends_no_message(comms: mp.Comms, culprit: int) -> None:
    """A rank waits for a message, and another one waits for that rank."""
    comms.barrier()
    after, last = (culprit + 1) % comms.world_size, (culprit + 2) % comms.world_size
    if comms.rank == after:
        comms.recv_tensor((8,), culprit)
        comms.send_tensor(torch.ones(8), last)
    elif comms.rank == last:
        comms.recv_tensor((8,), after)


def swaps_two_calls(comms: mp.Comms, culprit: int) -> None:
    comms.barrier()
    if comms.rank == culprit:
        comms.all_gather(torch.ones(16))
        comms.reduce(torch.ones(16))
    else:
        comms.reduce(torch.ones(16))
        comms.all_gather(torch.ones(16))


def evaluates_alone(comms: mp.Comms, culprit: int) -> None:
    """One rank has come to the broadcast, and the others still sum up their loss."""
    comms.all_reduce(torch.ones(32))
    comms.all_reduce(torch.ones(32))
    if comms.rank == culprit:
        comms.broadcast(torch.ones(32))
    comms.all_reduce(torch.ones(1))
    comms.broadcast(torch.ones(32))


def has_a_larger_batch(comms: mp.Comms, culprit: int) -> None:
    """Gloo ends a process that gets more bytes than it has asked for, and that is another rank than the culprit."""
    comms.all_reduce(torch.ones(10))
    comms.all_reduce(torch.ones(9 if comms.rank == culprit else 4))
    comms.barrier()


def is_killed(comms: mp.Comms, culprit: int) -> None:
    comms.all_reduce(torch.ones(128))
    if comms.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    comms.all_reduce(torch.ones(128))


def is_killed_in_the_call(comms: mp.Comms, culprit: int) -> None:
    """A rank waits like all others when it is killed; the last one comes after that."""
    comms.all_reduce(torch.ones(128))
    if comms.rank == culprit:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if comms.rank == (culprit + 1) % comms.world_size:
        time.sleep(0.4)
    comms.all_reduce(torch.ones(128))


def reads_a_slow_disk(comms: mp.Comms, culprit: int) -> None:
    for step in range(3):
        if comms.rank == culprit and step == 2:
            time.sleep(60)
        comms.all_reduce(torch.ones(64))


def computes_at_the_end_of_a_line(comms: mp.Comms, culprit: int) -> None:
    """Each rank waits for the next one's message, and the last one computes."""
    comms.barrier()
    if comms.rank == culprit:
        time.sleep(60)
    else:
        comms.recv_tensor((4,), (comms.rank + 1) % comms.world_size)
    comms.send_tensor(torch.ones(4), (comms.rank - 1) % comms.world_size)


@dataclass(frozen=True, slots=True)
class Run:
    """What the ranks do, how many there are and how they talk; who is to blame, and why."""

    function: Callable[[mp.Comms, int], None]
    ranks: int
    transport: str
    culprit: int
    reason: str

    def __str__(self) -> str:
        return f"{self.function.__name__.replace('_', ' ')}, {self.ranks} ranks"


RUNS = (
    Run(reads_a_slow_disk, 3, "shm", 1, "still computing"),
    Run(reads_a_slow_disk, 4, "gloo", 0, "still computing"),
    Run(computes_at_the_end_of_a_line, 4, "shm", 3, "still computing"),
    Run(returns_early, 3, "shm", 2, "missing call"),
    Run(returns_early, 2, "gloo", 0, "missing call"),
    Run(sends_no_message, 4, "shm", 1, "missing call"),
    Run(is_killed, 3, "shm", 2, "dead"),
    Run(is_killed_in_the_call, 3, "gloo", 1, "dead"),
    Run(swaps_two_calls, 4, "gloo", 1, "other order"),
    Run(evaluates_alone, 4, "gloo", 0, "other order"),
    Run(has_a_larger_batch, 4, "gloo", 2, "other shape"),
    Run(has_a_larger_batch, 3, "gloo", 0, "other shape"),
)


def record(run: Run) -> HungRun:
    """Let it hang, and keep what its ranks have written by then."""
    with tempfile.TemporaryDirectory() as folder, _started(run, folder):
        deadline = time.monotonic() + _LIMIT
        while time.monotonic() < deadline:
            if flights := _hung(sorted(look(Path(folder)).values(), key=lambda one: one.rank), run):
                return HungRun(str(run), run.culprit, run.reason, tuple(flights))
            time.sleep(0.02)
    raise SystemExit(f"{run}: it did not hang")


@contextlib.contextmanager
def _started(run: Run, folder: str) -> Iterator[None]:
    """Start the ranks as processes that nobody watches: no launcher ends the others when one has died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = []
    try:
        for rank in range(run.ranks):
            if (pid := os.fork()) == 0:
                environment = shared | {"RANK": rank, "LOCAL_RANK": rank, FOLDER_VARIABLE: folder}
                os.environ.update({name: str(value) for name, value in environment.items()})
                _be_a_rank(run)
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _be_a_rank(run: Run) -> NoReturn:
    try:
        torch.set_num_threads(1)
        comms = mp.connect(run.transport, device="cpu")
        try:
            run.function(comms, run.culprit)
            comms.flight.finishes()
        except mp.errors.CommsError as error:
            comms.flight.ends_with(error)
        time.sleep(2 * _LIMIT)
    finally:
        os._exit(1)


def _hung(flights: Sequence[Snapshot], run: Run) -> list[Snapshot]:
    """The flights, if all ranks are there and have got stuck; else none."""
    if len(flights) < run.ranks:
        return []
    culprit, others = flights[run.culprit], [one for one in flights if one.rank != run.culprit]
    stuck = {
        "dead": culprit.state == "ended" and all(one.current is not None for one in others),
        "missing call": culprit.ending == "finished" and all(one.ending == "finished" or _waits(one) for one in others),
        "still computing": _computes(culprit) and all(_waits(one) for one in others),
        "other order": all(_waits(one) or one.state == "ended" for one in flights),
        "other shape": any(one.state == "ended" for one in others),
    }
    return list(flights) if stuck[run.reason] else []


def _waits(one: Snapshot) -> bool:
    return one.state == "running" and one.current is not None and one.now - one.current.since > _SETTLED


def _computes(one: Snapshot) -> bool:
    last = one.last
    return one.current is None and last is not None and last.end is not None and one.now - last.end > _SETTLED


def main(
    only: Annotated[str, typer.Option(help="only runs whose name has this in it")] = "",
    to: Annotated[Path, typer.Option(help="the file to write")] = FILE,
) -> None:
    """Record all of them."""
    found = []
    for run in RUNS:
        if only in str(run):
            found.append(record(run))
            print(found[-1].name)
    to.write_text(to_text(found), "utf-8")


if __name__ == "__main__":
    typer.run(main)
