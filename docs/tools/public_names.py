"""The API pages: a line `::: mp.launch` becomes what the docstring of that public name says."""

from __future__ import annotations

import importlib
import inspect
import re

import microparallel as mp

_LINE = re.compile(r"^::: mp\.([\w.]+)$", re.MULTILINE)


def with_docstrings(markdown: str) -> str:
    """Replace each such line by a directive of mkdocstrings, under the name that users write."""
    return _LINE.sub(lambda match: _directive(match[1], level=2), markdown)


def _directive(name: str, level: int) -> str:
    value = mp
    for part in name.split("."):
        value = getattr(value, part)
    if inspect.ismodule(value):
        return _module(name)
    home = _home(name)
    options = [f'heading: "mp.{name}"', f'toc_label: "{name}"', f"heading_level: {level}"]
    lines = "\n".join(f"      {option}" for option in options)
    anchor = f"[](){{ #mp.{name} }}"  # for links such as api/launching.md#mp.launch
    return f"{anchor}\n\n::: {home}\n    options:\n{lines}\n"


def _home(name: str) -> str:
    """The module where a name is defined, not one that hands it on."""
    module, _, last = f"microparallel.{name}".rpartition(".")
    value = getattr(importlib.import_module(module), last)
    home = getattr(value, "__module__", None)
    if not isinstance(home, str) or getattr(value, "__qualname__", "") != last:
        home = mp._HOMES.get(name, module)
    return f"{home}.{last}"


def _module(name: str) -> str:
    module = importlib.import_module(f"microparallel.{name}")
    opening = (module.__doc__ or "").strip().partition("\n\n")[0]
    public = [item for item in module.__all__ if hasattr(getattr(module, item), "__qualname__")]  # classes, functions
    return f"## mp.{name}\n\n{opening}\n\n" + "\n".join(_directive(f"{name}.{item}", level=3) for item in public)


def tree_of_errors() -> str:
    """The exception tree, as the module that defines it draws it."""
    words = importlib.import_module("microparallel.errors").__doc__ or ""
    return re.sub(r"^```$", "```text", words.partition("\n\n")[2].strip(), count=1, flags=re.MULTILINE)
