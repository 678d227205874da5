"""The flight files of the ranks that a process has started, as their parent sees them."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import cloudpickle
import torch.distributed as dist

from microparallel.errors import Interrupted, LaunchError, RankFailed, RanksTimedOut, UsageError
from microparallel.observe.diagnosis import diagnose, in_words
from microparallel.observe.flight import new_folder
from microparallel.observe.flight_recorder import write_exit
from microparallel.observe.folders import flight_file, gather, remove
from microparallel.observe.processes import ENDED_STATUS
from microparallel.topology import MOST_RANKS_PER_CORE, Placement, available_cores
from microparallel.world.child import AllDone, Finished, Job, Raised
from microparallel.world.connect import DEFAULT_TIMEOUT, require_possible
from microparallel.world.fork_server import ForkServer
from microparallel.world.rank_process import RankProcess

_LITTLE = 0.05  # seconds of waiting that count when a world has failed already


class Flights:
    """One world's; None instead of a folder where nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._died: set[int] = set()

    @property
    def folder_name(self) -> str | None:
        """The folder, for the ranks."""
        return None if self._folder is None else str(self._folder)

    def note_death(self, rank: int, exit_status: int | None) -> None:
        """Write down how a rank's process ended: when it is gone, only its parent knows."""
        self._died.add(rank)
        if exit_status is not None:
            self._write_exit(rank, exit_status)

    def note_end(self, ranks: int) -> None:
        """Write down that those who are left are ended by their parent."""
        for rank in set(range(ranks)) - self._died:
            self._write_exit(rank, ENDED_STATUS)

    def _write_exit(self, rank: int, status: int) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_exit(flight_file(self._folder, rank), status)

    def why(self) -> str:
        """What is wrong, in lines that go beneath a headline."""
        if self._folder is None:
            return ""
        try:
            findings = diagnose(gather(self._folder), _LITTLE)
        except Exception:  # whatever it is, the error that is being explained matters more
            return ""
        return "".join(f"\n  {line}" for line in in_words(findings).splitlines())

    def remove_unless_a_rank_died(self) -> None:
        """Take the files away; those of ranks that died stay for `microparallel why`."""
        if self._folder is not None and not self._died:
            with contextlib.suppress(OSError):
                remove(self._folder)


# A pool of ranks: processes that are started once and run one function after another, each in a fresh world.


_GRACE_FOR_FIRST_CAUSE = 1.5
_GRACE_AFTER_INTERRUPT = 10.0
_LOOK_AROUND = 0.1


