"""The `draw` and `step` fences: each line is what follows `microparallel draw`, and becomes a figure of the page."""

from __future__ import annotations

import contextlib
import html
import io
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path

from microparallel.cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def figures(text: str, *, stepped: bool) -> str:
    """HTML of all figures of a fence, with the caption under the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    caption = lines.pop(0).removeprefix("caption:").strip() if lines and lines[0].startswith("caption:") else ""
    if not lines:
        raise ValueError("nothing to draw: give the arguments of `microparallel draw`, such as `1f1b --ranks 4`")
    drawn = "".join(_frame(line) if stepped else _figure(line) for line in lines)
    below = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
    return f'<figure class="drawn" data-search-exclude>{drawn}{below}</figure>'


def _figure(line: str) -> str:
    """A figure that shrinks with the page as long as it can be read, and scrolls from there."""
    return _shrinking(_drawn(line, "--svg"))


def figure_of(drawing: str, caption: str, below: str = "", kind: str = "") -> str:
    """HTML of one SVG, what stands below it, and its caption; `kind` is one more class for the figure."""
    told = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
    return f'<figure class="drawn {kind}" data-search-exclude>{_shrinking(drawing)}{below}{told}</figure>'


def _shrinking(drawing: str) -> str:
    width = re.search(r'width="(\d+)"', drawing)
    natural = int(width[1]) if width else 700
    drawing = re.sub(r"\s*\n\s*", "", drawing)  # Markdown must not see empty lines
    return f'<div class="drawing" tabindex="0" style="--natural:{natural}px">{drawing}</div>'


def _frame(line: str) -> str:
    page = html.escape(_drawn(line, "--html"), quote=True).replace("\n", "&#10;")
    name = html.escape(f"microparallel draw {line}, to step through", quote=True)
    return f'<iframe class="stepped" title="{name}" srcdoc="{page}" loading="lazy"></iframe>'


@cache
def _drawn(line: str, flag: str) -> str:
    """What `microparallel draw` writes for these arguments."""
    import typer

    quiet = contextlib.ExitStack()
    quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
    quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))  # its notes are for who types the command
    quiet.enter_context(contextlib.chdir(ROOT))  # so that `examples/mine.txt` is found
    with quiet, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figure"
        arguments = ["draw", *shlex.split(line), flag, str(file)]
        try:
            typer.main.get_command(app).main(arguments, prog_name="microparallel", standalone_mode=False)
        except Exception as error:  # whatever is wrong with the line
            words = error.format_message() if hasattr(error, "format_message") else str(error)
            raise ValueError(f"microparallel draw {line}: {words}") from error
        return file.read_text(encoding="utf-8")


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
