"""Over thirty ways to hang, die or disagree, on real ranks: is the right rank named, with the right line, in time?

    python benchmarks/hangs.py                     # all of them: some minutes
    python benchmarks/hangs.py --only deadlock     # those whose name has that in it
    python benchmarks/hangs.py --seed 7            # other ranks are guilty, after other numbers of steps
    python benchmarks/hangs.py --cost              # what the flight recorder costs a call

Every scenario ends in an error, or in a world that is asked about as `microparallel why` does. The first sentence must
begin with the kind of the fault, name the guilty rank (of a deadlock, all of them) and the line that ends in `# here`;
and it must be there at most two seconds after the limit.
"""

# ruff: noqa: D103  (the names of the scenarios say what goes wrong)

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import microparallel as mp
from microparallel.observe import folders
from microparallel.observe.diagnosis import diagnose
from microparallel.observe.flight_recorder import FlightRecorder
from microparallel.observe.folders import gather

LIMIT = 1.5  # seconds a world may hang before it is asked
GRACE = 2.0
KINDS = "death|stopped|wrong order|mismatched \\w+|deadlock|missing rank|straggler|transfer"


@dataclass(frozen=True, slots=True)
class Setup:
    """What the ranks of a scenario all know."""

    guilty: int
    steps: int  # that go well before
    size: int

    def tensor(self) -> torch.Tensor:
        """Something to send."""
        return torch.ones(self.size)


def warm_up(comms: mp.Comms, setup: Setup) -> None:
    """Steps that go well."""
    for step in range(setup.steps):
        comms.flight.at_step(step)
        comms.all_reduce(setup.tensor())


# ── wrong order ─────────────────────────────────────────────────────────────────────────────────────────────────────


