"""SVG and HTML elements as strings: everything is escaped in one place, and all figures share ink and fonts.

The ink is a middle grey, and cells bring their own: a figure stands on a light page as well as on a dark one.
"""

from __future__ import annotations

import json
from typing import Any

INK, FAINT = "#757b85", "#8a9099"
MONOSPACE = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_SANS_SERIF = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"
CHARACTER, MARGIN = 6.7, 12.0  # the width of a character of MONOSPACE at size 11, and the edge of a figure
BASELINE = 4  # below the middle of a line of text; not every viewer can centre text by itself

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


def svg(body: Markup, width: float, height: float, *, role: str, label: str) -> Markup:
    """The outermost element, with the size and the ink that everything inside inherits."""
    return element(
        "svg",
        body,
        xmlns="http://www.w3.org/2000/svg" if role == "img" else None,  # a page knows what svg is
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role=role,
        aria_label=label,
        font_family=_SANS_SERIF,
        font_size=12,
        fill=INK,
    )


def label(text: str, x: float, middle: float, **attributes: str | float | None) -> Markup:
    """Text around a point."""
    given: dict[str, str | float | None] = {"text_anchor": "middle", "font_family": MONOSPACE, "font_size": 11}
    return element("text", text, x=x, y=middle + BASELINE, **{**given, **attributes})


def data_script(data: Any) -> Markup:
    """An element that holds data for a page's scripts, as JSON that cannot end it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Markup(f'<script type="application/json" id="data">{safe}</script>')


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
