"""`mp.record`: what all ranks do, as a `Trace`: their calls, and torch's forward, backward and optimizer.

```python
with mp.record(comms) as recorder:
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
recorder.trace.save("runs/mine")
```

`DataParallel` and `Pipeline` follow a program, and the recorder is told its operations. Of everything else it keeps
what can be seen from outside: an `Observed` forward, backward or call. `recorder.trace.step(0).followed` is the program
that the ranks followed in one step, and `recorder.trace.step(0).memory` says what each rank held in it.

Of ranks on a GPU a trace says what the GPU did, not what the host has asked of it: see `gpu_clock.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils.hooks import RemovableHandle

from microparallel.collectives import traffic
from microparallel.comms.clocks import Clocks
from microparallel.comms.comms import Comms
from microparallel.comms.gpu_clock import GpuClock, Moment, works_of_torch
from microparallel.comms.memory_meter import MemoryMeter, sizes_of
from microparallel.comms.wire import gather_json
from microparallel.errors import UsageError
from microparallel.observe.observer import Activity
from microparallel.program import Broadcast, Free, GroupOp, Kind, Op, OptimizerStep, halves, lane, parse_op
from microparallel.program.ops import Observed
from microparallel.topology.clocks import OtherClock
from microparallel.torch_private import (
    Engine,
    backward_engine,
    forward_hooks_of,
    forward_pre_hooks_of_all_modules,
    replace_backward_engine,
)
from microparallel.trace import Event, Trace, kind_of
from microparallel.trace.meetings import met


@contextmanager
def record(comms: Comms, *, memory: bool = True, **about: Any) -> Iterator[Recorder]:
    """Record what all ranks do in a `with` block; every rank enters and leaves it.

    Args:
        comms: the ranks. Calls of its sub-groups are recorded too, and those that torch's own `distributed` makes on
            our backend. What torch's DistributedDataParallel waits for inside its backward counts as communication
            or waiting, from the moment at which all was computed.
        memory: measure what each rank holds, for `Trace.memory` of steps of DataParallel and Pipeline. It costs some
            microseconds for each tensor that autograd saves; with False, times of very small models are closer to
            those without a recording.
        about: words and numbers that are kept with the trace, such as `model="gpt"`.

    Example:
        ```python
        with mp.record(comms) as recorder:
            train_some_steps()
        if comms.rank == 0:
            recorder.trace.save("runs/mine")  # then: microparallel report runs/mine
            print(mp.draw(recorder.trace))
        ```
    """
    recorder = Recorder(comms, memory=memory)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()
    recorder.gather(about)


class Row:
    """One event that is being recorded."""

    __slots__ = (
        *("after", "arrived", "before", "behind", "begun", "bytes", "done", "end", "group", "have_run"),
        *("number", "op", "opened", "parts", "peer", "place", "previous", "replaced", "start", "step", "thread"),
        *("waited", "works"),
    )

    def __init__(self, activity: Activity, start: Moment, step: int) -> None:
        self.op = activity.op
        self.start = start
        self.end: Moment | None = None
        self.waited: Moment | None = None
        self.arrived: float | None = None
        self.previous: Row | None = None  # it began when that one had ended
        self.step = step
        self.thread = threading.get_ident()
        self.bytes = activity.bytes
        self.group = activity.group
        self.number = 0
        self.peer = activity.peer
        self.place = activity.place
        self.before: int | None = None  # bytes of activations when it began, and when it had ended
        self.after: int | None = None
        self.parts = 0  # calls that are under way
        self.opened = False  # a collective that began before its first call did: its calls are parts of it
        self.replaced = False  # a forward or backward of torch's, inside of which a program's own operations ran
        # Of a collective on a GPU:
        self.begun: Moment | None = None  # when the stream that does it came to it
        self.behind: Row | None = None  # the collective before it in its group, which ends first
        self.works: list[Any] = []  # what was started for it in the work queue
        self.have_run = 0  # how many of these
        self.done: Moment | None = None  # when the last of them, or NCCL, has


class Recorder:
    """An observer that keeps one rank's events; when the `with` block ends, `trace` has those of all ranks.

    Attributes:
        trace: what happened, once the block has ended.
        step: the number of the step that is under way; it counts up when an optimizer has updated the weights.
    """

    def __init__(self, comms: Comms, *, memory: bool = True, gpu: GpuClock | None = None) -> None:
        self.step = 0
        self._meter = MemoryMeter() if memory else None
        self._optimizers: RemovableHandle | None = None  # torch calls the meter when one has made a step
        self._comms = comms
        self._rows: list[Row] = []
        self._row_of: dict[Activity, Row] = {}  # of what is under way
        self._numbers: dict[object, Iterator[int]] = defaultdict(itertools.count)
        self._torch_hooks = TorchHooks(self._torch_begins, self._torch_ends, self._step_ends)
        self._of_torch: dict[Kind, Row] = {}  # the forward and the backward of torch's that are under way
        self._waited_in_backward: list[Row] = []
        # When the last operation ended, or was handed to another thread, since torch's last forward or backward began.
        self._ended: Moment | None = None
        self._waited_for: dict[int, Row] = {}  # for each thread, the row whose end it has waited for last
        self._trace: Trace | None = None
        # A GPU runs behind the host: there, events on its streams say what it did.
        self._gpu = GpuClock(comms.device) if gpu is None and comms.device.type == "cuda" else gpu
        self._carriers = self._gpu if comms.transport_name in ("cuda", "nccl") else None  # the host carries, if None
        self._now: Callable[[], Moment] = time.perf_counter if self._gpu is None else self._gpu.now
        self._to_be_waited_for: dict[Activity, Row] = {}  # collectives that have ended; nobody has waited
        self._last_of: dict[tuple[int, ...], Row] = {}  # of each group, the last collective on a GPU
        self._clocks: Clocks | None = None

    @property
    def trace(self) -> Trace:
        """What all ranks did."""
        if self._trace is None:
            raise UsageError("trace: it is there when the `with mp.record(comms)` block has ended")
        return self._trace

    def start(self) -> None:
        """Observe the Comms, and hook into this process's modules, backwards and optimizers; every rank calls this."""
        self._clocks = Clocks(self._comms)
        if self._meter is not None:  # before the hooks that count the step
            self._optimizers = torch_optimizers.register_optimizer_step_post_hook(self._optimizer_ends)
        self._torch_hooks.start()
        if self._gpu is not None:
            self._gpu.begin()
        self._comms.observers.append(self)

    def stop(self) -> None:
        """Observe no longer."""
        self._comms.observers.remove(self)
        self._torch_hooks.stop()
        if self._optimizers is not None:
            self._optimizers.remove()

    # ── what the observers of a Comms are told ──────────────────────────────────────────────────────────────────

    def begins(self, activity: Activity) -> None:
        """An operation begins; a call inside of one that a pipeline has opened is part of that."""
        number = next(self._numbers[activity.group]) if activity.group else 0
        row = self._opened(activity.op) if activity.group else None
        if row is None:
            row = self._new_row(activity, number)
        else:
            row.bytes += activity.bytes
            if not row.group:
                row.group, row.number = activity.group, number
                self._line_up(row)
        row.parts += 1
        self._row_of[activity] = row

    def _opened(self, op: Op) -> Row | None:
        """The collective that was opened without a call, and is still open."""
        rows = list(self._row_of.values())  # at once: another thread may end one of them meanwhile
        return next((row for row in rows if row.op == op and row.opened), None)

    def _new_row(self, activity: Activity, number: int) -> Row:
        kind = kind_of(activity.op)
        before = None
        if self._meter is not None and (halves(activity.op) or isinstance(activity.op, Free)):
            before = self._meter.begins(activity, self.step)
        row = Row(activity, self._now(), self.step)
        row.before = before
        row.number = number if row.peer is None else next(self._numbers[kind, row.peer])
        row.opened = kind == "collective" and not row.group
        if not isinstance(row.op, Observed) and kind in ("forward", "backward"):
            self._torch_hooks.pause()  # this operation stands for the modules and backwards inside of it
            around = self._of_torch.get(kind)
            if around is not None:
                if not around.replaced:  # it began when torch's own did, or when the operation before it ended
                    row.start = around.start if self._ended is None else self._ended
                    # The thread that waited goes on at once, even if another one still writes down that end.
                    row.previous = self._waited_for.get(row.thread)
                    if self._ended is None and around.before is not None:
                        row.before = around.before
                around.replaced = True
        elif kind == "collective":
            self._ended = row.start  # if another thread does it, this one goes on
        if row.group:
            self._line_up(row)
        self._rows.append(row)
        return row

    def _line_up(self, row: Row) -> None:
        """A group's collectives run one after another, also on a GPU."""
        if self._gpu is not None:
            row.behind = self._last_of.get(row.group)
            self._last_of[row.group] = row

    def issued(self, activity: Activity, works: Sequence[Any]) -> None:
        """A collective was started: on a GPU, the stream that does it says when it begins and ends."""
        row = self._row_of.get(activity)
        if self._carriers is None or row is None:
            return
        if of_torch := works_of_torch(works):
            begun, row.done = self._carriers.follow(of_torch, row.group)
            row.begun = begun if row.begun is None else row.begun
            return
        for work in works:
            if (watch := getattr(work, "watch", None)) is not None:
                row.works.append(work)
                watch(functools.partial(self._runs, row), functools.partial(self._has_run, row))

    def _runs(self, row: Row) -> None:
        """Note where this thread's stream is: the thread runs the collective now."""
        if row.begun is None:
            row.begun = self._now()

    def _has_run(self, row: Row) -> None:
        """Note where this thread's stream is: the thread has run the collective, which ends there."""
        row.have_run += 1
        row.done = self._now()

    def waits(self, activity: Activity) -> None:
        """The rank has nothing left to do but to wait for this operation."""
        row = self._row_of.get(activity)
        if row is None and (row := self._to_be_waited_for.pop(activity, None)) and self._carriers is None:
            self._waited_for[threading.get_ident()] = row  # it has ended: nobody waits, but what follows is later
            return
        if row is not None and row.waited is None:
            row.waited = self._now()
            self._waited_for[threading.get_ident()] = row
            if "backward" in self._of_torch:
                self._waited_in_backward.append(row)

    def ends(self, activity: Activity) -> None:
        """An operation has ended."""
        row = self._row_of.get(activity)
        if row is None:
            return
        row.parts -= 1
        if not row.parts and row.waited is None and row.group:
            self._to_be_waited_for[activity] = row  # first: another thread may come to wait for it at any moment
        del self._row_of[activity]
        if row.parts:
            return
        row.arrived = activity.arrived if self._gpu is None else None  # the host saw it, not the GPU
        # To forget a value takes no time that a drawing could show.
        row.end = row.start if isinstance(row.op, Free) else self._end_of(row, activity)
        if row.waited is not None or row.thread == threading.get_ident():
            self._ended = row.end
        if not isinstance(row.op, Observed) and kind_of(row.op) in ("forward", "backward"):
            self._torch_hooks.resume()
        if self._meter is not None and row.before is not None:
            row.after = self._meter.ends(activity)

    def _end_of(self, row: Row, activity: Activity) -> Moment:
        """When it ended: of a call on the CPU that is known, even if the thread that tells it waited for a core.

        On a GPU the stream knows it that has done it, or one that has waited for it: this thread's, say.
        """
        if self._carriers is None:  # of what is no call, no end is known
            return activity.ended if activity.ended is not None else self._now()
        works, row.works = row.works, []
        if row.done is not None and row.have_run == len(works):
            return row.done
        if works and all(work.done for work in works):  # some ran before this recorder was told of them
            return self._carriers.end_of(works, row.group)
        return self._now()

    # ── what torch's hooks tell ─────────────────────────────────────────────────────────────────────────────────

    def _torch_begins(self, op: Observed | OptimizerStep) -> Row:
        held = None
        if self._meter is not None and kind_of(op) != "forward":
            held = self._meter.torch_begins(op, self._torch_hooks.roots)
        row = Row(Activity(op), self._now(), self.step)
        row.before = row.after = held
        self._rows.append(row)
        self._of_torch[kind_of(op)] = row
        self._ended = None
        return row

    def _torch_ends(self, row: Row) -> None:
        row.end = self._now()
        self._of_torch.pop(kind_of(row.op), None)
        if kind_of(row.op) == "backward":
            for waited in self._waited_in_backward:
                if waited.end is None:  # backward has returned without it
                    waited.waited = None
            self._waited_in_backward.clear()

    def _step_ends(self) -> None:
        self.step += 1

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        if self._meter is not None:
            self._meter.optimizer_ends(optimizer, self.step)

    # ── all ranks' events, on one clock ─────────────────────────────────────────────────────────────────────────

    def gather(self, about: dict[str, Any]) -> Trace:
        """Bring all ranks' events together, on one clock; every rank calls this."""
        if self._clocks is None:
            raise UsageError("gather: nothing was recorded; call start() first")
        if self._gpu is not None:
            self._gpu.end()
        clocks = self._clocks.align()
        clock = clocks[self._comms.rank]
        mine = [self._written(row, clock) for row in self._rows if row.end is not None and not row.replaced]
        sizes = {} if self._meter is None else self._meter.written()
        doubt = 0.0 if self._gpu is None else self._gpu.doubt
        by_rank = gather_json({"rows": mine, "sizes": sizes, "doubt": doubt}, self._comms)
        begun = min((row[2] for recorded in by_rank for row in recorded["rows"]), default=0.0)
        events = met([_event(rank, row, begun) for rank, recorded in enumerate(by_rank) for row in recorded["rows"]])
        events = [_counted(event, self._comms.transport_name) for event in events]
        worst, about = self._clocks.worst(clocks), about | self._clocks.about(clocks)
        worst += 2 * max(recorded["doubt"] for recorded in by_rank)
        known = sizes_of([recorded["sizes"] for recorded in by_rank])
        self._trace = Trace(events, None, self._comms.world_size, worst, about, sizes=known or None)
        return self._trace

    def _written(self, row: Row, clock: OtherClock) -> list[Any]:
        start, *others = (self._seconds(moment) for moment in (row.start, row.end, row.waited, row.arrived))
        if row.previous is not None and row.previous.end is not None:
            start = max(start, min(self._seconds(row.previous.end), others[0]))
        if self._carriers is not None and kind_of(row.op) == "collective":
            end, waited, _ = others
            # A stream that came to wait when all was done has not waited.
            others = [end, math.nan if waited >= end else waited, self._begun(row)]
        moments = (start, *others)
        times = [None if math.isnan(moment) else clock.at(moment) for moment in moments]
        file, line = row.place
        place = f"{PurePath(file.decode('utf-8', 'replace')).name}:{line}" if line else ""
        kind = row.op.kind if isinstance(row.op, Observed) else None
        activations = None if row.before is None or row.after is None else [row.before, row.after]
        return [str(row.op), kind, *times, row.step, row.bytes, row.group, row.number, row.peer, place, activations]

    def _begun(self, row: Row) -> float:
        """When the stream that does a collective came to it; before that, it does those before it in the group."""
        if row.begun is not None:
            return self._seconds(row.begun)
        behind = None if row.behind is None else row.behind.end
        return self._seconds(row.start if behind is None else behind)

    def _seconds(self, moment: Moment | None) -> float:
        if moment is None:
            return math.nan
        return float(moment) if self._gpu is None else self._gpu.seconds(moment)  # type: ignore[arg-type]


