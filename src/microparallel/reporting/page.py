"""The page itself: its frame in HTML, its style, its scripts and what they show, in one file.

Numbers and words are found in Python; the scripts only draw them. The page forbids itself any use of a network.
"""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from microparallel.drawing import kinds
from microparallel.drawing.markup import Markup, data_script, element, joined
from microparallel.reporting.curves import curves, memory
from microparallel.reporting.folder import Run
from microparallel.reporting.measured import Measured
from microparallel.reporting.words import configuration_of, lead_of, prediction_of, subtitle_of, tiles_of, title_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
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
    sizes = memory(run.metrics, run.summary, run.trace.about if run.trace is not None else {})
    data = {
        "curves": curves(run.metrics),
        "measured": measured.written() if measured is not None else None,
        "memory": sizes,
        "colours": {name: [kind.fill, kind.ink] for name, kind in _COLOURS.items()},
    }
    sections = [
        *_head(run, measured),
        *_learning(run),
        _step(run, measured) if measured is not None else _no_trace(),
        *([_section("memory", "Memory", Markup('<div id="memory-figures"></div>'))] if sizes is not None else []),
        _configuration(run),
        element("footer", f"Written by microparallel {version}. This page needs no network.", class_="quiet"),
    ]
    return _document(title_of(run), sections, data)


def _head(run: Run, measured: Measured | None) -> list[Markup]:
    found = [element("h1", title_of(run)), element("p", subtitle_of(run), class_="quiet where")]
    for group in tiles_of(run, measured):
        tiles = [element("div", element("dt", name), element("dd", value)) for name, value in group.items()]
        found.append(element("dl", *tiles, class_="metrics"))
    if measured is not None:
        found.append(element("p", " ".join(lead_of(measured)), class_="lead"))
    return found


def _learning(run: Run) -> list[Markup]:
    if not any("loss" in record or "samples_per_second" in record for record in run.metrics):
        return []
    figures = [_figure("loss", "Loss"), _figure("speed", "Throughput, samples a second")]
    return [_section("learning", "Learning", element("div", *figures, class_="pair"))]


def _figure(name: str, title: str) -> Markup:
    plot = Markup(f'<div class="plot" id="plot-{name}"></div><p class="readout quiet" aria-live="polite"></p>')
    return element("figure", element("figcaption", title), plot)


def _no_trace() -> Markup:
    words = [
        element("p", "This run was not recorded, so there is nothing to show of what its ranks did in a step."),
        element(
            "p", "To see where time goes, record some steps: ", element("code", "microparallel train --trace"), "."
        ),
    ]
    return _section("step", "Inside a step", element("div", *words, class_="note"))


def _step(run: Run, measured: Measured) -> Markup:
    """The frames that the scripts fill: shares, the timeline, and when buckets arrived."""
    picker = Markup(
        '<div class="picker controls"><label for="step-choice">Step</label>'
        '<button type="button" id="earlier" aria-label="the step before">‹</button>'
        '<select id="step-choice"></select>'
        '<button type="button" id="later" aria-label="the step after">›</button>'
        '<span class="quiet" id="step-note"></span></div>'
    )
    return _section(
        "step",
        "Inside a step",
        picker,
        _section("shares", "Where the time went", Markup('<div id="share-rows"></div>'), level="h3"),
        _section("timeline", "Who did what, when", *_timeline(run), *_prediction(measured), level="h3"),
        _section(
            "arrivals",
            "When gradients arrived",
            element(
                "p",
                "Each row is a collective that was handed over while backward ran. It can begin only when the last "
                "rank has come.",
                class_="quiet",
            ),
            Markup('<div class="plot" id="arrival-plot"></div><p id="arrival-note" aria-live="polite"></p>'),
            level="h3",
        ),
    )


def _timeline(run: Run) -> list[Markup]:
    buttons = [
        element("button", text, type="button", id=name, aria_label=label)
        for name, text, label in (
            ("zoom-in", "+", "zoom in"),
            ("zoom-out", "−", "zoom out"),
            ("pan-left", "←", "earlier"),
            ("pan-right", "→", "later"),
            ("fit", "Whole step", "show the whole step"),
        )
    ]
    if run.predicted is not None:
        buttons.append(
            Markup(
                '<label class="check"><input type="checkbox" id="predicted" checked> predicted, above measured</label>'
            )
        )
    buttons.append(Markup('<span class="quiet" id="window"></span>'))
    hint = (
        "Point at a bar, tap it, or walk with the arrow keys: what it is, and for whom it waited. Drag to move; zoom "
        "with two fingers, with Ctrl and the wheel (once you clicked, with the wheel alone), or by dragging over the "
        "time axis."
    )
    label = "timeline of all ranks; arrow keys walk from bar to bar, plus and minus zoom, 0 shows the whole step"
    return [
        element("div", *buttons, class_="controls"),
        Markup(f'<canvas id="lanes" tabindex="0" role="application" aria-label="{label}"></canvas>'),
        element("div", element("p", hint, class_="quiet"), class_="details", id="details", aria_live="polite"),
        Markup('<ul class="legend" id="legend"></ul>'),
    ]


def _prediction(measured: Measured) -> list[Markup]:
    rows = prediction_of(measured)
    if not rows:
        return []
    heading = element("tr", *(element("th", name, scope="col") for name in (" ", "predicted", "measured", "ratio")))
    body = [
        element("tr", element("th", name, scope="row"), *(element("td", value) for value in values))
        for name, *values in rows
    ]
    return [element("table", element("caption", "A typical step"), heading, *body, id="prediction")]


def _configuration(run: Run) -> Markup:
    words = {
        "told": "What it was told",
        "found": "What came of it",
        "trace": "The trace",
    }
    tables = [
        element(
            "table",
            element("caption", words[name]),
            *(
                element("tr", element("th", key, scope="row"), element("td", value or " "))
                for key, value in group.items()
            ),
        )
        for name, group in configuration_of(run).items()
    ]
    return _section("configuration", "Configuration", element("div", *tables, class_="tables"))


def _section(name: str, title: str, *content: str, level: str = "h2") -> Markup:
    return element(
        "section", element(level, title, id=f"{name}-title"), *content, id=name, aria_labelledby=f"{name}-title"
    )


def _document(title: str, sections: list[Markup], data: dict[str, Any]) -> str:
    head = joined(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", f"{title}: run report"),
        Markup(f"<style>\n{_style()}</style>"),
    )
    body = joined(
        element("main", *sections),
        Markup("<noscript><p>The figures are drawn by scripts, which are switched off here.</p></noscript>"),
        data_script(_finite(data)),
        Markup("<script>\n" + "\n".join(_own(name) for name in _SCRIPTS) + "</script>"),
    )
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


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
