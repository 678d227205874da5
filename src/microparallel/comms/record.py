"""Record what the ranks of any program do: their own Comms calls, and torch's forward, backward and optimizer.

```python
with mp.record(comms) as recorder:
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
recorder.recording.save("runs/mine")
```
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath
from typing import Any

import torch

from microparallel.comms.calls import Call
from microparallel.comms.clocks import offset_from_rank_0
from microparallel.comms.comms import Comms
from microparallel.comms.computing import Computing
from microparallel.comms.notes import gather_json
from microparallel.errors import UsageError
from microparallel.torch_private import at_end_of_backward, number_of_backward
from microparallel.trace.recording import Kind, Recording, Span

Moment = float | torch.cuda.Event


class Row:
    """One span that is being recorded."""

    __slots__ = ("bytes", "end", "group", "kind", "name", "number", "peer", "place", "start", "step", "waited")

    def __init__(self, kind: Kind, name: str, start: Moment, step: int) -> None:
        self.kind = kind
        self.name = name
        self.start = start
        self.end: Moment | None = None
        self.waited: Moment | None = None
        self.step = step
        self.bytes = 0
        self.group: tuple[int, ...] = ()
        self.number = 0
        self.peer: int | None = None
        self.place: tuple[bytes, int] = (b"", 0)


class Recorder:
    """One rank's notes; when the `with` block ends, `recording` has those of all ranks.

    Attributes:
        recording: what happened, once the block has ended.
        step: the number of the step that is under way; it counts up when an optimizer has updated the weights.
    """

    def __init__(self, comms: Comms) -> None:
        self.step = 0
        self._comms = comms
        self._rows: list[Row] = []
        self._numbers: dict[object, Iterator[int]] = defaultdict(itertools.count)
        self._computing = Computing(self._compute_begins, self._compute_ends)
        self._left: list[Row] = []  # to a backward that is under way, which will wait for it
        self._computed: Moment | None = None  # when that had nothing else to do
        self._recording: Recording | None = None
        self._now: Callable[[], Moment] = time.perf_counter if comms.device.type == "cpu" else self._event
        self._zero: torch.cuda.Event | None = None
        self._zero_time = 0.0

    @property
    def recording(self) -> Recording:
        """What all ranks did."""
        if self._recording is None:
            raise UsageError("recording: it is there when the `with mp.record(comms)` block has ended")
        return self._recording

    # ── what a Comms tells ──────────────────────────────────────────────────────────────────────────────────────

    def begin(self, call: Call, world_ranks: Sequence[int], place: tuple[bytes, int]) -> Row:
        """A call begins."""
        kind: Kind = "collective" if call.collective else "send" if call.sends else "receive"
        row = Row(kind, call.text, self._now(), self.step)
        row.bytes = call.size
        row.place = place
        if call.collective:
            row.group = tuple(world_ranks)
            row.number = next(self._numbers[row.group])
        elif call.peer is not None:
            self._address(row, world_ranks[call.peer])
        self._rows.append(row)
        return row

    def _address(self, row: Row, peer: int) -> None:
        row.peer = peer
        row.number = next(self._numbers[row.kind, peer])

    def wait(self, row: Row) -> None:
        """The rank has nothing else to do."""
        if row.waited is None:
            row.waited = self._now()

    def end(self, row: Row) -> None:
        """A call has ended."""
        if row.end is None:
            row.end = self._now()

    def leave(self, row: Row) -> None:
        """Nobody will say that it is waited for.

        If a backward began it, that is torch's DistributedDataParallel, which waits inside of backward when all is
        computed. Calls that autograd runs then run in the order in which they were asked for, and DDP asks after us.
        """
        if self._computing.in_backward and number_of_backward() is not None:
            self._left.append(row)
            at_end_of_backward(self._all_is_computed)

    # ── what a pipeline tells ───────────────────────────────────────────────────────────────────────────────────

    def add(self, kind: Kind, name: str, start: float, end: float, size: int = 0, peer: int | None = None) -> None:
        """Take down something that has happened already."""
        row = Row(kind, name, start, self.step)
        row.end, row.bytes = end, size
        if peer is not None:
            row.waited = start
            self._address(row, peer)
        self._rows.append(row)

    def muted(self) -> AbstractContextManager[None]:
        """Leave torch's modules alone: somebody else tells what is computed."""
        return self._computing.muted()

    # ── what torch tells ────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Listen to the Comms, and to every module, backward and optimizer of this process."""
        self._computing.start()
        self._comms.listeners.append(self)
        if self._comms.device.type == "cuda":
            torch.cuda.synchronize(self._comms.device)
            self._zero = self._event()
        self._zero_time = time.perf_counter()

    def stop(self) -> None:
        """Listen no longer."""
        self._comms.listeners.remove(self)
        self._computing.stop()

    def _compute_begins(self, kind: Kind, name: str) -> Row:
        row = Row(kind, name, self._now(), self.step)
        self._rows.append(row)
        return row

    def _compute_ends(self, row: Row) -> None:
        row.end = self._now()
        if row.kind == "optimizer":
            self.step += 1
        elif row.kind == "backward" and self._left:
            self._waited_for_what_was_left()

    def _all_is_computed(self) -> None:
        self._computed = self._now()
        self._left = [row for row in self._left if row.end is None]

    def _waited_for_what_was_left(self) -> None:
        """Backward has returned: what was under way when all was computed and has ended since, it waited for."""
        for row in self._left:
            if row.end is not None and row.waited is None:
                row.waited = self._computed
        self._left = []

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def gather(self, about: dict[str, Any]) -> Recording:
        """Bring all ranks' notes together, on one clock; every rank calls this."""
        if self._comms.device.type == "cuda":
            torch.cuda.synchronize(self._comms.device)
        offset, error = offset_from_rank_0(self._comms)
        mine = [self._written(row, offset) for row in self._rows if row.end is not None]
        everybody = gather_json({"rows": mine, "error": error}, self._comms)
        begun = min((row[2] for notes in everybody for row in notes["rows"]), default=0.0)
        spans = [_span(rank, row, begun) for rank, notes in enumerate(everybody) for row in notes["rows"]]
        worst = max(notes["error"] for notes in everybody)
        self._recording = Recording(self._comms.world_size, spans, worst, about)
        return self._recording

    def _written(self, row: Row, offset: float) -> list[Any]:
        start, end, waited = (self._seconds(moment) for moment in (row.start, row.end, row.waited))
        times = [None if math.isnan(moment) else moment + offset for moment in (start, end, waited)]
        file, line = row.place
        place = f"{PurePath(file.decode('utf-8', 'replace')).name}:{line}" if line else ""
        return [row.kind, row.name, *times, row.step, row.bytes, row.group, row.number, row.peer, place]

    def _event(self) -> torch.cuda.Event:
        """A moment of the GPU's own: work is booked when it ran, not when it was asked for."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, moment: Moment | None) -> float:
        if moment is None:
            return math.nan
        if isinstance(moment, float) or self._zero is None:
            return float(moment)  # type: ignore[arg-type]
        return self._zero_time + float(self._zero.elapsed_time(moment)) / 1e3


def _span(rank: int, row: list[Any], begun: float) -> Span:
    kind, name, start, end, waited, step, size, group, number, peer, place = row
    return Span(
        rank=rank,
        kind=kind,
        name=name,
        start=start - begun,
        end=end - begun,
        step=step,
        waited=math.nan if waited is None else waited - begun,
        bytes=size,
        group=tuple(group),
        number=number,
        peer=peer,
        place=place,
    )


@contextmanager
def record(comms: Comms, **about: Any) -> Iterator[Recorder]:
    """Record what all ranks do in a `with` block; every rank enters and leaves it.

    Args:
        comms: the ranks. Calls of its sub-groups are recorded too, and those that torch's own `distributed` makes on
            our backend. What torch's DistributedDataParallel waits for inside its backward counts as communication
            or waiting, from the moment at which all was computed.
        about: words and numbers that are kept with the recording, such as `model="gpt"`.

    Example:
        ```python
        with mp.record(comms) as recorder:
            train_some_steps()
        if comms.rank == 0:
            recorder.recording.save("runs/mine")  # then: microparallel report runs/mine
            print(mp.draw(recorder.recording))
        ```
    """
    recorder = Recorder(comms)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
    recorder.gather(about)
