"""Strips of what ranks hold, under their timelines: honest heights, one scale, and the peak in numbers."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

import microparallel as mp
from microparallel.drawing.memory import HEIGHT, strips_of
from microparallel.trace import Sizes

SIZES = Sizes(parameters=4, gradients=4, optimizer=8, activations=4)


def simulated(name, ranks=2, microbatches=2, sizes=SIZES, **costs):
    return mp.simulate(mp.schedules.build(name, ranks, microbatches), mp.Costs(sizes=sizes, **costs))


def test_a_strip_under_each_rank():
    text = mp.draw(simulated("gpipe"), memory=True)
    assert (
        text
        == """\
gpipe · 2 ranks · 2 micro-batches · makespan 9 · bubble 33.3 % · peak activations 2 2
rank 0   │F0│F1│········│B0   │B1   │
  bytes  ▆▆▆▇▇▇▇▇▇▇▇▇▇▇▇██████▇▇▇▇▇▇
rank 1   ···│F0│F1│B0   │B1   │·····│
  bytes  ▄▄▄▆▆▆▇▇▇██████▇▇▇▇▇▇▆▆▆▆▆▆
         ├──┼──┼──┼──┼──┼──┼──┼──┼──┤
time     0  1  2  3  4  5  6  7  8  9
 F  forward 1    B  backward 2   · idle   the number is the micro-batch   █ 24 B held
peak    time   all  parameters  optimizer  gradients  activations
rank 0     5  24 B         4 B        8 B        4 B          8 B
rank 1     3  24 B         4 B        8 B        4 B          8 B
takes no time here: 4 × send, 4 × receive
"""
    )


def test_without_memory_a_drawing_is_as_before():
    trace = simulated("1f1b")
    assert "bytes" not in mp.draw(trace) and "memory" not in mp.draw(trace, as_="svg")


def test_several_programs_share_a_scale():
    one, other = simulated("gpipe", microbatches=8), simulated("1f1b", microbatches=8)
    alone, together = mp.draw(other, memory=True), mp.draw([one, other], memory=True)
    assert "█ 24 B held" in alone and together.count("█ 48 B held") == 2
    assert together.startswith(mp.draw(one, memory=True)) and alone not in together
    assert [strips.most for strips in strips_of([one, other])] == [48, 48]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_drawing_keeps_to_its_width(width):
    traces = [simulated("zb-h1", 4, 8, sizes=Sizes(parameters=1e9, activations=3e8)), simulated("1f1b", 4, 8)]
    lines = mp.draw(traces, memory=True, width=width).splitlines()
    assert max(map(len, lines)) <= width


def heights(figure, fill):
    """For each area of a colour: how high it is, in pixels."""
    found = []
    for node in figure.iter():
        if node.tag.endswith("polygon") and node.get("fill") == fill:
            places = [float(point.split(",")[1]) for point in node.get("points").split()]
            found.append(max(places) - min(places))
    return found


def test_in_a_figure_areas_are_as_high_as_what_they_show():
    figure = ElementTree.fromstring(mp.draw([simulated("gpipe"), simulated("1f1b")], as_="svg", memory=True))
    pixels = (HEIGHT - 13) / 24  # of a byte: the most that a rank holds is 24
    assert heights(figure, "#009e73") == pytest.approx([4 * pixels] * 4, abs=0.15)
    assert heights(figure, "#555b66") == pytest.approx([8 * pixels] * 4, abs=0.15)
    texts = ["".join(node.itertext()) for node in figure.iter() if node.tag.endswith("text")]
    assert [text for text in texts if text.endswith(" B") and len(text) < 6] == ["24 B", "24 B", "24 B", "20 B"]
    assert {"parameters", "optimizer state", "gradients", "activations"} <= set(texts) and "in flight" not in texts
    assert texts.count("  bytes") == 4
    titles = ["".join(node.itertext()) for node in figure.iter() if node.tag.endswith("title")]
    assert "activations of rank 1: at most 4 B" in titles


def test_a_page_with_two_schedules():
    page = mp.draw([simulated("gpipe"), simulated("1f1b")], as_="html", memory=True)
    assert "<title>gpipe, 1f1b</title>" in page and page.count('class="chart"') == 2
    assert page.count("</polygon>") == 4 * 4 and "the highest is 24 B" in page
    assert page.count('class="details"') == 1 and "://" not in page


def test_what_is_sent_is_in_flight():
    text = mp.draw(simulated("1f1b", bytes_per_value=100, seconds_per_byte=0.01), memory=True)
    assert "in flight" in text and "100 B" in text


def test_a_recorded_step():
    trace = simulated("gpipe")
    moved = [event.moved(5) for event in trace.events]
    recorded = replace(trace, events=moved, program=None, simulated=False, sizes={0: replace(SIZES, parameters=[4, 4])})
    text = mp.draw(recorded, memory=True, width=9 + 27)
    assert "rank 0  " in text and "█ 24 B held" in text
    assert "rank 0  5.00 s  24 B" in mp.draw(recorded, memory=True)
    figure = ElementTree.fromstring(mp.draw(recorded, as_="svg", memory=True))
    assert len(heights(figure, "#009e73")) == 2


@pytest.mark.parametrize(
    ("drawn", "options", "words"),
    [
        (mp.collectives.build("ring", 2), {}, "memory is known for training steps"),
        (mp.schedules.build("gpipe", 2, 2), {"view": "clock"}, "has no time axis"),
        ([], {}, "nothing to draw"),
        (replace(simulated("gpipe"), sizes=None), {}, "does not say how large"),
    ],
)
def test_what_has_no_strips(drawn, options, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        mp.draw(drawn, memory=True, **options)
