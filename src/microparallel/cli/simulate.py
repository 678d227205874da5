"""`microparallel simulate`: what would a program cost?"""

from __future__ import annotations

import json as json_format
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from microparallel.cli import flags, programs
from microparallel.cli.flags import require_writable, takes
from microparallel.errors import ConfigError, MicroparallelError
from microparallel.program import Program, TrainingStep
from microparallel.simulator import Costs
from microparallel.simulator import simulate as simulate_program
from microparallel.simulator.costs import PerStage
from microparallel.text import count, short
from microparallel.trace import Sizes, Trace
from microparallel.trace.memory import KINDS

EXAMPLES = flags.examples(
    ("microparallel simulate 1f1b --ranks 4 --microbatches 8", "bubble, waiting and activations of each rank"),
    (
        "microparallel simulate gpipe 1f1b interleaved zb-h1 zbv --ranks 8 --microbatches 32 --same-model",
        "schedules side by side, on the same model",
    ),
    (
        "microparallel simulate ring tree --ranks 8 --bytes 1e6 --latency 1e-5 --seconds-per-byte 1e-9",
        "all-reduces of 1 MB over links with a latency of 10 µs and 1 GB/s",
    ),
    ("microparallel simulate ring --link 2-3=10", "a ring with one slow link"),
    (
        "microparallel simulate ring hierarchical --nodes 2 --per-node 4 --inside 5us,100GB --between 20us,10GB "
        "--bytes 1e8",
        "two nodes of four ranks, which share their node's network port",
    ),
    (
        "microparallel simulate ddp zero-1 zero-2 --ranks 4 --layers 4 --memory",
        "what each rank holds, with its parameters, gradients and optimizer state whole or in parts",
    ),
    (
        "microparallel simulate zero-3 --replicas 2 --nodes 2 --per-node 4 --inside 5us,100GB --between 20us,10GB "
        "--bytes 1e8",
        "parameters in parts inside each of two nodes, which sum parts of gradients",
    ),
)


@takes(programs.ProgramAndCostFlags)
def simulate(
    given: dict[str, Any],
    *,
    names: programs.Names,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace, which Perfetto opens, too.")
    ] = None,
    same_model: Annotated[
        bool,
        typer.Option(
            "--same-model",
            help="Costs, sizes and activations are those of a rank's whole part of the model, however many stages it "
            "holds.",
        ),
    ] = False,
    json: flags.Json = False,
) -> int:
    """Walk through programs with a clock for every rank, and say what they would cost.

    One program is shown rank by rank, several are shown side by side; an option, such as --ranks-per-node, then goes to
    those that take it. Times have the unit of the costs that are given,
    which are those of one stage; interleaved, zbv and dualpipev have several stages on a rank, so compare them with
    others by --same-model.
    """
    if chrome is not None and len(names) > 1:
        raise ConfigError(f"--chrome {chrome}: one file holds one program's trace, and {len(names)} were named")
    if chrome is not None:
        require_writable(chrome, "--chrome")
    loaded = programs.load_all(names, given)
    memory = programs.memory_wanted(given, loaded)
    for program in loaded if memory and not json else ():
        programs.require_drawable(program, "leave out --memory, or add --json")
    traces: list[Trace] = []
    shares: list[float] = []
    for name, program in zip(names, loaded, strict=True):
        wrong = programs.complaint(name, program)
        if wrong is not None:  # its numbers would mislead
            raise MicroparallelError(f"{name} is wrong: {wrong}")
        shares.append(_share(program) if same_model else 1)
        traces.append(simulate_program(program, _scaled(programs.costs_of(program, given), shares[-1])))
    if chrome is not None:
        traces[0].to_chrome(chrome)
    if json:
        found = [summary(trace, share, memory=memory) for trace, share in zip(traces, shares, strict=True)]
        print(json_format.dumps(found if len(found) > 1 else found[0]))
    elif len(traces) > 1:
        Console().print(_side_by_side(names, traces, shares))
    else:
        _show_one(traces[0], shares[0])
    if memory and not json:
        print()
        programs.show(traces, "timeline", None, memory=True)
    if chrome is not None and not json:
        print(f"wrote {chrome}")
    return 0


