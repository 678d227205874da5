"""What does a message cost? Latency and bandwidth: fitted to measured all-reduces, or timed by ping-pong.

A message of n bytes costs latency + n × seconds per byte, and adding n bytes costs n × seconds per byte of its own. So
an algorithm's time is

    time = messages × latency + bytes × seconds per byte + added bytes × seconds per added byte

where the three numbers of the algorithm count what stands on its longest path, one after another. The simulator knows
them: they are the algorithm's time in a world where one of the three costs is 1 and the others are nothing.

    ring of 4 ranks, n bytes:   6 × latency + 1.5 n × seconds per byte + 0.75 n × seconds per added byte

Adding is timed by itself. The other two costs are then the pair that comes nearest to all measured times, where near
means by what factor a prediction is off: twice too long counts as much as half as long, and as much at 1 ms as at 1 s.
(By seconds the largest tensors alone would decide; by percentages, too short would be cheaper than too long.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microparallel.bench.all_reduce import ADD, Case, Method, add_method, algorithm_method, rounds_of
from microparallel.bench.engine import seconds_of
from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.program import Program
from microparallel.simulator import Costs, simulate
from microparallel.topology import Link

_STEPS = 25  # a handful is enough where the measurements make sense


@dataclass(frozen=True)
class MessageCosts:
    """What communication costs, in seconds."""

    latency: float
    seconds_per_byte: float
    add_seconds_per_byte: float

    def predict(self, program: Program, size: int) -> float:
        """How long a collective would take on a tensor of this many bytes, by the simulator."""
        costs = Costs(
            latency=self.latency,
            seconds_per_byte=self.seconds_per_byte,
            add_seconds_per_byte=self.add_seconds_per_byte,
            bytes_per_value=size,
        )
        return simulate(program, costs).makespan


@dataclass(frozen=True)
class LongestPath:
    """What an algorithm does one after another: how many messages, and how many times the tensor's bytes."""

    messages: float
    sent: float
    added: float


def longest_path(program: Program) -> LongestPath:
    """Count what stands on a collective's longest path."""
    return LongestPath(
        messages=simulate(program, Costs(latency=1)).makespan,
        sent=simulate(program, Costs(seconds_per_byte=1)).makespan,
        added=simulate(program, Costs(add_seconds_per_byte=1)).makespan,
    )


def fit_messages(
    measured: Sequence[tuple[Program, int, float]], adds: Sequence[tuple[int, float]]
) -> MessageCosts | None:
    """Find the costs that explain the measured times best.

    Args:
        measured: programs with the size they ran on, in bytes, and the seconds they took.
        adds: sizes in bytes, and the seconds it took to add one tensor of that size to another.

    Returns:
        The costs; None where they cannot be told apart, as with a single size or a single rank.
    """
    adding = fit_line(adds)
    if adding is None:
        return None
    add_seconds_per_byte = adding[1]
    paths = {program.name: longest_path(program) for program, _, _ in measured}
    observations = []
    for program, size, seconds in measured:
        path = paths[program.name]
        adding_seconds = path.added * size * add_seconds_per_byte
        observations.append(_Observation(path.messages, path.sent * size, adding_seconds, seconds))
    found = _nearest_pair(observations)
    return None if found is None else MessageCosts(*found, add_seconds_per_byte)


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """The constant and the slope of the line that comes nearest to these points; None for fewer than two sizes."""
    return _nearest_pair([_Observation(1.0, size, 0.0, seconds) for size, seconds in points])


def fit_link(observations: Sequence[tuple[float, float, float]]) -> Link | None:
    """The latency and the time a byte that come nearest to (messages, bytes, seconds) of what was sent.

    None where they cannot be told apart, as with a single size.
    """
    found = _nearest_pair([_Observation(messages, size, 0.0, seconds) for messages, size, seconds in observations])
    return None if found is None else Link(*found)


def typical_factor(pairs: Sequence[tuple[float, float]]) -> float:
    """By what factor predictions are typically off, in either direction: 1 is perfect."""
    return statistics.median(max(predicted / measured, measured / predicted) for predicted, measured in pairs)


@dataclass(frozen=True)
class _Observation:
    """A measured time, which is to be `a × first + b × second + known`."""

    first: float
    second: float
    known: float
    seconds: float

    def predict(self, a: float, b: float) -> float:
        return a * self.first + b * self.second + self.known

    def around(self, centre: float) -> tuple[float, float, float]:
        """The factors of a and b, and their target, where the logarithm is replaced by its slope at a prediction."""
        target = centre * (1 + math.log(self.seconds / centre)) - self.known
        return self.first / centre, self.second / centre, target / centre


