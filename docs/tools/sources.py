"""The `include` fence: the source of a function, class or file, as it stands in the tree.

The solution of an exercise is shown as `microparallel learn solution` shows it: without the marks of its hole.
"""

from __future__ import annotations

import ast
import html
import textwrap
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

from microparallel.learn.holes import solved

ROOT = Path(__file__).resolve().parents[2]
_SOLUTIONS = ROOT / "exercises" / "solutions"
_SHOWN = ("src", "examples", "exercises", "tests", "docs")


def included(text: str) -> str:
    """HTML of the source that `path::name` names, titled with its path and lines."""
    path, _, name = text.strip().partition("::")
    file = ROOT / path
    if "\n" in text.strip() or not file.is_file() or path.split("/")[0] not in _SHOWN:
        raise ValueError(f"include {text.strip()!r}: give one file below {', '.join(_SHOWN)}, as path or path::name")
    source = file.read_text(encoding="utf-8")
    is_solution = file.is_relative_to(_SOLUTIONS)
    if is_solution:
        source = solved(source)
    lines = source.splitlines()
    first, last = _range(source, file, name, len(lines))
    code = textwrap.dedent("\n".join(lines[first - 1 : last])).rstrip()
    where = f"{path}, lines {first} to {last}" if name and not is_solution else path
    return code_block(code, where, file.name)


def code_block(code: str, title: str, filename: str) -> str:
    """A titled block of highlighted code, as the theme makes them."""
    try:
        lexer = get_lexer_for_filename(filename)
    except ClassNotFound:
        lexer = get_lexer_for_filename("plain.txt")
    body = highlight(code, lexer, HtmlFormatter(nowrap=True))
    head = f'<span class="filename">{html.escape(title).replace("/", "/<wbr>")}</span>'
    return f'<div class="highlight included">{head}<pre><code>{body}</code></pre></div>'


def _range(source: str, file: Path, name: str, lines: int) -> tuple[int, int]:
    """First and last line of a definition, its decorators and the comment above it included."""
    if not name:
        return 1, lines
    found: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = _child(found, part, file, name)
    decorators = getattr(found, "decorator_list", [])
    first = min([found.lineno, *(decorator.lineno for decorator in decorators)])  # type: ignore[attr-defined]
    return first, found.end_lineno or first  # type: ignore[attr-defined]


def _child(parent: ast.AST, part: str, file: Path, name: str) -> ast.AST:
    definitions = {}
    for node in getattr(parent, "body", []):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node
    if part not in definitions:
        raise ValueError(f"include: {file.relative_to(ROOT)} has no {name}; there are {', '.join(definitions)}")
    return definitions[part]
