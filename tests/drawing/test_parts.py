"""Traces without a program drawn: every moment of every rank."""

from xml.etree import ElementTree

from tests.spans import recorded, span

import microparallel as mp


def straggler():
    """Rank 1 computes three times as long; the all-reduce itself takes 1."""

    def all_reduce(rank, start):
        return span(rank, "collective", "all_reduce", start, 7, waited=start, group=(0, 1))

    events = [
        span(0, "backward", "backward", 0, 2),
        all_reduce(0, 2),
        span(1, "forward", "forward", 0, 3),
        span(1, "backward", "backward", 3, 6),
        all_reduce(1, 6),
        span(0, "optimizer", "SGD", 7, 8),
        span(1, "optimizer", "SGD", 7, 8),
    ]
    return recorded(2, events)


def test_as_text():
    title, first, second, axis, numbers, legend = mp.draw(straggler(), width=8 + 16).splitlines()
    assert title == "recorded · 2 ranks · 1 step · 8.00 s"
    assert first == "rank 0  ████········░░▒▒"
    assert second == "rank 1  ▓▓▓▓▓▓██████░░▒▒"
    assert len(axis) == 24 and "ms" in numbers and "░ communicating" in legend


def test_as_a_figure():
    figure = ElementTree.fromstring(mp.draw(straggler(), as_="svg"))
    texts = ["".join(node.itertext()) for node in figure.iter() if node.tag.endswith("title")]
    assert "waiting, 4.00 s" in texts and "communicating, 1.00 s" in texts


def test_an_empty_trace_is_drawn_too():
    assert "0 s" in mp.draw(recorded(1, []))
    ElementTree.fromstring(mp.draw(recorded(1, []), as_="svg"))


def test_a_simulated_step_has_the_unit_of_its_costs():
    trace = mp.simulate(mp.schedules.build("gpipe", 2, 1), mp.Costs(forward=1, backward_input=1, backward_weight=1))
    title, first, second, _, numbers, _ = mp.draw(trace, view="parts", width=8 + 24).splitlines()
    assert title == "simulated · 2 ranks · 1 step · 6" and numbers.startswith("time")
    assert first == "rank 0  ▓▓▓▓············████████"
    assert second == "rank 1  ····▓▓▓▓████████········"
