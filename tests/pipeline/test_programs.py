"""One order for the messages of all ranks."""

from hypothesis import given
from hypothesis import strategies as st

from microparallel.pipeline.programs import message_order
from microparallel.program import Recv, Send, from_text
from microparallel.schedules import PIPELINES, build, forwards_only, lower


@given(
    name=st.sampled_from(list(PIPELINES)),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 14),
    only_forwards=st.booleans(),
)
def test_the_order_has_all_messages_of_a_rank_and_keeps_each_channels_order(name, ranks, microbatches, only_forwards):
    program = build(name, ranks, microbatches)
    program = forwards_only(program) if only_forwards else program
    for ops, order in zip(program.ranks, message_order(program), strict=True):
        messages = [op for op in ops if isinstance(op, Send | Recv)]
        assert sorted(map(str, order)) == sorted(map(str, messages))
        for peer in range(ranks):
            assert [op for op in order if isinstance(op, Send) and op.to == peer] == [
                op for op in messages if isinstance(op, Send) and op.to == peer
            ]
            assert [op for op in order if isinstance(op, Recv) and op.source == peer] == [
                op for op in messages if isinstance(op, Recv) and op.source == peer
            ]


def test_a_rank_receives_a_message_before_it_answers():
    goal = "goal: training step of 2 stages, 2 micro-batches"
    program = from_text(f"program p\n{goal}\nrank 0: F0.0 F0.1 B0.0 B0.1\nrank 1: F1.0 B1.0 F1.1 B1.1")
    first, second = message_order(lower(program))
    assert " ".join(map(str, first)) == ">A0.0@1 >A0.1@1 <G0.0@1 <G0.1@1"
    assert " ".join(map(str, second)) == "<A0.0@0 <A0.1@0 >G0.0@0 >G0.1@0"