class Pool:
    """Ranks that stay warm between functions, since starting a process costs seconds.

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
        self._fork_server = fork_server
        self._store, self._port = _open_store()
        self._processes: list[RankProcess] = []
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._worlds = 0

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *arguments: Any,
        transport: str = "auto",
        device: str = "auto",
        timeout: float | None = None,
        check: bool = False,
        **named_arguments: Any,
    ) -> list[Any]:
        """Run `function(comms, *arguments, **named_arguments)` on every rank; see `launch`."""
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise UsageError(f"ranks={ranks!r}: a world needs a whole number of ranks, at least 1")
        if ranks > MOST_RANKS_PER_CORE * (cores := available_cores()):
            raise UsageError(
                f"ranks={ranks}: more than {MOST_RANKS_PER_CORE} ranks a core cannot work, and {cores} are here"
            )
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise UsageError(f"timeout={timeout!r}: give a number of seconds greater than 0, or None to wait for ever")
        require_possible(transport, device, Placement(0, ranks, local_rank=0, local_world_size=ranks))
        call = _dumps_call(function, arguments, named_arguments)
        self._worlds += 1
        name = f"world-{self._worlds}"
        flights = Flights(new_folder())
        try:
            self._start(ranks)
            for rank, process in enumerate(self._processes[:ranks]):
                job = Job(
                    rank, ranks, self._port, name, transport, device, DEFAULT_TIMEOUT, check, call, flights.folder_name
                )
                process.send(pickle.dumps(job))
            results = _Watch(self._processes[:ranks], timeout, flights).results()
        except BaseException:
            flights.note_end(ranks)
            self._end_processes()
            flights.remove_unless_a_rank_died()
            raise
        flights.remove_unless_a_rank_died()
        return results

    def replace_ranks(self) -> None:
        """End the processes: whatever a function has changed in them is gone, and the next run starts new ones."""
        self._end_processes()

    def close(self) -> None:
        """End all ranks."""
        self._end_processes()
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

    def _start(self, ranks: int) -> None:
        if self._lifeline_write < 0:
            raise LaunchError("this pool is closed; make a new one")
        if not all(process.alive for process in self._processes):
            self._end_processes()
        while len(self._processes) < ranks:
            self._processes.append(RankProcess(self._lifeline_read, ranks, self._fork_server))

    def _end_processes(self) -> None:
        # A second Ctrl-C must not stop this half-way and leave processes behind.
        before = _ignore_interrupts()
        try:
            for process in self._processes:
                process.hang_up()
            _end(self._processes)
            self._processes = []
        finally:
            _restore_interrupts(before)


class _Watch:
    """Waits for all ranks of one world to finish, and ends them all as soon as one fails."""

    def __init__(self, processes: Sequence[RankProcess], timeout: float | None, flights: Flights) -> None:
        self._processes = processes
        self._timeout = timeout
        self._flights = flights
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Raised] = {}

    @property
    def _pending(self) -> list[int]:
        done = self._results.keys() | self._failures.keys()
        return [rank for rank in range(len(self._processes)) if rank not in done]

    def results(self) -> list[Any]:
        """The results in rank order."""
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
            raise
        if self._failures:
            raise self._first_cause()
        for process in self._processes:
            process.send(pickle.dumps(AllDone()))
        return self._results_in_order()

    def _results_in_order(self) -> list[Any]:
        return [self._results[rank] for rank in range(len(self._processes))]

    def _look(self, patience: float) -> None:
        ranks = {self._processes[rank].connection: rank for rank in self._pending}
        for connection in wait(list(ranks), patience):
            self._hear(ranks[cast(Any, connection)])
        for rank in self._pending:
            # A process may die while a child of its own still holds the connection open.
            if not self._processes[rank].alive and not self._processes[rank].connection.poll():
                self._failures[rank] = self._death(rank)

    def _death(self, rank: int) -> Raised:
        how = self._processes[rank].how_it_ended()
        self._flights.note_death(rank, self._processes[rank].exit_status)
        return Raised(how, "", died=True)

    def _hear(self, rank: int) -> None:
        try:
            report: Finished | Raised = pickle.loads(self._processes[rank].connection.recv_bytes())
        except (EOFError, OSError):
            self._failures[rank] = self._death(rank)
            return
        if isinstance(report, Raised):
            self._failures[rank] = report
        else:
            self._results[rank] = pickle.loads(report.result)

    def _first_cause(self) -> RankFailed:
        """The failure that came first: an error about a lost rank follows from that rank's own."""
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
        return RankFailed(rank, headline + hint + newline + rest + why, failure.traceback, failure.refusal)

    def _timed_out(self) -> RanksTimedOut:
        late = self._pending
        why = self._flights.why()
        places = {rank: process.where() if rank in late else "finished" for rank, process in enumerate(self._processes)}
        rows = [f"  rank {rank}: {place}" for rank, place in places.items()]
        headline = f"{len(late)} of {len(self._processes)} ranks had not finished after {self._timeout:g} s"
        return RanksTimedOut(late, "\n".join([headline + why, *rows]), places)

    def _let_ranks_stop(self) -> None:
        """Pass Ctrl-C on, and give ranks that save their work a moment; a second Ctrl-C cuts it short."""
        for rank in self._pending:
            self._processes[rank].signal(signal.SIGINT)
        deadline = time.monotonic() + _GRACE_AFTER_INTERRUPT
        while self._pending and time.monotonic() < deadline:
            self._look(_LOOK_AROUND)


def _end(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + 1.0
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()


def _open_store() -> tuple[dist.TCPStore, int]:
    """The meeting point of the ranks, on a port the system chose, reachable from this machine alone.

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


def _ignore_interrupts() -> Any:
    try:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, where interrupts do not arrive anyway
        return None


def _restore_interrupts(handler: Any) -> None:
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
