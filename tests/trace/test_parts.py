"""Where the time went: every moment in one part, and waiting is never called communication."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spans import recorded, span

from microparallel.trace.parts import parts


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
