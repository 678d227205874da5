"""The puzzles: what each level asks for, what may be placed, and what is known of it.

A set of levels is a file in `levels/`:

    [[level]]
    id = "two-stages"                    its name in addresses, in saved progress and in solved.json
    title = "Two stages, one micro-batch"
    kind = "pipeline"                    "pipeline": a list for each rank; "replicas": one list, which every rank does
                                         on its own micro-batches; "messages": hops of messages
    goal = "training step of 2 stages, 1 micro-batch"      as in a program's text
    stages = [[0], [1]]                  pipeline: the stages of each rank
    backward = "B"                       pipeline: "B", or "IW" for its two halves
    ranks = 2                            replicas, messages
    place = "F0.0 B0.0 *U0@dp S"         replicas: what rank 0 may place; the others have the same, shifted
    costs = {forward = 1}                of `Costs`; links = [[0, 1, 5]] is a latency from rank 0 to rank 1
    limits = {activations = 2}           and memory (bytes a rank holds), hops
    second = "activations"               what the third star is for: activations, memory, bytes
    story, hint, lesson                  words, and the page of the course that explains it
    wrong = ["1:F1.0 | needs A0.0"]      moves, of which the last is refused in words that have the part behind the bar
    bound = [5, "because …"]             a bound that `solving.py` does not find by itself
    tries = ["0>1:C0 …"]                 solutions of which it would not think

`solved.json` has what `solving.py` found for each level: the best builder (`par`), the best solution that is known
(`best`, with its moves), and a bound below which none can be (`bound`, with its reason).
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from microparallel.errors import UsageError
from microparallel.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Collective,
    Forward,
    Goal,
    Op,
    TrainingStep,
    parse_op,
)
from microparallel.program.text import parse_goal
from microparallel.simulator import Costs
from microparallel.text import did_you_mean
from microparallel.topology import Link
from microparallel.trace import Sizes

Kind = Literal["pipeline", "replicas", "messages"]
SETS = {
    "pipelines": "Pipelines",
    "collectives": "Collectives",
    "data_parallel": "Data parallelism",
    "sharding": "Sharding",
}
MEASURES = {
    "activations": "activations held at once by any one rank",
    "memory": "bytes held at once by any one rank",
    "bytes": "most sent by one rank, in whole tensors",
}
ONE_BY_ONE = "one thing after another"  # par, where no builder does what a level asks for


@dataclass(frozen=True)
class Level:
    """One puzzle, as its file says it."""

    id: str
    set: str
    title: str
    kind: Kind
    goal: Goal
    ranks: int
    trays: tuple[tuple[Op, ...], ...]  # what is to be placed, for each list
    costs: Costs
    limits: Mapping[str, float]
    second: str
    story: str
    hint: str
    lesson: str
    wrong: tuple[str, ...] = ()
    bound: tuple[float, str] | None = None
    tries: tuple[str, ...] = ()
    slow: tuple[tuple[int, int, float], ...] = ()  # links with a latency of their own

    @property
    def counted(self) -> str:
        """What the board shows beside the time: what the third star is for, or what has a limit; maybe nothing."""
        return self.second or next((name for name in self.limits if name in MEASURES), "")

    @property
    def per_rank(self) -> int:
        """How many micro-batches each replica has."""
        return self.goal.microbatches // self.ranks if isinstance(self.goal, TrainingStep) else 0


@functools.cache
def all_levels() -> dict[str, Level]:
    """Every level by its id, in the order in which they are meant to be played."""
    found: dict[str, Level] = {}
    for name in SETS:
        for entry in tomllib.loads(_file(f"{name}.toml"))["level"]:
            level = _level(name, entry)
            if level.id in found:
                raise UsageError(f"two levels are called {level.id!r}")
            found[level.id] = level
    return found


def level_named(name: str) -> Level:
    """The level of this id."""
    levels = all_levels()
    if name not in levels:
        raise UsageError(f"there is no level {name!r}; {did_you_mean(name, levels, 'the list has all of them')}")
    return levels[name]


@functools.cache
def solved() -> dict[str, Any]:
    """What `solving.py` has found of each level."""
    content: dict[str, Any] = json.loads(_file("solved.json"))
    return content


def _file(name: str) -> str:
    return files("microparallel.playground").joinpath("levels", name).read_text(encoding="utf-8")


def _level(name: str, entry: dict[str, Any]) -> Level:
    goal = parse_goal(entry["goal"])
    kind: Kind = entry["kind"]
    trays: tuple[tuple[Op, ...], ...] = ()
    ranks = entry.get("ranks", 0)
    if kind == "pipeline":
        assert isinstance(goal, TrainingStep)
        ranks = len(entry["stages"])
        halves = [Backward] if entry.get("backward", "B") == "B" else [BackwardInput, BackwardWeight]
        trays = tuple(
            tuple(make(stage, number) for make in (Forward, *halves) for stage in mine for number in goal.numbers())
            for mine in entry["stages"]
        )
    elif kind == "replicas":
        trays = (tuple(map(parse_op, entry["place"].split())),)
    else:
        assert isinstance(goal, Collective)
    costs = dict(entry.get("costs", {}))
    slow = tuple((int(a), int(b), float(latency)) for a, b, latency in costs.pop("links", ()))
    sizes = Sizes(**costs.pop("sizes", {}))
    links = {(a, b): Link(latency) for a, b, latency in slow}
    return Level(
        entry["id"],
        name,
        entry["title"],
        kind,
        goal,
        ranks,
        trays,
        Costs(**costs, links=links, sizes=sizes),
        entry.get("limits", {}),
        entry["second"],
        " ".join(entry["story"].split()),
        " ".join(entry["hint"].split()),
        entry["lesson"],
        tuple(entry.get("wrong", ())),
        tuple(entry["bound"]) if "bound" in entry else None,
        tuple(entry.get("tries", ())),
        slow,
    )