def other_call(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        comms.broadcast(setup.tensor())  # here
    comms.all_reduce(setup.tensor())


def swapped_calls(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        comms.all_gather(setup.tensor())  # here
        comms.reduce(setup.tensor())
    else:
        comms.reduce(setup.tensor())
        comms.all_gather(setup.tensor())


def other_call_of_torch(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        dist.broadcast(setup.tensor(), 0)  # here
    dist.all_reduce(setup.tensor())


# ── mismatches ──────────────────────────────────────────────────────────────────────────────────────────────────────


def other_shape(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        comms.all_reduce(torch.ones(setup.size + 1))  # here
    else:
        comms.all_reduce(setup.tensor())


def other_shape_waits(comms: mp.Comms, setup: Setup) -> None:
    """A shape so much larger that gloo waits for the rest of it."""
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        comms.all_gather(torch.ones(setup.size, 3))  # here
    else:
        comms.all_gather(torch.ones(setup.size))
    comms.barrier()


def other_dtype(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        comms.all_reduce(setup.tensor().to(torch.int32))  # here
    else:
        comms.all_reduce(setup.tensor())


def other_op_of_torch(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        dist.all_reduce(setup.tensor(), op=dist.ReduceOp.MAX)  # here
    else:
        dist.all_reduce(setup.tensor())


def other_message(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    other = (setup.guilty + 1) % comms.world_size
    if comms.rank == other:
        comms.send_tensor(setup.tensor(), setup.guilty)
    elif comms.rank == setup.guilty:
        comms.recv_tensor((setup.size + 1,), other)  # here
    comms.barrier()


# ── a rank that is missing ──────────────────────────────────────────────────────────────────────────────────────────


def leaves_early(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank != setup.guilty:
        comms.all_reduce(setup.tensor())  # here


def leaves_early_of_torch(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank != setup.guilty:
        dist.all_reduce(setup.tensor())  # here


def nobody_receives(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == (setup.guilty + 1) % comms.world_size:
        comms.send_tensor(torch.ones(1_000_000), setup.guilty)  # here


def goes_on_elsewhere(comms: mp.Comms, setup: Setup) -> None:
    """One rank of a group forgets the group's call, and goes on with a friend."""
    friend = (setup.guilty + 1) % comms.world_size
    pair = comms.group(sorted((setup.guilty, friend)))
    rest = comms.group([rank for rank in range(comms.world_size) if rank != friend])
    warm_up(comms, setup)
    if rest is not None and comms.rank != setup.guilty:
        rest.all_reduce(setup.tensor())  # here
    while pair is not None:
        pair.all_reduce(setup.tensor())
        time.sleep(0.01)


# ── stragglers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sleeps(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        time.sleep(60)  # here
    comms.all_reduce(setup.tensor())


def computes(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    matrix = torch.rand(300, 300)
    while comms.rank == setup.guilty:
        matrix = matrix @ matrix / matrix.norm()  # here
    comms.barrier()


def computes_of_torch(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    while comms.rank == setup.guilty:
        sorted(range(100_000), key=lambda number: -number)  # here
    dist.barrier()


def is_late_with_a_message(comms: mp.Comms, setup: Setup) -> None:
    """And the one who waits for it keeps the others waiting."""
    warm_up(comms, setup)
    other = (setup.guilty + 1) % comms.world_size
    if comms.rank == setup.guilty:
        time.sleep(60)  # here
        comms.send_tensor(setup.tensor(), other)
    if comms.rank == other:
        comms.recv_tensor((setup.size,), setup.guilty)
    if comms.rank == (other + 1) % comms.world_size:
        comms.recv_tensor((setup.size,), other)


def is_late_for_ddp(comms: mp.Comms, setup: Setup) -> None:
    """Torch's own DDP waits in C++, for calls that nobody waits for in Python."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(setup.size, 1))
    for _ in range(3):
        model(torch.ones(1, setup.size)).sum().backward()
    if comms.rank == setup.guilty:
        time.sleep(60)  # here
    model(torch.ones(1, setup.size)).sum().backward()


def times_out(comms: mp.Comms, setup: Setup) -> None:
    """A call with a limit of its own: whoever waits says why."""
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        time.sleep(60)  # here
    comms.all_reduce(setup.tensor(), async_op=True).wait(timeout=LIMIT)


# ── deadlocks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def all_receive(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    comms.recv_tensor((setup.size,), (comms.rank + 1) % comms.world_size)  # here
    comms.send_tensor(setup.tensor(), (comms.rank - 1) % comms.world_size)


def all_receive_of_torch(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    dist.recv(setup.tensor(), (comms.rank + 1) % comms.world_size)  # here
    dist.send(setup.tensor(), (comms.rank - 1) % comms.world_size)


def all_send(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    tensor = comms.empty(1_000_000)  # in shared memory, where a send waits until it has been read
    comms.send_tensor(tensor, (comms.rank + 1) % comms.world_size)  # here
    comms.recv_tensor((1_000_000,), (comms.rank - 1) % comms.world_size)


def message_against_collective(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        comms.recv_tensor((setup.size,), (setup.guilty + 1) % comms.world_size)  # here
    comms.barrier()
    if comms.rank == (setup.guilty + 1) % comms.world_size:
        comms.send_tensor(setup.tensor(), setup.guilty)


def groups_in_two_orders(comms: mp.Comms, setup: Setup) -> None:
    one, other = comms.group(range(comms.world_size)), comms.group(range(comms.world_size))
    assert one is not None and other is not None
    warm_up(comms, setup)
    if comms.rank == setup.guilty:
        one, other = other, one
    one.all_reduce(setup.tensor())  # here
    other.all_reduce(setup.tensor())


# ── deaths ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_killed(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    comms.barrier()  # here
    if comms.rank == setup.guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    comms.all_reduce(setup.tensor())


def is_killed_of_torch(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    dist.barrier()  # here
    if comms.rank == setup.guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(setup.tensor())


def exits(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    comms.barrier()  # here
    if comms.rank == setup.guilty:
        os._exit(7)
    comms.all_reduce(setup.tensor())


def is_stopped(comms: mp.Comms, setup: Setup) -> None:
    warm_up(comms, setup)
    comms.barrier()  # here
    if comms.rank == setup.guilty:
        os.kill(os.getpid(), signal.SIGSTOP)
    comms.all_reduce(setup.tensor())


# ── plain torch programs, started by nobody we know ─────────────────────────────────────────────────────────────────


def script_computes(rank: int, setup: Setup) -> None:
    dist.all_reduce(setup.tensor())
    while rank == setup.guilty:
        time.sleep(0.01)  # here
    dist.all_reduce(setup.tensor())


def script_receives(rank: int, setup: Setup) -> None:
    dist.all_reduce(setup.tensor())
    dist.recv(setup.tensor(), (rank + 1) % dist.get_world_size())  # here


def script_is_stopped(rank: int, setup: Setup) -> None:
    dist.all_reduce(setup.tensor())  # here
    if rank == setup.guilty:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(setup.tensor())


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to go wrong.

    Attributes:
        function: what the ranks do; a line of it ends in `# here`.
        transport: shm or gloo (with mp.launch), or script: processes of their own on torch's backend "microparallel".
        ranks: how many.
        kind: what the diagnosis must begin with.
        everybody: the guilty ones are all ranks, not one.
    """

    function: Callable[..., None]
    transport: str
    ranks: int
    kind: str
    everybody: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.function.__name__.replace('_', ' ')}, {self.transport}, {self.ranks} ranks"


SCENARIOS = (
    Scenario(other_call, "shm", 3, "wrong order"),
    Scenario(other_call, "gloo", 3, "wrong order"),
    Scenario(swapped_calls, "gloo", 4, "wrong order"),
    Scenario(other_call_of_torch, "shm", 3, "wrong order"),
    Scenario(other_shape, "shm", 3, "mismatched shape"),
    Scenario(other_shape_waits, "gloo", 3, "mismatched shape"),
    Scenario(other_dtype, "shm", 4, "mismatched dtype"),
    Scenario(other_op_of_torch, "shm", 3, "mismatched op"),
    Scenario(other_message, "shm", 2, "mismatched shape"),
    Scenario(leaves_early, "shm", 3, "missing rank"),
    Scenario(leaves_early, "gloo", 4, "missing rank"),
    Scenario(leaves_early_of_torch, "shm", 2, "missing rank"),
    Scenario(nobody_receives, "gloo", 2, "missing rank"),
    Scenario(goes_on_elsewhere, "gloo", 4, "missing rank"),
    Scenario(sleeps, "shm", 3, "straggler"),
    Scenario(computes, "gloo", 4, "straggler"),
    Scenario(computes_of_torch, "shm", 3, "straggler"),
    Scenario(is_late_with_a_message, "gloo", 3, "straggler"),
    Scenario(is_late_for_ddp, "shm", 2, "straggler"),
    Scenario(times_out, "shm", 3, "straggler"),
    Scenario(all_receive, "shm", 2, "deadlock", everybody=True),
    Scenario(all_receive, "gloo", 3, "deadlock", everybody=True),
    Scenario(all_receive_of_torch, "shm", 3, "deadlock", everybody=True),
    Scenario(all_send, "shm", 2, "deadlock", everybody=True),
    Scenario(message_against_collective, "gloo", 2, "deadlock", everybody=True),
    Scenario(groups_in_two_orders, "shm", 2, "deadlock", everybody=True),
    Scenario(is_killed, "gloo", 4, "death"),
    Scenario(is_killed_of_torch, "shm", 3, "death"),
    Scenario(exits, "shm", 2, "death"),
    Scenario(is_stopped, "shm", 3, "stopped"),
    Scenario(is_stopped, "gloo", 2, "stopped"),
    Scenario(script_computes, "script", 3, "straggler"),
    Scenario(script_receives, "script", 2, "deadlock", everybody=True),
    Scenario(script_is_stopped, "script", 2, "stopped"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a scenario went."""

    sentence: str
    seconds: float
    wrong: str  # empty: all is as it should be


def setup_of(scenario: Scenario, seed: int) -> Setup:
    """Who is guilty, and what happens before."""
    chance = random.Random(f"{seed} {scenario}")
    return Setup(chance.randrange(scenario.ranks), chance.randrange(1, 40), chance.randrange(2, 2000))


def run(scenario: Scenario, seed: int, pool: mp.Pool) -> Verdict:
    """Let it happen, and look at what is said about it."""
    setup = setup_of(scenario, seed)
    if scenario.transport == "script":
        sentence, seconds = ask_about_script(scenario, setup)
    else:
        sentence, seconds = _launch(scenario, setup, pool)
    return Verdict(sentence, seconds, _what_is_wrong(scenario, setup, sentence, seconds))


def _launch(scenario: Scenario, setup: Setup, pool: mp.Pool) -> tuple[str, float]:
    warm = _ddp_once if scenario.function is is_late_for_ddp else _nothing
    pool.run(warm, scenario.ranks, transport=scenario.transport)  # what has to be imported is no hang
    start = time.monotonic()
    limit = 2 * LIMIT if scenario.function is times_out else LIMIT
    try:
        pool.run(scenario.function, scenario.ranks, setup, transport=scenario.transport, timeout=limit)
    except mp.errors.LaunchError as error:
        found = re.search(rf"^\s*((?:{KINDS}): .*)$", str(error), re.MULTILINE)
        return (found.group(1) if found else str(error)), time.monotonic() - start
    return "nothing went wrong", time.monotonic() - start


def _nothing(comms: mp.Comms) -> None:
    comms.barrier()


def _ddp_once(_: mp.Comms) -> None:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()


def _what_is_wrong(scenario: Scenario, setup: Setup, sentence: str, seconds: float) -> str:
    circle = " → ".join(map(str, (*range(scenario.ranks), 0)))
    begins = f"{scenario.kind}: {circle}: " if scenario.everybody else f"{scenario.kind}: rank {setup.guilty} "
    if not sentence.startswith(begins):
        return f"it should begin with {begins!r}"
    if not re.search(rf"{Path(__file__).name}:{line_of(scenario.function)}\b", sentence):
        return f"line {line_of(scenario.function)} is not named"
    return "" if seconds <= LIMIT + GRACE else "too late"


def line_of(function: Callable[..., Any]) -> int:
    """The number of the line that ends in `# here`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))


# ── programs of their own ───────────────────────────────────────────────────────────────────────────────────────────


def ask_about_script(scenario: Scenario, setup: Setup) -> tuple[str, float]:
    """Start the ranks as any launcher would, and ask about one of them when it has waited for long enough."""
    with _started(scenario, setup) as processes:
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            folder = folders.folder_of_process(processes[0].pid)
            snapshots = gather(folder) if folder is not None else []
            waits = [one.now - one.current.since for one in snapshots if one.current is not None]
            if waits and max(waits) > LIMIT:
                findings = diagnose(snapshots)
                if findings:
                    return findings[0].text, max(waits)
            time.sleep(0.1)
    return "nothing was found", 50.0


@contextlib.contextmanager
def _started(scenario: Scenario, setup: Setup) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(scenario.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ["--script", scenario.function.__name__, str(setup.guilty), str(setup.steps), str(setup.size)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(scenario.ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run_script(name: str, guilty: str, steps: str, size: str) -> None:
    from microparallel._torch_entry import register

    register()  # torch does it by itself where the package is installed
    dist.init_process_group("microparallel")
    globals()[name](dist.get_rank(), Setup(int(guilty), int(steps), int(size)))


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────────


def cost() -> None:
    """Print how long a call takes to be recorded, from its beginning to its end."""
    text = "all_reduce(float32[1048576], op='sum')"
    with tempfile.TemporaryDirectory() as folder:
        log = FlightRecorder(Path(folder) / "rank-0.flight", 0, 4, "cost").group(range(4))
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(5000):
                entry = log.collective(text, text)
                entry.started()
                entry.waits()
                entry.ends()
            best = min(best, (time.perf_counter() - start) / 5000)
    print(f"{best * 1e6:.1f} µs a call: begun, started, waited for, ended")


def main(
    only: Annotated[str, typer.Option(help="Run the scenarios whose name has this in it.")] = "",
    seed: Annotated[int, typer.Option(help="Draws the guilty ranks, and what happens before.")] = 0,
    measure: Annotated[bool, typer.Option("--cost", help="Only measure what recording costs.")] = False,
) -> None:
    """Run the scenarios, and exit with 1 if the diagnosis of any is wrong."""
    if measure:
        cost()
        return
    chosen = [scenario for scenario in SCENARIOS if only in str(scenario)]
    wrong = 0
    with mp.Pool() as pool:
        for number, scenario in enumerate(chosen, 1):
            verdict = run(scenario, seed, pool)
            wrong += bool(verdict.wrong)
            mark = "✗" if verdict.wrong else "✓"
            print(f"{number:2} {mark} {scenario!s:75} {verdict.seconds:4.1f} s  {verdict.wrong}")
            print(f"     {verdict.sentence}", flush=True)
    print(
        f"{len(chosen) - wrong} of {len(chosen)} diagnosed: kind, rank, line and time (limit {LIMIT:g} + {GRACE:g} s)"
    )
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        _run_script(*sys.argv[2:])
    else:
        typer.run(main)
