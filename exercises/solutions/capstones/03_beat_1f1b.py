"""Beat 1F1B: a schedule for a machine that is not even. You write this file; here is its contract.

    def schedule(ranks: int, microbatches: int, costs: mp.Costs, most: Sequence[int])
        -> mp.Program

Return the program of one training step that takes less time on this machine than 1F1B does.

  - `ranks`: how many ranks there are, at least 2. The model is cut into as many stages, and
    stage s is on rank s.
  - `microbatches`: how many there are, at least 2. Each has its forward and its backward once on
    every stage.
  - `costs`: how long everything takes, as `mp.simulate` reads it. Stages differ, and links
    differ. `costs.of(op)` says how long an operation computes, `costs.link(sender,
    receiver).latency` how long a message takes.
  - `most`: of each rank, the most activations that it may hold at once. 1F1B always keeps to
    that.
  - What to return: `Program(name, TrainingStep(ranks, microbatches), rows)`, with a tuple of
    operations for each rank, all from `microparallel.program`: Forward(stage, microbatch), and
    then Backward, or its two halves BackwardInput and BackwardWeight. Messages may be left out:
    they are added. The program's text (`mp.program.to_text`) will do, too.

Your function may simulate and search (`mp.simulate`, `mp.verify`), for 6 seconds a machine; of
`mp.schedules` nothing may be called. It is judged on machines that are not shown. It passes if
it beats 1F1B on all of them, which is one star; two stars are for at most 5 % more than the best
known on every machine, and three for at most 1 %.

Lesson: docs/capstones/03_beat_1f1b.md          Check it: microparallel learn check beat-1f1b
"""

# ┌ hole
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import microparallel as mp
from microparallel.program import BackwardInput, BackwardWeight, Forward, Op, Program, TrainingStep


class Rank:
    """What a rank has done so far: its operations, and when each forward, input half and weight half has ended."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.forwards: list[float] = []
        self.inputs: list[float] = []
        self.weights: list[float] = []
        self.free = 0.0


@dataclass(frozen=True)
class Habits:
    """How a rank decides.

    A weight half fills a gap, and nobody waits for it. With a patience of 1 a rank does it when nothing else comes in
    the time that it takes; with a patience of 0, when nothing else can begin sooner.
    """

    room: int  # how many activations it holds, at most
    patience: float = 0.5
    forward_first: bool = False  # when an input half can begin, too; also what makes room for a forward comes first

    def others(self, most: int) -> Iterator["Habits"]:
        """All that differ in one of the three."""
        yield from (replace(self, room=room) for room in range(1, most + 1))
        yield from (replace(self, patience=patience) for patience in (0.0, 0.5, 1.0))
        yield replace(self, forward_first=not self.forward_first)


def as_it_comes(microbatches: int, costs: mp.Costs, plan: Sequence[Habits]) -> Program:
    """Let every rank do whatever can begin first, and its habits decide where that is not enough."""
    ranks = len(plan)
    rows = [Rank() for _ in range(ranks)]

    def choices(rank: int) -> list[tuple[float, Op, list[float], float]]:
        """What a rank could do next: from when on it would like to, what, where its end is noted, and its beginning."""
        row, habits = rows[rank], plan[rank]
        f, i, w = len(row.forwards), len(row.inputs), len(row.weights)
        activations = [0.0] * microbatches if rank == 0 else arrived(rows[rank - 1].forwards, rank - 1, rank)
        gradients = [0.0] * f if rank == ranks - 1 else arrived(rows[rank + 1].inputs, rank + 1, rank)
        full = f - w >= habits.room
        able = []
        if i < min(f, len(gradients)):
            begin = max(row.free, gradients[i])
            able.append((begin, BackwardInput(rank, i), row.inputs, begin))
        if f < len(activations) and not full:
            begin = max(row.free, activations[f])
            able.append((begin, Forward(rank, f), row.forwards, begin))
        if w < i:
            op = BackwardWeight(rank, w)
            patience = 0 if full else habits.patience * costs.of(op)
            able.append((row.free + patience, op, row.weights, row.free))
        return able[::-1] if habits.forward_first else able

    def arrived(ends: list[float], sender: int, receiver: int) -> list[float]:
        return [end + costs.link(sender, receiver).latency for end in ends]

    for _ in range(3 * ranks * microbatches):
        ready = [(rank, *choice) for rank in range(ranks) for choice in choices(rank)]
        rank, _, op, ends, begin = min(ready, key=lambda one: one[1])
        rows[rank].free = begin + costs.of(op)
        rows[rank].ops.append(op)
        ends.append(rows[rank].free)
    return Program("mine", TrainingStep(ranks, microbatches), tuple(tuple(row.ops) for row in rows))


def schedule(ranks: int, microbatches: int, costs: mp.Costs, most: Sequence[int]) -> Program:
    """Try plans, and change one habit of one rank after another for as long as that helps."""

    def seconds(plan: Sequence[Habits]) -> float:
        program = as_it_comes(microbatches, costs, plan)
        return mp.simulate(program, costs).makespan  # messages queue at their ports: as_it_comes ignores that

    def neighbours(plan: list[Habits]) -> Iterator[list[Habits]]:
        for rank, habits in enumerate(plan):
            for other in habits.others(most[rank]):
                yield [*plan[:rank], other, *plan[rank + 1 :]]

    like_1f1b = [min(limit, ranks - rank) for rank, limit in enumerate(most)]
    alike = itertools.product((most, like_1f1b), (0.0, 0.5, 1.0), (False, True))
    best = min(([Habits(one, *rest) for one in room] for room, *rest in alike), key=seconds)
    least = seconds(best)
    while True:
        better = min(neighbours(best), key=seconds)
        if seconds(better) >= least:
            return as_it_comes(microbatches, costs, best)
        best, least = better, seconds(better)


if __name__ == "__main__":
    costs = mp.Costs(forward=[1, 2, 1], backward_input=[1, 2, 1], backward_weight=[1, 2, 1], latency=0.5)
    one_f_one_b = mp.simulate(mp.schedules.one_f_one_b(3, 6), costs)
    mine = mp.simulate(schedule(3, 6, costs, [4, 3, 2]), costs)
    print(mp.draw(mine))
    print(f"1F1B takes {one_f_one_b.makespan:g}, and mine {mine.makespan:g}")
# └
