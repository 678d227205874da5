"""Uneven machines for schedules, what 1F1B takes on each, and the shortest step that a search has found.

python -m microparallel.learn.graders._machines     search again, and write machines.json (minutes)

Stage s is on rank s, and micro-batches go in their order, so an order is a word for each rank: `FFIWFIWIW` does two
forwards, then the first micro-batch's two halves of a backward, and so on. The search begins with 1F1B and with our
solution of the exercise, moves letters about, and keeps what is shorter or, at first, not much longer (simulated
annealing). What it finds is simulated as everybody's.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microparallel.errors import ProgramError
from microparallel.program import BackwardInput, BackwardWeight, Forward, Program, TrainingStep
from microparallel.schedules import one_f_one_b
from microparallel.simulator import Costs, simulate
from microparallel.topology import Link

FILE = Path(__file__).with_name("machines.json")
_KINDS: dict[str, Callable[[int, int], Any]] = {"F": Forward, "I": BackwardInput, "W": BackwardWeight}
_ROUNDS, _SEEDS = 5_000, (0, 1)
_HEAT = 0.02  # of the makespan: how much longer a step may become in the first round


@dataclass(frozen=True, eq=False)
class Machine:
    """One rank for each stage; how long everything takes, and the most activations that each rank may hold."""

    name: str
    microbatches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    most: tuple[int, ...]
    latency: float = 0.0
    slow_links: tuple[tuple[int, int, float], ...] = ()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.forward)

    @property
    def costs(self) -> Costs:
        """What the simulator takes."""
        return Costs(
            forward=self.forward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            latency=self.latency,
            links={(sender, to): Link(latency=latency) for sender, to, latency in self.slow_links},
        )

    @property
    def call(self) -> str:
        """The call of a learner's function with this machine, as it would be written."""
        numbers = [f"{name}={[*getattr(self, name)]}" for name in ("forward", "backward_input", "backward_weight")]
        links = ", ".join(f"({sender}, {to}): mp.Link(latency={one:g})" for sender, to, one in self.slow_links)
        parts = [*numbers, f"latency={self.latency:g}", *([f"links={{{links}}}"] if links else [])]
        return f"schedule({self.ranks}, {self.microbatches}, mp.Costs({', '.join(parts)}), {[*self.most]})"

    @functools.cached_property
    def of_1f1b(self) -> float:
        """How long 1F1B takes."""
        return simulate(one_f_one_b(self.ranks, self.microbatches), self.costs).makespan

    @property
    def best_known(self) -> float:
        """How long the shortest step takes that the search has found."""
        return float(_found()[self.name]["makespan"])

    @property
    def best_known_words(self) -> list[str]:
        """The orders of that step."""
        return list(_found()[self.name]["words"])

    def program(self, words: Sequence[str]) -> Program:
        """The program of these orders."""
        goal = TrainingStep(self.ranks, self.microbatches)
        return Program("best known", goal, tuple(_operations(rank, word) for rank, word in enumerate(words)))


def _operations(rank: int, word: str) -> tuple[Any, ...]:
    numbers: Counter[str] = Counter()
    ops = []
    for letter in word:
        ops.append(_KINDS[letter](rank, numbers[letter]))
        numbers[letter] += 1
    return tuple(ops)


MACHINES = (
    Machine("a slow stage", 8, (1, 1, 2, 1), (1, 1, 2, 1), (1, 1, 2, 1), (4, 4, 4, 4), latency=0.1),
    Machine("a slow link", 6, (2, 2, 2), (2, 2, 2), (2, 2, 2), (5, 5, 3), 0.2, ((1, 2, 3), (2, 1, 3))),
    Machine("two ranks", 5, (3, 2), (2, 4), (4, 1), (3, 2), latency=0.5),
    Machine("a heavy last stage", 10, (1, 1, 1, 1, 1.5), (1, 1, 1, 1, 1.5), (1, 1, 1, 1, 1.5), (6, 6, 5, 4, 3), 0.5),
    Machine("no room to spare", 6, (1, 1.5, 1, 1), (1, 1.5, 1, 1), (1, 1, 1, 1), (4, 3, 2, 1), latency=0.25),
    Machine("slow in one direction", 12, (2, 1, 1), (2, 1.5, 1), (3, 1, 1), (5, 4, 3), 0, ((0, 1, 2),)),
    Machine("few micro-batches", 3, (1, 2, 1, 1), (1, 3, 1, 1), (1, 2, 2, 1), (3, 3, 3, 3), latency=0.5),
)


@functools.cache
def _found() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


# ── the search ──────────────────────────────────────────────────────────────────────────────────────────────────────


def search(machine: Machine, start: Sequence[str], seed: int) -> tuple[float, list[str]]:
    """The shortest step that is found from these orders on."""
    dice = random.Random(seed)
    words = [*start]
    now = _makespan(machine, words)
    best, kept = now, words
    for turn in range(_ROUNDS):
        tried = [*words]
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            rank = dice.randrange(machine.ranks)
            letters = [*tried[rank]]
            letters.insert(dice.randrange(len(letters)), letters.pop(dice.randrange(len(letters))))
            tried[rank] = "".join(letters)
        if tried == words or not all(map(_in_order, tried, machine.most)):
            continue
        heat = _HEAT * best * (1 - turn / _ROUNDS)
        then = _makespan(machine, tried)
        if then <= now or dice.random() < math.exp((now - then) / max(heat, 1e-9)):
            words, now = tried, then
        if now < best:
            best, kept = now, words
    return best, kept


def _in_order(word: str, most: int) -> bool:
    """Whether every backward comes after its forward, and no more activations are held than there is room for."""
    forwards = inputs = weights = 0
    for letter in word:
        forwards, inputs, weights = forwards + (letter == "F"), inputs + (letter == "I"), weights + (letter == "W")
        if not weights <= inputs <= forwards <= weights + most:
            return False
    return True


def _makespan(machine: Machine, words: Sequence[str]) -> float:
    try:
        return simulate(machine.program(words), machine.costs).makespan
    except ProgramError:  # a rank waits for ever
        return math.inf


def words_of(program: Program) -> list[str]:
    """The orders of a program as words."""
    letters = {kind: letter for letter, kind in _KINDS.items()}
    return ["".join(letters.get(type(op), "IW") for op in ops) for ops in program.ranks]


def _main() -> None:
    from microparallel.learn.catalogue import find_exercise
    from microparallel.learn.learner import load_file

    ours = load_file(str(find_exercise("beat-1f1b").solution))
    found = {}
    for machine in MACHINES:
        own = ours.schedule(machine.ranks, machine.microbatches, machine.costs, machine.most)
        starts = (words_of(own), words_of(one_f_one_b(machine.ranks, machine.microbatches)))
        makespan, words = min(search(machine, start, seed) for start in starts for seed in _SEEDS)
        found[machine.name] = {"makespan": round(makespan, 9), "words": words}
    FILE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    _main()
