"""What changes over a run's steps: loss, speed, memory, in few enough points to be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_MOST_POINTS = 600
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

Point = tuple[float, float | None]


def curves(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Training and validation loss, and throughput; None stands where a loss was not finite."""
    loss, speed = _points(metrics, "loss"), _points(metrics, "samples_per_second")
    return {
        "loss": thinned(loss),
        "validation": thinned(_points(metrics, "validation_loss")),
        "speed": thinned(speed),
        "steps_a_point": math.ceil(max(len(loss), len(speed), 1) / _MOST_POINTS),
    }


def memory(metrics: Sequence[dict[str, Any]], *facts: dict[str, Any]) -> dict[str, Any] | None:
    """All that is known about memory, in bytes, whoever wrote it down; None if that is nothing."""
    keys = list(dict.fromkeys(key for record in metrics for key in record if "memory" in key.lower()))
    over_steps = {key: thinned(_points(metrics, key, _scale(key))) for key in keys}
    found = {
        key: _sizes(value, _scale(key)) for fact in facts for key, value in fact.items() if "memory" in key.lower()
    }
    curves = {key: points for key, points in over_steps.items() if any(value is not None for _, value in points)}
    sizes = {key: value for key, value in found.items() if value}
    return {"over_steps": curves, "sizes": sizes} if curves or sizes else None


def thinned(points: list[Point]) -> list[Point]:
    """So many neighbours in a row as one, their mean, that few enough points are left."""
    many = math.ceil(len(points) / _MOST_POINTS)
    return points if many <= 1 else [_mean(points[at : at + many]) for at in range(0, len(points), many)]


def _mean(points: list[Point]) -> Point:
    values = [value for _, value in points if value is not None]
    return points[-1][0], sum(values) / len(values) if values else None


def _points(metrics: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> list[Point]:
    records = [record for record in metrics if key in record and _is_number(record.get("step"))]
    return [(record["step"], record[key] * scale if _is_number(record[key]) else None) for record in records]


def _scale(key: str) -> float:
    """Bytes, unless the name ends in another unit."""
    return _UNITS.get(key.lower().replace(" ", "_").rpartition("_")[2], 1.0)


def _sizes(value: Any, scale: float) -> list[float]:
    """One number for all, or one a rank."""
    values = value if isinstance(value, list | tuple) else [value]
    return [number * scale for number in values] if all(_is_number(number) for number in values) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
