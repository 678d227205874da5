"""ZeRO's steps are right for any number of layers, buckets, ranks and micro-batches, and cost what the formulas say."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import microparallel as mp
from microparallel.program import AllGather, Delta, Free, OptimizerStep, Parameters, from_text, to_text
from microparallel.schedules import free_dead_values, zero
from microparallel.trace import reasons
from microparallel.trace.memory import Sizes


@pytest.mark.parametrize("gather", ["after", "before"])
@pytest.mark.parametrize("level", [1, 2])
def test_any_number_of_everything(level, gather):
    for ranks, layers, microbatches in itertools.product((1, 2, 3, 5), (1, 2, 4), (1, 2, 3)):
        for buckets in range(1, layers + 1):
            program = zero(level, layers, ranks, microbatches, buckets=buckets, gather=gather)
            mp.verify(program)
            mp.verify(free_dead_values(program))
            mp.simulate(program)
            assert from_text(to_text(program)) == program


def test_the_drawn_examples_are_what_is_built():
    assert to_text(zero(1, 2, 2, 2)).splitlines()[2] == (
        "rank 0: F0.0 F1.0 B1.0 B0.0 F0.2 F1.2 B1.2 %U0@dp B0.2 %U1@dp S ~T1@dp ~T0@dp"
    )
    assert to_text(zero(2, 2, 2, 1)).splitlines()[2] == (
        "rank 0: F0.0 F1.0 B1.0 %U0.0@dp !D1.0 B0.0 %U1.0@dp !D0.0 S ~T1@dp ~T0@dp"
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_on_the_wire(ranks, microbatches):
    """As many as an all-reduce in level 1; in level 2 gradients travel once for each micro-batch."""
    copy = 6 * 10 * (ranks - 1) / ranks  # six layers of ten bytes
    costs = mp.Costs(bytes_per_value=10, seconds_per_byte=1)
    for gather in ("after", "before"):
        first = mp.simulate(zero(1, 6, ranks, microbatches, buckets=2, gather=gather), costs)
        second = mp.simulate(zero(2, 6, ranks, microbatches, buckets=2, gather=gather), costs)
        assert first.bytes_sent == pytest.approx([2 * copy] * ranks)
        assert second.bytes_sent == pytest.approx([(microbatches + 1) * copy] * ranks)


def test_a_forward_hides_the_gathers_that_stand_before_it():
    costs = mp.Costs(seconds_per_byte=1)
    before, after = (mp.simulate(zero(1, 8, 2, buckets=8, gather=gather), costs) for gather in ("before", "after"))
    assert max(before.exposed_communication) == 1  # the first gather, and the last reduce-scatter
    assert max(after.exposed_communication) == 4.5
    assert before.bytes_sent == after.bytes_sent


def test_a_layer_waits_for_the_parameters_of_its_bucket():
    trace = mp.simulate(zero(1, 4, 2, buckets=2, gather="before"), mp.Costs(seconds_per_byte=10))
    ends = {str(event.op): event.end for event in trace.by_rank[0]}
    starts = {str(event.op): event.start for event in trace.by_rank[0]}
    assert starts["F0.0"] == ends["~T1@dp"] and starts["F2.0"] == ends["~T0@dp"] > ends["F1.0"]


def test_level_2_lets_whole_gradients_go():
    gone = [op.value for op in zero(2, 2, 2, 2).ranks[1] if isinstance(op, Free)]
    assert gone == [Delta(1, 1), Delta(0, 1), Delta(1, 3), Delta(0, 3)]
    assert not any(isinstance(op, Free) for op in zero(1, 2, 2, 2).ranks[1])


def test_every_rank_updates_once():
    for level in (1, 2):
        assert [ops.count(OptimizerStep()) for ops in zero(level, 3, 4, 2).ranks] == [1] * 4


# ── level 3: parameters are gathered where they are used ────────────────────────────────────────────────────────────


def units(prefetch, reshard=True, layers=4, ranks=2, microbatches=1, buckets=4):
    options = {"buckets": buckets, "prefetch": prefetch, "reshard_after_forward": reshard}
    return zero(3, layers, ranks, microbatches, **options)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_units_of_any_size_and_number(prefetch, reshard):
    """Gradients travel once for each micro-batch, and so do parameters, or twice, if they are let go in between."""
    for ranks, layers, microbatches in itertools.product((1, 2, 3), (1, 2, 4), (1, 2)):
        for buckets in range(1, layers + 1):
            program = units(prefetch, reshard, layers, ranks, microbatches, buckets)
            mp.verify(program)
            mp.verify(free_dead_values(program))
            assert from_text(to_text(program)) == program
            trace = mp.simulate(program, mp.Costs(bytes_per_value=10, seconds_per_byte=1))
            copy = layers * 10 * (ranks - 1) / ranks
            assert trace.bytes_sent == pytest.approx([(3 if reshard else 2) * microbatches * copy] * ranks)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("speed", [0, 0.1, 10])
def test_no_more_units_are_whole_than_is_allowed(prefetch, speed):
    sizes = Sizes(parameters=4, gradients=0, optimizer=0, activations=0)
    trace = mp.simulate(units(prefetch), mp.Costs(seconds_per_byte=speed, sizes=sizes))
    own = 4 * 4 / 2
    most = own + (prefetch + 1) * 4
    peak = trace.memory[0].peak_of("parameters")
    assert peak <= most if speed > 1 else peak == most  # slow gathers come one after another
    kept = mp.simulate(units(prefetch, reshard=False), mp.Costs(seconds_per_byte=speed, sizes=sizes))
    assert kept.memory[0].peak_of("parameters") == own + 4 * 4


def test_what_was_let_go_is_waited_for_again():
    """A backward does not begin with the parameters of its forward, nor a forward with those of the last backward."""
    trace = mp.simulate(units(prefetch=0, layers=2, buckets=2, microbatches=2), mp.Costs(seconds_per_byte=10))
    by_rank = sorted(trace.by_rank[0], key=lambda event: (event.start, event.end))
    uses = ["~T1@dp F0.{0}", "~T0@dp F1.{0}", "~T0@dp B1.{0} %U0.{1}@dp", "~T1@dp B0.{0} %U1.{1}@dp"]
    words = [one.format(2 * turn, turn) for turn in (0, 1) for one in uses]
    assert " ".join(str(event.op) for event in by_rank) == " ".join([*words, "S"])
    assert trace.makespan == 2 * (6 * 5 + 2 * 3)  # nothing hides anything: 6 exchanges of 5 and two layers of 3 a turn


def test_prefetching_hides_gathers():
    costs = mp.Costs(seconds_per_byte=1)
    exposed = [max(mp.simulate(units(prefetch), costs).exposed_communication) for prefetch in (0, 1, 2)]
    assert exposed[0] > exposed[1] >= exposed[2]


def test_the_drawn_example_of_level_3_is_what_is_built():
    assert to_text(zero(3, 3, 2)).splitlines()[2].replace("@dp", "").replace(".0", "") == (
        "rank 0: ~T2 ~T1 F0 !T2 ~T0 F1 !T1 F2 !T0 ~T0 ~T1 B2 %U0 !D2 !T0 ~T2 B1 %U1 !D1 !T1 B0 %U2 !D0 !T2 S"
    )


@given(
    layers=st.integers(1, 12),
    buckets=st.integers(1, 12),
    replicas=st.integers(1, 3),
    shards=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    prefetch=st.integers(0, 14),
    reshard=st.booleans(),
)
def test_at_no_place_are_more_units_whole_than_prefetch_allows(
    layers, buckets, replicas, shards, microbatches, prefetch, reshard
):
    """At most `prefetch` + 1, or all, where a unit is kept from its forward to its backward; and none in the end."""
    count = min(layers, buckets)
    options = {"buckets": count, "prefetch": prefetch, "reshard_after_forward": reshard, "replicas": replicas}
    for ops in zero(3, layers, replicas * shards, microbatches, **options).ranks:
        whole, most = set(), 0
        for op in ops:
            if isinstance(op, AllGather):
                assert op.value not in whole
                whole.add(op.value)
            elif isinstance(op, Free) and isinstance(op.value, Parameters):
                whole.remove(op.value)
            most = max(most, len(whole))
        assert most == min(count, prefetch + 1 if reshard else count)
        assert not whole


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("!T2 ~T0@dp F1.0", "~T0@dp F1.0", "has gathered T2 already"),
        ("~T1@dp F0.0 !T2", "F0.0 !T2", "does F1.0, which needs T1"),
        ("!T0 ~T0@dp ~T1@dp B2.0", "!T0 ~T1@dp B2.0", "does B2.0, which needs T0, and has freed it; ~T0@dp gathers it"),
        ("F0.0 !T2 ~T0@dp F1.0", "F0.0 !T2 !T1 ~T0@dp F1.0", "which needs T1, and has freed it"),
    ],
)
def test_what_goes_wrong_with_units_is_named(before, after, words):
    text = to_text(zero(3, 3, 2))
    assert before in text
    with pytest.raises(mp.errors.ProgramError) as refused:
        mp.verify(from_text(text.replace(before, after).replace(before.replace(".0", ".1"), after.replace(".0", ".1"))))
    assert words in str(refused.value)


# ── replicas, each of which keeps its parameters in parts ───────────────────────────────────────────────────────────


def test_the_drawn_example_of_replicas_is_what_is_built():
    rows = [f"~T0@dp F0.{r} !T0 ~T0@dp B0.{r} %U0.0@dp *U0.0/@replica !D0.{r} !T0 S" for r in range(4)]
    assert to_text(zero(3, 1, 4, replicas=2)).splitlines() == [
        "program zero-3 × 2",
        "goal: training step of 1 stage, 4 micro-batches, buckets 0:1, sharded",
        "mesh: replica 2, dp 2",
        *(f"rank {rank}: {row}" for rank, row in enumerate(rows)),
    ]


def test_one_replica_is_plain_zero():
    for level in (1, 2, 3):
        assert zero(level, 3, 4, 2, replicas=1) == zero(level, 3, 4, 2)
        assert not zero(level, 3, 4, 2).mesh


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_replicas_of_any_size_and_number(replicas, shards, reshard):
    """In a replica, each micro-batch sends 2 or 3 copies; between replicas, a rank's part there and back."""
    ranks = replicas * shards
    for layers, microbatches, prefetch in itertools.product((1, 2, 4), (1, 2), (0, 1, 9)):
        options = {"replicas": replicas, "prefetch": prefetch, "reshard_after_forward": reshard}
        for buckets in range(1, layers + 1):
            program = zero(3, layers, ranks, microbatches, buckets=buckets, **options)
            mp.verify(program)
            mp.verify(free_dead_values(program))
            assert from_text(to_text(program)) == program
            trace = mp.simulate(program, mp.Costs(bytes_per_value=10, seconds_per_byte=1))
            copy = layers * 10
            inside = (3 if reshard else 2) * (shards - 1) / shards * copy
            across = 2 * (replicas - 1) / replicas * copy / shards
            assert trace.bytes_sent == pytest.approx([microbatches * (inside + across)] * ranks)


