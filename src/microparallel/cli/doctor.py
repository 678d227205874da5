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
from microparallel.cli.doctor_between import PORT, WAIT
from microparallel.cli.doctor_between import between as between_hosts
from microparallel.errors import UsageError
from microparallel.topology import ALONE, find_placement, ranks_of_the_world

EXAMPLES = flags.examples(
    ("microparallel doctor", "versions, cores, GPUs, transports with their measured speed, problems with their fix"),
    ("microparallel doctor --selftest", "prove that this machine's ranks and GPUs train as one process does"),
    (
        "torchrun --nproc-per-node=4 -m microparallel doctor --selftest",
        "the same for ranks that torchrun has started, on one host or several",
    ),
    ("microparallel doctor --between alpha,beta", "run it on both hosts: the link between them, clocks, versions"),
    (
        "srun --ntasks-per-node=1 microparallel doctor --between ranks",
        "the same for the nodes of a Slurm job; torchrun works, too",
    ),
)


def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Also check collectives and training on all ranks and devices here.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Ranks of the self-test.", show_default="4 on the CPU, one a GPU on GPUs"),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTS",
            help="Examine the links between hosts instead: alpha,beta,gamma, the same on each of them; they meet at "
            "the first one. Under torchrun or srun: ranks.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Where hosts meet on the first one.", show_default=str(PORT)),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(min=1, help="How many seconds a host waits for the others.", show_default=f"{WAIT:g}"),
    ] = None,
    json: flags.Json = False,
) -> int:
    """Examine this machine: versions, cores, GPUs, which transports work and how fast, and what is wrong.

    With --between, examine what is between hosts: who reaches whom and at which address, round trips, bandwidth,
    clocks, and versions that differ. Every host prints the same, within a bounded time, also if some host never comes.

    The exit code is 1 if no transport works, the self-test fails, or there is a problem between hosts.
    """
    if between is not None:
        if selftest or ranks is not None:
            raise UsageError(f"--between {between} examines hosts, and --selftest this one; run one after the other")
        return between_hosts(between, port, wait, json=json)
    for flag, value in (("--port", port), ("--wait", wait)):
        if value is not None:
            raise UsageError(f"{flag} {value:g} is for several hosts; add --between HOST1,HOST2")
    if find_placement(os.environ) != ALONE:
        if not selftest:
            raise UsageError(
                "doctor looks at one machine; run it without torchrun or srun, or add --selftest to check these ranks, "
                "or --between ranks to look at the links between their hosts"
            )
        ranks_of_the_world(os.environ, ranks)
        return _check_these_ranks(json)
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
        mps = checkup.check_mps(progress)
        if selftest:
            for setting in settings_here(ranks):
                findings += run_selftest(setting, pool, progress)
    facts, problems = checkup.facts(__version__, mps), checkup.problems(transports, mps)
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


def _check_these_ranks(json: bool) -> int:
    """The self-test on the ranks that torchrun or Slurm has started; rank 0 says what was found."""
    from microparallel.train.selftest import selftest_of_ranks
    from microparallel.world import connect

    with connect(check=True) as comms:
        with Console(stderr=True).status("meeting the other ranks") as status:
            findings: list[Any] = selftest_of_ranks(comms, status.update)
        if comms.rank:
            return 0
    if json:
        print(json_format.dumps({"selftest": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_selftest(Console(highlight=False, soft_wrap=True), findings)
    return 0 if all(finding.passed for finding in findings) else 1


def _print_selftest(console: Console, findings: list[Any]) -> None:
    console.print("[bold]self-test[/]")
    for finding in findings:
        console.print(f"  {_mark(finding.passed)} {finding.setting}: {finding.check}: {finding.detail}")


def _print(facts: dict[str, str], transports: list[Any], problems: list[Any], findings: list[Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"[bold]{name:>14}[/]  {value}")
    console.print("\n[bold]transports[/]")
    for check in transports:
        console.print(f"  {_mark(check.works, '[dim]–[/]')} {check.name:5} {check.detail}")
    if findings:
        console.print()
        _print_selftest(console, findings)
    console.print("\n[bold]problems[/]" if problems else "\nno problems found")
    for problem in problems:
        console.print(f"  [yellow]![/] {problem.what}: {problem.fix}")


def _mark(good: bool, otherwise: str = "[red]✗[/]") -> str:
    return "[green]✓[/]" if good else otherwise
