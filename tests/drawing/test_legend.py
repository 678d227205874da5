"""The legend: one list of entries, as text, in a figure and on a page."""

from xml.etree import ElementTree

import microparallel as mp
from microparallel.drawing.kinds import FORWARD
from microparallel.drawing.legend import Entry, legend_figure, legend_page, legend_text, of_kind, of_rows
from microparallel.drawing.lines import plain
from microparallel.drawing.markup import element
from microparallel.drawing.rows import rows_of

ENTRIES = [
    of_kind(FORWARD, "1"),
    Entry("·", "idle", mark=element("circle", r=3), quiet=True),
    Entry("", "the number is the micro-batch"),
]


def test_as_text():
    assert plain(legend_text(ENTRIES, None)) == " F  forward 1   · idle   the number is the micro-batch\n"
    assert plain(legend_text(ENTRIES, 24)) == " F  forward 1   · idle\nthe number is the micro-batch\n"


def test_in_a_figure():
    markup, height = legend_figure(ENTRIES, ["and a note"], top=100, right=200)
    legend = ElementTree.fromstring(markup)
    assert [text.text for text in legend.iter("text")] == [
        "F forward, 1",
        "idle",
        "the number is the micro-batch",
        "and a note",
    ]
    assert len(list(legend.iter("rect"))) == 1 and len(list(legend.iter("circle"))) == 1
    heights = [float(text.get("y")) for text in legend.iter("text")]
    assert heights == [110, 110, 131, 152] and height == 3 * 21


def test_on_a_page():
    listed, note = legend_page(ENTRIES, ["and a note"])
    assert "".join(ElementTree.fromstring(listed).itertext()) == "F forward, 1"  # only what has a colour
    assert legend_page([], ["and a note"]) == [note]


def test_kinds_come_with_their_times():
    rows = rows_of(mp.simulate(mp.schedules.build("1f1b", 2, 2), mp.Costs(forward=[1, 3])))
    assert [(entry.words, entry.detail) for entry in of_rows(rows)] == [("forward", "1 to 3"), ("backward", "2")]
