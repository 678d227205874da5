"""`microparallel verify`: is a program right?"""

from __future__ import annotations

import json as json_format
from typing import Annotated, cast

import typer
from rich.console import Console

from microparallel.cli import flags, programs
from microparallel.errors import ConfigError, ProgramError
from microparallel.program import Program, TrainingStep, peak_activations
from microparallel.program.walk import Sends
from microparallel.text import count
from microparallel.verifier import verify as verify_program

EXAMPLES = flags.examples(
    ("microparallel verify my_schedule.txt", "a schedule of your own, in text form"),
    (
        "microparallel verify 1f1b --ranks 4 --sends blocking",
        "does 1F1B survive sends that block? No: who waits for whom",
    ),
    ("microparallel verify gpipe --microbatches 8 --max-activations 4", "may a rank hold more than 4 activations?"),
)


def verify(
    name: programs.Name,
    ranks: programs.Ranks = None,
    microbatches: programs.Microbatches = None,
    stages_per_rank: programs.StagesPerRank = None,
    layers: programs.Layers = None,
    buckets: programs.Buckets = None,
    ranks_per_node: programs.RanksPerNode = None,
    sends: Annotated[
        str, typer.Option(help="rendezvous (and buffered), or blocking: sends that stop their rank as well.")
    ] = "rendezvous",
    max_activations: Annotated[
        int | None,
        typer.Option("--max-activations", help="The most activations a rank may hold at once.", show_default="any"),
    ] = None,
    json: flags.Json = False,
) -> int:
    """Check a program: messages match, nobody waits for ever, and its goal is reached.

    The text form has a line for each rank; what a schedule sends may be left out, and is added:

        program mine
        goal: training step of 2 stages, 2 micro-batches
        rank 0: F0.0 F0.1 B0.0 B0.1
        rank 1: F1.0 B1.0 F1.1 B1.1

    F, B, I and W are forward, backward, its input half and its weight half, of stage.micro-batch. The exit code is 1 if
    the program is wrong, and 2 if it cannot be read.
    """
    if sends not in ("buffered", "rendezvous", "blocking"):
        raise ConfigError(f"--sends {sends}: choose buffered, rendezvous or blocking")
    program = programs.load(
        name, ranks, microbatches, stages_per_rank, layers, buckets, ranks_per_node, completed=False
    )
    error = None
    try:
        program = programs.complete(program, name)
        verify_program(program, cast(Sends, sends), max_activations)
    except ProgramError as found:
        error = str(found)
    if json:
        print(json_format.dumps(_summary(program, sends, error)))
    else:
        _show(program, sends, error)
    return 0 if error is None else 1


def _summary(program: Program, sends: str, error: str | None) -> dict[str, object]:
    return {
        "program": program.name,
        "goal": str(program.goal),
        "ranks": program.world_size,
        "operations": len(program),
        "sends": sends,
        "right": error is None,
        "error": error,
        "messages_sent": program.messages_sent(),
        "peak_activations": [peak_activations(ops) for ops in program.ranks],
    }


def _show(program: Program, sends: str, error: str | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    ranks, operations = count(program.world_size, "rank"), count(len(program), "operation")
    console.print(f"{program.name} · {ranks} · {operations} · {program.goal}", markup=False)
    if error is not None:
        console.print("[bold red]wrong[/]: ", end="")
        console.print(error, markup=False)
        return
    meanings = "buffered, rendezvous and blocking sends" if sends == "blocking" else "buffered and rendezvous sends"
    console.print(f"[bold green]right[/]: every message is received in order, nobody waits for ever under {meanings},")
    if isinstance(program.goal, TrainingStep):
        peaks = " ".join(str(peak_activations(ops)) for ops in program.ranks)
        console.print("       every micro-batch has its forward and its backward on every stage once, in order")
        console.print(f"       peak activations of each rank: {peaks}")
    else:
        console.print("       and every rank ends with what the goal promises")