def summary(trace: Trace, share: float = 1, *, memory: bool = False) -> dict[str, Any]:
    """Everything that was found out, for scripts; `share` is what one activation counts.

    With `memory`, the most bytes that each rank holds, together and of each kind.
    """
    pipeline = _is_pipeline(trace)
    numbers: dict[str, Any] = {
        "makespan": trace.makespan,
        "bubble": trace.bubble if pipeline else None,
        "bubble_async": trace.bubble_async if pipeline else None,
        "bubble_fraction": trace.bubble_fraction if pipeline else None,
        "work": trace.work,
        "exposed_communication": trace.exposed_communication,
        "waiting": trace.waiting,
        "peak_activations": [peak * share for peak in trace.peak_activations],
        "messages_sent": trace.messages_sent,
        "bytes_sent": trace.bytes_sent,
    }
    if memory:
        numbers["peak_memory"] = trace.peak_memory
        numbers["peak_memory_by_kind"] = {kind: [rank.peak_of(kind) for rank in trace.memory] for kind in KINDS}
    program = trace.followed
    return {"program": program.name, "goal": str(program.goal), "ranks": program.world_size, **numbers}


def _show_one(trace: Trace, share: float) -> None:
    console = Console(highlight=False)
    program = trace.followed
    training = isinstance(program.goal, TrainingStep)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{program.name} · {count(program.world_size, 'rank')} · {program.goal}",
        title_justify="left",
    )
    columns = ["rank", *(["computes"] if training else []), "exposed", "waits"]
    columns += [*(["held"] if training else []), "messages", "bytes"]
    for column in columns:
        table.add_column(column, justify="right")
    for rank in range(program.world_size):
        cells = [str(rank), *([number(trace.work[rank])] if training else [])]
        cells += [number(trace.exposed_communication[rank]), number(trace.waiting[rank])]
        cells += [number(trace.peak_activations[rank] * share)] if training else []
        table.add_row(*cells, str(trace.messages_sent[rank]), number(trace.bytes_sent[rank]))
    console.print(table)
    held = "; held: activations, at most at once" if training else ""
    console.print(f"exposed: communication that nothing hides{held}\n")
    console.print(f"makespan {number(trace.makespan)}")
    if _is_pipeline(trace):
        console.print(
            f"bubble   {number(trace.bubble)} ({trace.bubble_fraction:.1%}); "
            f"{number(trace.bubble_async)} if no barrier stands between two steps",
        )


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), caption_justify="left")


def _side_by_side(names: Sequence[str], traces: list[Trace], shares: list[float]) -> Table:
    programs_named = Counter(trace.followed.name for trace in traces)
    training = any(isinstance(trace.followed.goal, TrainingStep) for trace in traces)
    table = _table()
    table.caption = "of the rank with most: exposed (communication that nothing hides), messages, bytes"
    table.caption += ", and held (activations at once)" if training else ""
    table.add_column("program", no_wrap=True)
    several = len({trace.followed.world_size for trace in traces}) > 1
    columns = [*(["ranks"] if several else []), "makespan", *(["bubble", "%", "async", "held"] if training else [])]
    for column in [*columns, "exposed", "messages", "bytes"]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, trace, share in zip(names, traces, shares, strict=True):
        alike = programs_named[trace.followed.name] > 1  # then the files tell them apart
        shown = Path(name).name if alike else trace.followed.name
        row = [shown, *([str(trace.followed.world_size)] if several else []), number(trace.makespan)]
        if _is_pipeline(trace):
            row += [number(trace.bubble), f"{trace.bubble_fraction:.1%}", number(trace.bubble_async)]
            row.append(number(max(trace.peak_activations) * share))
        elif training:
            row += ["-"] * 4
        row += [number(max(trace.exposed_communication)), str(max(trace.messages_sent)), number(max(trace.bytes_sent))]
        table.add_row(*row)
    return table


def _is_pipeline(trace: Trace) -> bool:
    """Whether gaps are a bubble: in a collective and in data parallelism they are communication."""
    return isinstance(trace.followed.goal, TrainingStep) and not trace.followed.goal.buckets


def _share(program: Program) -> float:
    """How much of a rank's part of the model one stage is: 1/2 with two stages a rank."""
    if not isinstance(program.goal, TrainingStep) or program.goal.buckets:
        return 1
    return program.world_size / program.goal.stages


def _scaled(costs: Costs, share: float) -> Costs:
    """The same costs, given for a rank's whole part of the model instead of one stage."""

    def scale(cost: PerStage) -> PerStage:
        return [number * share for number in cost] if isinstance(cost, Sequence) else cost * share

    given = {} if costs.sizes is None else asdict(costs.sizes)
    sizes = costs.sizes and Sizes(**{kind: scale(size) for kind, size in given.items() if size is not None})
    return replace(
        costs,
        forward=scale(costs.forward),
        backward_input=scale(costs.backward_input),
        backward_weight=scale(costs.backward_weight),
        sizes=sizes,
    )


def number(value: float) -> str:
    """A number to six digits: programs that hardly differ are told apart."""
    return short(value, digits=6)
