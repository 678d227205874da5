"""What the page says in words and numbers: its title, the figures at its head, and what follows from them."""

from __future__ import annotations

import json
import math
from typing import Any

from microparallel.reporting.folder import Run
from microparallel.reporting.measured import Measured
from microparallel.text import count, show_percent, show_seconds

_LONGEST_TEXT = 500
_TIMES = ("makespan", "work of the busiest rank", "bubble", "exposed communication")
_SPACE = "\u00a0"  # keeps a number and its unit together


def title_of(run: Run) -> str:
    """What was run, on how many ranks."""
    model, ranks = _fact(run, "model"), ranks_of(run)
    what = str(model) if model is not None else run.name
    return what if ranks is None else f"{what} on {count(ranks, 'rank')}"


def subtitle_of(run: Run) -> str:
    """Where it is kept, and what it trained on and how."""
    strategy, data = _fact(run, "strategy"), _fact(run, "data")
    layout = [f"{axis} {_fact(run, axis)}" for axis in ("dp", "pp") if isinstance(_fact(run, axis), int)]
    facts = [_fact(run, "schedule"), *layout, _fact(run, "device")]
    words = [run.name, strategy, *facts, data]
    return " · ".join(str(word) for word in words if word is not None and word != "auto")


def ranks_of(run: Run) -> int | None:
    """How many there were, as far as anybody wrote it down."""
    if run.trace is not None:
        return run.trace.ranks
    ranks = _fact(run, "ranks")
    return ranks if isinstance(ranks, int) else None


def tiles_of(run: Run, measured: Measured | None) -> list[dict[str, str]]:
    """The figures at the head of the page: how it learned, and what its steps were like."""
    summary = run.summary
    learning = {
        "training loss": _number(summary.get("loss", _last(run, "loss")), ".4g"),
        "validation loss": _number(summary.get("validation_loss", _last(run, "validation_loss")), ".4g"),
        "accuracy": _number(summary.get("validation_accuracy", _last(run, "validation_accuracy")), ".1%"),
        "samples/s": _number(summary.get("samples_per_second"), ",.0f"),
        "steps": _number(summary.get("steps", _last(run, "step")), ",.0f"),
        "parameters": _number(summary.get("parameters"), ",.0f"),
    }
    steps = {}
    if measured is not None:
        hidden = measured.hidden_share
        steps = {
            "typical step": time(measured.length),
            "computing": percent(measured.share("forward", "backward", "optimizer")),
            "waiting": percent(measured.share("waiting")),
            "communication hidden": "" if hidden is None else percent(hidden),
        }
    groups = [{name: value for name, value in group.items() if value} for group in (learning, steps)]
    return [group for group in groups if group]


def lead_of(measured: Measured) -> list[str]:
    """Where the time went, in sentences."""
    parts = {
        "computes": measured.share("forward", "backward", "optimizer"),
        "waits for others": measured.share("waiting"),
        "communicates with nothing else to do": measured.share("communicating"),
    }
    words = ", ".join(f"{name} {percent(share)}" for name, share in list(parts.items())[:-1])
    name, share = list(parts.items())[-1]
    sentences = [f"Of its time in a step, a rank {words} and {name} {percent(share)}."]
    hidden = measured.hidden_share
    if hidden is not None:
        much = percent(hidden) if hidden >= 0.005 else "next to nothing"
        sentences.append(f"Of the communication, {much} ran behind computation, where it costs nothing.")
    return [*sentences, *_straggler(measured)]


def prediction_of(measured: Measured) -> list[tuple[str, str, str, str]]:
    """What was predicted of a typical step and what was measured, where both are times: a row each."""
    return [
        (row.name, time(row.one), time(row.other), f"{row.ratio:.2f}" if row.one else "–")
        for row in measured.differences
        if row.name in _TIMES and (row.one or row.other)
    ]


def _straggler(measured: Measured) -> list[str]:
    waited = measured.waited_for()
    total = sum(waited.values())
    if measured.trace.ranks < 2 or measured.share("waiting") < 0.02 or not total:
        return []
    rank, seconds = next(iter(waited.items()))
    if seconds < 0.5 * total:
        return []
    return [f"{percent(seconds / total)} of all waiting was for rank {rank}."]


def configuration_of(run: Run) -> dict[str, dict[str, str]]:
    """Everything the run was told and found, as names and values, in groups with a caption each."""
    found = {key: value for key, value in run.summary.items() if key not in run.config}
    groups = {"What it was told": run.config, "What came of it": found}
    if run.trace is not None:
        error = run.trace.clock_error
        clocks = "the same for all ranks" if error == 0 else f"at most {time(error)} apart"
        groups["The trace"] = {"clocks": clocks, "events": len(run.trace.events), **run.trace.about}
    return {name: {key: _text(value) for key, value in group.items()} for name, group in groups.items() if group}


def time(seconds: float) -> str:
    """A time that stays on one line."""
    return show_seconds(seconds).replace(" ", _SPACE)


def percent(share: float) -> str:
    """A share that stays on one line."""
    return show_percent(share).replace(" ", _SPACE)


def _fact(run: Run, key: str) -> Any:
    """What is known: how it ended, what it was told, or what the trace says."""
    about = run.trace.about if run.trace is not None else {}
    return next((facts[key] for facts in (run.summary, run.config, about) if facts.get(key) is not None), None)


def _last(run: Run, key: str) -> Any:
    return next((record[key] for record in reversed(run.metrics) if key in record), None)


def _number(value: Any, form: str) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return ""
    return format(value, form).replace("%", f"{_SPACE}%")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
