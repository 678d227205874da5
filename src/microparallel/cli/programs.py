"""What `draw`, `simulate` and `verify` work on: a program by name or from a file, and what its operations cost."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from microparallel import collectives, schedules
from microparallel.drawing import View, coloured, plain, text_lines
from microparallel.errors import ConfigError, DataError, ProgramError, UsageError
from microparallel.program import Collective, Program, TrainingStep, from_text
from microparallel.settings import AT_LEAST_ONE, check_value, declared, setting
from microparallel.simulator import Costs
from microparallel.simulator.costs import default_costs
from microparallel.text import count, did_you_mean
from microparallel.topology import Cluster, Link, parse_link
from microparallel.trace import Sizes, Trace
from microparallel.verifier import verify

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help="A collective (ring, tree, …), a schedule (1f1b, gpipe, ddp, …), or a file with a program in text form.",
        show_default=False,
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME|FILE...",
        help="Collectives (ring, tree, …), schedules (1f1b, gpipe, ddp, …), or files with programs in text form.",
        show_default=False,
    ),
]


# ── flags ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# the headings of `--help`
_PROGRAM, _COSTS, _CLUSTER = "Which program", "What operations cost", "A cluster"
_MEMORY = "What ranks hold"


@dataclass(frozen=True)
class ProgramFlags:
    """Which program: the flags of `draw`, `simulate` and `verify`."""

    ranks: int | None = setting(None, "How many ranks.", _PROGRAM, shown="4")
    microbatches: int | None = setting(
        None, "Micro-batches of a pipeline's batch, or of a rank in zero.", _PROGRAM, shown="8; zero 1"
    )
    stages_per_rank: int | None = setting(None, "Stages a rank holds in interleaved.", _PROGRAM, shown="2")
    layers: int | None = setting(None, "Layers of ddp, ddp-naive and zero.", _PROGRAM, shown="8")
    buckets: int | None = setting(None, "Buckets the layers of ddp and zero share.", _PROGRAM, shown="4")
    replicas: int | None = setting(
        None, "Copies of the parameters in zero-3, each in parts on its share of the ranks.", _PROGRAM, shown="1"
    )
    prefetch: int | None = setting(None, "Buckets ahead that zero-3 gathers parameters.", _PROGRAM, shown="1")
    ranks_per_node: int | None = setting(None, "Ranks a node of hierarchical.", _PROGRAM, shown="2")
    algorithm: str | None = setting(
        None, "How ddp, ddp-naive and zero sum: ring, tree, …; ddp also topk-0.01, int8, ….", _PROGRAM, shown="auto"
    )


@dataclass(frozen=True)
class ProgramAndCostFlags(ProgramFlags):
    """Which program, and what its operations cost: the flags of `draw` and `simulate`."""

    forward: str | None = setting(
        None, "A stage's forward. One number, or one for each stage: 1,2,1,1.", _COSTS, shown="1", metavar="TIME"
    )
    backward_input: str | None = setting(
        None, "The half of its backward that gives its input's gradient.", _COSTS, shown="1", metavar="TIME"
    )
    backward_weight: str | None = setting(
        None,
        "The half that gives its weights' gradients; a full backward takes both.",
        _COSTS,
        shown="1",
        metavar="TIME",
    )
    latency: float | None = setting(
        None,
        "What each message costs, however small; so long, it holds its sender's and its receiver's port.",
        _COSTS,
        shown="1 in collectives, else 0",
        metavar="TIME",
    )
    seconds_per_byte: float | None = setting(
        None, "What each byte of a message costs.", _COSTS, shown="1 in ddp, else 0", metavar="TIME"
    )
    add_seconds_per_byte: float | None = setting(
        None, "What it costs to add a received byte.", _COSTS, shown="0", metavar="TIME"
    )
    bytes_per_value: float | None = setting(
        None,
        "Size of a collective's tensor, of a stage's output, or of a layer's gradients.",
        _COSTS,
        shown="1",
        metavar="BYTES",
        flag="--bytes",
    )
    link: str | None = setting(
        None,
        "A link with a latency, and seconds a byte, of its own: 2-3=5 or 2-3=5,0.1. Can be given several times.",
        _COSTS,
        shown="none",
        metavar="FROM-TO=TIME[,TIME]",
        several=True,
    )
    nodes: int | None = setting(
        None,
        "How many nodes; --ranks follows. Needs --per-node, --inside and --between as well.",
        _CLUSTER,
        within=AT_LEAST_ONE,
    )
    per_node: int | None = setting(
        None, "Ranks of each node, numbered node by node; --ranks-per-node follows.", _CLUSTER, within=AT_LEAST_ONE
    )
    inside: str | None = setting(None, "The links inside a node: 5us,100GB.", _CLUSTER, metavar="LATENCY,BANDWIDTH")
    between: str | None = setting(
        None,
        "The links between nodes: 20us,10GB, or 1ms,100Mbit. Times are in seconds then.",
        _CLUSTER,
        metavar="LATENCY,BANDWIDTH",
    )
    no_shared_nic: bool | None = setting(
        None,
        "Every rank has a network port of its own. Otherwise the ranks of a node share one, which sends one message at "
        "a time and receives one.",
        _CLUSTER,
    )
    memory: bool | None = setting(
        None, "Draw the bytes that each rank holds, below its timeline; all programs on one scale.", _MEMORY
    )
    parameter_bytes: str | None = setting(
        None, "A stage's or layer's parameters. One number, or one for each: 4,8.", _MEMORY, shown="4", metavar="BYTES"
    )
    gradient_bytes: str | None = setting(None, "The gradients of these.", _MEMORY, shown="4", metavar="BYTES")
    optimizer_bytes: str | None = setting(
        None, "The optimizer's state for them.", _MEMORY, shown="8, as Adam's", metavar="BYTES"
    )
    activation_bytes: str | None = setting(
        None, "What is kept of one micro-batch until its backward.", _MEMORY, shown="1", metavar="BYTES"
    )


Given = Mapping[str, Any]  # the flags that were given, by name


def costs_given(given: Given) -> bool:
    """Whether a flag says what something costs."""
    return bool(given.keys() - declared(ProgramFlags).keys() - {"memory", *_OF_MEMORY})


def memory_wanted(given: Given, loaded: Sequence[Program]) -> bool:
    """Whether memory is to be drawn; raises `ConfigError` for sizes without it, and for what has no memory."""
    wanted = bool(given.get("memory", False))
    for name in _OF_MEMORY:
        if name in given and not wanted:
            raise ConfigError(f"{_flag(name)} {given[name]}: this is about memory, which is not drawn; add --memory")
    for program in loaded:
        if wanted and not isinstance(program.goal, TrainingStep):
            raise ConfigError(f"--memory: {program.name} ({program.goal}) is no training step; only those hold memory")
    return wanted


def _flag(name: str) -> str:
    return declared(ProgramAndCostFlags)[name].flag


# ── the program ─────────────────────────────────────────────────────────────────────────────────────────────────────

_SCHEDULES = schedules.PIPELINES | schedules.DATA_PARALLEL
_COLLECTIVES = collectives.ALL_REDUCES | collectives.OTHERS
# Beyond these a mistyped number would fill the memory.
_MOST = {"ranks": 1024, "microbatches": 100_000, "stages_per_rank": 64, "layers": 10_000}
_MOST_CELLS = 500_000  # ranks × micro-batches × stages a rank, or layers: about ten operations each


def _remark(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def load(name: str, given: Given | None = None, *, completed: bool = True) -> Program:
    """The program that a name or a file means.

    `naive` is both a pipeline and an all-reduce: it is the pipeline if there are micro-batches. `pipeline:naive` and
    `all-reduce:naive` say it outright. A name wins over a file; `./ring` is always a file.

    Args:
        name: of a schedule or a collective, or a file.
        given: those of `ProgramFlags` are used, and the number of ranks of a cluster.
        completed: give a file that says only what to compute its sends, receives and frees.
    """
    return load_all([name], given, completed=completed)[0]


def load_all(names: Sequence[str], given: Given | None = None, *, completed: bool = True) -> list[Program]:
    """The programs that several names or files mean: an option goes to those that take it, and one must take it."""
    flags = given or {}
    options = {flag: number for flag, number in flags.items() if flag in declared(ProgramFlags)}
    cluster = cluster_of(flags)
    on_nodes = {} if cluster is None else {"ranks": cluster.ranks, "ranks_per_node": cluster.per_node}
    _require_not_too_many(on_nodes | options)
    meant = [_Meant.by(name, options) for name in names]
    unknown = {flag for flag in options if not any(flag in one.takes for one in meant)}
    programs = []
    for one in meant:
        # What no program takes is given to the first, which refuses it in its own words.
        own = {flag: number for flag, number in (on_nodes | options).items() if flag in one.takes | unknown}
        programs.append(one.load(own, completed=completed))
    return programs


@dataclass(frozen=True)
class _Meant:
    """What a name on the command line means.

    Attributes:
        name: as it was given.
        kind: "pipeline" (or data parallelism), "all-reduce" (or another collective), or "file".
        builder: its name there.
        takes: the options that it takes.
    """

    name: str
    kind: str
    builder: str
    takes: frozenset[str]

    @classmethod
    def by(cls, name: str, options: dict[str, Any]) -> _Meant:
        kind, _, short = name.rpartition(":")
        if (kind or _kind(name, options)) == "pipeline" and short in _SCHEDULES:
            return cls(name, "pipeline", short, frozenset(inspect.signature(_SCHEDULES[short]).parameters))
        if kind in ("", "all-reduce") and short in _COLLECTIVES:
            return cls(name, "all-reduce", short, frozenset(inspect.signature(_COLLECTIVES[short]).parameters))
        beyond = collectives.is_compressed(short) or collectives.hosts_named(short) is not None
        if kind in ("", "all-reduce") and beyond and not Path(name).exists():
            return cls(name, "all-reduce", short, frozenset({"ranks"}))
        if not Path(name).exists():
            raise UsageError(_unknown(name))
        return cls(name, "file", "", frozenset())

    def load(self, options: dict[str, Any], *, completed: bool) -> Program:
        if self.kind == "pipeline":
            usual = {"ranks": 4} | ({"microbatches": 8} if self.builder in schedules.PIPELINES else {})
            return schedules.build(self.builder, **usual | options)
        if self.kind == "all-reduce":
            if (number := options.get("microbatches")) is not None:
                raise ConfigError(
                    f"--microbatches {number}: {self.builder} is a collective, which has none; leave it out"
                )
            hosts = collectives.hosts_named(self.builder)
            return collectives.build(self.builder, **{"ranks": 4 if hosts is None else hosts.world_size} | options)
        for flag, number in options.items():
            raise ConfigError(f"{_flag(flag)} {number}: the program in {self.name} says that; leave it out")
        program = read(Path(self.name))
        return complete(program, self.name) if completed else program


def _require_not_too_many(options: dict[str, Any]) -> None:
    numbers = {name: number for name, number in options.items() if name in _MOST}
    for name, number in numbers.items():
        if number > _MOST[name]:
            raise ConfigError(f"{_flag(name)} {number}: at most {_MOST[name]} are built here")
    if math.prod(numbers.values()) > _MOST_CELLS:
        flags = " ".join(f"{_flag(name)} {number}" for name, number in numbers.items())
        raise ConfigError(f"{flags}: that makes millions of operations, which would fill the memory; choose less")


def _kind(name: str, options: dict[str, Any]) -> str:
    if name in _SCHEDULES and name in _COLLECTIVES:
        kind, other = ("pipeline", "all-reduce") if "microbatches" in options else ("all-reduce", "pipeline")
        _remark(f"{name} is the {kind} here; {other}:{name} is the {other}")
        return kind
    return "pipeline" if name in _SCHEDULES else "all-reduce"


def _unknown(name: str) -> str:
    names = [*_SCHEDULES, *_COLLECTIVES, *collectives.METHODS, "pipeline:naive", "all-reduce:naive"]
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


def complete(program: Program, name: str) -> Program:
    """A file's program with what it may leave out (`schedules.complete`), and a remark if something was added."""
    try:
        completed = schedules.complete(program)
    except ProgramError as error:
        raise ProgramError(f"{name}: {error}") from None
    if completed is not program:
        _remark(f"{name} says what to compute and sends nothing: sends, receives and frees were added")
    return completed


