"""The studio's own pages: a list of runs, and the files of one. Names, settings and logs are text, never markup."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from microparallel.drawing.markup import Markup, element, joined
from microparallel.errors import MicroparallelError
from microparallel.reporting import Run, read_run
from microparallel.text import count, short, show_age

MARKS = ("config.toml", "metrics.jsonl", "trace.json")  # a folder with one of them is a run's
SHOWN = ("config.toml", "summary.json", "metrics.jsonl")  # and any that ends with .log
_MOST_RUNS, _MOST_TEXT = 500, 200_000
BUILD = "The course is not built here: run `make docs` in a checkout, then `microparallel studio --site CHECKOUT/site`."
Link = Callable[[str], str]  # from a path to an address with the token


@dataclass(frozen=True)
class Row:
    """One run in the list; `trouble` says why it cannot be read, if it cannot."""

    name: str
    age: str
    facts: str = ""
    steps: str = ""
    loss: str = ""
    recorded: bool = False
    trouble: str = ""


def runs_in(folder: Path) -> list[str]:
    """The names of the runs in a folder, the newest first."""
    try:
        with os.scandir(folder) as entries:
            found = [
                entry for entry in entries if entry.is_dir() and any((Path(entry) / mark).is_file() for mark in MARKS)
            ]
    except OSError:
        return []
    return [entry.name for entry in sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)][:_MOST_RUNS]


def row_of(folder: Path, name: str) -> Row:
    """What the list says of a run."""
    age = show_age(time.time() - (folder / name).stat().st_mtime) + " ago"
    try:
        run = read_run(folder / name)
    except MicroparallelError as error:
        return Row(name, age, trouble=str(error))
    last: dict[str, Any] = next((record for record in reversed(run.metrics) if "loss" in record), {})
    loss = run.summary.get("validation_loss", run.summary.get("loss", last.get("loss")))
    steps = run.summary.get("steps", last.get("step", ""))
    shown = short(loss) if isinstance(loss, int | float) and not isinstance(loss, bool) else ""
    told = f"{steps} steps" if steps != "" else ""
    return Row(name, age, _facts(run), told, f"loss {shown}" if shown else "", run.trace is not None)


def _facts(run: Run) -> str:
    told: dict[str, Any] = {**run.config, **run.summary}
    names = [str(told[name]) for name in ("model", "strategy", "schedule") if told.get(name)]
    ranks = told.get("ranks")
    return " · ".join([*names, *([count(ranks, "rank")] if isinstance(ranks, int) else [])])


def home(folder: Path, site: Path | None, link: Link) -> str:
    """The studio's first page: the course, the playground, the puzzles, and the runs."""
    names = runs_in(folder)
    ways = []
    if site is not None:
        for title, path, words in _WAYS:
            ways.append(
                element("a", element("strong", title), element("span", words), href=f"/site/{path}", class_="way")
            )
    course = element("nav", *ways, class_="ways") if ways else _note(BUILD)
    rows = [_shown(row_of(folder, name), link) for name in names]
    heads = [element("th", words, scope="col") for words in ("run", "what", "steps", "loss", "when", "")]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    none = f"There are no runs in {folder} yet. `microparallel train --ranks 4 --trace --out {folder}/first` makes one."
    parts = [element("h1", "microparallel studio"), course, element("h2", "Runs")]
    return _document("microparallel studio", [*parts, table if rows else _note(none)])


def _note(words: str) -> Markup:
    """A line of words; what stands between backticks is code."""
    pieces = words.split("`")
    return element("p", *(element("code", one) if at % 2 else one for at, one in enumerate(pieces)), class_="note")


_WAYS = (
    ("The course", "index.html", "lessons, reference"),
    ("Playground", "playground/index.html", "write a schedule"),
    ("Puzzles", "playground/puzzles.html", "find a schedule yourself"),
)


def _shown(row: Row, link: Link) -> Markup:
    if row.trouble:
        return element(
            "tr", element("th", row.name, scope="row"), element("td", row.trouble, colspan=4), element("td", row.age)
        )
    report = element("a", row.name, href=link(f"/runs/{_quoted(row.name)}/report"))
    texts = element("a", "files", href=link(f"/runs/{_quoted(row.name)}/files"))
    recorded = " · recorded" if row.recorded else ""
    cells = [row.facts + recorded, row.steps, row.loss, row.age]
    return element(
        "tr", element("th", report, scope="row"), *(element("td", cell) for cell in cells), element("td", texts)
    )


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(os.fsencode(name), safe="")


def files_page(folder: Path, name: str, link: Link) -> str:
    """What a run has written down, as text."""
    parts = [element("p", element("a", "‹ all runs", href=link("/"))), element("h1", name)]
    for path in _texts(folder / name):
        content, cut = _end_of(path)
        parts.append(element("h2", path.name))
        if cut:
            parts.append(element("p", f"the last {_MOST_TEXT // 1000} KB", class_="note"))
        parts.append(element("pre", content, tabindex=0))
    return _document(name, parts)


def _texts(folder: Path) -> Iterator[Path]:
    named = [folder / name for name in SHOWN]
    logs = sorted(path for path in folder.iterdir() if path.suffix == ".log")
    for path in (*named, *logs):
        if path.is_file() and not path.is_symlink():
            yield path


def _end_of(path: Path) -> tuple[str, bool]:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _MOST_TEXT))
        return file.read(_MOST_TEXT).decode("utf-8", "replace"), size > _MOST_TEXT


def _document(title: str, body: list[Markup]) -> str:
    style = _resource("drawing", "page.css") + _resource("studio", "studio.css")
    head = joined(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        Markup(f"<style>\n{style}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{joined(*body)}\n</body>\n</html>\n'


def _resource(package: str, name: str) -> str:
    return files(f"microparallel.{package}").joinpath(name).read_text(encoding="utf-8")
