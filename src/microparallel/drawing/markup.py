"""XML elements as strings, with everything escaped in one place."""

from __future__ import annotations

import json
from typing import Any

Attribute = str | float | None

# `xml.sax.saxutils` would do this too, but imports an HTTP client.
_IN_TEXT = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_TEXT = str.maketrans(_IN_TEXT)
_ATTRIBUTE = str.maketrans(_IN_TEXT | {'"': "&quot;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: Attribute) -> Markup:
    """One element; a plain string among the children is text. `aria_label` becomes `aria-label`, `class_` `class`."""
    written = [
        f' {name.rstrip("_").replace("_", "-")}="{_value(value).translate(_ATTRIBUTE)}"'
        for name, value in attributes.items()
        if value is not None
    ]
    inside = "".join(child if isinstance(child, Markup) else child.translate(_TEXT) for child in children)
    return Markup(f"<{tag}{''.join(written)}>{inside}</{tag}>" if inside else f"<{tag}{''.join(written)}/>")


def joined(*parts: str) -> Markup:
    """Several elements, one a line."""
    return Markup("\n".join(parts))


def data_script(data: Any) -> Markup:
    """An element that holds data for a page's scripts, as JSON that cannot end it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Markup(f'<script type="application/json" id="data">{safe}</script>')


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
