"""How the results of `bench predict` are shown: as a table for people, as JSON for scripts."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.table import Table

from microparallel.cli.bench_output import console_for_results, machine, show_step
from microparallel.performance.caveats import chance_speaks, cores_are_shared, quartiles
from microparallel.performance.predict_bench import Predictions
from microparallel.text import count, show_seconds

_AIM = 0.1


def as_json(found: Predictions) -> dict[str, Any]:
    """Everything that was measured and predicted, in plain types."""
    return {
        "machine": machine(found.cores),
        "ranks": found.ranks,
        "transport": found.transport,
        "device": found.device,
        "model": found.text,
        "bucket_mb": found.bucket_mb,
        "results": [
            {
                "method": row.method,
                "predicted_seconds": row.seconds,
                "measured_seconds": row.median,
                "error": row.error,
                "steps": list(row.measured),
            }
            for row in found.rows
        ],
        "calibration": {"work": [asdict(one) for one in found.work], "messages": asdict(found.messages)},
        "notes": notes(found),
    }


def show(found: Predictions) -> None:
    """Print the table, and what a reader must know."""
    console = console_for_results()
    ranks, cores = count(found.ranks, "rank"), count(found.cores, "core")
    where = f"{found.transport}, float32 on {found.device}, torch {torch.__version__}"
    console.print(f"[bold]predicted step[/], {ranks} on {cores}: {where}\n")
    console.print(f"{found.text}; buckets of {found.bucket_mb:g} MB", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("method", "predicted", "measured", "quartiles", "error"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in found.rows:
        lower, median, upper = quartiles(row.measured)
        style = "green" if abs(row.error) <= _AIM else "yellow"
        cells = [*show_step(median, lower, upper, len(row.measured)), f"[{style}]{row.error:+.1%}[/]"]
        table.add_row(row.method, show_seconds(row.seconds), *cells)
    console.print(table)
    typical = statistics.median(abs(row.error) for row in found.rows)
    console.print(f"\ntypically off by {typical:.1%}; within {_AIM:.0%}: {_within(found)} of {len(found.rows)}")
    for note in notes(found):
        console.print(f"[yellow]![/] {note}")


def _within(found: Predictions) -> int:
    return sum(abs(row.error) <= _AIM for row in found.rows)


def notes(found: Predictions) -> list[str]:
    """What a reader must know."""
    shared = cores_are_shared(found.ranks_here, found.cores, found.device)
    return [*shared, *chance_speaks("here", len(found.rows[0].measured))]
