"""One rank: the program that `launch` and `Pool` run in each process that they start.

It reads jobs from its parent, runs each in a new world, and sends back the result or the error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import threading
import traceback
from bdb import BdbQuit
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from microparallel.files.state_memory import HeldStates
    from microparallel.world.output import RankOutput

# Seconds for which a rank that has finished keeps its connections open. After that, ranks which still wait for it get
# an error.
LINGER = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A function to run as one rank of a world."""

    rank: int
    world_size: int
    port: int
    name: str  # of the world: several use one store
    transport: str
    device: str
    timeout: float
    check: bool
    call: bytes  # the function with its arguments, pickled
    logging: bytes  # the parent's, as `logs.describe` gives it
    flight_folder: str | None = None
    processes: tuple[int, ...] = ()  # of all ranks of the world
    prefix: bool = False  # "[rank 1] " before each line that the rank prints
    debug: bool = False
    states: HeldStates | None = None  # memory that outlives the ranks


@dataclass(frozen=True, slots=True)
class AllDone:
    """The parent's message that every rank has finished, so that connections may be closed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a rank's function returned, pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """What a rank's function raised. A secondary error follows from the failure of another rank; see `RankFailed`."""

    reason: str
    traceback: str
    secondary: bool = False
    refusal: str | None = None
    lost: tuple[int, ...] = ()
    died: bool = False  # set by the parent, for a process that has ended
    error: bytes | None = None  # the exception itself, as `carried_error` pickles it


def main(parent_fd: int, lifeline_fd: int, stacks_fd: int, screen_fd: int, unfinished_fd: int) -> None:
    """Run jobs until the parent closes its connection."""
    from microparallel.world import rank_process
    from microparallel.world.fork_server import wake_when_parent_ends
    from microparallel.world.output import RankOutput

    wake_when_parent_ends()
    rank_process.keep_sockets_together()
    # Ctrl-C before the job has begun ends the process silently; the parent prints the error.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rank_process.dump_stack_on_signal(stacks_fd)
    parent = Connection(parent_fd)
    rank = _Rank(parent, RankOutput(screen_fd, unfinished_fd))
    threading.Thread(target=_end_with_parent, args=(lifeline_fd, rank), daemon=True).start()
    while True:
        try:
            message = pickle.loads(parent.recv_bytes())
        except (EOFError, OSError):  # the parent has closed its connection
            rank_process.remove_sockets(os.getpid())
            return
        if isinstance(message, Job):
            rank.run(message)


class _Rank:
    """The process, which is a rank of one world after another."""

    def __init__(self, parent: Connection, output: RankOutput) -> None:
        from microparallel.world.debugging import RankDebugger
        from microparallel.world.logs import RankLogging

        self.peers: tuple[int, ...] = ()  # the processes of the world that this one is in
        self._parent = parent
        self._output = output
        self._logging = RankLogging()
        self._debugger = RankDebugger(parent, output)

    def run(self, job: Job) -> None:
        """Run a job in a world of its own, and report to the parent."""
        import cloudpickle

        comms = None
        self.peers = job.processes
        try:
            self._prepare(job)
            comms = _join(job)
            comms.held_states = job.states
            function, arguments, named_arguments = pickle.loads(job.call)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            result = function(comms, *arguments, **named_arguments)
            comms.finish()
            comms.flight.finishes()
            report: Finished | Raised = Finished(_dumps_result(cloudpickle, result))
        except KeyboardInterrupt:
            sys.exit(130)
        except SystemExit as error:
            if comms is not None:
                comms.flight.ends_with(error)
            # torch's threads must end before Python does: otherwise they sometimes crash the process.
            with contextlib.suppress(Exception):
                _leave(comms)
            sys.exit(error.code if error.code is not None else 0)
        except BaseException as error:  # the parent decides what to do with it
            if comms is not None:
                comms.flight.ends_with(error)
            report = _raised(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._output.finish_lines()
        try:
            self._parent.send_bytes(pickle.dumps(report))
            self._parent.poll(LINGER)  # the parent's next message says that all ranks are done
        except OSError:
            sys.exit(1)  # the parent has closed the connection: another rank failed, and this one is about to be ended
        self.peers = ()
        _leave(comms)

    def _prepare(self, job: Job) -> None:
        """Let this process log, print and stop as the caller of `launch` has asked."""
        self._output.begin(job.rank, job.prefix)
        self._logging.apply(job.logging)
        self._debugger.begin(job.rank, job.debug)


def _raised(error: BaseException) -> Raised:
    from microparallel.errors import CheckpointError, MicroparallelError, PeerGone, PeerLost, UsageError
    from microparallel.topology.limits import limit_behind
    from microparallel.world.carried_error import dumps_error

    if isinstance(error, BdbQuit):
        return Raised("was ended in its debugger", "")
    limit = limit_behind(error)
    said = f"{type(error).__name__}: {_text(error)}"
    if limit is not None and not isinstance(error, MicroparallelError):  # whose own text says which, and for what
        said = f"{type(error).__name__}: {limit}"
    return Raised(
        f"raised {said}",
        "" if isinstance(error, CheckpointError) or limit is not None else traceback.format_exc(),
        # One that waited for a rank that had given up says so, and why that rank did is said by its own error.
        secondary=isinstance(error, PeerLost | PeerGone) or isinstance(error.__cause__, PeerGone),
        refusal=str(error) if isinstance(error, UsageError) else None,
        lost=error.ranks if isinstance(error, PeerLost | PeerGone) else (),
        error=dumps_error(error),
    )


def _join(job: Job) -> Any:
    import torch
    import torch.distributed as dist

    from microparallel.topology import threads_per_rank
    from microparallel.topology.placement import Placement
    from microparallel.world.connect import join

    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    torch.set_num_threads(threads_per_rank(job.world_size))
    client = _store(job.port)
    client.set_timeout(timedelta(seconds=job.timeout))
    placement = Placement(job.rank, job.world_size, local_rank=job.rank, local_world_size=job.world_size)
    return join(
        placement,
        dist.PrefixStore(job.name, client),
        transport=job.transport,
        device=job.device,
        timeout=job.timeout,
        check=job.check,
        flight_folder=None if job.flight_folder is None else Path(job.flight_folder),
    )


@functools.cache
def _store(port: int) -> Any:
    """The connection to the parent's store, opened once: torch looks 127.0.0.1 up at the name server each time."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _leave(comms: Any) -> None:
    import torch.distributed as dist

    if comms is not None:
        comms.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _dumps_result(cloudpickle: Any, result: object) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result, a {type(result).__name__}, cannot be sent to the parent: {error}") from error
    return pickled


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:
        return f"(its text cannot be shown: {type(worse).__name__})"


def _end_with_parent(lifeline_fd: int, rank: _Rank) -> None:
    """Wait until the parent has ended: then its end of this pipe is closed, and the rank ends, too.

    It ends the other ranks of its world first: one that was stopped, or that holds Python's lock, cannot end itself.
    """
    from microparallel.world.rank_process import remove_leftovers

    os.read(lifeline_fd, 1)
    for process in {*rank.peers, os.getpid()}:  # before any is ended: one of them may end this one at the same time
        remove_leftovers(process)
    for process in rank.peers:
        if process != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this rank and all processes that it has started
