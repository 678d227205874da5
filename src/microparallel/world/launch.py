"""Start ranks on this machine, run a function on each, and return their results.

`launch` is for one function; a `Pool` keeps its processes for the next one. The parent watches over the ranks of each
run (`_Supervisor`): when one fails, it ends the others and raises that rank's error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import cloudpickle
import torch.distributed as dist

from microparallel.errors import Interrupted, LaunchError, RankFailed, RanksTimedOut, UsageError
from microparallel.files.state_memory import StateMemory, can_hold
from microparallel.observe.diagnosis import diagnose, show_findings
from microparallel.observe.flight import SHORT_WAIT, new_folder
from microparallel.observe.flight_file import read
from microparallel.observe.flight_recorder import write_exit
from microparallel.observe.folders import flight_file, flight_files, gather, remove
from microparallel.observe.processes import ENDED_STATUS
from microparallel.text import show_ranks
from microparallel.topology import Placement, require_cores
from microparallel.topology.limits import require_addresses, require_files
from microparallel.world import logs
from microparallel.world.carried_error import loads_error
from microparallel.world.child import AllDone, Job, Raised
from microparallel.world.connect import DEFAULT_TIMEOUT, require_possible
from microparallel.world.debugging import (
    WAIT_FOR_PEOPLE,
    HasTerminal,
    LeavesTerminal,
    Terminal,
    WantsTerminal,
    require_stdin,
)
from microparallel.world.fork_server import ForkServer, can_fork
from microparallel.world.mps import MpsOfRanks
from microparallel.world.mps.of_ranks import Wanted
from microparallel.world.output import Screen, prefix_of
from microparallel.world.rank_process import RankProcess
from microparallel.world.restarts import OnRestart, Restarts

_GRACE_FOR_FIRST_CAUSE = 1.5  # seconds
_SAY_WHO_IS_BUSY = 10.0  # seconds after Ctrl-C, and again
_LOOK_AROUND = 0.1
_LOOK_FOR_STOPPED = 0.5
_FILES, _FILES_A_RANK = 16, 4  # that this process opens: for the store, the screen and for a moment; and for each rank


def launch(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    transport: str = "auto",
    device: str = "auto",
    timeout: float | None = None,
    check: bool = False,
    prefix: bool = False,
    debug: bool = False,
    call_timeout: float | None = None,
    mps: str = "auto",
    restarts: int = 0,
    min_ranks: int | None = None,
    in_groups_of: int = 1,
    on_restart: OnRestart | None = None,
    **named_arguments: Any,
) -> list[Any]:
    """Run `function(comms, *arguments, **named_arguments)` in `ranks` fresh processes; return results in rank order.

    The function may live anywhere, in a script without a main guard and in a notebook too. Each rank computes with its
    share of the cores. No process outlives the call: not after an error, nor after Ctrl-C, nor when this process is
    killed. What ranks print appears line by line and does not mix. Logging is set up in the ranks as it is here: the
    levels of all loggers, and the root's handlers to stderr, stdout and files. `torch.distributed` is initialised when
    the function begins, and is left when it has returned.

    Args:
        function: takes a `Comms` first; what it returns comes back to the caller.
        ranks: how many processes.
        arguments: handed to the function after its Comms.
        transport: "auto", "shm", "cuda", "gloo", "shm+gloo" or "nccl"; see `connect`.
        device: "auto", "cpu" or "cuda"; see `connect`.
        timeout: seconds after which the ranks are ended; None waits for ever.
        check: compare calls between ranks before each one; see `connect`.
        prefix: put `[rank 1] ` before each line that rank 1 prints or logs (not before those of C libraries and of
            programs that it starts).
        debug: let `breakpoint()` stop a rank, which then reads commands from this terminal; the others wait. Nothing
            times out: neither `timeout` nor that of calls between ranks holds.
        call_timeout: seconds that a call between ranks waits for the others; None for the usual half an hour.
        mps: whether ranks that share a GPU compute under NVIDIA's MPS, and so at once and not by turns. "auto": if its
            control program is here, a daemon of their own is started before them, and ended after them; one that this
            process's environment leads to is used instead. "on": doing without is an error. "off": they use none.
        restarts: how often the function is run again, from its beginning and in new processes, after a rank has
            failed. It should then go on from what it saved last: see `Checkpointer`.
        min_ranks: with how few ranks it may be run again, if the system cannot start as many; None for all of them.
        in_groups_of: then it is run with so many fewer, or twice as many fewer, and so on: a pipeline needs all of its
            ranks.
        on_restart: told of each restart instead of a line on stderr: (the error, the number of the restart, ranks).
        named_arguments: handed to the function by name (other than those above, which are `launch`'s own).

    Raises:
        RankFailed: a rank raised, exited or was killed; says which, with its traceback. If it raised, this is raised
            from a copy of its exception, `error.__cause__`, where that can be rebuilt here.
        RanksTimedOut: says which ranks had not finished, why, and where each stood.

    Example:
        ```python
        def add_up(comms):
            return comms.all_reduce(torch.tensor([comms.rank])).item()

        mp.launch(add_up, ranks=4)  # [6, 6, 6, 6]
        ```
    """
    _require_restarts(restarts, min_ranks, ranks, in_groups_of)
    with contextlib.ExitStack() as stack:
        # A rank that is forked from a process which has imported torch is there at once.
        quick = stack.enter_context(ForkServer()) if restarts and can_fork() else None
        pool = stack.enter_context(Pool(quick))
        return pool.run(
            function,
            ranks,
            *arguments,
            transport=transport,
            device=device,
            timeout=timeout,
            check=check,
            prefix=prefix,
            debug=debug,
            call_timeout=call_timeout,
            mps=mps,
            restarts=restarts,
            min_ranks=min_ranks,
            in_groups_of=in_groups_of,
            on_restart=on_restart,
            **named_arguments,
        )


class Pool:
    """Ranks whose processes stay between functions, since starting a process takes seconds.

    Every `run` makes a new world of as many ranks as it asks for. After a failure the processes are replaced. With a
    `ForkServer` (microparallel.world.fork_server) they are forked from a process that has imported torch already.

    Example:
        ```python
        with mp.Pool() as pool:
            pool.run(train, 2)
            pool.run(train, 4)
        ```
    """

    def __init__(self, fork_server: ForkServer | None = None) -> None:
        require_files(_FILES)
        require_addresses()
        self._fork_server = fork_server
        self._store, self._port = _open_store()
        self._processes: list[RankProcess] = []
        self._debug = False  # whether these processes have this one's stdin
        self._prefix = False  # whether their lines have prefixes
        self._screen_file = Screen.file()
        self._screen = Screen(self._screen_file.fileno())
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._worlds = 0
        self._mps = MpsOfRanks()

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *arguments: Any,
        transport: str = "auto",
        device: str = "auto",
        timeout: float | None = None,
        check: bool = False,
        prefix: bool = False,
        debug: bool = False,
        call_timeout: float | None = None,
        mps: str = "auto",
        restarts: int = 0,
        min_ranks: int | None = None,
        in_groups_of: int = 1,
        on_restart: OnRestart | None = None,
        **named_arguments: Any,
    ) -> list[Any]:
        """Run `function(comms, *arguments, **named_arguments)` on every rank; see `launch`."""
        _require_restarts(restarts, min_ranks, ranks, in_groups_of)
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise UsageError(f"ranks={ranks!r}: a world needs a whole number of ranks, at least 1")
        require_cores(ranks, f"ranks={ranks}")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise UsageError(f"timeout={timeout!r}: give a number of seconds greater than 0, or None to wait for ever")
        if debug:
            require_stdin()
        require_possible(transport, device, Placement(0, ranks, local_rank=0, local_world_size=ranks))
        wanted = self._mps.choose(mps, transport, device, ranks)
        job = Job(
            rank=0,
            world_size=ranks,
            port=self._port,
            name="",
            transport=transport,
            device=device,
            timeout=WAIT_FOR_PEOPLE if debug else call_timeout or DEFAULT_TIMEOUT,
            check=check,
            call=_dumps_call(function, arguments, named_arguments),
            logging=logs.describe(),
            prefix=prefix,
            debug=debug,
        )
        deadline = None if debug or timeout is None else timeout
        with _memory_for_states(ranks) as memory:
            try:
                job = replace(job, states=None if memory is None else memory.held)
                least = max(min_ranks or ranks, in_groups_of)
                return self._attempts(job, deadline, least, in_groups_of, Restarts(restarts, on_restart), wanted)
            except (LaunchError, KeyboardInterrupt):
                with contextlib.suppress(Exception):  # what has ended the ranks matters more
                    if memory is not None:
                        memory.all_has_failed()
                raise

    def _attempts(
        self,
        job: Job,
        deadline: float | None,
        min_ranks: int,
        in_groups_of: int,
        attempts: Restarts,
        mps: Wanted,
    ) -> list[Any]:
        """Run a job until it succeeds, or there is to be no other attempt."""
        while True:
            try:
                self._start(job.world_size, job.debug, mps)
            except (LaunchError, OSError) as error:
                if self._lifeline_write < 0 or job.world_size - in_groups_of < min_ranks:
                    raise
                job = replace(job, world_size=job.world_size - in_groups_of)
                attempts.after(LaunchError(f"a process cannot be started ({error})"), None, job.world_size)
                continue
            flights = _FlightFiles(new_folder())
            try:
                return self._attempt(job, deadline, flights)
            except LaunchError as error:
                attempts.after(error, flights.step, job.world_size)
            finally:
                flights.remove_unless_a_rank_died()

    def _attempt(self, job: Job, timeout: float | None, flights: _FlightFiles) -> list[Any]:
        """Run a job in a new world; the processes are ended if it fails."""
        self._worlds += 1
        self._prefix = job.prefix
        processes = self._processes[: job.world_size]
        job = replace(job, processes=tuple(process.pid for process in processes))
        try:
            for rank, process in enumerate(processes):
                own = replace(job, rank=rank, name=f"world-{self._worlds}", flight_folder=flights.folder_name)
                process.send(pickle.dumps(own))
            return _Supervisor(processes, timeout, flights, float("inf") if job.debug else job.timeout).results()
        except BaseException:
            flights.record_end_by_parent(job.world_size)
            self._end_processes()
            raise

    @property
    def forks(self) -> bool:
        """Whether its processes are forked, which takes no time worth mentioning."""
        return self._fork_server is not None

    def replace_ranks(self) -> None:
        """End the processes, with all that functions have changed in them; the next run starts new ones."""
        self._end_processes()

    def close(self) -> None:
        """End all ranks."""
        self._end_processes()
        self._screen_file.close()
        for fd in (self._lifeline_read, self._lifeline_write):
            if fd >= 0:
                os.close(fd)
        self._lifeline_read = self._lifeline_write = -1

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, ranks: int, debug: bool, mps: Wanted) -> None:
        if self._lifeline_write < 0:
            raise LaunchError("this pool is closed; make a new one")
        suits = debug == self._debug and self._mps.suits(mps)
        if not suits or not all(process.alive for process in self._processes):
            self._end_processes()
        self._debug = debug
        require_files(_FILES + _FILES_A_RANK * (ranks - len(self._processes)))
        if not self._processes:
            self._mps.begin(mps)
        while len(self._processes) < ranks:
            screen = self._screen_file.fileno()
            try:
                process = RankProcess(
                    *(self._lifeline_read, screen, ranks, self._fork_server),
                    debug=debug,
                    environment=self._mps.environment,
                )
            except LaunchError:
                if self._fork_server is None or not self._worlds:
                    raise
                self._fork_server = None  # it did its work before, and was killed: start ranks without it, more slowly
                continue
            self._processes.append(process)

    def _end_processes(self) -> None:
        # A second Ctrl-C must not interrupt this and leave processes behind.
        before = _ignore_interrupts()
        try:
            for process in self._processes:
                process.disconnect()
            for rank, unfinished in enumerate(_end(self._processes)):
                for number, text in unfinished.items():
                    with contextlib.suppress(OSError):  # its reader may be gone
                        pid, prefix = self._processes[rank].pid, prefix_of(rank) if self._prefix else b""
                        self._screen.show(number, text + b"\n", pid, prefix)
            self._processes = []
        finally:
            self._mps.end()  # after the ranks: they use it to the end
            _restore_interrupts(before)


def _end(processes: Sequence[RankProcess]) -> list[dict[int, bytes]]:
    """End all processes; returns what each had written of lines without their ends."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    return [process.kill() for process in processes]


def _open_store() -> tuple[dist.TCPStore, int]:
    """The store through which the ranks find each other, on a free port that only this machine can reach.

    The parent holds it, so it outlives every rank.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    return store, port


@contextlib.contextmanager
def _memory_for_states(ranks: int) -> Iterator[StateMemory | None]:
    """Memory in which ranks may leave copies of their states; None where it cannot be had, which is no error."""
    memory = None
    if can_hold():
        with contextlib.suppress(LaunchError, OSError):
            require_files(_FILES + _FILES_A_RANK * ranks + StateMemory.files(ranks))
            memory = StateMemory(ranks)
    try:
        yield memory
    finally:
        if memory is not None:
            memory.close()


def _dumps_call(function: Callable[..., Any], arguments: Sequence[Any], named_arguments: dict[str, Any]) -> bytes:
    if not callable(function):
        raise UsageError(f"the first argument must be a function taking a Comms, not {function!r}")
    try:
        pickled: bytes = cloudpickle.dumps((function, arguments, named_arguments))
    except Exception as error:
        raise UsageError(
            f"{getattr(function, '__name__', function)} or its arguments cannot be sent to other processes: {error}"
        ) from error
    return pickled


def _require_restarts(restarts: int, min_ranks: int | None, ranks: int, in_groups_of: int) -> None:
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise UsageError(f"restarts={restarts!r}: give a whole number, 0 or more")
    if min_ranks is not None and not (isinstance(min_ranks, int) and 1 <= min_ranks <= ranks):
        raise UsageError(f"min_ranks={min_ranks!r}: give a whole number from 1 to ranks={ranks}")
    if not isinstance(in_groups_of, int) or in_groups_of < 1 or ranks % in_groups_of:
        raise UsageError(f"in_groups_of={in_groups_of!r}: ranks={ranks} cannot be cut into such groups; give a divisor")


def _ignore_interrupts() -> Any:
    try:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, where interrupts do not arrive anyway
        return None


def _restore_interrupts(handler: Any) -> None:
    if handler is not None:
        signal.signal(signal.SIGINT, handler)


# ── watching over the ranks of one run ──────────────────────────────────────────────────────────────────────────────


class _Supervisor:
    """Waits in the parent for all ranks of one world, and raises as soon as one fails; the pool ends the others."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        timeout: float | None,
        flights: _FlightFiles,
        stopped_limit: float = float("inf"),
    ) -> None:
        self._processes = processes
        self._timeout = timeout
        self._stopped_limit = stopped_limit  # seconds that a rank may be stopped by a signal
        self._stopped: dict[int, float] = {}  # ranks that are, and since when
        self._looked = 0.0
        self._flights = flights
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Raised] = {}
        self._terminal = Terminal(lambda rank: processes[rank].send(pickle.dumps(HasTerminal())))

    @property
    def _pending(self) -> list[int]:
        done = self._results.keys() | self._failures.keys()
        return [rank for rank in range(len(self._processes)) if rank not in done]

    def results(self) -> list[Any]:
        """Wait for all ranks; returns their results in rank order."""
        deadline = time.monotonic() + self._timeout if self._timeout is not None else float("inf")
        try:
            while self._pending and not self._failures:
                if time.monotonic() > deadline:
                    raise self._timed_out()
                self._look(min(_LOOK_AROUND, max(0.0, deadline - time.monotonic())))
        except KeyboardInterrupt:
            self._let_ranks_stop()
            if not self._pending and not self._failures:
                raise Interrupted(self._results_in_order()) from None
            if any(not failure.died for failure in self._failures.values()):  # one could not save, say
                raise KeyboardInterrupt from self._first_cause()
            raise
        finally:
            self._terminal.close()
        if self._failures:
            raise self._first_cause()
        for process in self._processes:
            process.send(pickle.dumps(AllDone()))
        return self._results_in_order()

    def _results_in_order(self) -> list[Any]:
        return [self._results[rank] for rank in range(len(self._processes))]

    def _look(self, timeout: float) -> None:
        ranks = {self._processes[rank].connection: rank for rank in self._pending}
        for connection in wait(list(ranks), timeout):
            self._receive_report(ranks[cast(Any, connection)])
        self._terminal.give()
        for rank in self._pending:
            # A process may have died while a child of its own still holds the connection open.
            if not self._processes[rank].alive and not self._processes[rank].connection.poll():
                self._failures[rank] = self._death(rank)
        if time.monotonic() - self._looked > _LOOK_FOR_STOPPED:
            self._looked = time.monotonic()
            self._look_for_stopped()

    def _look_for_stopped(self) -> None:
        """Give up ranks that were stopped too long ago: nobody else notices if no other rank waits for them."""
        now = time.monotonic()
        stopped = [rank for rank in self._pending if self._processes[rank].stopped]
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        for rank, since in self._stopped.items():
            if now - since > self._stopped_limit:
                self._failures[rank] = Raised(f"was stopped (SIGSTOP, or a debugger) for {now - since:.0f} s", "")

    def _death(self, rank: int) -> Raised:
        how = self._processes[rank].how_it_ended()
        self._flights.record_death(rank, self._processes[rank].exit_status)
        return Raised(how, "", died=True)

    def _receive_report(self, rank: int) -> None:
        try:
            report = pickle.loads(self._processes[rank].connection.recv_bytes())
        except (EOFError, OSError):
            self._failures[rank] = self._death(rank)
            return
        if isinstance(report, WantsTerminal):
            self._terminal.wants(rank, self._processes[rank].pid)
        elif isinstance(report, LeavesTerminal):
            self._terminal.leaves()
        elif isinstance(report, Raised):
            self._failures[rank] = report
        else:
            self._results[rank] = pickle.loads(report.result)

    def _first_cause(self) -> RankFailed:
        """The failure that came first: an error about a lost rank follows from that rank's own failure."""
        deadline = time.monotonic() + _GRACE_FOR_FIRST_CAUSE
        while all(failure.secondary for failure in self._failures.values()) and time.monotonic() < deadline:
            self._look(_LOOK_AROUND)
            if not self._pending:
                break
        rank = min(self._failures, key=lambda rank: (self._failures[rank].secondary, rank))
        failure = self._failures[rank]
        returned = [other for other in failure.lost if other in self._results]
        hint = f" (rank {returned[0]}'s function had already returned)" if returned else ""
        headline, newline, rest = failure.reason.partition("\n")
        why = self._flights.why() if failure.died else ""
        exit_status = self._processes[rank].exit_status if failure.died else None
        reason = headline + hint + newline + rest + why
        error = RankFailed(rank, reason, failure.traceback, failure.refusal, exit_status)
        error.__cause__ = loads_error(failure.error)
        return error

    def _timed_out(self) -> RanksTimedOut:
        late = self._pending
        why = self._flights.why()
        places = {rank: process.where() if rank in late else "finished" for rank, process in enumerate(self._processes)}
        rows = [f"  rank {rank}: {place}" for rank, place in places.items()]
        headline = f"{len(late)} of {len(self._processes)} ranks had not finished after {self._timeout:g} s"
        return RanksTimedOut(late, "\n".join([headline + why, *rows]), places)

    def _let_ranks_stop(self) -> None:
        """Send Ctrl-C to the ranks, and let them save their work, however long that takes; a second one ends them."""
        for rank in self._pending:
            self._processes[rank].signal(signal.SIGINT)
        told = time.monotonic()
        while self._pending and not self._failures:
            self._look(_LOOK_AROUND)
            if time.monotonic() - told > _SAY_WHO_IS_BUSY:
                told = time.monotonic()
                print(
                    f"waiting for {show_ranks(self._pending)} to stop; Ctrl-C again ends them at once",
                    file=sys.stderr,
                    flush=True,
                )
        if self._pending:  # another has failed: what they wait for does not come
            deadline = time.monotonic() + _GRACE_FOR_FIRST_CAUSE
            while self._pending and time.monotonic() < deadline:
                self._look(_LOOK_AROUND)


