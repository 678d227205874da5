"""`microparallel doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import json as json_format
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from microparallel import __version__
from microparallel.cli import flags
from microparallel.errors import UsageError
from microparallel.topology import ALONE, find_placement

EXAMPLES = flags.examples(
    ("microparallel doctor", "versions, cores, GPUs, transports with their measured speed, problems with their fix"),
    ("microparallel doctor --selftest", "prove that this machine's ranks and GPUs train as one process does"),
)


def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Also check collectives and training on all ranks and devices here.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Ranks of the self-test.", show_default="4 on the CPU, one a GPU on GPUs"),
    ] = None,
    json: flags.Json = False,
) -> int:
    """Examine this machine: versions, cores, GPUs, which transports work and how fast, and what is wrong.

    The exit code is 1 if no transport works or the self-test fails.
    """
    if find_placement(os.environ) != ALONE:
        raise UsageError("doctor starts its own ranks; run it without torchrun or srun")
    if ranks is not None and not selftest:
        raise UsageError(f"--ranks {ranks} is for the self-test; add --selftest")
    from microparallel.analyze import checkup
    from microparallel.train.selftest import selftest as run_selftest
    from microparallel.train.selftest import settings_here
    from microparallel.world import Pool

    console = Console(stderr=True)
    findings: list[Any] = []
    with console.status("starting ranks") as status, Pool() as pool:

        def progress(text: str) -> None:
            status.update(text)

        transports = checkup.check_transports(pool, progress)
        if selftest:
            for setting in settings_here(ranks):
                findings += run_selftest(setting, pool, progress)
    facts, problems = checkup.facts(__version__), checkup.problems(transports)
    if json:
        report = {
            "facts": facts,
            "transports": [asdict(check) for check in transports],
            "problems": [asdict(problem) for problem in problems],
            "selftest": [asdict(finding) for finding in findings] if selftest else None,
        }
        print(json_format.dumps(report, indent=2))
    else:
        _print(facts, transports, problems, findings)
    fine = any(check.works for check in transports) and all(finding.passed for finding in findings)
    return 0 if fine else 1


def _print(facts: dict[str, str], transports: list[Any], problems: list[Any], findings: list[Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"[bold]{name:>14}[/]  {value}")
    console.print("\n[bold]transports[/]")
    for check in transports:
        console.print(f"  {_mark(check.works, '[dim]–[/]')} {check.name:5} {check.detail}")
    if findings:
        console.print("\n[bold]self-test[/]")
        for finding in findings:
            console.print(f"  {_mark(finding.passed)} {finding.setting}: {finding.check}: {finding.detail}")
    console.print("\n[bold]problems[/]" if problems else "\nno problems found")
    for problem in problems:
        console.print(f"  [yellow]![/] {problem.what}: {problem.fix}")


def _mark(good: bool, otherwise: str = "[red]✗[/]") -> str:
    return "[green]✓[/]" if good else otherwise
