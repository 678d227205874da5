"""The verifier accepts every collective we build, and names what is wrong with a broken one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import microparallel as mp
from microparallel.collectives import ALL_REDUCES, OTHERS, build
from microparallel.program import from_text
from microparallel.topology.hosts import Hosts
from microparallel.verifier import Deadlock


@pytest.mark.parametrize("name", ALL_REDUCES | OTHERS)
def test_every_collective_is_right_for_any_number_of_ranks(name):
    for ranks in range(1, 20):
        mp.verify(build(name, ranks))


@settings(max_examples=60, derandomize=True)
@given(places=st.lists(st.integers(0, 4), min_size=1, max_size=11), data=st.data())
def test_two_levels_with_any_ranks_on_any_host(places, data):
    hosts, ranks = Hosts.of(places), len(places)
    for name in ("gather-add", "hierarchical", "hierarchical-reduce-scatter", "hierarchical-all-gather", "leaders"):
        mp.verify(build(f"{name}-{hosts}", ranks))
    root = data.draw(st.integers(0, ranks - 1))
    for name in ("leaders-broadcast", "leaders-reduce"):
        mp.verify(build(f"{name}-{hosts}", ranks, root=root))


@pytest.mark.parametrize("name", ALL_REDUCES | OTHERS)
def test_blocking_sends_stop_what_passes_round_in_circles(name):
    survives = name.removeprefix("direct-").removeprefix("leaders-") in (
        "naive",
        "tree",
        "broadcast",
        "reduce",
        "scatter",
        "gather",
    )
    if survives:
        mp.verify(build(name, 6), sends="blocking")
    else:
        with pytest.raises(Deadlock):
            mp.verify(build(name, 6), sends="blocking")


def test_a_deadlock_is_explained_as_a_circle():
    with pytest.raises(mp.errors.ProgramError) as caught:
        mp.verify(build("ring", 3), sends="blocking")
    assert str(caught.value) == (
        "deadlock under blocking sends: rank 0 sends C0 to rank 1, rank 1 sends C1 to rank 2, rank 2 sends C2 to rank 0"
        "\n  rank 0: [>C0@1] <+C2@2 >C2@1 <+C1@2 …"
        "\n  rank 1: [>C1@2] <+C0@0 >C0@2 <+C2@0 …"
        "\n  rank 2: [>C2@0] <+C1@1 >C1@0 <+C0@1 …"
    )


def broken(*ranks, goal="all-reduce of 1 slice"):
    rows = [f"rank {rank}: {ops}" for rank, ops in enumerate(ranks)]
    return from_text("\n".join(["program broken", f"goal: {goal}", *rows]))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (broken(">C0@1", ""), "rank 0 does >C0@1, which rank 1 never receives"),
        (broken("<C0@1", ""), "rank 0 does <C0@1, which rank 1 never sends"),
        (broken(">C0@0"), "a message to itself"),
        (broken(">C0@7", ""), "only ranks 0 to 1"),
        (broken(">C0@1", "<C1@0", goal="all-reduce of 2 slices"), "is sent as >C0@1 and received as <C1@0"),
        (
            broken("<+C0@1 >C0@1", "<+C0@0 >C0@0"),
            "buffered sends: rank 0 waits for C0 from rank 1, rank 1",
        ),
        (
            broken(">C0@1", "<C0@0"),
            r"ends with rank 0's part in slice 0, and should have rank 0's part \+ rank 1's",
        ),
        (broken(">C0@1 <+C0@1", "<+C0@0 >C0@0"), "rank 0 ends with rank 0's part 2 times"),
        (broken("C0+=P1", ""), "rank 0 reads P1, which it has not received"),
        (broken("F0.0"), "rank 0 does F0.0, which is no operation of a collective"),
        (broken("", "", goal="reduce of 1 slice, root 7"), "root is rank 7, and there are ranks 0 to 1"),
        (
            broken(">C0@1", "<C0@0 C1+=C0", goal="broadcast of 2 slices, root 0"),
            "ends with rank 0's part of slice 0 in slice 1, and should have rank 0's part",
        ),
        (
            broken(">C0@1 <P1@1 C0+=P1", ">C0@0 <P0@0 C0+=P0", goal="all-reduce of 2 slices"),
            "message 1 from rank 0 to rank 1 is sent as >C0@1 and received as <P0@0",
        ),
        (
            broken(">C0@1 <C0@1 >C0@1 <+C0@1", ">C0@0 <C0@0 >C0@0 <+C0@0"),
            "under rendezvous sends: rank 0 must not overwrite C0 while it sends C0 to rank 1, rank 1 must not",
        ),
        (broken(">C5@1", "<C5@0"), "rank 0 names C5, and the tensor has 1 slices"),
    ],
)
def test_what_is_wrong_is_named(program, words):
    with pytest.raises(mp.errors.ProgramError, match=words):
        mp.verify(program)


def test_a_value_must_not_be_overwritten_while_it_is_sent():
    """With a buffer this works. Without one, rank 0 waits for rank 1, that for rank 2, and that for rank 0."""
    program = broken(">C0@1 <C0@2 >C1@2", "<C1@2 <C0@0", ">C0@0 <C1@0 >C1@1", goal="all-reduce of 2 slices")
    with pytest.raises(mp.errors.ProgramError) as caught:
        mp.verify(program)
    assert str(caught.value) == (
        "deadlock under rendezvous sends: rank 0 must not overwrite C0 while it sends C0 to rank 1, "
        "rank 1 waits for C1 from rank 2, rank 2 waits for C1 from rank 0"
        "\n  rank 0: >C0@1 [<C0@2] >C1@2"
        "\n  rank 1: [<C1@2] <C0@0"
        "\n  rank 2: >C0@0 [<C1@0] >C1@1"
    )
