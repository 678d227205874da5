"""Programs as text: what is written reads back, and what cannot be read is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.collectives import ALL_REDUCES, OTHERS, build
from microparallel.program import (
    Act,
    Add,
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Broadcast,
    Bucket,
    Collective,
    Forward,
    ForwardBackward,
    Free,
    Grad,
    Join,
    Named,
    OptimizerStep,
    Parameters,
    Part,
    Program,
    Recv,
    ReduceScatter,
    Send,
    Shard,
    Slices,
    State,
    TrainingStep,
    from_text,
    parse_value,
    to_text,
)

numbers = st.integers(0, 30)
values = st.one_of(
    st.builds(Act, numbers, numbers),
    st.builds(Grad, numbers, numbers),
    st.builds(lambda start, length: Slices(start, start + length + 1), numbers, numbers),
    st.builds(Part, numbers),
    st.builds(Bucket, numbers, st.none() | numbers),
    st.builds(Parameters, numbers),
    st.builds(Shard, st.builds(Bucket, numbers, numbers) | st.builds(Parameters, numbers) | st.builds(State, numbers)),
    st.builds(Named, st.sampled_from(["loss", "w", "norm.1", "learnt-order", "A0"])),
)
algorithms = st.sampled_from(["auto", "ring", "gather-add"])
operations = st.one_of(
    *(st.builds(kind, numbers, numbers) for kind in (Forward, Backward, BackwardInput, BackwardWeight)),
    st.builds(ForwardBackward, st.builds(Forward, numbers, numbers), st.builds(Backward, numbers, numbers)),
    st.builds(Send, values, numbers),
    st.builds(Recv, values, numbers, st.booleans()),
    st.builds(Add, values, values),
    st.builds(Free, values),
    st.builds(AllReduce, values, st.sampled_from(["dp", "pp"]), algorithms),
    st.builds(Broadcast, values, st.sampled_from(["dp", "pp"]), numbers, algorithms),
    st.builds(ReduceScatter, values, st.sampled_from(["dp", "pp"]), algorithms),
    st.builds(AllGather, values, st.sampled_from(["dp", "pp"]), algorithms),
    st.just(OptimizerStep()),
    st.just(Join()),
)
goals = st.one_of(
    st.builds(TrainingStep, st.integers(1, 9), st.integers(1, 9)),
    st.builds(
        lambda stages, sharded: TrainingStep(stages, 2, ((0, stages),), (), sharded),
        numbers.map(abs).filter(bool),
        st.booleans(),
    ),
    st.builds(TrainingStep.of, st.integers(1, 9), st.sets(st.integers(0, 20), min_size=1)),
    st.builds(Collective, st.sampled_from(["all-reduce", "reduce-scatter", "all-gather"]), st.integers(1, 9)),
    st.builds(Collective, st.sampled_from(["broadcast", "reduce", "scatter", "gather"]), st.integers(1, 9), numbers),
)
programs = st.builds(
    Program,
    st.text("abcxyz-0123456789", min_size=1),
    goals,
    st.lists(st.lists(operations, max_size=6).map(tuple), min_size=1, max_size=12).map(tuple),
)


@given(programs)
def test_what_is_written_reads_back(program):
    assert from_text(to_text(program)) == program


def test_a_mesh_reads_back():
    ranks = ((AllReduce(Named("loss"), "dp", "ring"), Broadcast(Named("w"), "pp", 0)),) * 6
    program = Program("grid", TrainingStep(1, 1), ranks, mesh=(("dp", 2), ("pp", 3)))
    assert "mesh: dp 2, pp 3\nrank 0: *:loss@dp:ring ^:w@pp/0\n" in to_text(program)
    assert from_text(to_text(program)) == program


@given(values)
def test_values_read_back(value):
    assert parse_value(str(value)) == value


@pytest.mark.parametrize("name", ALL_REDUCES | OTHERS)
def test_every_collective_reads_back(name):
    for ranks in (1, 2, 5, 8):
        program = build(name, ranks)
        assert from_text(to_text(program)) == program


def test_remarks_and_blank_lines():
    text = "# a ring\nprogram ring\n\ngoal: all-reduce of 1 slice   # one\nrank 0:   # nothing to do\n"
    assert from_text(text) == Program("ring", Collective("all-reduce", 1), ((),))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: >C0", "line 3: '>C0' is no operation"),
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: >X0@1", "line 3: 'X0' names no value"),
        ("program x\ngoal: all-reduce of 1 slice\nrank 1: >C0@1", "line 3: rank 1 comes where rank 0 should"),
        ("program x\ngoal: world peace\nrank 0:", "line 2: 'world peace' is no goal"),
        ("program x\nrank 0:", "has no line `goal:"),
        ("goal: all-reduce of 1 slice\nrank 0:", "has no line `program NAME`"),
        ("program x\ngoal: all-reduce of 1 slice", "has no ranks"),
        ("program x\nhello\n", "line 2: 'hello' begins no line of a program"),
        ("program x\ngoal: broadcast of 2 slices\nrank 0:", "line 2: broadcast needs a root"),
        ("program x\ngoal: all-reduce of 0 slices\nrank 0:", "line 2: a collective has 1 to 100,000 slices, not 0"),
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: >C0@²", "line 3: '>C0@²' is no operation"),
        ("program x\nprogram y", "line 2: a second name; the program is called 'x' already"),
        (
            "program x\ngoal: training step of 2 stages, 1 micro-batch, buckets 0:2 1:2\nrank 0:",
            "line 2: stage 1 is in bucket 0:2 and in another",
        ),
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: ~A0.0/@dp", "line 3: 'A0.0/': A0.0 has no shards"),
        ("program x\ngoal: training step of 1 stage, 1 micro-batch, sharded\nrank 0:", "every stage must be in one"),
        ("program x\ngoal: all-reduce of 1 slice\nmesh: dp two\nrank 0:", "line 3: 'dp two' is no mesh"),
        ("program x\ngoal: all-reduce of 1 slice\nmesh: dp 2\nmesh: dp 2\nrank 0:", "line 4: a second mesh"),
        ("program x\ngoal: all-reduce of 1 slice\nmesh: dp 2\nrank 0:", "is dp 2, and it has 1 ranks"),
        ("program x\ngoal: all-reduce of 1 slice\nmesh: dp 1, dp 1\nrank 0:", "names an axis twice"),
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: ^:w@dp", "line 3: '\\^:w@dp' is no operation"),
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: *U0@dp/0", "line 3: '\\*U0@dp/0' is no operation"),
        ("program x\ngoal: all-reduce of 1 slice\nrank 0: *:1@dp", "line 3: '1' is no name of a value"),
        ("program x\ngoal: all-reduce of 9 slices\nrank 0: >C3:3@1", r"line 3: Slices\(3, 3\) has no slices"),
    ],
)
def test_what_cannot_be_read_is_named(text, words):
    with pytest.raises(mp.errors.ProgramError, match=words):
        from_text(text)


def test_a_byte_order_mark_does_no_harm():
    assert from_text("\ufeff" + to_text(build("ring", 2))) == build("ring", 2)
