"""Pages: well-formed, complete, escaped, and without any use of a network."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import microparallel as mp
from microparallel.trace import Trace, reasons

NASTY = """</script><script>alert("1")</script> & 'q' <b>"""
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


def test_a_page_stands_alone(program):
    text = mp.draw(program, as_="html")
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


def test_everything_is_escaped(program):
    program = replace(program, name=NASTY)
    page = Page(mp.draw(program, as_="html"))
    assert page.open == []
    assert not [script for script in page.scripts if "alert" in script and not script.startswith("{")]
    assert not [script for script in page.scripts if script.startswith("{") and set(script) & set("<>&")]
    svg = ElementTree.fromstring(mp.draw(program, as_="svg"))
    assert NASTY in svg.get("aria-label")


def test_figures_of_seconds_and_of_nothing():
    program = mp.schedules.build("gpipe", 2, 2)
    tiny = [event._replace(start=event.start * 1e-6, end=event.end * 1e-6) for event in mp.simulate(program).events]
    assert "time ×10⁻⁶" in mp.draw(Trace(tiny, program), as_="svg")
    empty = Trace([], program)
    assert "never happens" in mp.draw(empty, as_="svg")
    assert Page(mp.draw(empty, as_="html")).open == []
