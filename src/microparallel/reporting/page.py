"""The report of a run as one page: report.html, filled with what is known, with its style and scripts in one file.

Numbers and words are found here, in Python; the scripts only draw them. The page forbids itself any use of a network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from microparallel.drawing import kinds
from microparallel.drawing.memory import KINDS as memory_kinds
from microparallel.reporting.folder import Run
from microparallel.reporting.steps import Measured
from microparallel.simulator.fitted import fit_step
from microparallel.simulator.gathering import Choice, choices_of, waits_of
from microparallel.text import count, show_percent, show_seconds, show_size, without_nan

_SCRIPTS = (
    "basics.js",
    "curves.js",
    "shares.js",
    "words.js",
    "lanes.js",
    "painting.js",
    "timeline.js",
    "arrivals.js",
    "holdings.js",
    "report.js",
)
_COLOURS = {
    "forward": kinds.FORWARD,
    "backward": kinds.BACKWARD,
    "optimizer": kinds.OPTIMIZER_STEP,
    "collective": kinds.ALL_REDUCE,
    "send": kinds.SEND,
    "receive": kinds.RECEIVE,
    "input half": kinds.INPUT_HALF,
    "weight half": kinds.WEIGHT_HALF,
    **{look.word: look for look in memory_kinds.values()},
}
_TIMES = ("makespan", "work of the busiest rank", "bubble", "exposed communication")
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MOST_POINTS = 600  # of a curve
_LONGEST_TEXT = 500
_MOST_SIMULATED = 4000  # events of a step: to simulate a larger one again takes seconds
_WORTH = 0.98  # of a step: what would take more than that is not worth a sentence
_SPACE = "\u00a0"  # keeps a number and its unit together

Point = tuple[float, float | None]


def report_page(run: Run, version: str = "") -> str:
    """Write the report of a run as a page that needs nothing else, neither files nor a network."""
    measured = Measured(run.trace, run.predicted) if run.trace is not None and run.trace.events else None
    data = {
        "curves": curves(run.metrics),
        "measured": measured.written() if measured is not None else None,
        "memory": memory(run.metrics, run.summary, run.trace.about if run.trace is not None else {}),
        "colours": {name: [kind.fill, kind.ink] for name, kind in _COLOURS.items()},
    }
    return _filled(
        title=title_of(run),
        subtitle=subtitle_of(run),
        tiles=tiles_of(run, measured),
        lead=lead_of(measured) if measured is not None else [],
        learned=any("loss" in record or "samples_per_second" in record for record in run.metrics),
        predicted=run.predicted is not None,
        differences=prediction_of(measured) if measured is not None else [],
        configuration=configuration_of(run),
        version=version,
        data=without_nan(data),
        style=_style(),
        scripts="\n".join(_own(name) for name in _SCRIPTS),
    )


def _filled(**values: Any) -> str:
    """Fill the template; Jinja escapes what is put into it, but for the style and the scripts, which are ours."""
    from jinja2 import Environment, StrictUndefined  # takes 0.1 s, so it is imported only when a page is written

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"),
        "ensure_ascii": False,
        "allow_nan": False,
    }
    return environment.from_string(_own("report.html")).render(values)


def _style() -> str:
    """The style of all our pages, the colours of what ranks do, and what only this page has."""
    colours = " ".join(f"--{name.replace(' ', '-')}: {kind.fill};" for name, kind in _COLOURS.items())
    family = _resource("microparallel.drawing", "page.css")
    return f"{family}\n:root {{ {colours} }}\n\n{_own('report.css')}"


def _own(name: str) -> str:
    return _resource("microparallel.reporting", name)


def _resource(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


# ── words and numbers: the title, the figures at the head, and what follows from them ─────────────────────────────────


def title_of(run: Run) -> str:
    """Which model was trained, on how many ranks."""
    model, ranks = _fact(run, "model"), ranks_of(run)
    what = str(model) if model is not None else run.name
    return what if ranks is None else f"{what} on {count(ranks, 'rank')}"


def subtitle_of(run: Run) -> str:
    """The run's folder, and how and on what it trained."""
    strategy, data = _fact(run, "strategy"), _fact(run, "data")
    layout = [f"{axis} {_fact(run, axis)}" for axis in ("dp", "pp") if isinstance(_fact(run, axis), int)]
    precision = _fact(run, "precision")
    facts = [_fact(run, "schedule"), *layout, _fact(run, "device"), None if precision == "float32" else precision]
    words = [run.name, strategy, *facts, data]
    return " · ".join(str(word) for word in words if word is not None and word != "auto")