def _event(rank: int, row: list[Any], begun: float) -> Event:
    text, kind, asked, end, waited, arrived, step, size, group, number, peer, place, activations = row
    op = parse_op(text) if kind is None else Observed(text, kind)
    sends = kind_of(op) == "send"
    # When a message came, its receiver knows better than `met` could tell, if the transport says it.
    start = asked if arrived is None else min(max(asked, arrived), end)
    return Event(
        rank=rank,
        lane=lane(op),
        op=op,
        start=start - begun,
        end=end - begun,
        messages=int(sends),
        sent=size if sends else 0,
        bytes=size,
        step=step,
        issued=None if arrived is None else asked - begun,
        waited=None if waited is None else waited - begun,
        group=tuple(group),
        number=number,
        peer=peer,
        place=place,
        activations=None if activations is None else tuple(activations),
    )


def _counted(event: Event, transport: str) -> Event:
    """A collective with what its rank sent for it; left as it is where the algorithm is not known."""
    op, group = event.op, event.group
    if not isinstance(op, GroupOp) or not group or (isinstance(op, Broadcast) and op.root not in group):
        return event
    messages, sent = traffic(op, group, event.bytes, transport)[group.index(event.rank)]
    return event._replace(messages=messages, sent=sent)


# ── what torch computes in this process ─────────────────────────────────────────────────────────────────────────────


