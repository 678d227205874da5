"""The one dependency rule: what operations need and make, and what must not be overwritten while it is sent."""

import itertools

import pytest
import torch

import microparallel as mp
from microparallel.comms import run_in_process
from microparallel.comms.interpreter import rounds
from microparallel.program import (
    Act,
    Add,
    Bucket,
    OpenSends,
    Parameters,
    Part,
    Recv,
    Rules,
    Send,
    Shard,
    Slices,
    from_text,
    halves,
    parse_op,
    peak_activations,
    touch,
)
from microparallel.program.rules import Version, held_activations, live_activations
from microparallel.verifier.order import check_order


def program(*ranks, goal="all-reduce of 2 slices"):
    return from_text("\n".join(["program test", f"goal: {goal}", *(f"rank {n}: {ops}" for n, ops in enumerate(ranks))]))


# ── what operations need and make ───────────────────────────────────────────────────────────────────────────────────

STEP = "B0.0 B1.0 B1.2 W2.0 *U1@dp S"
GOAL = "training step of 4 stages, 3 micro-batches, buckets 3:4 1:3"
RULE = {  # operation: what it needs, and what it makes
    "F0.1": ("", "A0.1"),
    "F2.1": ("A1.1", "A2.1"),
    "F1:3.1": ("A0.1", "A1.1 A2.1"),
    "B0.1": ("A0.1 G0.1", "D0.1"),
    "B2.1": ("A1.1 A2.1 G2.1", "G1.1 D2.1"),
    "B3.1": ("A2.1 A3.1", "G2.1 D3.1"),  # the last stage makes its output's gradient from the loss
    "I2.1": ("A1.1 A2.1 G2.1", "G1.1 R2.1"),
    "W2.1": ("A1.1 A2.1 R2.1", "D2.1"),
    "F1.2&B2.1": ("A0.2 A1.1 A2.1 G2.1", "A1.2 G1.1 D2.1"),
    ">A0.1@1": ("A0.1", ""),
    "<A0.1@1": ("", "A0.1"),
    "<+C0@1": ("C0", "C0"),
    "C0+=P1": ("P1 C0", "C0"),
    "!A0.1": ("A0.1", ""),
    "*U1@dp": ("D1.0 D1.2 D2.0", "U1"),  # the gradients of its stages that this rank makes
    "*U0@dp": ("", "U0"),
    "*:loss@dp": ("", ":loss"),
    "^:w@dp/0": ("", ":w"),
    "S": ("U1 D0.0", ""),  # stage 0 is in no bucket
    "%U1@dp": ("D1.0 D1.2 D2.0", "U1/"),
    "%U1.1@dp": ("D1.2", "U1.1/"),  # of this rank's second micro-batch
    "%U1.5@dp": ("", "U1.5/"),  # it has no sixth
    "~T1@dp": ("T1/", "T1"),
    "*U1.1/@replica": ("U1.1/", "U1.1/"),  # a new version of it
    "=": ("", ""),
    "?forward/0/forward": ("", ""),
}


@pytest.mark.parametrize("op", RULE)
def test_needs_and_makes(op):
    subject = program(STEP, goal=GOAL)
    rules, needs_and_makes = Rules(subject.goal, subject.ranks[0]), RULE[op]
    found = rules.needs(parse_op(op)), rules.makes(parse_op(op))
    assert tuple(" ".join(map(str, values)) for values in found) == needs_and_makes


def test_a_bucket_that_the_goal_does_not_name():
    subject = program(STEP, goal=GOAL)
    with pytest.raises(mp.errors.ProgramError, match="there is no bucket U2; the goal names 2"):
        Rules(subject.goal, subject.ranks[0]).needs(parse_op("*U2@dp"))


def test_an_operation_needs_the_version_that_stands_last_before_it():
    step = program(
        "~T0@dp F0.0 !T0 ~T0@dp B0.0 %U0@dp *U0/@replica S",
        goal="training step of 1 stage, 1 micro-batch, buckets 0:1, sharded",
    )
    versions = Rules(step.goal, step.ranks[0]).versions()
    assert {str(step.ranks[0][place]): needs for place, needs in versions.items()} == {
        "B0.0": (Act(0, 0), Version(Parameters(0), 2)),
        "S": (Version(Shard(Bucket(0)), 2),),
    }
    assert Rules(step.goal, step.ranks[0][:3]).versions() == {}


def test_halves():
    words = {op: " ".join(map(str, halves(parse_op(op)))) for op in ("F0.1", "F0:2.1", "F0.1&B1.0", ">A0.1@1", "S")}
    assert words == {"F0.1": "F0.1", "F0:2.1": "F0.1 F1.1", "F0.1&B1.0": "F0.1 B1.0", ">A0.1@1": "", "S": ""}


def test_an_activation_is_held_until_the_backward_of_its_weights():
    ops = [parse_op(op) for op in ["F0.0", "F0.1", "I0.0", "W0.0", "F0.2&B0.1", "B0.2"]]
    assert [live_activations(op) for op in ops] == [(1, 0), (1, 0), (0, 0), (0, 1), (1, 1), (0, 1)]
    assert list(held_activations(ops)) == [1, 2, 2, 2, 2, 1] and peak_activations(ops) == 2


# ── what must not be overwritten ────────────────────────────────────────────────────────────────────────────────────


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
    run_in_process(PASSED_ON, tensors)
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