# ── the costs ───────────────────────────────────────────────────────────────────────────────────────────────────────

_PER_STAGE = ("forward", "backward_input", "backward_weight")
_OF_MEMORY = {  # and what `Sizes` calls them
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
}
_OF_MESSAGES = ("latency", "seconds_per_byte", "add_seconds_per_byte", "bytes_per_value")


def costs_of(program: Program, given: Given | None = None) -> Costs:
    """The costs that flags say; for what they do not say, what `default_costs` says."""
    flags = given or {}
    stages: dict[str, Any] = {name: _times(name, flags[name]) for name in _PER_STAGE if name in flags}
    defaults = default_costs(program)
    messages: dict[str, Any] = {"latency": defaults.latency, "seconds_per_byte": defaults.seconds_per_byte}
    messages |= {name: _number(name, flags[name]) for name in _OF_MESSAGES if name in flags}
    if isinstance(program.goal, Collective) and collectives.is_compressed(program.name):
        # Its program runs on what is sent, and --bytes is what is compressed.
        rounds = collectives.payload(program.name, messages.get("bytes_per_value", defaults.bytes_per_value))
        messages["bytes_per_value"] = sum(one.bytes for one in rounds)
    links = dict(_link(text, program) for text in flags.get("link", "").split())
    sizes = Sizes(**{size: _times(name, flags[name]) for name, size in _OF_MEMORY.items() if name in flags})
    return Costs(**stages, **messages, links=links, topology=cluster_of(flags), sizes=sizes)


