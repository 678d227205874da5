"""What a step really did: events of one rank, and the trace of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microparallel.comms import Comms
from microparallel.comms.notes import gather_json
from microparallel.program import Op, Program, Send, lane, parse_op
from microparallel.schedules.replicas import shifted
from microparallel.trace import Event, Trace


class Events:
    """A recorder that keeps every operation of one rank.

    On a GPU an operation returns before it has run, so each is waited for: a traced step takes longer than others.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: list[tuple[Op, float, float, int]] = []
        self._device = device

    def settle(self) -> None:
        """Wait until the device has done what it was told."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __call__(
        self,
        op: Op,
        start: float,
        end: float,
        sent: Sequence[torch.Tensor] = (),
        waited: float | None = None,  # noqa: ARG002 what came before the start is waiting, and no event's time
    ) -> None:
        """Keep an operation."""
        self.rows.append((op, start, end, sum(tensor.nbytes for tensor in sent)))


def gather_trace(events: Events, program: Program, comms: Comms, shift: tuple[int, int]) -> Trace:
    """Put every rank's events together; all ranks call this.

    Args:
        events: this rank's.
        program: of all ranks.
        comms: all ranks.
        shift: this rank's pipeline counts micro-batches and ranks from here.
    """
    mine = [(str(shifted(op, *shift)), start, end, size) for op, start, end, size in events.rows]
    everybody = gather_json(mine, comms)
    begun = min((row[1] for rows in everybody for row in rows), default=0.0)
    found = []
    for rank, rows in enumerate(everybody):
        for text, start, end, size in rows:
            op = parse_op(text)
            messages = int(isinstance(op, Send))
            found.append(Event(rank, lane(op), op, start - begun, end - begun, messages, size, size))
    return Trace(found, program)
