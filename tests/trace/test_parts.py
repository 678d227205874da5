"""Where the time went: every moment in one part, and waiting is never called communication."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import recorded, span

import microparallel as mp
from microparallel.program import Act, Forward, Lane, Recv, from_text
from microparallel.trace import Event, Trace
from microparallel.trace.parts import Shares, apportion, parts, shares, utilisation_table


def collective(rank, start, end, waited=None, number=0, ranks=2):
    name = "all_reduce"
    waited = start if waited is None else waited
    return span(rank, "collective", name, start, end, waited=waited, group=tuple(range(ranks)), number=number)


def test_a_straggler_makes_others_wait_and_not_communicate():
    """Rank 1 computes three times as long; the all-reduce itself takes 1."""
    trace = recorded(
        2,
        [
            span(0, "backward", "backward", 0, 2),
            collective(0, 2, 7),
            span(1, "backward", "backward", 0, 6),
            collective(1, 6, 7),
        ],
    )
    quick, slow = parts(trace)
    assert (quick.backward, quick.waiting, quick.communicating) == (2, 4, 1)
    assert (slow.backward, slow.waiting, slow.communicating) == (6, 0, 1)
    assert quick.step == slow.step == 7


def test_communication_behind_computation_is_hidden():
    """It begins at 2, the rank goes on computing until 5 and then waits for its last moment."""
    events = [span(0, "backward", "backward", 0, 6), collective(0, 2, 6, waited=5, ranks=1)]
    (mine,) = parts(recorded(1, events))
    assert (mine.backward, mine.hidden, mine.communicating, mine.waiting) == (5, 3, 1, 0)


def test_a_receive_waits_until_its_message_is_sent():
    trace = recorded(
        2,
        [
            span(0, "forward", "F0.0", 0, 4),
            span(0, "send", ">A0.0@1", 4, 5, peer=1, waited=4),
            span(1, "receive", "<A0.0@0", 0, 6, peer=0, waited=0),
            span(1, "forward", "F1.0", 6, 8),
        ],
    )
    first, second = parts(trace)
    assert (second.waiting, second.communicating, second.forward) == (4, 2, 2)
    assert (first.forward, first.communicating, first.waiting) == (4, 1, 3)  # it is done at 5, and the step at 8


def test_recomputation_counts_to_the_backward_it_is_part_of():
    (mine,) = parts(recorded(1, [span(0, "backward", "backward", 0, 5), span(0, "forward", "again", 1, 3)]))
    assert (mine.backward, mine.forward) == (5, 0)


KINDS = st.sampled_from(["forward", "backward", "optimizer", "collective", "send", "receive"])
TIMES = st.integers(0, 40)


@st.composite
def events(draw):
    start, length = draw(TIMES), draw(st.integers(0, 10))
    kind = draw(KINDS)
    waited = None if kind in ("forward", "backward", "optimizer") else start + draw(st.integers(0, length))
    rank = draw(st.integers(0, 2))
    return span(
        rank,
        kind,
        "something",
        start,
        start + length,
        waited=waited,
        group=(0, 1, 2),
        number=draw(st.integers(0, 3)),
        peer=(rank + 1) % 3,
    )


@given(st.lists(events(), max_size=30))
def test_the_parts_add_up_to_the_step(found):
    trace = recorded(3, found)
    for mine in parts(trace):
        added = mine.forward + mine.backward + mine.optimizer + mine.communicating + mine.waiting + mine.other
        assert added == pytest.approx(mine.step)
        assert min(mine.forward, mine.backward, mine.optimizer, mine.communicating, mine.waiting, mine.hidden) >= 0
        assert mine.other >= -1e-9


# ── which share of a step each rank computes, communicates and waits ──────────────────────────────────────────────────


def simulated(schedule, ranks, microbatches, **costs):
    return mp.simulate(mp.schedules.build(schedule, ranks, microbatches), mp.Costs(**costs))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_naive_lets_one_rank_compute_at_a_time(ranks):
    for share in shares(simulated("naive", ranks, 3)):
        assert share.computing == pytest.approx(1 / ranks)
        assert share.communicating == 0
        assert share.waiting == pytest.approx(1 - 1 / ranks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (4, 32)])
def test_the_bubble_is_what_is_waited(schedule, ranks, microbatches):
    bubble = (ranks - 1) / (microbatches + ranks - 1)  # FACTS.md
    for share in shares(simulated(schedule, ranks, microbatches)):
        assert share.waiting == pytest.approx(bubble)
        assert share.computing == pytest.approx(1 - bubble)


def test_only_communication_that_nothing_hides_counts():
    program = from_text("program p\ngoal: training step of 2 stages, 2 micro-batches\nrank 0: F0.0\nrank 1: F1.0\n")
    events = [
        Event(0, Lane.COMPUTE, Forward(0, 0), 5.0, 9.0),
        Event(0, Lane.COMM, Recv(Act(0, 0), 1), 8.0, 10.0),  # half of it behind the computation
        Event(0, Lane.COMM, Recv(Act(0, 1), 1), 9.0, 10.0),  # at the same time as the other
        Event(1, Lane.COMPUTE, Forward(1, 0), 5.0, 15.0),
    ]
    assert shares(Trace(events, program)) == [Shares(0.4, 0.1, 0.5), Shares(1.0, 0.0, 0.0)]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
def test_shares_sum_to_one(schedule):
    for share in shares(simulated(schedule, 4, 8, latency=0.3)):
        assert share.computing + share.communicating + share.waiting == pytest.approx(1)
        assert min(share.computing, share.communicating, share.waiting) >= -1e-12


def test_a_trace_of_nothing():
    program = mp.schedules.build("1f1b", 2, 2)
    assert shares(Trace([], program)) == [Shares(0, 0, 1), Shares(0, 0, 1)]
    assert "100 % waits" in utilisation_table(Trace([], program))


def test_the_table():
    assert utilisation_table(simulated("naive", 2, 3)).splitlines() == [
        "rank 0  ████████████············  50 % computes   0 % communicates  50 % waits",
        "rank 1  ████████████············  50 % computes   0 % communicates  50 % waits",
    ]


def test_the_table_is_narrow_and_even():
    lines = utilisation_table(simulated("1f1b", 12, 7, latency=0.4)).splitlines()
    assert [line[:9] for line in lines[9:]] == ["rank  9  ", "rank 10  ", "rank 11  "]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 80


@pytest.mark.parametrize(
    ("fractions", "total", "whole"),
    [
        ((1 / 3, 1 / 3, 1 / 3), 100, [34, 33, 33]),
        ((0.625, 0.025, 0.35), 100, [63, 2, 35]),
        ((0.999, 0.001, 0), 10, [10, 0, 0]),
        ((1 + 1e-12, 0, -1e-12), 24, [24, 0, 0]),
        ((0, 0, 1), 24, [0, 0, 24]),
    ],
)
def test_rounded_shares_still_sum(fractions, total, whole):
    assert apportion(fractions, total) == whole
