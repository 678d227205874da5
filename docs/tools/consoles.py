"""The `run`, `measured`, `fails` and `output` fences: commands and what they print, told apart."""

from __future__ import annotations

import html
import re
from pathlib import Path

from pages import Block, calls_of

_WORD = re.compile(r"\b[A-Za-z]{2,}\b")
_FLAG = re.compile(r"(?<![\w&-])--?[A-Za-z][\w-]*")
_COLUMNS = re.compile(r"\S  +\S|[|│┃─█▓░]")
_TITLES = {"measured": "measured: your numbers will differ", "fails": "this fails, and should"}


def console(block: Block) -> str:
    """HTML of a console; copying it gives the commands alone."""
    calls = calls_of(block)
    parts = []
    for call in calls:
        command, *more = call.command.split("\n")
        lines = [f'<span class="prompt">$ </span><span class="command">{whole_flags(html.escape(command))}</span>']
        lines += [f'<span class="command">{whole_flags(html.escape(line))}</span>' for line in more]
        output = "\n".join(call.output).rstrip()
        if output:
            lines.append(printed(output))
        parts.append("\n".join(lines))
    commands = html.escape("\n".join(call.command for call in calls), quote=True).replace("\n", "&#10;")
    title = ", ".join(_TITLES[word] for word in (block.kind, *block.options) if word in _TITLES)
    head = f'<span class="note">{title}</span>' if title else ""
    body = "\n\n".join(parts) if any(call.output for call in calls) else "\n".join(parts)
    return f'<div class="highlight console" data-copy="{commands}">{head}<pre><code>{body}</code></pre></div>'


def output(block: Block) -> str:
    """HTML of what a Python block printed."""
    note = "prints (measured: your numbers will differ)" if block.measured else "prints"
    text = printed(block.text.rstrip())
    return f'<div class="highlight console answer"><span class="note">{note}</span><pre><code>{text}</code></pre></div>'


def printed(text: str) -> str:
    """HTML of what was printed. A sentence, such as an error, may be broken where the page is too narrow for it.

    A row of a table or of a drawing may not: it has columns.
    """
    shown = []
    for line in text.split("\n"):
        sentence = len(_WORD.findall(line)) > 3 and not _COLUMNS.search(line)
        shown.append(f'<span class="sentence">{html.escape(line)}</span>' if sentence else html.escape(line))
    return '<span class="printed">' + "\n".join(shown) + "</span>"


def whole_flags(escaped: str) -> str:
    """HTML of code, in which no line ends within a flag, as it might behind each hyphen."""
    return _FLAG.sub(r'<span class="flag">\g<0></span>', escaped)


def block_from(kind: str, options: tuple[str, ...], text: str) -> Block:
    """A block that has lost its place in the page."""
    return Block(Path("page"), 0, kind, options, tuple(text.splitlines()))
