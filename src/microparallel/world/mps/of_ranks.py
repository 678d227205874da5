"""The MPS daemon of a pool's ranks: started before them, ended after them, and never kept after a failure.

Every process that computes under one MPS server may be disturbed when another is killed. So the daemon ends whenever
the pool ends its ranks; those that are started again get a new one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from microparallel.errors import LaunchError, UsageError
from microparallel.world.mps import choice
from microparallel.world.mps.choice import NOWHERE, PIPES, Daemon
from microparallel.world.mps.daemon import MpsDaemon


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a world is to have; where the caller insists, doing without is an error."""

    daemon: Daemon
    insists: bool


class MpsOfRanks:
    """What the processes of a pool have of MPS.

    Attributes:
        environment: what differs in the ranks' environment from the launcher's.
    """

    def __init__(self) -> None:
        self.environment: Mapping[str, str] = {}
        self._own: MpsDaemon | None = None
        self._has = Daemon.NONE
        self._does_not_start = False  # so that it is tried once, and not before every world

    def choose(self, mps: str, transport: str, device: str, ranks: int) -> Wanted:
        """What the next world is to have; raises a `UsageError` where "on" cannot be."""
        gpus = choice.gpus_here()
        given = bool(gpus) and choice.given_daemon(os.environ) is not None
        can_start = choice.control_program() is not None and (mps == "on" or not self._does_not_start)
        wanted = choice.choose(mps, transport, device, ranks, gpus, given=given, can_start=can_start)
        return Wanted(wanted, insists=mps == "on")

    def suits(self, wanted: Wanted) -> bool:
        """Whether processes that run already have what the next world is to have."""
        does_without = wanted.daemon is Daemon.OWN and self._does_not_start and not wanted.insists
        return does_without or wanted.daemon in (self._has, Daemon.ANY)

    def begin(self, wanted: Wanted) -> None:
        """Get ready for processes that are about to be started."""
        if wanted.daemon is Daemon.OWN and (wanted.insists or not self._does_not_start):
            try:
                self._own = MpsDaemon(choice.control_program() or choice.CONTROL)
            except (LaunchError, OSError) as error:
                if wanted.insists:
                    raise UsageError(
                        f"mps 'on' cannot work here: {error}; choose 'auto', which goes without"
                    ) from error
                self._does_not_start = True
            else:
                self._has, self.environment = Daemon.OWN, self._own.environment
                return
        given = bool(choice.gpus_here()) and choice.given_daemon(os.environ) is not None
        without = given and wanted.daemon is Daemon.NONE
        self.environment = {PIPES: NOWHERE} if without else {}
        self._has = Daemon.GIVEN if given and not without else Daemon.NONE

    def end(self) -> None:
        """End the daemon: all processes that used it have ended."""
        own, self._own = self._own, None
        self.environment, self._has = {}, Daemon.NONE
        if own is not None:
            own.close()
