"""Time a training step whose gradients are compressed, over fast and slow links, and see what it learns.

Each method trains a copy of its own of the same model, with mp.DataParallel and AdamW:

    none            float32 gradients, all-reduced as they are; it runs twice: what lies between the two is chance
    bf16            in 16 bits
    int8            in 8 bits, with a scale for each block
    sign            one bit each
    topk:0.01       the hundredth that is largest
    randomk:0.01    a hundredth by chance, the same on all ranks
    powersgd:2      matrices as products of two narrow ones
    topk:0.01+bf16  one after another

What a link costs depends on nothing but what is sent, so a method is predicted for each: its step is recorded over
links that take no time, with all that it computes, and the program of each sum is simulated on the link
(`simulator/over_links.py`). What is recorded takes turns with the steps that are predicted.

    round 3   none ○◐◐●   bf16 ○◐◐●   topk:0.01 ○◐◐●     without delay: ○ not timed, ◐ recorded     on the link: ● timed
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from microparallel.bench.engine import (
    Call,
    Measured,
    Rounds,
    TimeBudget,
    Wrong,
    count_ranks_here,
    largest,
    require_memory,
    shares_memory,
    step_rounds,
    timed,
    torch_group,
    transport_of,
    wait_for_gpu,
    where,
)
from microparallel.bench.settings import GLOO, TRANSPORT, CompressSettings, Progress, injected_link
from microparallel.bench.subjects import Batch, Subject, bytes_of, find_subject, to_device
from microparallel.collectives import payload
from microparallel.comms import Comms
from microparallel.comms.message_group import count_messages
from microparallel.comms.record import Recorder
from microparallel.comms.slow_links import slow_down
from microparallel.comms.torch_group import TorchGroup
from microparallel.compression import Compressor, parse
from microparallel.data_parallel import DataParallel, replicas_are_identical
from microparallel.errors import UsageError
from microparallel.models.loss import mean_loss
from microparallel.simulator.fitted import fit_step
from microparallel.simulator.over_links import over_link
from microparallel.topology import Link
from microparallel.trace import Trace

NONE, AGAIN = "none", ", again"
LEARNING_RATE = 5e-4
_COPIES = 8  # what a method needs at most, in models: weights, gradients, two moments, residuals, what is encoded
_SAMPLES_UNSEEN = 256  # on which the loss is taken
_NO_DELAY = Link(0.0, 0.0)
_WARM_UP = 2  # steps: buckets are arranged anew after the first
_RECORDED = 2  # steps before each that is timed


@dataclass(frozen=True)
class Learned:
    """What a method sends in a step, and what it learned.

    Attributes:
        method: by its name.
        sent: bytes of a step, by the rank that sent most, counted message by message.
        sent_by_formula: what these should be.
        loss: on samples that were not trained on, after the steps of training.
    """

    method: str
    sent: float
    sent_by_formula: float
    loss: float


@dataclass(frozen=True)
class Timing:
    """The counted steps of one method over one link, each with the time of the slowest rank.

    Attributes:
        method: by its name.
        link: by its name.
        seconds: of each step.
        predicted: seconds; None where the link was not injected, so that its costs are not known.
    """

    method: str
    link: str
    seconds: tuple[float, ...]
    predicted: float | None


@dataclass(frozen=True)
class Result:
    """Everything about one model."""

    model: str
    text: str
    batch: int
    gradient_bytes: int
    train_steps: int
    loss_at_first: float
    learned: tuple[Learned, ...]
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Measurements(Measured):
    """Everything one run measured; it ends at the first wrong result."""

    results: tuple[Result, ...]


def bench_compress(comms: Comms, settings: CompressSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods on all models and links; every rank calls this, and all get the same numbers."""
    results: list[Result] = []
    wrong = None
    for index, name in enumerate(settings.models):

        def of_all(part: float, what: str, steps: int, index: int = index, name: str = name) -> None:
            progress((index + part) / len(settings.models), f"{name} {what}", steps)

        bench = _Bench(comms, settings, find_subject(name, settings.batch, learnable=True))
        result, wrong = bench.run(of_all)
        results.append(result)
        del bench
        gc.collect()  # modules and their hooks hold each other; the next model shall have the memory
        if wrong is not None:
            break
    return Measurements(*where(comms), tuple(results), wrong=wrong)


