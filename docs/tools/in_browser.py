"""What the playground's pages run in the browser: a WebAssembly Python, an editor, and the pure half of this project.

from_npm.py fetches Python and the editor. There is no bundler: `add_parts` copies the editor's modules as they are, and
writes `./style-mod.js` where one of them imports `style-mod`. Where they could not be fetched, the site is built all
the same, and its pages say in one line what they lack (`missing`).

    site/playground/parts/python/          pyodide
    site/playground/parts/editor/          CodeMirror
    site/playground/parts/course.zip       the pure half of src/microparallel, which needs nothing else
"""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import figures
import from_npm

from microparallel.playground import all_levels
from microparallel.playground.showing import sets
from microparallel.playground.starts import starts

ROOT = Path(__file__).resolve().parents[2]
PARTS = "playground/parts"
PYTHON = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
EDITOR = ("@codemirror/state", "@codemirror/view", "@codemirror/commands", "@codemirror/lint")
# The packages whose modules the page's Python imports; tests/playground compares them with what it really needs.
PURE = ("collectives", "drawing", "playground", "program", "schedules", "simulator", "topology", "trace", "verifier")
ALONE = ("__init__.py", "errors.py", "settings.py", "text.py")
MISSING = (
    "Python for the browser was not built into this site: with npm and a network, `make docs` adds it, and "
    "`microparallel draw`, `verify` and `simulate` do the same in a terminal."
)
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])(@?[a-z][^"']*)\2""")


def missing() -> str:
    """The line for pages that lack their Python; nothing where it has been fetched."""
    return "" if from_npm.is_fetched() else MISSING


def add_parts(site: Path) -> None:
    """Put into a built site what its pages run."""
    parts = site / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    pack(parts / "course.zip")
    if missing():
        return
    modules = from_npm.FETCHED / "node_modules"
    (parts / "python").mkdir(exist_ok=True)
    for file in PYTHON:
        shutil.copyfile(modules / "pyodide" / file, parts / "python" / file)
    (parts / "editor").mkdir(exist_ok=True)
    copied: dict[str, str] = {}
    for package in EDITOR:
        _copy_module(package, modules, parts / "editor", copied)
    shutil.copyfile(modules / "@codemirror" / "state" / "LICENSE", parts / "editor" / "LICENSE")
    used = [json.loads((modules / name / "package.json").read_text()) for name in ("pyodide", *copied)]
    lines = [f"{about['name']} {about['version']}: {about['license']}" for about in used]
    (parts / "NOTICE.txt").write_text(
        "Taken unchanged from npm, but for the names of imports:\n" + "\n".join(lines) + "\n"
    )


def _copy_module(package: str, modules: Path, folder: Path, copied: dict[str, str]) -> str:
    """Copy an ES module and those that it imports; the name of its file."""
    if package not in copied:
        copied[package] = name = f"{package.removeprefix('@').replace('/', '-')}.js"
        about = json.loads((modules / package / "package.json").read_text(encoding="utf-8"))
        text = (modules / package / about["exports"]["import"]).read_text(encoding="utf-8")

        def here(found: re.Match[str]) -> str:
            return f'{found[1]}"./{_copy_module(found[3], modules, folder, copied)}"'

        (folder / name).write_text(_IMPORT.sub(here, text), encoding="utf-8")
    return copied[package]


def _lacks() -> str:
    return f' data-missing="{html.escape(missing(), quote=True)}"' if missing() else ""


def playground(text: str) -> str:
    """The HTML in which a page shows the playground; in a lesson, a figure until it is opened.

    A lesson's line is that of a `draw` fence, `1f1b --ranks 4 --microbatches 8`: a builder of the playground's list.
    """
    lacks = _lacks()
    if not text.strip():
        return f'<div class="playground" data-kind="page"{lacks}></div>'
    start = html.escape(json.dumps(_start(text)), quote=True)
    figure = f'<div class="pg-until">{figures.figures(text, stepped=False)}</div>'
    press = '<p class="pg-until"><button type="button" class="pg-button pg-open">Change it here</button></p>'
    about = f'data-kind="panel" data-start="{start}" data-search-exclude{lacks}'
    return f'<div class="playground" {about}>{figure}{press}</div>'


def puzzles() -> str:
    """The place of the puzzles, as Markdown, with what their list needs; before that, a list for links."""
    items = "\n".join(f"1. {one.title}\n    {{: #{one.id} }}" for one in all_levels().values())
    listed = f'<div class="pg-until" markdown>\n\n{items}\n\n</div>'
    known = html.escape(json.dumps(sets()), quote=True)
    return f'<div class="puzzles" data-sets="{known}"{_lacks()} markdown>\n{listed}\n</div>'


def _start(text: str) -> dict[str, Any]:
    """The builder and the numbers that a lesson's line names."""
    name, *rest = shlex.split(text.strip().splitlines()[-1])
    numbers = {
        flag.removeprefix("--").replace("-", "_"): int(number)
        for flag, number in zip(rest[::2], rest[1::2], strict=True)
    }
    known = [one for one in starts() if one["name"] == name.rpartition(":")[2]]
    pipeline = name.startswith("pipeline:") or "microbatches" in numbers
    found = next((one for one in known if len(known) == 1 or (one["kind"] == "pipelines") == pipeline), None)
    unknown = numbers.keys() - {slider["name"] for slider in found["sliders"]} if found else {name}
    if found is None or unknown:
        raise ValueError(f"the playground does not start with {', '.join(unknown)}: {text.strip()}")
    return {"kind": found["kind"], "name": found["name"], "numbers": numbers}


def pack(file: Path) -> None:
    """Write the pure half into a zip; the same sources make the same bytes."""
    source = ROOT / "src" / "microparallel"
    paths = [source / name for name in ALONE]
    paths += [path for name in PURE for path in sorted((source / name).rglob("*")) if path.suffix in _PACKED]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            about = zipfile.ZipInfo(str(path.relative_to(source.parent)))
            about.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(about, path.read_bytes())


_PACKED = (".py", ".css", ".js", ".toml", ".json")
