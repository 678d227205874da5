"""Where a reader may start: every program that a builder makes, with what can be chosen."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from microparallel import collectives, schedules
from microparallel.errors import ProgramError, UsageError
from microparallel.program import Free, Program, Recv, Send, TrainingStep, to_text
from microparallel.schedules import complete

MOST_RANKS, MOST_MICROBATCHES = 16, 32
_GROUPS = {
    "pipelines": schedules.PIPELINES,
    "data parallelism": {name: one for name, one in schedules.DATA_PARALLEL.items() if not name.startswith("zero")},
    "sharding": schedules.ZERO,
    "all-reduces": collectives.ALL_REDUCES,
    "other collectives": collectives.OTHERS,
}
_OPTIONS = {  # what a slider changes: from where to where, and where it starts
    "stages_per_rank": (1, 4, 2),
    "layers": (1, 12, 4),
    "buckets": (1, 12, 2),
    "prefetch": (0, 4, 1),
    "ranks_per_node": (1, 8, 2),
}


def starts() -> list[dict[str, Any]]:
    """Every builder: its kind, its name there, and the sliders it has."""
    found = []
    for kind, builders in _GROUPS.items():
        for name, builder in builders.items():
            takes = inspect.signature(builder).parameters
            sliders = {"ranks": (1, MOST_RANKS, 4)}
            if kind == "pipelines":
                sliders["microbatches"] = (1, MOST_MICROBATCHES, 8)
            elif kind == "sharding":
                sliders["microbatches"] = (1, 4, 1)
            fits = {option for option in _OPTIONS if option in takes and (option != "prefetch" or name == "zero-3")}
            sliders |= {option: numbers for option, numbers in _OPTIONS.items() if option in fits}
            listed = [{"name": one, "least": a, "most": b, "start": c} for one, (a, b, c) in sliders.items()]
            found.append({"kind": kind, "name": name, "sliders": listed})
    return found


def start(kind: str, name: str, numbers: dict[str, int]) -> Program:
    """Build a start; a pipeline comes without the messages and frees that are added for it."""
    if kind not in _GROUPS or name not in _GROUPS[kind]:
        raise UsageError(f"there is no {name!r} among {kind}")
    known = next(one for one in starts() if (one["kind"], one["name"]) == (kind, name))
    given = {}
    for slider in known["sliders"]:
        number = numbers.get(slider["name"], slider["start"])
        if not isinstance(number, int) or not slider["least"] <= number <= slider["most"]:
            raise UsageError(f"{slider['name']} {number!r}: choose {slider['least']} to {slider['most']}")
        given[slider["name"]] = number
    if "buckets" in given:
        given["buckets"] = min(given["buckets"], given["layers"])
    if _GROUPS[kind] in (collectives.ALL_REDUCES, collectives.OTHERS):
        return collectives.build(name, given.pop("ranks"), **given)
    program = schedules.build(name, given.pop("ranks"), given.pop("microbatches", None), **given)
    return without_messages(program) if kind == "pipelines" else program


def without_messages(program: Program) -> Program:
    """A schedule as it is written: what to compute. Messages and frees are added for it, and come out the same."""
    ranks = tuple(tuple(op for op in ops if not isinstance(op, Send | Recv | Free)) for ops in program.ranks)
    return replace(program, ranks=ranks)


def completed_or_same(program: Program) -> Program:
    """A program with the messages that are added for it; as it is, if it names what is not there (`verify` says so)."""
    try:
        return complete(program) if isinstance(program.goal, TrainingStep) else program
    except ProgramError:
        return program


def with_messages(program: Program) -> str | None:
    """The text of a schedule with what is added for it; None if nothing is."""
    completed = completed_or_same(program)
    return None if completed is program else to_text(completed)