class _Bench:
    """All methods on one model, phase by phase: what it learns, the transport, gloo beside it, injected links."""

    def __init__(self, comms: Comms, settings: CompressSettings, subject: Subject) -> None:
        self._comms = comms
        self._settings = settings
        self._subject = subject
        self._methods = [NONE, *settings.methods, NONE + AGAIN]
        self._start = subject.model().to(comms.device)
        require_memory(
            comms,
            count_ranks_here() * len(self._methods) * _COPIES * bytes_of(self._start),
            f"{subject.name}: {len(self._methods)} copies of it on every rank",
            "choose fewer --methods, or a smaller model",
        )
        beside = shares_memory(transport_of(comms))  # elsewhere gloo is what ranks talk through, or there are GPUs
        names = [name for name in settings.links if name != GLOO or beside]
        if not names:
            raise UsageError(
                f"--links gloo: it is measured beside shared memory, and these ranks talk through "
                f"{transport_of(comms)}; try --links {TRANSPORT}"
            )
        self._plain = [name for name in names if injected_link(name) is None]
        self._injected = {name: link for name in names if (link := injected_link(name)) is not None}

    def run(self, progress: Callable[[float, str, int], None]) -> tuple[Result, Wrong | None]:
        """Everything that was measured, and a wrong result."""
        phases = 1 + len(self._plain) + bool(self._injected)
        subject, settings = self._subject, self._settings
        loss_at_first = self._loss(self._start)
        learned, wrong = self._learn(lambda part, what: progress(part / phases, what, 0))
        timings: list[Timing] = []
        for phase, name in enumerate(self._plain if wrong is None else (), 1):

            def of_phase(part: float, steps: int, phase: int = phase, name: str = name) -> None:
                progress((phase + part) / phases, name, steps)

            with self._over(name) as comms:
                timings += self._time(comms, name, of_phase)
        if self._injected and wrong is None:
            what = ", ".join(self._injected)
            timings += self._time_injected(lambda part, n: progress((phases - 1 + part) / phases, what, n))
        result = Result(
            *(subject.name, subject.text, subject.batch, bytes_of(self._start), settings.train_steps, loss_at_first),
            *(tuple(learned), tuple(timings)),
        )
        return result, wrong

    @property
    def _budget(self) -> TimeBudget:
        """Seconds for what is timed together; injected links have most to wait for."""
        settings = self._settings
        phases = len(self._plain) + 2 * bool(self._injected)
        return TimeBudget(settings.seconds / len(settings.models) / max(1, phases), repeats=settings.steps)

    # ── what each method sends, and learns ──────────────────────────────────────────────────────────────────────

    def _learn(self, progress: Callable[[float, str], None]) -> tuple[list[Learned], Wrong | None]:
        """Train with each method for some steps: samples and seeds are the same for all. No link changes the loss."""
        comms = self._comms
        found: list[Learned] = []
        for number, method in enumerate(self._methods):
            progress(number / len(self._methods), f"learning by {method}")
            replica = self._replica(method, comms)
            for step in range(self._settings.train_steps):
                replica.train(to_device(self._subject.on_rank(step * comms.world_size + comms.rank), comms.device))
            loss = self._loss(replica.model)
            if not replicas_are_identical(replica.model, comms):
                problem = f"trained {self._subject.name} wrongly: its ranks ended with different weights"
                return found, Wrong(method, problem)
            found.append(Learned(method, self._count(method), self._formula(method), loss))
        return found, None

    def _count(self, method: str) -> float:
        """How many bytes a rank sends in a step: each message is counted, where all go as on a network."""
        counted, counts = count_messages(self._comms)
        replica = self._replica(method, counted)
        for _ in range(_WARM_UP):
            replica.step()
        before = counts.bytes_sent
        replica.step()
        [most] = largest(self._comms, [counts.bytes_sent - before])
        counted.close()
        return most

    def _formula(self, method: str) -> float:
        """How many bytes these should be: of gradients, without the few that tell which there are."""
        ranks, compressor = self._comms.world_size, compressor_of(method)
        summed, gathered = 2 * (ranks - 1) / ranks, ranks - 1
        if compressor is None:
            return summed * bytes_of(self._start)
        shapes = [tuple(one.shape) for one in self._start.parameters() if one.requires_grad]
        large = [shape for shape in shapes if math.prod(shape) >= compressor.smallest]
        size = 4 * sum(map(math.prod, large))
        left_alone = bytes_of(self._start) - size
        rounds = payload(compressor.algorithm(large), size) if large else ()
        return summed * left_alone + sum((summed if one.kind == "sum" else gathered) * one.bytes for one in rounds)

    def _loss(self, model: nn.Module) -> float:
        unseen = replace(self._subject, batch=_SAMPLES_UNSEEN).on_rank(-1)
        with torch.no_grad():
            return float(mean_loss(model, *to_device(unseen, self._comms.device)))

    def _replica(self, method: str, comms: Comms) -> Replica:
        batch = to_device(self._subject.on_rank(comms.rank), comms.device)
        return Replica(method, self._start, batch, comms)

    # ── over the transport as it is, and over gloo ──────────────────────────────────────────────────────────────

    @contextmanager
    def _over(self, name: str) -> Iterator[Comms]:
        """The ranks, over the link of that name, which is not injected."""
        if name == TRANSPORT:
            yield self._comms
            return
        with torch_group(self._comms) as group:
            beside = TorchGroup(group, None, frozenset({"cpu"}))
            yield Comms(beside, device=self._comms.device, local_rank=self._comms.local_rank)

    def _time(self, comms: Comms, link: str, progress: Callable[[float, int], None]) -> list[Timing]:
        replicas = [self._replica(method, comms) for method in self._methods]
        rounds = step_rounds(self._comms, replicas)
        rounds.fill(self._budget, progress)
        return [Timing(one.method, link, tuple(rounds.seconds[one]), None) for one in replicas]

    # ── over injected links ─────────────────────────────────────────────────────────────────────────────────────

    def _time_injected(self, progress: Callable[[float, int], None]) -> list[Timing]:
        wires = Wires(self._comms)
        replicas = [self._replica(method, wires.comms) for method in self._methods]
        for replica, _ in itertools.product(replicas, range(_WARM_UP)):
            replica.step()
        contenders = [OnLink(one, name, link, wires) for name, link in self._injected.items() for one in replicas]
        rounds = Rounds(self._comms, contenders, self._time_on_link, warm_up=0)
        rounds.fill(self._budget, progress)
        wires.comms.close()
        found = []
        for one in contenders:
            steps = one.replica.steps
            predicted = statistics.median(_predict(*each, one.link, self._comms.transport_name) for each in steps)
            found.append(Timing(one.replica.method, one.name, tuple(rounds.seconds[one]), predicted))
        return found

    def _time_on_link(self, contender: OnLink) -> Call:
        contender.record()
        self._comms.barrier()  # waiting for a late rank is no cost of this method
        return timed(contender.step, self._comms.device)


