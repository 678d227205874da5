"""One step: whom ranks waited for, when buckets arrived, and that the picture agrees with the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import recorded, span

from microparallel.reporting.steps import EXPOSED, KINDS, WAITING, Measured, StepView, Table, by_step
from microparallel.trace.parts import parts

COLUMNS = ("rank", "kind", "name", "start", "end", "begun", "waited", "bytes", "meeting", "last", "place", "row")


def written(trace):
    names, places = Table(), Table()
    step = StepView(trace).written(names, places)
    step["bars"] = [dict(zip(COLUMNS, row, strict=True)) for row in step["bars"]]
    for event in step["bars"]:
        event["name"], event["kind"] = names.texts[event["name"]], KINDS[event["kind"]]
        event["place"] = None if event["place"] is None else places.texts[event["place"]]
    return step


def test_a_straggler_is_named():
    """Rank 1 computes until 6; rank 0 waits for it from 2, and then both communicate for 1."""
    together = {"group": (0, 1), "number": 0}
    events = [
        span(0, "backward", "backward", 0, 2),
        span(0, "collective", "all_reduce", 2, 7, waited=2, **together),
        span(1, "backward", "backward", 0, 6),
        span(1, "collective", "all_reduce", 6, 7, waited=6, **together),
    ]
    step = written(recorded(2, events))
    waiting, exposed, theirs = step["blocked"]
    assert waiting[:4] == [0, 2e6, 6e6, WAITING]
    assert exposed[:4] == [0, 6e6, 7e6, EXPOSED]
    assert theirs[:4] == [1, 6e6, 7e6, EXPOSED]
    assert waiting[5] == 1  # for rank 1
    cause = step["bars"][waiting[4]]
    assert (cause["rank"], cause["name"], cause["last"], cause["begun"]) == (0, "all_reduce", 1, 6e6)


def test_a_receive_waits_for_its_sender(pipeline):
    step = written(pipeline)
    by_name = {event["name"]: event for event in step["bars"]}
    send, receive = by_name[">A0.0@1"], by_name["<A0.0@0"]
    assert send["meeting"] == receive["meeting"]
    assert (receive["last"], receive["begun"], receive["place"]) == (0, 4000, "model.py:90")
    assert [1, 0, 4000, WAITING] in [row[:4] for row in step["blocked"]]


def test_who_is_done_waits_for_the_last(pipeline):
    assert written(pipeline)["blocked"][-1] == [1, 19_000, 28_000, WAITING, None, 0]


def test_buckets_arrive_in_the_order_in_which_they_were_handed_over(trace):
    step = written(by_step(trace)[1])  # rank 3 is slow
    assert step["all_arrivals"] == 3
    for bucket, (_, _, size, handed, met, back, last) in enumerate(step["arrivals"]):
        assert size == 1_000_000
        assert [rank for rank, _ in handed] == [0, 1, 2, 3]
        assert last == 3
        assert met == handed[3][1] == max(time for _, time in handed)
        assert back == pytest.approx(met + 3000)
        assert handed[0][1] == pytest.approx(38_000 + 4000 * bucket - 30_000)


def test_collectives_outside_backward_are_no_arrivals():
    events = [span(0, "backward", "backward", 0, 2), span(0, "collective", "all_reduce", 3, 4, waited=3, group=(0,))]
    assert written(recorded(1, events))["arrivals"] == []


def test_what_runs_at_the_same_time_stands_in_rows():
    events = [span(0, "collective", f"all_reduce {n}", n, n + 2.5, group=(0,), number=n) for n in range(4)]
    assert [event["row"] for event in written(recorded(1, events))["bars"]] == [0, 1, 2, 0]


def test_the_halves_of_a_backward_have_their_own_colours():
    events = [span(0, "backward", name, n, n + 1) for n, name in enumerate(("I0.3", "W0.3", "B0.3", "Waiter"))]
    kinds = [event["kind"] for event in written(recorded(1, events))["bars"]]
    assert kinds == ["input half", "weight half", "backward", "backward"]


def test_a_step_in_which_nobody_computes_is_none(trace):
    goodbye = [span(rank, "collective", "all_reduce", 1.0, 1.1, step=5, group=(0, 1, 2, 3)) for rank in range(4)]
    assert list(by_step(recorded(4, [*trace.events, *goodbye]))) == [0, 1, 2, 3, 4]
    assert list(by_step(recorded(4, goodbye))) == [5]


@st.composite
def recordings(draw):
    ranks = draw(st.integers(1, 3))
    time = st.integers(0, 40).map(lambda n: n / 1000)
    events = []
    for rank in range(ranks):
        for number in range(draw(st.integers(0, 4))):
            start, waited, end = sorted([draw(time), draw(time), draw(time)])
            waits = draw(st.booleans())
            events.append(
                span(
                    rank,
                    "collective",
                    "all_reduce",
                    start,
                    end,
                    waited=waited if waits else None,
                    group=tuple(range(ranks)),
                    number=number,
                )
            )
        for _ in range(draw(st.integers(0, 3))):
            start, end = sorted([draw(time), draw(time)])
            events.append(span(rank, draw(st.sampled_from(["forward", "backward", "optimizer"])), "work", start, end))
    return recorded(ranks, events or [span(0, "forward", "work", 0, 1)])


@given(recordings())
def test_the_picture_shows_what_the_numbers_say(trace):
    """Bars of waiting and of exposed communication are as long as `parts` says."""
    step = written(trace)
    for rank, part in enumerate(parts(trace)):
        for what, seconds in ((WAITING, part.waiting), (EXPOSED, part.communicating)):
            drawn = sum(end - start for owner, start, end, kind, *_ in step["blocked"] if (owner, kind) == (rank, what))
            assert drawn == pytest.approx(1e6 * seconds, abs=2)


def test_the_typical_step_is_in_the_middle(trace):
    measured = Measured(trace)
    lengths = sorted(step.makespan for step in measured.steps.values())
    assert measured.length == lengths[2]
    assert measured.first_step == 3


def test_who_was_waited_for(trace):
    """Rank 3 is slow in steps 1 and 3, rank 2 in the others; at the end, all wait for rank 3's optimizer."""
    waited = Measured(trace).waited_for()
    assert set(waited) == {2, 3}
    assert sum(waited.values()) == pytest.approx(
        sum(rank.waiting for step in by_step(trace).values() for rank in parts(step))
    )


def test_a_prediction_of_one_step_holds_for_all(trace):
    predicted = recorded(4, [event for event in trace.events if event.step == 0])
    found = Measured(trace, predicted).written()
    assert len(found["predictions"]) == 1
    assert {step["predicted"] for step in found["steps"]} == {0}
    assert found["predictions"][0]["length"] == found["steps"][0]["length"]
