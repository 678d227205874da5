"""Tables of words, in a `<div class="cards" markdown>`: on a phone each row is a card, which has no headings above it.

So each cell but the first says which column it is from, and the style sheet shows that.
"""

from __future__ import annotations

import html
import re

_CARDS = re.compile(r'<div class="cards.*?</table>', re.DOTALL)
_HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)


def with_labels(page: str) -> str:
    """A page's HTML, with the heading of its column in each cell of a table of cards."""
    return _CARDS.sub(_labelled, page)


def _labelled(table: re.Match[str]) -> str:
    headings = [html.unescape(re.sub("<[^>]+>", "", heading)) for heading in _HEADING.findall(table[0])]

    def row(found: re.Match[str]) -> str:
        columns = iter(headings)

        def cell(_: re.Match[str]) -> str:
            name = next(columns)
            return "<td" if name == headings[0] else f'<td data-label="{html.escape(name)}"'

        return re.sub("<td", cell, found[0])

    return _ROW.sub(row, table[0])