# ── their flight files ──────────────────────────────────────────────────────────────────────────────────────────────


class _FlightFiles:
    """The flight files of one world's ranks, as their parent uses them; without a folder nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._died: set[int] = set()

    @property
    def folder_name(self) -> str | None:
        """The folder, as text for the ranks' jobs."""
        return None if self._folder is None else str(self._folder)

    def record_death(self, rank: int, exit_status: int | None) -> None:
        """Write into a rank's file how its process ended, which only its parent knows."""
        self._died.add(rank)
        if exit_status is not None:
            self._write_exit(rank, exit_status)

    def record_end_by_parent(self, ranks: int) -> None:
        """Write into the files of all other ranks that their parent ended them."""
        for rank in set(range(ranks)) - self._died:
            self._write_exit(rank, ENDED_STATUS)

    def _write_exit(self, rank: int, status: int) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_exit(flight_file(self._folder, rank), status)

    @property
    def step(self) -> int | None:
        """The training step that the first of the ranks had come to; None where they count none."""
        if self._folder is None:
            return None
        files = (read(path) for path in flight_files(self._folder))
        steps = [one.step for one in files if one is not None and one.step is not None]
        return max(steps, default=None)

    def why(self) -> str:
        """What is wrong, in indented lines that follow a headline."""
        if self._folder is None:
            return ""
        try:
            findings = diagnose(gather(self._folder), SHORT_WAIT)
        except Exception:  # the error that is being explained matters more than this one
            return ""
        return "".join(f"\n  {line}" for line in show_findings(findings).splitlines())

    def remove_unless_a_rank_died(self) -> None:
        """Remove the files; if a rank died, they stay for `microparallel why`."""
        if self._folder is not None and not self._died:
            with contextlib.suppress(OSError):
                remove(self._folder)
