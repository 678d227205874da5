"""The `results` fence: what was measured on a machine that not every reader has, from a file in benchmarks/results/."""

from __future__ import annotations

import csv
import html
import re
from dataclasses import dataclass
from pathlib import Path

from consoles import printed
from pages import Block

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "benchmarks/results/"
_ORIGIN = ("command", "machine", "date")
_HEADING = re.compile(r"^── (?P<name>.+?) ─*$")


def results(block: Block) -> str:
    """HTML of a part of a file, `path::heading`; the line below it is the command that makes the file.

    A part goes from its heading, a line such as `── two ranks ──`, to the next one. Where nobody has measured yet, the
    page says so, and how to.
    """
    if len(block.lines) != 2 or not block.lines[0].startswith(_FOLDER):
        raise ValueError(f"results: give a file below {_FOLDER}, as path or path::heading, and the command below it")
    path, _, heading = block.lines[0].partition("::")
    command = block.lines[1]
    file = ROOT / path
    if not file.is_file():
        words = f"not measured yet; on a machine with an NVIDIA GPU, this does: {command}"
        return f'<div class="highlight console"><span class="note">{html.escape(words)}</span></div>'
    text = part_of(file, heading)
    note = html.escape(f"measured by {command}, in {path}; your numbers will differ")
    return (
        f'<div class="highlight console answer"><span class="note">{note}</span>'
        f"<pre><code>{printed(text)}</code></pre></div>"
    )


@dataclass(frozen=True)
class Kept:
    """The lines of a kept table, and a sentence that says where they come from."""

    lines: list[str]
    origin: str


def kept(words: str) -> Kept:
    """A table of a file, `path::heading`, whose first lines say the command, the machine and the date that made it."""
    path, _, heading = words.partition("::")
    file = ROOT / path
    if not path.startswith(_FOLDER) or not file.is_file():
        raise ValueError(f"data: {path} is no file below {_FOLDER}")
    first = file.read_text(encoding="utf-8").splitlines()[: len(_ORIGIN)]
    found = [re.fullmatch(rf"# {name}: (.*\S)", line) for name, line in zip(_ORIGIN, first, strict=False)]
    said = [one[1] for one in found if one]
    if len(said) < len(_ORIGIN):
        wanted = ", ".join(f"`# {name}: …`" for name in _ORIGIN)
        raise ValueError(f"data: {path} does not say where it comes from; its first lines must be {wanted}")
    command, machine, date = said
    lines = [line for line in part_of(file, heading).splitlines() if not line.startswith("#")]
    if file.suffix == ".csv":
        lines = ["  ".join(cells) for cells in csv.reader(lines)]
    return Kept(lines, f"Made by `{command}`: {machine}, {date}.")


def part_of(file: Path, heading: str) -> str:
    """The lines below a heading of a file; all of it, if there is no heading to look for."""
    parts: dict[str, list[str]] = {"": []}
    lines = file.read_text(encoding="utf-8").splitlines()
    name = ""
    for line in lines:
        if found := _HEADING.match(line):
            name = found["name"]
            parts[name] = []
        else:
            parts[name].append(line)
    if heading not in parts:
        raise ValueError(f"results: {file.name} has no part {heading!r}; there are {', '.join(filter(None, parts))}")
    return "\n".join(parts[heading] if heading else lines).strip("\n")
