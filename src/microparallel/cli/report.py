"""`microparallel report`: one page about what a run did, in one file."""

from __future__ import annotations

import json as json_format
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from microparallel import __version__
from microparallel.cli import flags
from microparallel.cli.flags import require_writable
from microparallel.errors import ConfigError
from microparallel.files.atomic import write_atomically
from microparallel.reporting import read_run, report_page
from microparallel.text import show_size

EXAMPLES = flags.examples(
    ("microparallel train --ranks 4 --trace --out runs/first", "a run whose ranks are recorded for some steps"),
    ("microparallel report runs/first --open", "write runs/first/report.html, and show it in the browser"),
    ("microparallel report runs/first --out first.html", "the same page elsewhere: one file, which needs no network"),
)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write.", show_default="RUN/report.html")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    json: flags.Json = False,
) -> None:
    """Write a page about a run: loss, throughput, what each rank did in a step, and where its time went.

    What ranks did is known of runs with --trace, or of a trace (`mp.record`) in RUN/trace.json.
    """
    found = read_run(run)
    file = out if out is not None else run / "report.html"
    require_writable(file, "--out" if out is not None else "the page")
    with Console(stderr=True).status("writing the report"):
        page = report_page(found, __version__).encode("utf-8", "replace")
        try:
            write_atomically(file, page)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}; choose another --out") from None
    steps = found.trace.steps if found.trace is not None else []
    if json:
        print(json_format.dumps({"file": str(file), "bytes": len(page), "recorded_steps": len(steps)}))
    else:
        print(f"wrote {file} ({show_size(len(page))})")
        if not steps:
            print("its ranks were not recorded; microparallel train --trace shows what they do in a step")
    if open_ and not webbrowser.open(file.resolve().as_uri()):
        Console(stderr=True).print(f"no browser was found here; open {file} in yours", highlight=False, soft_wrap=True)
