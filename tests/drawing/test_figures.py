"""SVG and HTML: well-formed, complete, escaped, and without any use of a network."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import microparallel as mp
from microparallel.drawing.kinds import KINDS, shaded
from microparallel.drawing.markup import element
from microparallel.trace import Trace, reasons

SVG = "{http://www.w3.org/2000/svg}"
NASTY = """</script><script>alert("1")</script> & 'q' <b>"""
PROGRAMS = {
    "1f1b": lambda: mp.schedules.build("1f1b", 4, 8),
    "dualpipev": lambda: mp.schedules.build("dualpipev", 2, 4),
    "ddp": lambda: mp.schedules.build("ddp", 2),
    "ring": lambda: mp.collectives.build("ring", 4),
    "gather-add": lambda: mp.collectives.build("gather-add", 3),
    "alone": lambda: mp.collectives.build("ring", 1),
}
VOID = {"meta", "input"}


class Page(HTMLParser):
    """Reads a page, and remembers what is open, which attributes there are, and what scripts hold."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.elements, self.scripts = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.elements.append(dict(attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        self.elements.append(dict(attributes))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def cells(svg):
    return [group for group in svg.iter(f"{SVG}g") if group.get("class", "").startswith("cell")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_figure_has_a_cell_for_each_event_that_takes_time(name):
    program = PROGRAMS[name]()
    trace = mp.simulate(program, mp.Costs(latency=1))
    svg = ElementTree.fromstring(mp.draw(trace, as_="svg"))
    assert svg.get("role") == "img" and program.name in svg.get("aria-label")
    assert svg.find(f"{SVG}title").text == svg.get("aria-label")
    titles = [group.find(f"{SVG}title").text for group in cells(svg)]
    expected = [f"{event.op}: " for event in trace.events if event.duration > 0]
    assert sorted(title.split(": ")[0] + ": " for title in titles) == sorted(expected)
    for place, reason in reasons(trace).items():
        assert sum(reason in title for title in titles) == (trace.events[place].duration > 0)


def test_boxes_begin_and_end_at_their_times():
    trace = mp.simulate(mp.schedules.build("zb-h1", 3, 5), mp.Costs(forward=1.75, backward_input=0.5, latency=0.25))
    svg = ElementTree.fromstring(mp.draw(trace, as_="svg"))
    boxes = []
    for group in cells(svg):
        start, end = map(float, re.search(r"from ([\d.]+) to ([\d.]+)", group.find(f"{SVG}title").text).groups())
        box = group.find(f"{SVG}rect")
        boxes.append((start, end, float(box.get("x")), float(box.get("width"))))
    assert len(boxes) == len(trace.events)
    track = next(box for box in svg.iter(f"{SVG}rect") if box.get("class") == "track")
    left, scale = float(track.get("x")), float(track.get("width")) / trace.makespan
    for start, end, x, width in boxes:  # less the gap between neighbours
        assert 0 <= x - (left + start * scale) < 0.8
        assert 0 <= left + end * scale - (x + width) < 0.8


def test_a_ring_has_an_arrow_for_each_message():
    svg = ElementTree.fromstring(mp.draw(mp.collectives.build("ring", 4), as_="svg"))
    arrows = next(group for group in svg.iter(f"{SVG}g") if group.get("class") == "arrows")
    assert len(arrows.findall(f"{SVG}path")) == 24


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_stands_alone(name):
    text = mp.draw(PROGRAMS[name](), as_="html")
    page = Page(text)
    assert page.open == []
    assert "://" not in text
    assert "default-src 'none'" in text
    names = {attribute for _, attribute, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "action"}
    assert not [name for name in names if name.startswith("on")]
    assert "url(" not in re.sub(r"url\(#microparallel-arrow\)", "", text)
    assert ("meta", "name", "viewport") in page.attributes


def test_a_schedule_s_page_says_why_each_cell_waited():
    trace = mp.simulate(mp.schedules.build("1f1b", 4, 8))
    page = Page(mp.draw(trace, as_="html"))
    waits = [value for _, attribute, value in page.attributes if attribute == "data-wait"]
    assert sorted(waits) == sorted(reasons(trace).values())
    assert "rank 2 waited for A1.0 from rank 1 before F2.0" in waits
    ops = [value for _, attribute, value in page.attributes if attribute == "data-op"]
    assert sorted(ops) == sorted(str(event.op) for event in trace.events if event.duration > 0)
    labels = [value for _, attribute, value in page.attributes if attribute == "aria-label"]
    assert sum("waited for" in label for label in labels) == len(waits)


def test_cells_know_what_they_are_about():
    def about(program, op):
        page = Page(mp.draw(program, as_="html", costs=mp.Costs(latency=1)))
        return {made.get("data-related") for made in page.elements if made.get("data-op") == op}

    pipeline, buckets = mp.schedules.build("dualpipev", 2, 4), mp.schedules.build("ddp", 2, layers=4, buckets=2)
    assert about(pipeline, "F0.3&B3.1") == {"3 1"}
    assert about(pipeline, ">A0.2@1") == {"2"}
    assert about(buckets, "F3.0") == {"3"}
    assert about(buckets, "*U0@dp") == {"2 3"}


def test_a_ring_s_page_holds_its_hops():
    data = json.loads(Page(mp.draw(mp.collectives.build("ring", 4), as_="html")).scripts[0])
    assert len(data["hops"]) == 6 and len(data["holds"]) == 7
    assert {"from": 0, "to": 1, "value": "+C0", "adds": True} in data["hops"][0]["messages"]
    assert "rank 0 sends slice 0 to rank 1, which adds it" in data["hops"][0]["words"]


@pytest.mark.parametrize("name", ["1f1b", "ring"])
def test_everything_is_escaped(name):
    program = replace(PROGRAMS[name](), name=NASTY)
    page = Page(mp.draw(program, as_="html"))
    assert page.open == []
    assert not [script for script in page.scripts if "alert" in script and not script.startswith("{")]
    assert not [script for script in page.scripts if script.startswith("{") and set(script) & set("<>&")]
    svg = ElementTree.fromstring(mp.draw(program, as_="svg"))
    assert NASTY in svg.get("aria-label")


def test_attributes_are_escaped():
    made = ElementTree.fromstring(element("g", 'a < b & "c"', aria_label="'\"<>&", class_="x", width=1.5, height=None))
    assert made.attrib == {"aria-label": "'\"<>&", "class": "x", "width": "1.5"}
    assert made.text == 'a < b & "c"'


def test_figures_of_seconds_and_of_nothing():
    program = mp.schedules.build("gpipe", 2, 2)
    tiny = [event._replace(start=event.start * 1e-6, end=event.end * 1e-6) for event in mp.simulate(program).events]
    assert "time ×10⁻⁶" in mp.draw(Trace(tiny, program), as_="svg")
    empty = Trace([], program)
    assert "never happens" in mp.draw(empty, as_="svg")
    assert Page(mp.draw(empty, as_="html")).open == []


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_names_can_be_read_on_their_colours(kind):
    """The contrast that accessibility asks of text, in every shade that is used with this ink."""
    assert contrast(kind.fill, kind.ink) >= 4.5
    if kind.ink == "#000000":
        assert contrast(shaded(kind.fill, 3), kind.ink) >= 4.5
