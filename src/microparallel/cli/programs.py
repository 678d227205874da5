"""What `draw`, `simulate` and `verify` work on: a program by name or from a file, and what its operations cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from microparallel import collectives, schedules
from microparallel.errors import ConfigError, DataError, ProgramError, UsageError
from microparallel.program import Free, Program, Recv, Send, TrainingStep, from_text
from microparallel.simulator import Costs
from microparallel.simulator.costs import default_costs
from microparallel.text import did_you_mean
from microparallel.topology import Link
from microparallel.verifier import verify

_PROGRAM, _COSTS = "Which program", "What operations cost"

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A collective (ring, tree, …), a schedule (1f1b, gpipe, ddp, …), or a file with a program in text form.",
        show_default=False,
    ),
]
Ranks = Annotated[int | None, typer.Option(help="How many ranks.", show_default="4", rich_help_panel=_PROGRAM)]
Microbatches = Annotated[
    int | None,
    typer.Option(help="Micro-batches of a pipeline's batch.", show_default="8", rich_help_panel=_PROGRAM),
]
StagesPerRank = Annotated[
    int | None,
    typer.Option(help="Stages a rank holds in interleaved.", show_default="2", rich_help_panel=_PROGRAM),
]
Layers = Annotated[
    int | None, typer.Option(help="Layers of ddp and ddp-naive.", show_default="8", rich_help_panel=_PROGRAM)
]
Buckets = Annotated[
    int | None, typer.Option(help="Buckets the layers of ddp share.", show_default="4", rich_help_panel=_PROGRAM)
]
RanksPerNode = Annotated[
    int | None,
    typer.Option("--ranks-per-node", help="Ranks a node of hierarchical.", show_default="2", rich_help_panel=_PROGRAM),
]

_PER_STAGE = "One number, or one for each stage: 1,2,1,1."
Forward = Annotated[
    str | None,
    typer.Option(metavar="TIME", help=f"A stage's forward. {_PER_STAGE}", show_default="1", rich_help_panel=_COSTS),
]
BackwardInput = Annotated[
    str | None,
    typer.Option(
        "--backward-input",
        metavar="TIME",
        help="The half of its backward that gives its input's gradient.",
        show_default="1",
        rich_help_panel=_COSTS,
    ),
]
BackwardWeight = Annotated[
    str | None,
    typer.Option(
        "--backward-weight",
        metavar="TIME",
        help="The half that gives its weights' gradients; a full backward takes both.",
        show_default="1",
        rich_help_panel=_COSTS,
    ),
]
Latency = Annotated[
    float | None,
    typer.Option(
        metavar="TIME",
        help="What each message costs, however small; so long, it holds its sender's and its receiver's port.",
        show_default="1 in collectives, else 0",
        rich_help_panel=_COSTS,
    ),
]
SecondsPerByte = Annotated[
    float | None,
    typer.Option(
        "--seconds-per-byte",
        metavar="TIME",
        help="What each byte of a message costs.",
        show_default="1 in ddp, else 0",
        rich_help_panel=_COSTS,
    ),
]
AddSecondsPerByte = Annotated[
    float | None,
    typer.Option(
        "--add-seconds-per-byte",
        metavar="TIME",
        help="What it costs to add a received byte.",
        show_default="0",
        rich_help_panel=_COSTS,
    ),
]
Bytes = Annotated[
    float | None,
    typer.Option(
        "--bytes",
        metavar="BYTES",
        help="Size of a collective's tensor, of a stage's output, or of a layer's gradients.",
        show_default="1",
        rich_help_panel=_COSTS,
    ),
]
Links = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        metavar="FROM-TO=TIME[,TIME]",
        help="A link with a latency, and seconds a byte, of its own: 2-3=5 or 2-3=5,0.1. Can be given several times.",
        show_default="none",
        rich_help_panel=_COSTS,
    ),
]


_SCHEDULES = schedules.PIPELINES | schedules.DATA_PARALLEL
_COLLECTIVES = collectives.ALL_REDUCES | collectives.OTHERS
# Beyond these a mistyped number would fill the memory.
_MOST = {"ranks": 1024, "microbatches": 100_000, "stages_per_rank": 64, "layers": 10_000}
_MOST_CELLS = 500_000  # ranks × micro-batches × stages a rank, or layers: about ten operations each


def _tell(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def load(
    name: str,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    layers: int | None = None,
    buckets: int | None = None,
    ranks_per_node: int | None = None,
    tell: Callable[[str], None] = _tell,
    completed: bool = True,
) -> Program:
    """The program that a name or a file means. None is "not given"; `tell` hears what is good to know about it.

    With `completed`, a file that says only what to compute is given its sends, receives and frees.

    `naive` is both a pipeline and an all-reduce: it is the pipeline if there are micro-batches. `pipeline:naive` and
    `all-reduce:naive` say it outright. A name wins over a file; `./ring` is always a file.
    """
    options = {
        "stages_per_rank": stages_per_rank,
        "layers": layers,
        "buckets": buckets,
        "ranks_per_node": ranks_per_node,
    }
    given = {option: number for option, number in options.items() if number is not None}
    _require_not_too_many({"ranks": ranks, "microbatches": microbatches, **given})
    kind, _, short = name.rpartition(":")
    if (kind or _kind(name, microbatches, tell)) == "pipeline" and short in _SCHEDULES:
        if short in schedules.PIPELINES and microbatches is None:
            microbatches = 8
        return schedules.build(short, 4 if ranks is None else ranks, microbatches, **given)
    if kind in ("", "all-reduce") and short in _COLLECTIVES:
        if microbatches is not None:
            raise ConfigError(f"--microbatches {microbatches}: {short} is a collective, which has none; leave it out")
        return collectives.build(short, 4 if ranks is None else ranks, **given)
    if not Path(name).exists():
        raise UsageError(_unknown(name))
    for option, number in {"ranks": ranks, "microbatches": microbatches, **given}.items():
        if number is not None:
            raise ConfigError(f"{_flag(option)} {number}: the program in {name} says that; leave it out")
    return complete(read(Path(name)), name, tell) if completed else read(Path(name))


def _require_not_too_many(given: dict[str, int | None]) -> None:
    numbers = {name: number for name, number in given.items() if number is not None and name in _MOST}
    for name, number in numbers.items():
        if number > _MOST[name]:
            raise ConfigError(f"{_flag(name)} {number}: at most {_MOST[name]} are built here")
    if math.prod(numbers.values()) > _MOST_CELLS:
        flags = " ".join(f"{_flag(name)} {number}" for name, number in numbers.items())
        raise ConfigError(f"{flags}: that makes millions of operations, which would fill the memory; choose less")


def _kind(name: str, microbatches: int | None, tell: Callable[[str], None]) -> str:
    if name in _SCHEDULES and name in _COLLECTIVES:
        kind, other = ("pipeline", "all-reduce") if microbatches is not None else ("all-reduce", "pipeline")
        tell(f"{name} is the {kind} here; {other}:{name} is the {other}")
        return kind
    return "pipeline" if name in _SCHEDULES else "all-reduce"


def _unknown(name: str) -> str:
    names = [*_SCHEDULES, *_COLLECTIVES, "pipeline:naive", "all-reduce:naive"]
    otherwise = f"choose one of {', '.join(dict.fromkeys(names[:-2]))}, or a file"
    return f"{name!r} is no program, and no such file is there; {did_you_mean(name, names, otherwise)}"


def read(path: Path) -> Program:
    """Read a program in text form."""
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"{path} cannot be read as a program: {reason}") from None
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from None


def complaint(name: str, program: Program) -> str | None:
    """What is wrong with a program that was read from a file; what is built here by name is right."""
    if not Path(name).exists():
        return None
    try:
        verify(program)
    except ProgramError as error:
        return str(error)
    return None


def complete(program: Program, name: str, tell: Callable[[str], None] = _tell) -> Program:
    """A schedule that only computes is given its sends, receives and frees; any other program is left as it is."""
    if not isinstance(program.goal, TrainingStep) or _has(program, (Send, Recv, Free)):
        return program
    try:
        lowered = schedules.lower(program)
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from None
    if _has(lowered, (Send,)):
        tell(f"{name} says what to compute and sends nothing: sends, receives and frees were added")
    return lowered


def _has(program: Program, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(op, kinds) for ops in program.ranks for op in ops)


def costs_of(
    program: Program,
    forward: str | None = None,
    backward_input: str | None = None,
    backward_weight: str | None = None,
    latency: float | None = None,
    seconds_per_byte: float | None = None,
    add_seconds_per_byte: float | None = None,
    bytes_per_value: float | None = None,
    links: list[str] | None = None,
) -> Costs:
    """The costs that flags say; for what they do not say, what `default_costs` says."""
    stages = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    chosen: dict[str, Any] = {name: _times(name, text) for name, text in stages.items() if text is not None}
    messages = {
        "latency": latency,
        "seconds_per_byte": seconds_per_byte,
        "add_seconds_per_byte": add_seconds_per_byte,
        "bytes_per_value": bytes_per_value,
    }
    defaults = default_costs(program)
    usual: dict[str, Any] = {"latency": defaults.latency, "seconds_per_byte": defaults.seconds_per_byte}
    given = {name: _number(name, number) for name, number in messages.items() if number is not None}
    return Costs(**chosen, **usual | given, links=dict(_link(text, program) for text in links or []))


def _flag(name: str) -> str:
    return "--bytes" if name == "bytes_per_value" else f"--{name.replace('_', '-')}"


def _number(name: str, number: float) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{_flag(name)} {number}: it must be 0 or more, and finite")
    return number


def _times(name: str, text: str) -> float | list[float]:
    try:
        numbers = [_number(name, float(word)) for word in text.split(",")]
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{_flag(name)} {text}: it is a number, or one for each stage, such as 1,2,1,1") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _link(text: str, program: Program) -> tuple[tuple[int, int], Link]:
    ends, _, costs = text.partition("=")
    sender, _, receiver = ends.partition("-")
    try:
        channel = (int(sender), int(receiver))
        latency, *per_byte = map(float, costs.split(","))
        link = Link(latency, *per_byte)
    except (ValueError, TypeError):
        hint = "from rank 2 to rank 3 with latency 5; after a comma, seconds a byte"
        raise ConfigError(f"--link {text}: it looks like 2-3=5, {hint}") from None
    if not all(math.isfinite(cost) and cost >= 0 for cost in (latency, *per_byte)):
        raise ConfigError(f"--link {text}: its costs must be 0 or more, and finite")
    if channel[0] == channel[1] or not all(0 <= rank < program.world_size for rank in channel):
        raise ConfigError(f"--link {text}: it joins two of the ranks 0 to {program.world_size - 1}")
    return channel, link
