r"""Formulas: a `math` fence for one on lines of its own, and `\( … \)` within a sentence.

```math
T = \alpha + \beta n
```

Markdown makes of each an element that shows its TeX. When all pages are made, KaTeX typesets all of them in one run of
node (`typeset`): the pages need no JavaScript. Where KaTeX or node is missing, readers see the TeX.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as etree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import from_npm
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.util import AtomicString

STYLE = "stylesheets/katex/katex.css"
_MADE = re.compile(  # what `display` and `_Inline` make
    r'(?P<opening><(?P<tag>div|var) class="formula"[^>]*>)(?:<pre>)?'
    r'<code class="tex">(?P<tex>.*?)</code>(?:</pre>)?</(?P=tag)>',
    re.DOTALL,
)
_NODE = """
const katex = require("katex");
const typeset = ([tex, displayMode]) => {
  try { return {html: katex.renderToString(tex, {displayMode, strict: "ignore"})}; }
  catch (error) { return {refused: error.message}; }
};
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf8")).map(typeset)));
"""
Formula = tuple[str, bool]  # its TeX, and whether it stands on lines of its own
_known: dict[Formula, dict[str, str]] = {}  # `make docs-serve` builds many times


class RefusedError(ValueError):
    """KaTeX does not understand a formula."""

    def __init__(self, tex: str, why: str) -> None:
        super().__init__(f"a formula that KaTeX refuses: {why}")
        self.tex = tex


def display(tex: str) -> str:
    """HTML of a `math` fence, until it is typeset."""
    if not tex.strip():
        raise ValueError("this formula is empty")
    code = html.escape(tex.strip(), quote=False)
    return f'<div class="formula" tabindex="0" data-search-exclude><pre><code class="tex">{code}</code></pre></div>'


class _Inline(InlineProcessor):
    # A <var>: what KaTeX makes has none, and the search plugin ends its exclusion at the first end of an equal tag.
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[etree.Element, int, int]:  # noqa: ARG002
        outer = etree.Element("var", {"class": "formula", "data-search-exclude": ""})
        etree.SubElement(outer, "code", {"class": "tex"}).text = AtomicString(m[1].strip())
        return outer, m.start(0), m.end(0)


class _Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After code (190), whose text it must not see, and before the backslash (180), which would take its own.
        md.inlinePatterns.register(_Inline(r"\\\((.+?)\\\)", md), "formula", 185)


def makeExtension(**_: Any) -> Extension:
    """What Python-Markdown looks for in a module that it is given as an extension."""
    return _Formulas()


def missing() -> bool:
    """Whether readers will see TeX; from_npm.py says why."""
    return not from_npm.is_fetched() or shutil.which("node") is None


def typeset(pages: Iterable[str]) -> None:
    """Let KaTeX typeset the formulas of all pages that it has not seen yet, in one run of node."""
    wanted = {_formula(found) for page in pages for found in _MADE.finditer(page)}
    fresh = sorted(wanted - _known.keys())
    if fresh and not missing():
        command = ["node", "--input-type=commonjs", "--eval", _NODE]
        told = subprocess.run(
            command, cwd=from_npm.FETCHED, input=json.dumps(fresh), capture_output=True, text=True, check=True
        )
        _known.update(zip(fresh, json.loads(told.stdout), strict=True))


def with_formulas(page: str) -> str:
    """A page with its formulas as they were typeset; as TeX, where they were not."""
    return _MADE.sub(_typeset, page)


def _typeset(found: re.Match[str]) -> str:
    made = _known.get(_formula(found))
    if made is None:
        return found[0]
    if "refused" in made:
        raise RefusedError(_formula(found)[0], made["refused"])
    return f"{found['opening']}{made['html']}</{found['tag']}>"


def _formula(found: re.Match[str]) -> Formula:
    return html.unescape(found["tex"]), found["tag"] == "div"


def line_of(tex: str, source: str) -> int:
    """The line of a page's source where a formula begins, from 1."""
    return source[: source.find(tex.splitlines()[0])].count("\n") + 1


def add_parts(site: Path) -> None:
    """Put KaTeX's style and fonts into a built site."""
    if missing():
        return
    package = from_npm.FETCHED / "node_modules" / "katex"
    style = (package / "dist" / "katex.min.css").read_text(encoding="utf-8")
    style = re.sub(r',url\([^)]+\.(?:woff|ttf)\) format\("\w+"\)', "", style)  # browsers take the first, woff2
    folder = (site / STYLE).parent
    (folder / "fonts").mkdir(parents=True, exist_ok=True)
    (site / STYLE).write_text(style, encoding="utf-8")
    for font in set(re.findall(r"url\((fonts/[\w-]+\.woff2)\)", style)):
        shutil.copyfile(package / "dist" / font, folder / font)
    shutil.copyfile(package / "LICENSE", folder / "LICENSE")
