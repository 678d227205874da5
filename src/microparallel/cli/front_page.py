"""The help of `microparallel` itself: what typer would show, in half the time.

typer's own pages import all that any page may need, such as a Markdown parser and tracebacks in colour. This one has a
usage, two tables and two sentences; a test holds it against typer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_NAME = "bold cyan"  # of a flag or of a verb
_CODE = "bold cyan on black"


def show(verbs: Any, context: Any) -> None:
    """Print the usage, the flags, the verbs and how to begin."""
    console = Console(highlight=False)
    usage = Text(verbs.get_usage(context))
    usage.highlight_words(["Usage: "], "yellow")
    console.print(Padding(usage, 1), style="bold")
    console.print(Padding(Text(verbs.help), (0, 1, 1, 1)))
    flags = [
        # Between a flag and its type typer has columns for short forms, and for what turns it off.
        (Text(option.opts[0], _NAME), *[Text()] * 3, Text("<bool>", "bold yellow"), Text(option.help))
        for option in verbs.get_params(context)
    ]
    console.print(_panel("Options", flags))
    console.print(_panel("Commands", [(Text(name, _NAME), Text(one.help)) for name, one in verbs.commands.items()]))
    console.print(Padding(_with_code(verbs.epilog), 1))


def _panel(title: str, rows: Iterable[Iterable[Text]]) -> Panel:
    """Rows in a frame; their last column takes what room there is."""
    table = Table.grid(padding=(0, 2), expand=True)
    for row in rows:
        table.add_row(*row)
    table.columns[-1].ratio = 1
    return Panel(table, title=Text(title), title_align="left", border_style="dim")


def _with_code(words: str) -> Text:
    """Words, of which those between backquotes are code."""
    parts = words.split("`")
    return Text.assemble(*((part, _CODE if number % 2 else "") for number, part in enumerate(parts)))
