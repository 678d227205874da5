"""Searches for solutions of levels: orders of a pipeline, one list of replicas, messages of one slice.

- *Pipelines*: branch and bound (`Orders`), rank by rank, over whatever could begin next. Micro-batches are alike, so on
  each stage they go in their order. If the search has come to its end, nothing faster exists.
- *Replicas* have one list, which is improved by moving its operations about, as long as there is something to gain.
- *Messages* of one slice are searched hop by hop.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from microparallel.errors import UsageError
from microparallel.playground.board import NEXT, Board
from microparallel.playground.levels import Level
from microparallel.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Op,
    TrainingStep,
    halves,
    peak_activations,
)

_NODES = 400_000
_ROUNDS = 3000
Ranks = tuple[frozenset[int], ...]  # what each rank holds of one slice


def small_collectives(level: Level) -> Iterator[list[str]]:
    """Every solution of one slice in as few hops as possible, in which a rank sends once a hop and receives once."""
    assert isinstance(level.goal, Collective)
    beginnings: list[list[str]] = [[]] if level.ranks <= 4 else []
    everybody = frozenset(range(level.ranks))
    adds = level.goal.kind == "all-reduce"
    start = tuple(frozenset([rank]) if adds or rank == level.goal.root else frozenset() for rank in range(level.ranks))
    target = everybody if adds else frozenset([level.goal.root])
    states: dict[Any, list[list[str]]] = {start: beginnings}
    for _ in range(3):
        following: dict[Any, list[list[str]]] = {}
        for state, ways in states.items():
            for hop, after in _hops_from(state, adds=adds):
                if len(following.setdefault(after, [])) < 40:
                    following[after] += [[*way, *([NEXT] if way else []), *hop] for way in ways[:3]]
        states = following
        done = tuple([target] * level.ranks)
        if done in states:
            yield from states[done]
            return


def too_few_hops(level: Level) -> str:
    """Of a collective of one slice with messages that all take as long: why no time is shorter, in words."""
    if level.kind != "messages" or level.slow or not isinstance(level.goal, Collective) or level.goal.slices > 1:
        return ""
    hops = next(small_collectives(level)).count(NEXT) + 1
    return f"a search has looked at every way in fewer than {hops} hops"


def _hops_from(
    state: tuple[frozenset[Any], ...], *, adds: bool
) -> Iterator[tuple[list[str], tuple[frozenset[Any], ...]]]:
    ranks = range(len(state))
    for receivers in itertools.product([None, *ranks], repeat=len(state)):
        chosen = [(sender, to) for sender, to in enumerate(receivers) if to is not None]
        if not chosen or len({to for _, to in chosen}) < len(chosen) or any(a == b for a, b in chosen):
            continue
        if any(
            not state[a] or (state[a] & state[b] and not state[b] < state[a]) or state[a] == state[b] for a, b in chosen
        ):
            continue
        after = list(state)
        for a, b in chosen:
            after[b] = state[a] | state[b]
        signs = ["+" if adds and not state[b] < state[a] else "" for a, b in chosen]
        yield [f"{a}>{b}:{sign}C0" for (a, b), sign in zip(chosen, signs, strict=True)], tuple(after)


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Orders:
    """Branch and bound over the orders in which ranks do their operations, as Giffler and Thompson enumerate them.

    Of all operations that could be next on some rank, take the one that would end first: on its rank, either that one
    is next, or another that could begin before it would end. The clock is a simple one (messages take no time); the
    simulator has the last word on what is found.
    """

    def __init__(self, level: Level, most_activations: int | None, best: float) -> None:
        assert isinstance(level.goal, TrainingStep)
        self._level, self._most, self.best = level, most_activations, best
        self._last = level.goal.stages - 1
        self._queues = [_queues(tray) for tray in level.trays]
        self._cost = {op: level.costs.of(op, 0) for tray in level.trays for op in tray}
        self.found: list[tuple[int, Op]] = []
        self.nodes, self.enough = 0, 0.0

    def run(self) -> bool:
        """Search; whether every order was looked at, or cannot be better."""
        places = [[0] * len(queues) for queues in self._queues]
        left = [sum(self._cost[op] for op in tray) for tray in self._level.trays]
        self._go(places, [0.0] * len(left), left, {}, [], [0] * len(left))
        return self.nodes < _NODES

    def _go(
        self,
        places: list[list[int]],
        free: list[float],
        left: list[float],
        ends: dict[Op, float],
        done: list[tuple[int, Op]],
        held: list[int],
    ) -> None:
        self.nodes += 1
        if self.nodes >= _NODES or self.best <= self.enough:
            return
        if max(time + work for time, work in zip(free, left, strict=True)) >= self.best:
            return
        if not any(left):
            self.best, self.found = max(free), list(done)
            return
        choices = list(self._choices(places, free, ends, held))
        if not choices:
            return
        until, rank = min((end, rank) for rank, _, _, _, end in choices)
        mine = [one for one in choices if one[0] == rank and one[3] < until]
        for _, queue, op, _, end in sorted(mine, key=lambda one: (one[3], isinstance(one[2], Forward), one[1])):
            kept = free[rank], left[rank], held[rank]
            places[rank][queue] += 1
            free[rank], left[rank] = end, left[rank] - self._cost[op]
            held[rank] += isinstance(op, Forward) - isinstance(op, Backward | BackwardWeight)
            ends[op] = end
            done.append((rank, op))
            self._go(places, free, left, ends, done, held)
            done.pop()
            del ends[op]
            free[rank], left[rank], held[rank] = kept
            places[rank][queue] -= 1

    def _choices(
        self, places: list[list[int]], free: list[float], ends: dict[Op, float], held: list[int]
    ) -> Iterator[tuple[int, int, Op, float, float]]:
        for rank, queues in enumerate(self._queues):
            for number, queue in enumerate(queues):
                if places[rank][number] == len(queue):
                    continue
                op = queue[places[rank][number]]
                if isinstance(op, Forward) and self._most is not None and held[rank] >= self._most:
                    continue
                before = [ends.get(one) for one in self._before(op)]
                if None in before:
                    continue
                start = max([free[rank], *(end for end in before if end is not None)])
                yield rank, number, op, start, start + self._cost[op]

    def _before(self, op: Op) -> list[Op]:
        """What must have ended before an operation."""
        (half,) = halves(op)
        stage, microbatch = half.stage, half.microbatch
        if isinstance(op, Forward):
            return [Forward(stage - 1, microbatch)] if stage else []
        if isinstance(op, BackwardWeight):
            return [BackwardInput(stage, microbatch)]
        make = BackwardInput if isinstance(op, BackwardInput) else Backward
        given: list[Op] = [] if stage == self._last else [make(stage + 1, microbatch)]
        return [Forward(stage, microbatch), *given]


def _queues(tray: Sequence[Op]) -> list[list[Op]]:
    """The operations of a rank, stage by stage and kind by kind, each in the order of the micro-batches."""
    queues: dict[Any, list[Op]] = {}
    for op in tray:
        (half,) = halves(op)
        queues.setdefault((type(op), half.stage), []).append(op)
    return list(queues.values())


def search_pipeline(level: Level, enough: float) -> tuple[list[str], str]:
    """The shortest order, and of those one that holds little; and whether all orders were looked at, in words."""
    most = level.limits.get("activations")
    limit = None if most is None else int(most)
    orders = Orders(level, limit, math.inf)
    orders.enough = enough
    whole = orders.run()
    best, found = orders.best, orders.found
    peak = max(peak_activations(op for rank, op in found if rank == which) for which in range(level.ranks))
    for fewer in range(1, peak):
        again = Orders(level, fewer, best + 1e-9)
        again.enough = best
        again.run()
        if again.found:
            found = again.found
            break
    words = f"a search has looked at every order ({orders.nodes:,} steps)" if whole else ""
    return [f"{rank}:{op}" for rank, op in found], words


# ── replicas ────────────────────────────────────────────────────────────────────────────────────────────────────────


def search_list(level: Level) -> list[str]:
    """Improve the order of the tray: move operations about, and keep what is shorter, or holds less."""
    dice = random.Random(0)
    tray = list(level.trays[0])
    best: tuple[float, float] | None = None
    kept = tray
    for _ in range(_ROUNDS):
        order = list(kept)
        for _ in range(dice.choice((1, 1, 2, 3)) if best is not None else dice.randrange(4)):
            order.insert(dice.randrange(len(order)), order.pop(dice.randrange(len(order))))
        try:
            board = Board(level, [f"0:{op}" for op in order])
            board._judge(Board(level))
            score = board.score()
        except UsageError:
            continue
        if score is None or (best is not None and (score.makespan, score.second) > best):
            continue
        if _can_be_played(level, board.moves):
            best, kept = (score.makespan, score.second), order
    return [f"0:{op}" for op in kept]


def _can_be_played(level: Level, moves: Sequence[str]) -> bool:
    """Whether each of these moves is accepted: a limit holds after every one of them."""
    board = Board(level)
    try:
        for move in moves:
            board = board.after(move)
    except UsageError:
        return False
    return True