_OF_CLUSTER = ("nodes", "per_node", "inside", "between")


def cluster_of(flags: Given) -> Cluster | None:
    """The cluster that flags describe; either all of it, or none."""
    given = [name for name in (*_OF_CLUSTER, "no_shared_nic") if name in flags]
    if not given:
        return None
    for name in ("nodes", "per_node"):
        if name in flags:
            check_value(declared(ProgramAndCostFlags)[name], flags[name])
    missing = [_flag(name) for name in _OF_CLUSTER if name not in flags]
    if missing:
        value = "" if given[0] == "no_shared_nic" else f" {flags[given[0]]}"
        raise ConfigError(f"{_flag(given[0])}{value}: a cluster needs {_and(missing)} as well")
    inside, between = (parse_link(flags[name], f"{_flag(name)} {flags[name]}") for name in ("inside", "between"))
    cluster = Cluster(flags["nodes"], flags["per_node"], inside, between, not flags.get("no_shared_nic", False))
    if "ranks" in flags and flags["ranks"] != cluster.ranks:
        nodes, ranks = count(cluster.nodes, "node"), count(cluster.per_node, "rank")
        raise ConfigError(
            f"--ranks {flags['ranks']}: {nodes} of {ranks} are {count(cluster.ranks, 'rank')}; leave --ranks out"
        )
    return cluster


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


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


# ── the drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────

_MOST_OPERATIONS = 200_000


def require_drawable(program: Program, otherwise: str) -> None:
    """Raise `UsageError`, with what to do otherwise, for a program that is too large to be read."""
    if len(program) > _MOST_OPERATIONS:
        raise UsageError(
            f"{program.name} has {len(program):,} operations, too many to read; at most {_MOST_OPERATIONS:,} are "
            f"drawn ({otherwise})"
        )


def show(traces: Sequence[Trace], view: View, width: int | None, *, memory: bool) -> None:
    """Draw in colour where the terminal has it and wants it; plain in a pipe, and where NO_COLOR is set."""
    console = Console(highlight=False, soft_wrap=True)
    room = width or (console.width if console.is_terminal else None)
    lines = text_lines(traces, view=view, width=room, memory=memory)
    if console.is_terminal and console.color_system and not console.no_color:
        console.print(coloured(lines), end="")
    else:
        print(plain(lines), end="")