def test_the_size_of_a_part_is_a_share_of_what_a_function_says():
    costs = mp.Costs(bytes_per_value=lambda value: {"U": 12, "T": 6}[str(value)[0]])
    trace = mp.simulate(zero(3, 1, 6, replicas=2), costs)
    assert {str(event.op): event.bytes for event in trace.by_rank[0] if not event.computes} == {
        "~T0@dp": 6,
        "%U0.0@dp": 12,
        "*U0.0/@replica": 4,
    }


def test_the_update_waits_for_the_sum_over_replicas():
    trace = mp.simulate(zero(3, 2, 4, replicas=2), mp.Costs(seconds_per_byte=1, optimizer=1))
    for events in trace.by_rank:
        times = {str(event.op): (event.start, event.end) for event in events}
        assert times["%U1.0@dp"][1] <= times["*U1.0/@replica"][0] < times["*U1.0/@replica"][1] == times["S"][0]
    said = {reason for place, reason in reasons(trace).items() if str(trace.events[place].op) == "S"}
    assert said == {f"rank {rank} waited for the all-reduce of U1.0/ before S" for rank in range(4)}


def test_a_rank_holds_a_part_of_its_replicas_copy():
    """Of 3 layers with 4 + 4 + 8 bytes, on 6 ranks: a sixth in one copy, half with three replicas."""
    for replicas, shards in ((1, 6), (2, 3), (3, 2), (6, 1)):
        trace = mp.simulate(zero(3, 3, 6, replicas=replicas))
        for memory in trace.memory:
            left = memory.at(trace.bounds[1])
            kept = {"parameters": 3 * 4 / shards, "gradients": 3 * 4 / shards, "optimizer": 3 * 8 / shards}
            assert {kind: left[kind] for kind in kept} == pytest.approx(kept)
            assert memory.peak_of("optimizer") == pytest.approx(kept["optimizer"])
            assert memory.peak_of("parameters") == pytest.approx(kept["parameters"] + 2 * 4)  # two units at a time


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((3, 2, 4), {"replicas": 3}, "replicas=3: 4 ranks do not make so many equal groups; choose a divisor of 4"),
        ((3, 2, 4), {"replicas": 0}, "replicas=0: 4 ranks do not make so many equal groups; choose a divisor of 4"),
        ((3, 2, 4), {"replicas": 8}, "replicas=8: 4 ranks do not make so many equal groups; choose a divisor of 4"),
        (
            (2, 2, 4),
            {"replicas": 2},
            "replicas=2: only at level 3 does a replica keep its parameters in parts; level=2",
        ),
        (
            (1, 2, 4),
            {"replicas": 2},
            "replicas=2: only at level 3 does a replica keep its parameters in parts; level=1",
        ),
        ((0, 2, 2), {}, "level=0: choose 1"),
        ((4, 2, 2), {}, "level=4: choose 1"),
        ((1, 0, 2), {}, "at least 1 each is needed"),
        ((1, 2, 2, 0), {}, "at least 1 each is needed"),
        ((1, 2, 2), {"buckets": 3}, "2 layers can be put into 1 to 2 buckets"),
        ((1, 2, 2), {"gather": "never"}, "gather='never': choose after"),
        ((3, 2, 2), {"gather": "after"}, "at level 3 parameters are gathered where they are used"),
        ((3, 2, 2), {"prefetch": -1}, "prefetch=-1: parameters are gathered 0 or more units ahead"),
        ((2, 2, 2), {"prefetch": 1}, "are for level 3"),
        ((1, 2, 2), {"reshard_after_forward": False}, "are for level 3"),
    ],
)
def test_what_makes_no_step(arguments, options, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        zero(*arguments, **options)
