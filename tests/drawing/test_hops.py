"""Collectives hop by hop: who sends what to whom, and what everybody holds then."""

from collections import Counter
from dataclasses import replace

import pytest

import microparallel as mp
from microparallel.drawing.hops import complete, hops_of
from microparallel.drawing.html import steps_of
from microparallel.program import Join, from_text

EVERY = [*mp.collectives.ALL_REDUCES, *mp.collectives.OTHERS]


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("name", mp.collectives.ALL_REDUCES)
def test_every_all_reduce_ends_complete_on_all_ranks(name, ranks):
    steps = steps_of(mp.collectives.build(name, ranks))
    for held in steps["holds"][-1]:
        assert [steps["sets"][place] for place in held] == [list(range(ranks))] * steps["slices"]
        assert all(place in steps["complete"][index] for index, place in enumerate(held))


@pytest.mark.parametrize("name", EVERY)
def test_every_operation_is_in_one_hop_and_every_message_finds_its_receive(name):
    program = mp.collectives.build(name, 5)
    walkthrough = hops_of(program)
    for rank, ops in enumerate(program.ranks):
        shown = [op for hop in walkthrough.hops for op in hop.ops[rank]]
        assert Counter(shown) == Counter(ops)
    assert sum(len(hop.messages) for hop in walkthrough.hops) == sum(program.messages_sent())


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("reduce-scatter", lambda rank, index, ranks: rank == index),
        ("all-gather", lambda rank, index, ranks: True),
        ("broadcast", lambda rank, index, ranks: True),
        ("reduce", lambda rank, index, ranks: rank == 0),
        ("scatter", lambda rank, index, ranks: rank == index),
        ("gather", lambda rank, index, ranks: rank == 0),
        ("all-to-all", lambda rank, index, ranks: index % ranks == rank),
    ],
)
def test_the_other_collectives_end_complete_where_they_promise(name, where):
    for ranks in range(2, 6):
        walkthrough = hops_of(mp.collectives.build(name, ranks))
        goal, held = walkthrough.goal, walkthrough.hops[-1].held
        for rank in range(ranks):
            for index, symbol in enumerate(held[rank].slices):
                if where(rank, index, ranks):
                    assert complete(goal, ranks, index, symbol), (ranks, rank, index)


def test_an_all_to_all_of_many_ranks_is_drawn_as_far_as_it_fits():
    """It has p² slices, on each of p ranks, after each of p − 1 hops."""
    text = mp.draw(mp.collectives.build("all-to-all", 24), width=100)
    assert "23 hops" in text and "takes more room" in text
    with pytest.raises(mp.errors.UsageError, match=r"48 moments × 48 ranks × 2304 slices; draw fewer ranks"):
        steps_of(mp.collectives.build("all-to-all", 48))


def test_hops_are_those_of_the_formulas():
    assert len(hops_of(mp.collectives.build("ring", 5)).hops) == 2 * 4
    assert len(hops_of(mp.collectives.build("recursive-doubling", 8)).hops) == 3
    assert len(hops_of(mp.collectives.build("tree", 8)).hops) == 2 * 3
    assert len(hops_of(mp.collectives.build("naive", 4)).hops) == 2 * 3


def test_nothing_is_complete_before_its_last_contribution():
    steps = steps_of(mp.collectives.build("ring", 4))
    done = [
        sum(place in steps["complete"][index] for held in moment for index, place in enumerate(held))
        for moment in steps["holds"]
    ]
    assert done == [0, 0, 0, 4, 8, 12, 16]


def test_a_lane_may_be_joined():
    ring = mp.collectives.build("ring", 3)
    joined = replace(ring, ranks=tuple((*ops[:2], Join(), *ops[2:]) for ops in ring.ranks))
    assert steps_of(joined)["holds"] == steps_of(ring)["holds"]


def test_what_is_added_twice_shows():
    text = "program p\ngoal: all-reduce of 1 slice\nrank 0: >C0@1 >C0@1 <C0@1\nrank 1: <+C0@0 <+C0@0 >C0@0\n"
    program = from_text(text)
    assert "│ !1" in mp.draw(program)
    steps = steps_of(program)
    assert [steps["sets"][place] for held in steps["holds"][-1] for place in held] == [[0, 0, 1], [0, 0, 1]]
    assert not {place for held in steps["holds"][-1] for place in held} & set(steps["complete"][0])


def test_a_slice_that_is_not_there():
    text = "program p\ngoal: all-reduce of 1 slice\nrank 0: >C5@1\nrank 1: <C5@0\n"
    with pytest.raises(mp.errors.ProgramError, match=r"rank 0 does >C5@1, and the tensor has 1 slices"):
        mp.draw(from_text(text))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_tables_go_on_below_when_they_are_too_wide(width):
    text = mp.draw(mp.collectives.build("ring", 12), width=width)
    assert max(map(len, text.splitlines())) <= width
    for hop in range(1, 23):
        assert f"hop {hop} " in text


def test_a_cell_that_is_too_wide_is_cut_with_a_mark():
    text = mp.draw(mp.collectives.build("gather-add", 4), width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert ">C0@3 <P1@1 C0+=P1" in text and "…" in text


def test_contributions_are_counted_where_they_cannot_be_named():
    assert "whose contributions" in mp.draw(mp.collectives.build("ring", 4), width=100)
    assert "how many contributions" in mp.draw(mp.collectives.build("ring", 8), width=100)
    assert "takes more room" in mp.draw(mp.collectives.build("ring", 16), width=80)


def test_contributions_kept_apart_are_named():
    text = mp.draw(mp.collectives.build("gather-add", 3))
    assert "0·· P2" in text and "P contribution kept apart" in text
