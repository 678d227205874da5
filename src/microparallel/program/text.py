"""The text form of a program, which people can write and tests can draw.

```
program ring
goal: all-reduce of 2 slices
rank 0: >C0@1 <+C1@1 >C1@1 <C0@1     # what follows # is a remark
rank 1: >C1@0 <+C0@0 >C0@0 <C1@0
```

A program whose ranks form a grid says so in a line `mesh: dp 2, pp 3`. Spaces in the name of something observed are
written as in an address (`?forward/0/forward%20of%20MLP`). It reads back to the same program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast, get_args
from urllib.parse import quote, unquote

from microparallel.errors import ProgramError
from microparallel.program import ops as o
from microparallel.program.program import Collective, CollectiveKind, Goal, Program, TrainingStep
from microparallel.program.values import parse_value

_COMPUTE: dict[str, Callable[[int, int], o.Op]] = {
    "F": o.Forward,
    "B": o.Backward,
    "I": o.BackwardInput,
    "W": o.BackwardWeight,
}
_TOGETHER: dict[str, Callable[..., o.Op]] = {"*": o.AllReduce, "%": o.ReduceScatter, "~": o.AllGather}
_N = "[0-9]{1,9}"
_RANK = re.compile(_N)
_STAGE_OP = re.compile(rf"([FBIW])({_N})\.({_N})")
_STAGES_OP = re.compile(rf"F({_N}):({_N})\.({_N})")
_PAIR = re.compile(rf"F({_N})\.({_N})&B({_N})\.({_N})")
_COLLECTIVE = re.compile(rf"({'|'.join(get_args(CollectiveKind))}) of ({_N}) slices?(?:, root ({_N}))?")
_BUCKETS = rf"(?:, buckets((?: {_N}:{_N})+))?"
_MESH = re.compile(rf"[A-Za-z_]\w* {_N}(?:, *[A-Za-z_]\w* {_N})*")
_GROUP = re.compile(rf"([^:/]+)(?:/({_N}))?(?::([a-z][a-z0-9.+-]*))?")  # axis, root, algorithm
_SKIPPED = rf"(?: skipping((?: {_N})+))?"
_OBSERVED = re.compile(rf"\?({'|'.join(get_args(o.Kind))})/({_N})/(.*)")
_TRAINING = re.compile(rf"training step of ({_N}) stages?, ({_N}) micro-batch(?:es)?{_SKIPPED}{_BUCKETS}(, sharded)?")


def to_text(program: Program) -> str:
    """Write a program down, one line for each rank."""
    width = len(str(program.world_size - 1))
    rows = [f"rank {rank:>{width}}: {' '.join(map(word, ops))}".rstrip() for rank, ops in enumerate(program.ranks)]
    mesh = [f"mesh: {', '.join(f'{axis} {size}' for axis, size in program.mesh)}"] if program.mesh else []
    return "\n".join([f"program {program.name}", f"goal: {program.goal}", *mesh, *rows]) + "\n"


def word(op: o.Op) -> str:
    """Write one operation down."""
    return f"?{op.kind}/{op.number}/{quote(op.name)}" if isinstance(op, o.Observed) else str(op)


def from_text(text: str) -> Program:
    """Read a program from its text form; errors name the line and the word."""
    name, goal, mesh = "", None, None
    ranks: list[tuple[o.Op, ...]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            if content.startswith("program ") and name:
                raise ProgramError(f"a second name; the program is called {name!r} already")
            if content.startswith("goal:") and goal is not None:
                raise ProgramError(f"a second goal; the program's goal is {goal} already")
            if content.startswith("program "):
                name = content.removeprefix("program ").strip()
            elif content.startswith("goal:"):
                goal = parse_goal(content.removeprefix("goal:").strip())
            elif content.startswith("mesh:"):
                if mesh is not None:
                    raise ProgramError("a second mesh; a program has at most one")
                mesh = _parse_mesh(content.removeprefix("mesh:").strip())
            else:
                ranks.append(_parse_rank(content, len(ranks)))
        except ProgramError as error:
            unreadable = ProgramError(f"line {number}: {error}")
            unreadable.line = number
            raise unreadable from None
    if not name or goal is None:
        missing = "`program NAME`" if not name else "`goal: …`, such as `goal: all-reduce of 4 slices`"
        raise ProgramError(f"the program has no line {missing}")
    return Program(name, goal, tuple(ranks), mesh or ())


def parse_goal(text: str) -> Goal:
    """Read what a program is to achieve."""
    if match := _COLLECTIVE.fullmatch(text):
        kind, slices, root = match.groups()
        return Collective(cast(CollectiveKind, kind), int(slices), None if root is None else int(root))
    if match := _TRAINING.fullmatch(text):
        stages, microbatches, skipped, buckets, sharded = match.groups(default="")
        bounds = [tuple(map(int, word.split(":"))) for word in buckets.split()]
        return TrainingStep(
            int(stages),
            int(microbatches),
            tuple((start, stop) for start, stop in bounds),
            tuple(map(int, skipped.split())),
            bool(sharded),
        )
    raise ProgramError(
        f"{text!r} is no goal; it looks like `all-reduce of 4 slices` or `training step of 4 stages, 8 micro-batches`"
    )


def _parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    if not _MESH.fullmatch(text):
        raise ProgramError(f"{text!r} is no mesh; it looks like `mesh: dp 2, pp 3`")
    axes = [axis.split() for axis in text.split(",")]
    return tuple((axis, int(size)) for axis, size in axes)


def parse_op(text: str) -> o.Op:
    """Read one operation."""
    if text == "S":
        return o.OptimizerStep()
    if text == "=":
        return o.Join()
    if match := _OBSERVED.fullmatch(text):
        return o.Observed(unquote(match[3]), cast(o.Kind, match[1]), int(match[2]))
    if match := _STAGE_OP.fullmatch(text):
        return _COMPUTE[match[1]](int(match[2]), int(match[3]))
    if match := _STAGES_OP.fullmatch(text):
        return o.ForwardStages(*map(int, match.groups()))
    if match := _PAIR.fullmatch(text):
        numbers = [int(number) for number in match.groups()]
        return o.ForwardBackward(o.Forward(*numbers[:2]), o.Backward(*numbers[2:]))
    if text.startswith("!"):
        return o.Free(parse_value(text[1:]))
    if "+=" in text:
        into, _, value = text.partition("+=")
        return o.Add(parse_value(value), parse_value(into))
    return _parse_communication(text)


def _parse_communication(text: str) -> o.Op:
    kind, (value, _, place) = text[:1], text[1:].partition("@")
    if (kind == "^" or kind in _TOGETHER) and (match := _GROUP.fullmatch(place)):
        axis, root, algorithm = match.groups(default="")
        if kind in _TOGETHER and not root:
            return _TOGETHER[kind](parse_value(value), axis, algorithm or o.AUTO)
        if kind == "^" and root:
            return o.Broadcast(parse_value(value), axis, int(root), algorithm or o.AUTO)
    if kind == ">" and _RANK.fullmatch(place):
        return o.Send(parse_value(value), int(place))
    if kind == "<" and _RANK.fullmatch(place):
        return o.Recv(parse_value(value.removeprefix("+")), int(place), reduce=value.startswith("+"))
    raise ProgramError(
        f"{text!r} is no operation; it looks like F0.3, B0.3, >A0.3@1, <A0.3@0, <+C2@0, C0+=P1, *U0@dp, ^:w@dp/0, "
        "%U0@dp or ~T0@dp"
    )


def _parse_rank(content: str, expected: int) -> tuple[o.Op, ...]:
    match = re.fullmatch(rf"rank +({_N}):(.*)", content)
    if match is None:
        raise ProgramError(
            f"{content.split(maxsplit=1)[0]!r} begins no line of a program; "
            "lines begin with program, goal:, mesh: or rank"
        )
    if int(match[1]) != expected:
        raise ProgramError(f"rank {match[1]} comes where rank {expected} should; ranks are counted from 0, in order")
    return tuple(parse_op(word) for word in match[2].split())
