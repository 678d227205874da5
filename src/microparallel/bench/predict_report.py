"""What `bench predict` shows: predicted steps beside measured ones."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from microparallel.bench import report
from microparallel.bench.predict import Prediction, Predictions
from microparallel.bench.report import Column, cores_are_shared, few_steps, make_table, quartiles, show_quartiles
from microparallel.text import show_seconds

_AIM = 0.1  # the error, in either direction, that a good prediction stays within


@dataclass(frozen=True)
class Report(report.Report[Predictions]):
    """The predictions as they are; nothing more is worked out."""

    title = "predicted step"

    def details(self) -> dict[str, Any]:
        """The model, every prediction with its measured steps, and the calibration."""
        found = self.measurements
        return {
            "model": found.text,
            "bucket_cap_mb": found.bucket_cap_mb,
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
        }

    def show_body(self, console: Console) -> None:
        """Print the table, and how far predictions are off."""
        found = self.measurements
        console.print(f"{found.text}; buckets of {found.bucket_cap_mb:g} MB", soft_wrap=True)
        console.print(make_table(_COLUMNS, found.rows))
        typical = statistics.median(abs(row.error) for row in found.rows)
        within = sum(abs(row.error) <= _AIM for row in found.rows)
        console.print(f"\ntypically off by {typical:.1%}; within {_AIM:.0%}: {within} of {len(found.rows)}")


def report_on(found: Predictions) -> Report:
    """The report with its warnings."""
    return Report(found, cores_are_shared(found) + few_steps("here", len(found.rows[0].measured)))


def _quartiles(row: Prediction) -> str:
    return "one step" if len(row.measured) == 1 else show_quartiles(*quartiles(row.measured))


def _error(row: Prediction) -> str:
    return f"[{'green' if abs(row.error) <= _AIM else 'yellow'}]{row.error:+.1%}[/]"


_COLUMNS: list[Column[Prediction]] = [
    Column("method", lambda row: row.method, on_the_left=True),
    Column("predicted", lambda row: show_seconds(row.seconds)),
    Column("measured", lambda row: show_seconds(row.median)),
    Column("quartiles", _quartiles),
    Column("error", _error),
]
