"""What MkDocs calls while it builds the site: our fences, the command line's reference, the API pages.

A fence that cannot be made (an unknown schedule, a function that is gone) ends the build, with its page and line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cards
import command_line
import consoles
import figures
import formulas
import in_browser
import plots
import public_names
import results
import sources
from pages import CONSOLES, Block, blocks_of

OURS = ("draw", "step", "include", "output", "plot", "bits", "math", "playground", "results", *CONSOLES)
_CODE = re.compile(r"<pre\b.*?</pre>|(?P<sentence><code>)[^<]*</code>", re.DOTALL)


def on_config(config: Any) -> Any:
    """Teach superfences our fences, and Markdown the formulas within sentences."""
    fences = [{"name": name, "class": name, "format": _format, "validator": _any_options} for name in OURS]
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    config.markdown_extensions.append(formulas.__name__)
    if not formulas.missing():
        config.extra_css.insert(0, formulas.STYLE)
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make every fence once, to find what is wrong with it while its place is known; then fill in references."""
    file = Path(page.file.abs_src_path)
    try:
        whole = plots.with_data(file.read_text(encoding="utf-8"), file)
        markdown = plots.with_data(markdown, file)
    except ValueError as error:
        raise PluginError(f"{_shown(file)}: {error}") from error
    for block, with_data in zip(blocks_of(file), blocks_of(file, whole), strict=True):
        if block.kind in OURS:
            try:
                made(with_data)
            except ValueError as error:
                raise PluginError(f"{_shown(file)}:{block.line}: {error}") from error
    markdown = markdown.replace("<!-- command line -->", command_line.reference())
    markdown = markdown.replace("<!-- puzzles -->", in_browser.puzzles())
    markdown = markdown.replace("<!-- errors -->", public_names.tree_of_errors())
    return public_names.with_docstrings(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Name the columns in tables that a phone shows as cards, and keep each flag on one line."""
    return with_whole_flags(cards.with_labels(html))


def with_whole_flags(html: str) -> str:
    """A page's HTML in which no line ends within a flag that stands in a sentence."""

    def whole(found: re.Match[str]) -> str:
        return consoles.whole_flags(found[0]) if found["sentence"] else found[0]

    return _CODE.sub(whole, html)


def on_env(env: Any, files: Any, **_: Any) -> Any:
    """Typeset the formulas, now that Markdown has made all pages."""
    pages = [file.page for file in files.documentation_pages() if file.page and file.page.content]
    formulas.typeset(page.content for page in pages)
    for page in pages:
        try:
            page.content = formulas.with_formulas(page.content)
        except formulas.RefusedError as error:
            file = Path(page.file.abs_src_path)
            line = formulas.line_of(error.tex, file.read_text(encoding="utf-8"))
            raise PluginError(f"{_shown(file)}:{line}: {error}") from error
    return env


def on_post_build(config: Any, **_: Any) -> None:
    """Put what the playground runs, and what formulas look like, beside the pages."""
    in_browser.add_parts(Path(config.site_dir))
    formulas.add_parts(Path(config.site_dir))


def _shown(file: Path) -> Path:
    return file.relative_to(sources.ROOT) if file.is_relative_to(sources.ROOT) else file


def made(block: Block) -> str:
    """The HTML of one of our fences."""
    if block.kind in ("draw", "step"):
        return figures.figures(block.text, stepped=block.kind == "step")
    if block.kind == "math":
        return formulas.display(block.text)
    if block.kind == "playground":
        return in_browser.playground(block.text)
    if block.kind == "include":
        return sources.included(block.text)
    if block.kind == "results":
        return results.results(block)
    if block.kind in ("plot", "bits"):
        return plots.plot(block) if block.kind == "plot" else plots.bits(block)
    return consoles.output(block) if block.kind == "output" else consoles.console(block)


def _format(source: str, language: str, _class: str, options: dict[str, Any], _markdown: Any, **_: Any) -> str:
    return made(consoles.block_from(language, tuple(options), source))


def _any_options(_language: str, inputs: dict[str, str], options: dict[str, Any], *_: Any) -> bool:
    """Keep every word after the fence's name: they are checked where they are read."""
    options.update(inputs)
    return True