class TorchHooks:
    """Tells when torch's forwards, backwards and optimizers begin and end in this process.

    A hook on a forward costs some microseconds, and a model has many modules in each other. So only the outermost is
    reported: the hook that all modules share is taken away when a forward begins, and put back when it has ended.

    Args:
        begin: called when something begins; what it returns is handed to `end`.
        end: called when that has ended.
        step_ends: called when an optimizer's step has ended, and with it the step of the training.
    """

    def __init__(
        self,
        begin: Callable[[Observed | OptimizerStep], Any],
        end: Callable[[Any], None],
        step_ends: Callable[[], None],
    ) -> None:
        self._begin = begin
        self._end = end
        self._step_ends = step_ends
        self._started = False
        self._pauses = 0  # operations of a program that are under way
        self._handles: list[RemovableHandle] = []
        self._hooks: dict[int, Any] = {}  # torch's own, those that all modules share
        self._key = 0  # and our place in it
        self._forward: Any = None
        # Those that step: one may do so inside of another, as in a ShardedOptimizer.
        self._optimizers: list[tuple[torch.optim.Optimizer, Any]] = []
        self._engine = backward_engine()
        self._run_backward: Engine | None = None
        self.in_backward = False
        self.roots: Sequence[Any] = ()  # the tensors at which the backward that is reported begins

    def start(self) -> None:
        """Hook into every module, every backward and every optimizer of this process."""
        any_module = torch_modules.register_module_forward_pre_hook(self._forward_begins)
        self._key, self._hooks = any_module.id, forward_pre_hooks_of_all_modules()
        self._handles = [
            any_module,
            torch_optimizers.register_optimizer_step_pre_hook(self._optimizer_begins),
            torch_optimizers.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        # All of torch.autograd comes through here. Hooks on what modules return, and a callback at the end, cost
        # several times as much, and miss what has no module.
        self._engine = backward_engine()
        self._run_backward = self._stand_between(self._engine)
        replace_backward_engine(self._run_backward)
        self._started = True

    def stop(self) -> None:
        """Remove the hooks."""
        self._started = False
        for handle in self._handles:
            handle.remove()
        if backward_engine() is self._run_backward:  # else another library has replaced it after us
            replace_backward_engine(self._engine)
        self._run_backward = None

    def pause(self) -> None:
        """Report no modules and backwards: an operation of a program begins that stands for them."""
        self._pauses += 1
        self._hooks.pop(self._key, None)

    def resume(self) -> None:
        """Report them again, when every operation that paused has ended."""
        self._pauses -= 1
        self._wait_for_a_forward()

    def _wait_for_a_forward(self) -> None:
        if self._started and not self._pauses:
            self._hooks[self._key] = self._forward_begins

    def _forward_begins(self, module: nn.Module, _: Any) -> None:
        """The outermost module is called: until it ends, those that it calls are not reported."""
        if self.in_backward:
            return  # it computes again what backward needs, and that is part of backward
        key = self._key
        self._hooks.pop(key, None)
        # As `module.register_forward_hook(…, always_call=True)`, whose handle takes as long as all the rest.
        hooks, always_called = forward_hooks_of(module)
        hooks[key], always_called[key] = self._forward_ends, True
        self._forward = self._begin(Observed(f"forward of {type(module).__name__}", "forward"))

    def _forward_ends(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self._end(self._forward)
        key = self._key
        for hooks in forward_hooks_of(module):
            hooks.pop(key, None)  # not there if the module calls itself
        self._wait_for_a_forward()

    def _stand_between(self, engine: Engine) -> Engine:
        """What torch's autograd calls instead of its engine."""

        def run_backward(*arguments: Any, **named: Any) -> Any:
            if self.in_backward or self._pauses or self._run_backward is not run_backward:
                return engine(*arguments, **named)
            self.in_backward = True
            self.roots = arguments[0] if arguments else ()
            backward = self._begin(Observed("backward", "backward"))
            try:
                return engine(*arguments, **named)
            finally:
                self._end(backward)
                self.in_backward = False
                self.roots = ()

        return run_backward

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        if any(other is optimizer for other, _ in self._optimizers):
            self._optimizers.clear()  # an error has ended its last step, and torch did not call the hook
        # What an optimizer does around the one inside of it is to communicate: the update is the inner one's.
        inside = getattr(optimizer, "updates_inside", False)
        self._optimizers.append((optimizer, None if inside else self._begin(OptimizerStep())))

    def _optimizer_ends(self, _optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        if not self._optimizers:
            return
        _, row = self._optimizers.pop()
        if row is not None:
            self._end(row)
        if not self._optimizers:
            self._step_ends()
