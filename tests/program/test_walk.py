"""One rule and one walk: what changes the rule changes everybody who reads it."""

import itertools

import pytest
import torch

import microparallel as mp
from microparallel.comms.interpreter import rounds
from microparallel.pipeline.programs import message_order
from microparallel.program import Add, OpenSends, Part, Policy, Recv, Send, Slices, Walk, from_text, touch
from microparallel.program.symbols import Contents
from microparallel.verifier.order import check_order


def program(*ranks, goal="all-reduce of 2 slices"):
    return from_text("\n".join(["program test", f"goal: {goal}", *(f"rank {n}: {ops}" for n, ops in enumerate(ranks))]))


def walked(subject, policy=None):
    walk = Walk(subject, policy)
    return [f"{cursor.rank}{cursor.op}" for cursor in walk], [str(wait) for wait in walk.waits()]


# ── the rule ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_write_waits_for_the_sends_that_read_the_same_memory():
    values = [Slices(start, stop) for start, stop in itertools.combinations(range(5), 2)] + [Part(0), Part(1)]
    for sent, value in itertools.product(values, values):
        sends = OpenSends()
        sends.add(sent, "a send")
        for op in (Recv(value, 1), Recv(value, 1, reduce=True), Add(Part(9), value)):
            assert bool(sends.conflicts(op)) == touch(sent, value)
        sends.close(sent, "a send")
        assert not sends.conflicts(Recv(value, 1)) and not list(sends)


def test_sends_are_closed_one_by_one():
    sends = OpenSends()
    sends.add(Slices(0, 3), "long")
    sends.add(Slices(2, 3), "short")
    assert list(sends) == ["long", "short"]
    assert sends.conflicts(Recv(Slices(0, 4), 1)) == {"long": Slices(0, 3), "short": Slices(2, 3)}
    sends.close(Slices(0, 3), "long")
    assert not sends.conflicts(Recv(Slices(0, 2), 1)) and list(sends) == ["short"]


SWAP = program(">C0@1 <C0@1", ">C0@0 <C0@0")
HELD_UP = program(">C0@1 <+C0@2", "<+C0@3 <+C0@0", ">C0@0", ">C0@1", goal="reduce of 1 slice, root 1")
SLOW = mp.Costs(latency=1, links={(3, 1): mp.Link(latency=20)})
PASSED_ON = program(">C0@1 <C0@2", "<C1@2 <C0@0", ">C0@0 >C1@1")


def what_the_readers_say():
    """The verifier, the simulator, the run in one process, and the interpreter of ranks with a process of their own."""
    try:
        check_order(SWAP, "rendezvous")
        verdict = "fine"
    except mp.errors.ProgramError as error:
        verdict = str(error).splitlines()[0]
    tensors = [torch.tensor([10.0 * rank, 1.0]) for rank in (1, 2, 3)]
    mp.run_in_process(PASSED_ON, tensors)
    cut = list(rounds([Send(Slices(0, 1), 1), Add(Part(1), Slices(0, 1))]))
    added = max(event.end for event in mp.simulate(HELD_UP, SLOW).by_rank[0] if isinstance(event.op, Recv))
    return verdict, added, tensors[1].tolist(), len(cut)


def test_all_readers_ask_the_one_rule(monkeypatch):
    deadlock = (
        "deadlock under rendezvous sends: rank 0 must not overwrite C0 while it sends C0 to rank 1, "
        "rank 1 must not overwrite C0 while it sends C0 to rank 0"
    )
    assert what_the_readers_say() == (deadlock, 21, [10.0, 1.0], 2)
    monkeypatch.setattr(OpenSends, "conflicts", lambda _sends, _op: {})
    # Now it is overwritten while it is sent: rank 1 gets what rank 2 sent to rank 0.
    assert what_the_readers_say() == ("fine", 1, [30.0, 1.0], 1)


# ── the walk ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    orders = message_order(mp.schedules.build("gpipe", 2, 3))
    assert " ".join(map(str, orders[1])) == "<A0.0@0 <A0.1@0 <A0.2@0 >G0.0@0 >G0.1@0 >G0.2@0"


def test_symbols_count_what_is_added_twice():
    goal = program("", goal="all-reduce of 2 slices").goal
    mine = Contents(goal, 0)
    for _ in range(2):
        mine.write(Slices(0, 1), ({(1, 0): 1},), add=True)
    mine.write(Slices(1, 2), ({(1, 0): 1},), add=False)
    assert mine.slices == [{(0, 0): 1, (1, 0): 2}, {(1, 0): 1}]