def ranks_of(run: Run) -> int | None:
    """How many ranks the run had; None if neither its trace nor its summary says so."""
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
        **_own_metrics(summary),
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


def _own_metrics(summary: dict[str, Any]) -> dict[str, str]:
    """What the user's own functions have measured (`train --metric`)."""
    known = ("validation_loss", "validation_accuracy")
    own = {name: value for name, value in summary.items() if name.startswith("validation_") and name not in known}
    return {name.removeprefix("validation_").replace("_", " "): _number(value, ".4g") for name, value in own.items()}


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
    return [*sentences, *_straggler(measured), *_gathering(measured)]


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


def _gathering(measured: Measured) -> list[str]:
    """Of a typical step whose parameters are gathered on demand: what it waited for, and what would help."""
    step = measured.trace.step(measured.typical)
    if len(step.events) > _MOST_SIMULATED or not (waits := waits_of(step)):
        return []
    worst, every = max(waits, key=lambda one: one.seconds), sum(one.seconds for one in waits)
    sentences = [
        f"In a typical step computation waited {time(every)} for units to be gathered and summed, longest for {worst}: "
        f"{time(worst.seconds)}."
        if every
        else "In a typical step computation waited for no unit to be gathered or summed."
    ]
    choices = choices_of(fit_step(step))
    best = min(choices, key=lambda one: one.seconds, default=None)
    if best is not None and best.seconds < _WORTH * choices[0].seconds:
        now = choices[0]
        how = [f"prefetch={best.prefetch}"] * (best.prefetch != now.prefetch)
        how += [f"reshard_after_forward={best.reshard_after_forward}"] * (
            best.reshard_after_forward != now.reshard_after_forward
        )
        how += ["overlap=True, with cores to spare,"] * (best.overlap != now.overlap)
        saved = percent(1 - best.seconds / now.seconds)
        sentences.append(f"By simulation, {' and '.join(how)} would take {saved} off the step{_memory_for(best, now)}.")
    return sentences


def _memory_for(choice: Choice, now: Choice) -> str:
    if choice.memory is None or now.memory is None or choice.memory == now.memory:
        return ""
    more = choice.memory - now.memory
    return f", with {show_size(abs(more))} {'more' if more > 0 else 'less'} memory".replace(" MB", f"{_SPACE}MB")


def configuration_of(run: Run) -> dict[str, dict[str, str]]:
    """Everything the run was told and found, as names and values, in groups with a caption each."""
    found = {key: value for key, value in run.summary.items() if key not in run.config}
    groups = {"What it was told": run.config, "What came of it": found}
    if run.trace is not None:
        error = run.trace.clock_error
        clocks = "the same for all ranks" if error == 0 else f"put on rank 0's; then at most {time(error)} apart"
        groups["The trace"] = {"clocks": clocks, "events": len(run.trace.events), **run.trace.about}
    return {name: {key: _text(value) for key, value in group.items()} for name, group in groups.items() if group}


def time(seconds: float) -> str:
    """A time that stays on one line."""
    return show_seconds(seconds).replace(" ", _SPACE)


def percent(share: float) -> str:
    """A share that stays on one line."""
    return show_percent(share).replace(" ", _SPACE)


def _fact(run: Run, key: str) -> Any:
    """A fact about the run: from its summary, its configuration, or its trace, in that order."""
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


# ── curves: loss, speed and memory over a run's steps, in few enough points to be drawn ───────────────────────────────


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
    """All that metrics, summary and trace say about memory, in bytes; None if that is nothing."""
    keys = list(dict.fromkeys(key for record in metrics for key in record if "memory" in key.lower()))
    over_steps = {key: thinned(_points(metrics, key, _scale(key))) for key in keys}
    found = {
        key: _sizes(value, _scale(key)) for fact in facts for key, value in fact.items() if "memory" in key.lower()
    }
    curves = {key: points for key, points in over_steps.items() if any(value is not None for _, value in points)}
    sizes = {key: value for key, value in found.items() if value}
    return {"over_steps": curves, "sizes": sizes} if curves or sizes else None


def thinned(points: list[Point]) -> list[Point]:
    """Few enough points to be drawn: neighbours become one, their mean."""
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
