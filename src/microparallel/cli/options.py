"""What the verbs have in common beside their settings: flags that every verb may take, and the examples of a help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with these settings; flags win over it.")
]


def examples(*lines: tuple[str, str]) -> str:
    """The end of a verb's help: commands to copy, each with what it does."""
    return "**Examples**\n\n" + "\n\n".join(f"`{command}`  \n{meaning}" for command, meaning in lines)