def _predict(trace: Trace, took: float, link: Link, transport: str) -> float:
    """How long a step would take on a link, of which one without delay was recorded."""
    outside = max(0.0, took - trace.makespan)  # such as what is done before forward begins
    return over_link(fit_step(trace), link, transport).makespan + outside


class Wires:
    """The ranks, whose messages all go over links that can be changed between two steps.

    Attributes:
        comms: the ranks.
    """

    def __init__(self, comms: Comms) -> None:
        pairs = itertools.combinations(comms.world_ranks, 2)
        self._links = {frozenset(ends): _NO_DELAY for ends in pairs}
        self.comms = slow_down(comms, self._links)

    def become(self, link: Link) -> None:
        """Let all links be this one; every rank calls this between two steps."""
        for ends in self._links:
            self._links[ends] = link


class OnLink:
    """One method over one link: a contender.

    Attributes:
        replica: the method's copy of the model, which it has for all links.
        name: of the link.
        link: what a message costs.
    """

    alone = False

    def __init__(self, replica: Replica, name: str, link: Link, wires: Wires) -> None:
        self.replica = replica
        self.name = name
        self.link = link
        self._wires = wires

    def step(self) -> None:
        """One step over the link."""
        self._wires.become(self.link)
        self.replica.step()

    def record(self) -> None:
        """Some steps over links without delay; all but the first are recorded."""
        self._wires.become(_NO_DELAY)
        self.replica.step()
        self.replica.steps += [self.replica.recorded(self._wires.comms) for _ in range(_RECORDED)]


def compressor_of(method: str) -> Compressor | None:
    """What compresses gradients by a method; None for that which sends them as they are."""
    return None if method.removesuffix(AGAIN) == NONE else parse(method)


class Replica:
    """One method's copy of the model on this rank, with its optimizer.

    Args:
        method: how gradients are compressed.
        model: is copied.
        batch: inputs and targets of this rank, for steps that are timed.
        comms: the ranks.

    Attributes:
        steps: those that were recorded, without delay: each trace, and how long the step took.
    """

    alone = False

    def __init__(self, method: str, model: nn.Module, batch: Batch, comms: Comms) -> None:
        self.method = method
        self.model = copy.deepcopy(model)
        self.steps: list[tuple[Trace, float]] = []
        self._batch = batch
        self._wrapped = DataParallel(self.model, comms, compress=compressor_of(method))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        """One step of training, always on the same samples."""
        self.train(self._batch)

    def train(self, batch: Batch) -> None:
        """One step of training: forward, backward, and the optimizer."""
        self._optimizer.zero_grad()
        mean_loss(self._wrapped, *batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def recorded(self, comms: Comms) -> tuple[Trace, float]:
        """Record one step: what all ranks did, and how long it took on the slowest; every rank calls this."""
        recorder = Recorder(comms, memory=False)
        comms.barrier()
        recorder.start()
        begun = time.perf_counter()
        try:
            self.step()
            wait_for_gpu(comms.device)
        finally:
            took = time.perf_counter() - begun
            recorder.stop()
        [slowest] = largest(comms, [took])
        return recorder.gather({}), slowest
