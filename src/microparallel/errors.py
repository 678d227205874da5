"""Every error microparallel raises on purpose, in one tree.

```
MicroparallelError
├── UsageError (ValueError)      what the caller asked for cannot be done; the command line exits with 2
│   ├── ConfigError              a flag, or a key of a configuration file
│   ├── DataError                a file or dataset that is missing, empty or of the wrong kind
│   ├── DeviceError              a device that a process group has no backend for (RuntimeError, as in torch)
│   ├── PartitionError           a model that cannot be cut that way
│   └── ProgramError             a program that is not well-formed, or does not do what it says
├── LaunchError                  ranks could not be started, or did not all finish
│   ├── RankFailed               .rank raised (.__cause__), exited or was killed; the traceback is in the text
│   └── RanksTimedOut            .ranks had not finished in time; the text says at which line each was
├── CommsError                   communication between ranks that failed
│   ├── PeerLost                 .ranks went away during .call
│   ├── Mismatch                 ranks made different calls, or the same call with different tensors
│   ├── CommsTimeout             a call waited longer than its timeout; .ranks are those known to be missing
│   └── TransportError           bytes that could not be moved; `Comms` raises one of the above instead, with its call
│       ├── TransportTimeout     a transfer was not complete in time (TimeoutError)
│       ├── PeerGone             .ranks are gone, and a transfer needs them (ConnectionError)
│       │   └── LinkLost         .ranks cannot be reached any more: their host, or the link to it, is down
│       └── AddressInUse         another program uses the port of the ranks' store
├── StageError                   a stage of a pipeline that raised, or returned something else than in its dry run
├── GradientError                gradients that are missing or not finite, where that was to be an error
└── CheckpointError              a checkpoint that cannot be written or read
KeyboardInterrupt
└── Interrupted                  Ctrl-C, after which every rank returned from its function: .results
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "AddressInUse",
    "CheckpointError",
    "CommsError",
    "CommsTimeout",
    "ConfigError",
    "DataError",
    "DeviceError",
    "GradientError",
    "Interrupted",
    "LaunchError",
    "LinkLost",
    "MicroparallelError",
    "Mismatch",
    "PartitionError",
    "PeerGone",
    "PeerLost",
    "ProgramError",
    "RankFailed",
    "RanksTimedOut",
    "StageError",
    "TransportError",
    "TransportTimeout",
    "UsageError",
]


class MicroparallelError(Exception):
    """The root of every error in this library."""


class UsageError(MicroparallelError, ValueError):
    """What the caller asked for cannot be done: the text names the value, the place and the fix."""


class ConfigError(UsageError):
    """A flag, or a key of a configuration file, has a value that cannot work."""


class DataError(UsageError):
    """A file or a dataset is missing, empty or of the wrong kind."""


class DeviceError(UsageError, RuntimeError):
    """A process group has no backend for the tensors of a device; torch's own groups raise a RuntimeError."""


class PartitionError(UsageError):
    """A model cannot be cut into the pieces that were asked for."""


class ProgramError(UsageError):
    """A program is not well-formed, or does not do what it says it does.

    Attributes:
        line: of its text, counted from 1, if it is that line that cannot be read.
    """

    line: int | None = None


class LaunchError(MicroparallelError):
    """Ranks could not be started, or did not all finish."""


class RankFailed(LaunchError):
    """One rank raised, exited or was killed, and the others were ended.

    Attributes:
        rank: which one.
        reason: what happened to it, in a line.
        traceback: the rank's own, if it raised.
        refusal: the text of the error, if the rank raised a `UsageError`: then the caller's request was wrong.
        exit_status: of its process, if that has ended: the code, or minus the number of the signal that killed it.

    Its `__cause__` is a copy of the rank's exception, if it raised one that can be rebuilt in the parent.
    """

    def __init__(
        self,
        rank: int,
        reason: str,
        traceback: str = "",
        refusal: str | None = None,
        exit_status: int | None = None,
    ) -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        self.refusal = refusal
        self.exit_status = exit_status
        details = f"\n\nrank {rank}'s own traceback:\n{traceback}" if traceback else ""
        super().__init__(f"rank {rank} {reason}{details}")


class RanksTimedOut(LaunchError, TimeoutError):
    """Some ranks had not finished when the time was up."""

    def __init__(self, ranks: Sequence[int], message: str, places: Mapping[int, str] | None = None) -> None:
        self.ranks = tuple(ranks)
        self.places = dict(places or {})  # at which line each rank was, as text
        super().__init__(message)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after which every rank returned from its function; `.results` holds what they returned."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results
        super().__init__()


class CommsError(MicroparallelError, RuntimeError):
    """Communication between ranks failed."""


class PeerLost(CommsError):
    """Another rank went away in the middle of a call."""

    def __init__(self, ranks: Sequence[int], call: str, message: str) -> None:
        self.ranks = tuple(ranks)
        self.call = call
        super().__init__(message)


class Mismatch(CommsError):
    """Ranks made different calls, or the same call with different tensors."""


class CommsTimeout(CommsError, TimeoutError):
    """A call waited longer than its timeout; `.ranks` are those known not to have made the call."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class TransportError(CommsError):
    """Bytes could not be moved. A transport knows no calls: `Comms` raises an error that names the call instead."""


class TransportTimeout(TransportError, TimeoutError):
    """A transfer was not complete in time; `.ranks` are those known not to have started their part of it."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class PeerGone(TransportError, ConnectionError):
    """Ranks are gone that a transfer needs; `.ranks` are their numbers in the transport's group."""

    def __init__(self, ranks: Sequence[int], message: str | None = None) -> None:
        self.ranks = tuple(ranks)
        super().__init__(f"rank {', '.join(map(str, ranks))} went away" if message is None else message)


class LinkLost(PeerGone):
    """A host, or the link to it, is down: what was sent to its ranks was never acknowledged."""


class AddressInUse(TransportError):
    """Another program uses the port of the ranks' store."""


class StageError(MicroparallelError, RuntimeError):
    """A stage of a pipeline raised, or returned something else than its dry run promised.

    The text names the rank, the stage, the micro-batch and the shapes.
    """


class GradientError(MicroparallelError, RuntimeError):
    """Gradients are missing or not finite, and the caller asked for an error: names the step, ranks and parameters."""


class CheckpointError(MicroparallelError):
    """A checkpoint cannot be written or read."""
