"""The walk: operations come as soon as they can be done, and a rank that cannot go on says what it waits for."""

import pytest

import microparallel as mp
from microparallel.pipeline.programs import line_up
from microparallel.program import Policy, Walk, from_text


def program(*ranks, goal="all-reduce of 2 slices"):
    return from_text("\n".join(["program test", f"goal: {goal}", *(f"rank {n}: {ops}" for n, ops in enumerate(ranks))]))


def walked(subject, policy=None):
    walk = Walk(subject, policy)
    return [f"{cursor.rank}{cursor.op}" for cursor in walk], [str(wait) for wait in walk.waits()]


def test_each_rank_goes_on_as_far_as_it_can():
    ring = program(">C0@1 <+C1@1", ">C1@0 <+C0@0")
    assert walked(ring) == (["0>C0@1", "1>C1@0", "1<+C0@0", "0<+C1@1"], [])


@pytest.mark.parametrize(
    ("sends", "waits"),
    [
        ("buffered", []),
        ("rendezvous", []),
        ("blocking", ["rank 0 sends C0 to rank 1", "rank 1 sends C1 to rank 0"]),
    ],
)
def test_what_a_send_means(sends, waits):
    assert walked(program(">C0@1 <C1@1", ">C1@0 <C0@0"), Policy(sends))[1] == waits


def test_who_waits_for_whom():
    assert walked(program("<C0@1", "*:x@dp", "*:x@dp", "*:x@dp *:x@dp"))[1] == [
        "rank 0 waits for C0 from rank 1",
        "rank 3 waits for rank 1 at *:x@dp",
    ]


def test_a_walk_on_two_lanes_waits_for_what_is_needed():
    class Lanes(Policy):
        lanes = True

    step = program(
        "F0.0 >A0.0@1 <G0.0@1 B0.0",
        "<A0.0@0 F1.0 B1.0 >G0.0@0 = S",
        goal="training step of 2 stages, 1 micro-batch",
    )
    done, waits = walked(step, Lanes("rendezvous"))
    assert waits == [] and done.index("1<A0.0@0") < done.index("1F1.0") < done.index("0B0.0")
    # A Send does not stop its lane, whether its value has been made or not.
    assert done.index("0>A0.0@1") < done.index("1F1.0") and done.index("1B1.0") < done.index("0<G0.0@1")


def test_ranks_take_turns_where_a_policy_says_so():
    lines = line_up(mp.schedules.build("gpipe", 2, 3))
    assert " ".join(map(str, lines[1])) == "<A0.0@0 <A0.1@0 <A0.2@0 >G0.0@0 >G0.1@0 >G0.2@0"
