"""SVG figures: well-formed, complete, and true to time."""

import re
from xml.etree import ElementTree

import microparallel as mp
from microparallel.trace import reasons

SVG = "{http://www.w3.org/2000/svg}"


def cells(svg):
    return [group for group in svg.iter(f"{SVG}g") if group.get("class", "").startswith("cell")]


def test_a_figure_has_a_cell_for_each_event_that_takes_time(program):
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
