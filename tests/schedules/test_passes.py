"""Passes: messages and frees are put where they belong, and forwards stand alone."""

from dataclasses import replace

import pytest

import microparallel as mp
from microparallel.program import Act, Forward, Free, Recv, Send, TrainingStep, from_text, halves, to_text
from microparallel.schedules import PIPELINES, build, forwards_only
from microparallel.verifier import Missing
from microparallel.verifier.order import check_matching, check_order

SHAPES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3, 5, 8)]


def order(program, rank):
    return " ".join(map(str, program.ranks[rank]))


def test_builders_give_the_order_of_computation_only():
    for builder in PIPELINES.values():
        text = to_text(builder(3, 4))
        assert not set("<>!") & set(text)


def test_lowering_sends_receives_and_frees():
    program = build("gpipe", 2, 2)
    assert order(program, 0) == ("F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 B0.0 !A0.0 !G0.0 <G0.1@1 B0.1 !A0.1 !G0.1")
    assert order(program, 1) == (
        "<A0.0@0 F1.0 <A0.1@0 F1.1 B1.0 !A0.0 !A1.0 >G0.0@0 !G0.0 B1.1 !A0.1 !A1.1 >G0.1@0 !G0.1"
    )


def test_lowering_receives_in_the_order_of_sending():
    """Rank 1 needs micro-batch 1 first, but rank 0 sent micro-batch 0 first: it takes both."""
    program = from_text(
        "program odd\ngoal: training step of 2 stages, 2 micro-batches\n"
        "rank 0: F0.0 F0.1 B0.0 B0.1\nrank 1: F1.1 F1.0 B1.0 B1.1"
    )
    lowered = mp.schedules.lower(program)
    mp.verify(lowered)
    assert order(lowered, 1).startswith("<A0.0@0 <A0.1@0 F1.1 F1.0")


@pytest.mark.parametrize("name", PIPELINES)
def test_messages_may_be_left_out(name):
    """verify, simulate and draw take a schedule that only computes as if its messages had been written down."""
    written, left_out = build(name, 3, 4), PIPELINES[name](3, 4)
    mp.verify(left_out)
    assert mp.schedules.complete(left_out) == written
    assert mp.simulate(left_out) == mp.simulate(written)
    assert mp.draw(left_out) == mp.draw(written)
    assert mp.draw(left_out, view="clock") == mp.draw(written, view="clock")
    assert mp.draw(left_out, as_="html") == mp.draw(written, as_="html")


def test_what_is_completed_is_only_a_schedule_whose_ranks_need_something_from_each_other():
    ddp, ring = mp.schedules.ddp(layers=4, buckets=2, ranks=2), mp.collectives.build("ring", 2)
    half = from_text(
        "program half\ngoal: training step of 2 stages, 1 micro-batch\n"
        "rank 0: F0.0 >A0.0@1 B0.0\nrank 1: <A0.0@0 F1.0 B1.0"
    )
    for program in (PIPELINES["gpipe"](1, 2), ddp, ring, half):
        assert mp.schedules.complete(program) is program
    with pytest.raises(Missing):
        mp.verify(half)
    with pytest.raises(Missing):
        mp.verify(PIPELINES["gpipe"](2, 2), completed=False)


def test_verify_names_what_no_rank_makes():
    program = from_text("program half\ngoal: training step of 2 stages, 1 micro-batch\nrank 0: F0.0 B0.0\nrank 1: B1.0")
    with pytest.raises(Missing) as missing:
        mp.verify(program)
    assert (missing.value.rank, str(missing.value.op), str(missing.value.value)) == (1, "B1.0", "A1.0")


@pytest.mark.parametrize("name", PIPELINES)
def test_forwards_alone_need_no_gradient_and_come_to_their_end(name):
    for ranks, microbatches in SHAPES:
        whole = build(name, ranks, microbatches)
        program = forwards_only(whole)
        check_matching(program)
        check_order(program, "buffered")
        check_order(program, "rendezvous")
        assert {type(op) for ops in program.ranks for op in ops} <= {Forward, Send, Recv, Free}
        assert all(isinstance(op.value, Act) for ops in program.ranks for op in ops if not isinstance(op, Forward))
        for ops, original in zip(program.ranks, whole.ranks, strict=True):
            wanted = [half for op in original for half in halves(op) if isinstance(half, Forward)]
            assert [op for op in ops if isinstance(op, Forward)] == wanted
            assert sum(isinstance(op, Free) for op in ops) == len({value for op in ops for value in _touched(op)})


def _touched(op):
    if isinstance(op, Forward):
        return [Act(op.stage, op.microbatch)] + [Act(op.stage - 1, op.microbatch)] * (op.stage > 0)
    return [op.value]


def test_forwards_of_a_program_with_messages_of_its_own_are_lowered_anew():
    program = build("1f1b", 3, 4)
    assert forwards_only(program) == forwards_only(replace(program, goal=TrainingStep(3, 4)))
    assert forwards_only(forwards_only(program)).ranks == forwards_only(program).ranks