def _nearest_pair(observations: Sequence[_Observation]) -> tuple[float, float] | None:
    """Find a and b, neither below 0, with the least sum of log²(predicted ÷ measured); None if many would do.

    The logarithm is not linear in a and b, so this goes in steps: around the last prediction, a small change of it is
    the same change of its logarithm, divided by the prediction. The first step is around the measured times.
    """
    centres = [observation.seconds for observation in observations]
    pair = None
    for _ in range(_STEPS):
        pair = _least_squares([one.around(centre) for one, centre in zip(observations, centres, strict=True)])
        if pair is None:
            return None
        # A prediction of nothing has no logarithm; a bounded step keeps away from it, and from swinging to and fro.
        predictions = [observation.predict(*pair) for observation in observations]
        centres = [min(max(new, old / 2), old * 2) for new, old in zip(predictions, centres, strict=True)]
    return pair


def _least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Solve `a × first + b × second ≈ target`, with neither below 0, as nothing takes less than no time."""
    aa = sum(first * first for first, _, _ in rows)
    ab = sum(first * second for first, second, _ in rows)
    bb = sum(second * second for _, second, _ in rows)
    at = sum(first * target for first, _, target in rows)
    bt = sum(second * target for _, second, target in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:  # also where there is nothing at all
        return None
    a, b = (at * bb - bt * ab) / determinant, (aa * bt - ab * at) / determinant
    if a < 0:
        return 0.0, max(0.0, bt / bb)
    if b < 0:
        return max(0.0, at / aa), 0.0
    return a, b


# ── measured quickly between these ranks, for estimates of what was not measured ────────────────────────────────────

_ALGORITHMS = ("ring", "tree")  # one with many small messages, and one with few large ones
_SIZES = (4_000, 64_000, 1_000_000, 4_000_000)  # bytes
_REPEATS = 7


def measure_message_costs(comms: Comms) -> MessageCosts:
    """Measure what a message costs, its bytes, and adding them; all ranks call this, in about a second."""
    if comms.world_size == 1:
        raise UsageError("one rank sends no messages, so their cost cannot be measured; start at least 2")
    methods = [*(algorithm_method(comms, name) for name in _ALGORITHMS), add_method(comms)]
    times = [(size, _medians(comms, methods, size)) for size in _SIZES]
    measured = [
        (all_reduce_program(name, comms.world_size), size, medians[name])
        for size, medians in times
        for name in _ALGORITHMS
    ]
    costs = fit_messages(measured, [(size, medians[ADD]) for size, medians in times])
    if costs is None:
        raise UsageError("latency and bandwidth of this world cannot be told apart")
    return costs


def time_all_reduce(comms: Comms, size: int, algorithm: str = "auto") -> float:
    """The median time of an all-reduce of so many bytes; all ranks call this."""
    return _medians(comms, [algorithm_method(comms, algorithm)], size)[algorithm]


def _medians(comms: Comms, methods: list[Method], size: int) -> dict[str, float]:
    dtype = torch.float32 if size >= torch.float32.itemsize else torch.uint8
    rounds = rounds_of(comms, methods, Case(comms, size, dtype))
    rounds.warm_up()
    for _ in range(_REPEATS):
        rounds.one_more()
    return {method.name: statistics.median(seconds) for method, seconds in rounds.seconds.items()}


# ── ping-pong: how long does a message take from one rank to another? ───────────────────────────────────────────────


@dataclass(frozen=True)
class MessageTime:
    """The time a message of this size takes one way."""

    size: int  # bytes
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """How fast the bytes move, latency included."""
        return self.size / self.seconds


def ping_pong(comms: Comms, sizes: Sequence[int], repeats: int = 30) -> list[MessageTime]:
    """Send messages from rank 0 to rank 1 and back; returns the median time one way, on both ranks alike."""
    if comms.world_size < 2:
        raise UsageError(f"ping-pong needs 2 ranks, and this world has {comms.world_size}")
    return [MessageTime(size, _time(comms, size, repeats)) for size in sizes]


def _time(comms: Comms, size: int, repeats: int) -> float:
    seconds = 0.0
    if comms.rank < 2:
        seconds = one_way(comms, 1 - comms.rank, comms.rank == 0, size, repeats)
    return comms.broadcast(torch.tensor(seconds, dtype=torch.float64), src=0).item()


def one_way(comms: Comms, other: int, first: bool, size: int, repeats: int) -> float:
    """The median time of a message to another rank, which calls this, too: half of the way there and back.

    Args:
        comms: the ranks.
        other: the other one of the two.
        first: whether this one begins.
        size: bytes.
        repeats: how many messages are timed; three more warm the connection up.
    """
    ball = torch.zeros(size, dtype=torch.uint8, device=comms.device)

    def there_and_back() -> None:
        if first:
            comms.send_tensor(ball, dest=other)
            comms.recv_tensor((size,), src=other, dtype=torch.uint8)
        else:
            comms.send_tensor(comms.recv_tensor((size,), src=other, dtype=torch.uint8), dest=other)

    times = [seconds_of(there_and_back, comms.device) for _ in range(repeats + 3)]
    return statistics.median(times[3:]) / 2
