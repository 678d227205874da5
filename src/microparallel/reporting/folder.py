"""Read what a run left behind, as far as it is there.

```
RUN/
  config.toml      what it was told
  metrics.jsonl    one JSON object a line, as training went on
  summary.json     how it ended; not there while it still runs
  trace.json       what its ranks did, if they were recorded
  predicted.json   what the simulator expected them to do, if it was asked
```
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from microparallel.errors import DataError
from microparallel.trace import Trace

_MARKS = ("config.toml", "metrics.jsonl", "trace.json")  # a folder with one of them is a run's

Content = TypeVar("Content")


@dataclass(frozen=True)
class Run:
    """What a run's folder holds; what is not there is empty, or None.

    Attributes:
        name: of the folder.
        config: what the run was told.
        metrics: what it wrote down as it went on.
        summary: how it ended.
        trace: what its ranks did.
        predicted: what they were expected to do.
    """

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    trace: Trace | None = None
    predicted: Trace | None = None


def read_run(path: Path | str) -> Run:
    """Read a run's folder; raises `DataError`, in one line, where it is none, or a file in it is broken."""
    folder = Path(path)
    if not any((folder / mark).is_file() for mark in _MARKS):
        what = f"it has none of {', '.join(_MARKS)}" if folder.is_dir() else "there is no such folder"
        raise DataError(f"{path} is not the folder of a run: {what}; name one such as runs/20250131-093000-mlp")
    return Run(
        name=folder.resolve().name,
        config=_read(folder / "config.toml", tomllib.loads) or {},
        metrics=_read(folder / "metrics.jsonl", _records) or [],
        summary=_read(folder / "summary.json", _object) or {},
        trace=read_trace(folder / "trace.json", "; record it again with `microparallel train --trace`"),
        predicted=read_trace(folder / "predicted.json", "; write it again, or remove it"),
    )


def read_trace(path: Path, fix: str) -> Trace | None:
    """Read a trace's file, if it is there; raises `DataError`, in one line that ends with `fix`, if it is broken."""
    return _read(path, Trace.from_json, fix)


def _read(path: Path, understand: Callable[[str], Content], fix: str = "") -> Content | None:
    if not path.exists():
        return None
    try:
        return understand(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise DataError(f"{path} is broken: {reason[:200]}{fix}") from None


def _records(text: str) -> list[dict[str, Any]]:
    """Every line that is a record; a crash may have cut the last one in two."""
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _object(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"this is a {type(content).__name__}, not an object")
    return content
