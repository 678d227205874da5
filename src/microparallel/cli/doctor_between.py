"""`microparallel doctor --between`: what several hosts are to each other, shown on each of them."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from microparallel.errors import UsageError
from microparallel.text import count, show_number, show_seconds
from microparallel.topology import ALONE, Link, find_placement, show_link

if TYPE_CHECKING:
    from microparallel.analyze.between import Host, Pair, Report

OF_RANKS = "ranks"
PORT, WAIT = 29500, 60.0
_PREFIXES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


def between(text: str, port: int | None, wait: float | None, *, json: bool) -> int:
    """Examine the links between hosts; `text` is what was given as --between."""
    placement = find_placement(os.environ)
    patience = WAIT if wait is None else wait
    if text == OF_RANKS:
        if placement == ALONE:
            raise UsageError(
                f"--between {OF_RANKS}: there are no ranks; start it by torchrun or srun, or name the hosts: "
                "--between HOST1,HOST2"
            )
        if port is not None:
            raise UsageError(f"--port {port}: ranks meet where torchrun or srun says; leave it out")
    elif placement != ALONE:
        raise UsageError(
            f"--between {text}: the ranks know their hosts; write --between {OF_RANKS} under torchrun or srun"
        )

    from microparallel.analyze import between as links
    from microparallel.analyze import hosts

    console = Console(stderr=True)
    with ExitStack() as open_:
        progress = _progress(console, open_)
        if text == OF_RANKS:
            party = open_.enter_context(hosts.meet_ranks(placement, patience))
        else:
            names = hosts.parse_hosts(text)
            number = hosts.number_of_this_host(names)
            party = open_.enter_context(hosts.meet(names, number, port or PORT, patience, progress))
        if party.number is None:
            return 1 if links.problems_found(party) else 0
        report = links.examine(party, party.number, progress)
    if json:
        print(json_format.dumps(asdict(report), indent=2))
    else:
        show(report)
    return 1 if report.problems else 0


def _progress(console: Console, open_: ExitStack) -> Callable[[str], None]:
    """Show what is done now: on a terminal in one line, else a line each."""
    if console.is_terminal:
        return open_.enter_context(console.status("meeting the other hosts")).update
    said: list[str] = []

    def say(text: str) -> None:
        if text not in said[-1:]:
            said.append(text)
            console.print(text, highlight=False, soft_wrap=True)

    return say


def show(report: Report) -> None:
    """Print a report for people."""
    from microparallel.analyze.between import differing
    from microparallel.bench.report import Column, console_for_results, make_table, text_table

    console = console_for_results(110)
    plain = Console(highlight=False, soft_wrap=True)
    names = [host.name for host in report.hosts]
    plain.print(f"{count(len(names), 'host')}, which met at {report.place}\n")
    columns: list[Column[Host]] = [
        Column("host", lambda host: host.name, on_the_left=True),
        Column("address", lambda host: host.address, on_the_left=True),
        Column("interface", lambda host: host.interface or "?", on_the_left=True),
        Column("MTU", lambda host: str(host.mtu or "?")),
    ]
    console.print(make_table(columns, report.hosts))
    if report.pairs:
        headings = ("link", "round trip", "9 of 10", "there", "back", "clock ahead by", "message")
        console.print()
        console.print(text_table(headings, [_row(pair, names) for pair in report.pairs]))
        plain.print(
            "\nround trip, there, back: over TCP; clock: of the second host, beside the first one's"
            "\nmessage: what one costs a rank that sends it over gloo, as a latency and a bandwidth"
        )
    different = differing(report.hosts)
    same = [f"{name} {value}" for name, value in report.hosts[0].versions.items() if name not in different]
    if same and len(names) > 1:
        plain.print(f"\nthe same everywhere: {', '.join(same)}")
    slowest = report.slowest
    if slowest is not None and slowest.link is not None:
        _plan(plain, slowest.link, f"{names[slowest.first]}–{names[slowest.second]}")
    plain.print("\n[bold]problems[/]" if report.problems else "\nno problems found")
    for problem in report.problems:
        plain.print(f"  [yellow]![/] {problem.what}\n    what to do: {problem.fix}")


def _row(pair: Pair, names: list[str]) -> tuple[str, ...]:
    ends, found = f"{names[pair.first]}–{names[pair.second]}", pair.measured
    if found is None:
        return (ends, "–", "–", "–", "–", "–", "–")
    low, high = found.spread
    return (
        ends,
        show_seconds(found.round_trip),
        f"{show_seconds(low)} to {show_seconds(high)}",
        show_rate(found.there),
        show_rate(found.back),
        f"{'-' if found.ahead < 0 else ''}{show_seconds(abs(found.ahead))} ± {show_seconds(found.clock_error)}",
        "–" if pair.link is None else show_link(pair.link),
    )


def _plan(console: Console, link: Link, ends: str) -> None:
    written = show_link(link)
    console.print(
        f"\n[bold]to plan with[/] the slowest link, {ends}:"
        f"\n  microparallel simulate … --nodes N --per-node P --inside LATENCY,BANDWIDTH --between {written}"
        f"\n  microparallel bench compress --links {written.replace(',', '+')}"
    )


def show_rate(bytes_per_second: float) -> str:
    """How fast bytes flow, in bits, as links are sold."""
    bits = 8 * bytes_per_second
    factor, unit = next((one for one in _PREFIXES if bits >= 0.9995 * one[0]), (1.0, "bit/s"))
    return f"{show_number(bits / factor)} {unit}"
