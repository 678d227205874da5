"""The page itself: report.html, filled with what is known of a run, with its style and its scripts in one file.

Numbers and words are found in Python; the scripts only draw them. The page forbids itself any use of a network.
"""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from microparallel.drawing import kinds
from microparallel.reporting.curves import curves, memory
from microparallel.reporting.folder import Run
from microparallel.reporting.measured import Measured
from microparallel.reporting.words import configuration_of, lead_of, prediction_of, subtitle_of, tiles_of, title_of

_SCRIPTS = (
    "basics.js",
    "curves.js",
    "shares.js",
    "words.js",
    "lanes.js",
    "painting.js",
    "timeline.js",
    "arrivals.js",
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
}


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
        data=_finite(data),
        style=_style(),
        scripts="\n".join(_own(name) for name in _SCRIPTS),
    )


def _filled(**values: Any) -> str:
    """Fill the template; Jinja escapes what is put into it, but for the style and the scripts, which are ours."""
    from jinja2 import Environment, StrictUndefined  # 0.1 s, which only who writes a page has to wait for

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
    """That of all our pages, the colours of what ranks do, and what only this page has."""
    colours = " ".join(f"--{name.replace(' ', '-')}: {kind.fill};" for name, kind in _COLOURS.items())
    family = _resource("microparallel.drawing", "page.css")
    return f"{family}\n:root {{ {colours} }}\n\n{_own('report.css')}"


def _finite(value: Any) -> Any:
    """Put null where a number is not finite, since JSON has no word for it."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _own(name: str) -> str:
    return _resource("microparallel.reporting", name)


def _resource(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
