"""`microparallel studio`: the course, the playground and this machine's runs in a browser."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from microparallel.cli import flags
from microparallel.studio import Studio, site_of
from microparallel.studio.pages import BUILD

PORT = 8717  # always the same, since a browser keeps the puzzles' stars by address

EXAMPLES = flags.examples(
    ("microparallel studio", "the course, the playground, the puzzles, and the runs in runs/, in the browser"),
    ("microparallel studio elsewhere/runs --port 0", "the runs of another folder, at any free port"),
    ("microparallel studio --no-open", "only print the address; Ctrl-C ends it"),
)


def studio(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder that has the runs.")] = Path("runs"),
    site: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The built course.", show_default="site/, where `make docs` puts it"),
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Where to listen; beyond this machine, say so."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = PORT,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
) -> None:
    """Show the course, the playground and this machine's runs in a browser.

    A small server on this machine serves the course that `make docs` has built, and makes a run's report when it is
    asked for. Its address has a token, without which it tells nothing of the runs.
    """
    found = site_of(site)
    with Studio(runs, found, host, port) as server:
        print(f"the studio is at {server.address}", flush=True)
        if found is None:
            print(f"note: {BUILD}", file=sys.stderr)
        if host not in ("127.0.0.1", "localhost", "::1"):
            print(f"note: whoever reaches {host} can read the course here; runs need the token", file=sys.stderr)
        if open_ and not webbrowser.open(server.address):
            print("no browser was found here; open the address in yours", file=sys.stderr)
        server.serve_forever()
