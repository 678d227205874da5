"""The fenced blocks of a Markdown page: where they stand, and the commands and outputs inside them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONSOLES = ("run", "measured", "fails")  # a prompt, a command, and what it prints
_OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<words>[^`]*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block: its kind is the first word after the fence, and its lines are without their indentation."""

    page: Path
    line: int  # of the opening fence, from 1
    kind: str
    options: tuple[str, ...]
    lines: tuple[str, ...]
    indent: str = ""

    @property
    def place(self) -> str:
        """Page and line, as editors understand them."""
        return f"{self.page}:{self.line}"

    @property
    def text(self) -> str:
        """Everything between the fences."""
        return "\n".join(self.lines)

    @property
    def measured(self) -> bool:
        """Whether its numbers may differ."""
        return self.kind == "measured" or "measured" in self.options

    @property
    def end(self) -> int:
        """The line of the closing fence, from 1."""
        return self.line + len(self.lines) + 1


@dataclass
class Call:
    """A command of a console block, with the lines it is said to print."""

    command: str
    output: list[str] = field(default_factory=list)


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """All fenced blocks of a page, in order."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    blocks, place = [], 0
    while place < len(lines):
        opening = _OPENING.match(lines[place])
        if opening is None:
            place += 1
            continue
        stop = _closing(lines, place, opening)
        blocks.append(_block(page, place, opening, lines[place + 1 : stop]))
        place = stop + 1
    return blocks


def _closing(lines: Sequence[str], place: int, opening: re.Match[str]) -> int:
    fence, indent = opening["fence"], len(opening["indent"])
    closing = re.compile(rf"^ {{0,{indent}}}{fence[0]}{{{len(fence)},}} *$")
    return next((stop for stop in range(place + 1, len(lines)) if closing.match(lines[stop])), len(lines))


def _block(page: Path, place: int, opening: re.Match[str], lines: Sequence[str]) -> Block:
    indent = opening["indent"]
    kind, *options = opening["words"].split() or [""]
    inside = tuple(line.removeprefix(indent) for line in lines)
    return Block(page, place + 1, kind, tuple(options), inside, indent)


def calls_of(block: Block) -> list[Call]:
    """The commands of a console block; a line that ends with a backslash goes on in the next."""
    calls: list[Call] = []
    unfinished = False
    for line in block.lines:
        if unfinished:
            calls[-1].command += "\n" + line
        elif line.startswith("$ "):
            calls.append(Call(line.removeprefix("$ ")))
        elif calls:
            calls[-1].output.append(line)
        elif line.strip():
            raise ValueError(f"{block.place}: a {block.kind} block begins with `$ ` and a command, not with {line!r}")
        unfinished = bool(calls) and not calls[-1].output and calls[-1].command.endswith("\\")
    if not calls:
        raise ValueError(f"{block.place}: this {block.kind} block has no command (a line that begins with `$ `)")
    return calls


def commands_of(block: Block) -> list[str]:
    """The commands of a bash block: line by line, or the whole of it where lines need each other."""
    text = block.text.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    together = re.compile(r"^(cd|export|source|for|while|if|\.) |<<|^\s|&$")
    return ["set -e\n" + block.text] if any(together.search(line) for line in lines) else lines


def words_of(command: str) -> list[str] | None:
    """A command's words, or None where it takes a shell to understand them."""
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>()$`*?~{}")
        lexer.whitespace_split = True
        plain = list(lexer)
        words = shlex.split(command, comments=True)
    except ValueError:
        return None
    # Where the two differ, or where punctuation stands alone, there is something for a shell to do.
    return words if plain == words and not any(set(word) <= set("|&;<>()") for word in words) else None
