"""What is known of each level: the best builder, the best solution, and a bound.

python -m microparallel.playground.solving           write levels/solved.json (two minutes): run it when levels change
python -m microparallel.playground.solving --check   fail if it would be another

*Par* is the best of our builders, if one makes a program for this goal within these limits. The *best* is what a search
has found (`searching.py`), or a builder. A *bound* has its reason (`bounds.py`). Every stored solution is played
on a board (`board.py`), and its numbers are the simulator's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from microparallel import collectives, schedules
from microparallel.drawing.hops import hops_of
from microparallel.playground.board import NEXT, Board, Refused, measure
from microparallel.playground.bounds import bound_of
from microparallel.playground.levels import ONE_BY_ONE, Level, all_levels
from microparallel.playground.searching import search_list, search_pipeline, small_collectives, too_few_hops
from microparallel.program import Collective, Free, Op, Part, Program, Recv, Send, TrainingStep, halves
from microparallel.simulator import simulate

FILE = Path(__file__).parent / "levels" / "solved.json"
Found = dict[str, Any]


def solve(level: Level) -> Found:
    """All that is stored of a level."""
    par = par_of(level)
    bound, because = bound_of(level)
    candidates = list(_candidates(level))
    exhausted = too_few_hops(level)
    if level.kind == "pipeline":
        moves, exhausted = search_pipeline(level, bound)
        candidates.append((moves, "found by a search"))
    elif level.kind == "replicas":
        # The order of the tray first: where nothing is better, its moves are the easiest to follow.
        candidates.append(([f"0:{op}" for op in level.trays[0]], ONE_BY_ONE))
        candidates.append((search_list(level), "found by a search"))
    played: list[tuple[float, float, int, list[str], str]] = []
    for moves, by in candidates:
        try:
            board = _played(level, moves)
        except Refused:
            continue
        if (score := board.score()) is not None:
            played.append((round(score.makespan, 9), score.second, len(played), moves, by))
    makespan, second, _, moves, by = min(played)
    best = {"makespan": makespan, "second": second, "by": by, "moves": list(moves)}
    found: Found = {"par": par, "best": best, "bound": {"makespan": bound, "because": because}}
    if exhausted and bound < makespan:
        found["exhausted"] = exhausted
    return found


def _played(level: Level, moves: Sequence[str]) -> Board:
    board = Board(level)
    for move in moves:
        board = board.after(move)
    return board


# ── par: what our builders do ───────────────────────────────────────────────────────────────────────────────────────


def par_of(level: Level) -> Found | None:
    """The best builder whose program has this goal, keeps to the limits, and computes what the level has."""
    found = []
    for name, program in _built(level):
        trace = simulate(program, level.costs)
        within = all(measure(trace, limit) <= most for limit, most in level.limits.items() if limit != "hops")
        if within:
            second = measure(trace, level.second) if level.second else 0
            found.append((round(trace.makespan, 9), second, name))
    if not found:
        return _plain(level)
    makespan, second, name = min(found, key=lambda one: one[:2])
    return {"makespan": makespan, "second": second, "name": name}


def _plain(level: Level) -> Found | None:
    """Where no builder does just this: one operation after another, in the order of the tray."""
    if level.kind != "replicas":
        return None
    score = Board(level, [f"0:{op}" for op in level.trays[0]]).score()
    assert score is not None, f"{level.id}: the order of the tray is wrong"
    return {"makespan": score.makespan, "second": score.second, "name": ONE_BY_ONE}


def _built(level: Level) -> Iterator[tuple[str, Program]]:
    goal = level.goal
    if isinstance(goal, Collective):
        for name in (*collectives.ALL_REDUCES, *collectives.OTHERS):
            program = collectives.build(name, level.ranks)
            apart = any(isinstance(getattr(op, "value", None), Part) for ops in program.ranks for op in ops)
            if program.goal == goal and not apart:  # in a puzzle, nothing is kept apart to be added later
                yield name, program
        return
    if level.kind == "pipeline":
        each = goal.stages // level.ranks
        for name in schedules.PIPELINES:
            for options in ({}, {"stages_per_rank": each}) if name == "interleaved" else ({},):
                program = schedules.build(name, level.ranks, goal.microbatches, **options)
                if program.goal == goal and _computes(program) == [set(tray) for tray in level.trays]:
                    yield name, program
        return
    yield from _built_replicas(level, goal)


def _computes(program: Program) -> list[set[Op]]:
    return [{half for op in ops for half in halves(op)} for ops in program.ranks]


def _built_replicas(level: Level, goal: TrainingStep) -> Iterator[tuple[str, Program]]:
    each = goal.microbatches // level.ranks
    for name in schedules.DATA_PARALLEL:
        options: dict[str, Any] = {"layers": goal.stages}
        if name != "ddp-naive":
            options["buckets"] = len(goal.buckets)
        if name in schedules.ZERO:
            options["microbatches"] = each
        elif each > 1:
            continue
        for more in ({}, {"reshard_after_forward": False}, {"prefetch": 0}) if name == "zero-3" else ({},):
            program = schedules.build(name, level.ranks, **options, **more)
            assert isinstance(program.goal, TrainingStep)
            same = sorted(program.goal.buckets) == sorted(goal.buckets) and program.goal.sharded == goal.sharded
            if same and _kinds(level.trays[0]) == _kinds(program.ranks[0]):
                yield name, program


def _kinds(ops: Sequence[Op]) -> list[str]:
    """The operations of a step without their numbers, and without the frees that are added for it."""
    return sorted(type(op).__name__ + str(op)[:2] * isinstance(op, Free) for op in ops if str(op)[:2] not in _ADDED)


_ADDED = ("!A", "!G", "!R")


def _candidates(level: Level) -> Iterator[tuple[list[str], str]]:
    """Solutions that need no search: the builders' own messages, what the level names, and small collectives."""
    for text in level.tries:
        yield text.split(), "found by hand"
    if level.kind != "messages":
        return
    for name, program in _built(level):
        yield _moves_of(program), f"the builder {name}"
    assert isinstance(level.goal, Collective)
    if level.goal.slices == 1:
        for moves in small_collectives(level):
            yield moves, "found by a search"


def _moves_of(program: Program) -> list[str]:
    """A program of messages alone as moves, hop by hop."""
    moves: list[str] = []
    for hop in hops_of(program).hops:
        moves += [NEXT] if moves else []
        for one in hop.messages:
            assert isinstance(one.send, Send)
            assert isinstance(one.receive, Recv)
            moves.append(f"{one.sender}>{one.receiver}:{'+' if one.receive.reduce else ''}{one.receive.value}")
    return moves


def all_solved() -> dict[str, Found]:
    """What is to be stored of every level."""
    return {name: solve(level) for name, level in all_levels().items()}


def main() -> None:
    """Write what is known of all levels, or compare it with what is stored."""
    text = json.dumps(all_solved(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if text == FILE.read_text(encoding="utf-8") else f"{FILE} is not what solving.py finds; run it again"
        )
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
