"""Every schedule is right for every number of ranks and micro-batches, and what cannot be built is named."""

import itertools

import pytest

import microparallel as mp
from microparallel.program import Backward, Forward, OptimizerStep, from_text, to_text
from microparallel.schedules import (
    PIPELINES,
    build,
    data_parallel_step,
    dualpipev,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zbv,
)

# Numbers of ranks and micro-batches. Schedules change their course around m = p, 2p - 1 and 2p.
SMALL = [(p, m) for p in range(1, 6) for m in range(1, 13)]
LARGER = [(p, m) for p in range(6, 10) for m in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 24)]
ALL = [(p, m) for p in range(1, 10) for m in range(1, 25)]


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("shapes", [SMALL + LARGER, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_schedule_is_right_for_all_small_shapes(name, shapes):
    for ranks, microbatches in shapes:
        program = build(name, ranks, microbatches)
        mp.verify(program)
        assert program.world_size == ranks


@pytest.mark.parametrize("stages_per_rank", [1, 3, 4])
def test_interleaved_takes_any_number_of_stages_a_rank(stages_per_rank):
    for ranks in (1, 2, 3, 5):
        for microbatches in (1, 2, 4, 7, 10):
            mp.verify(build("interleaved", ranks, microbatches, stages_per_rank=stages_per_rank))


def test_ddp_takes_any_number_of_layers_and_buckets():
    for ranks in (1, 2, 5):
        for layers in range(1, 7):
            mp.verify(build("ddp-naive", ranks, layers=layers))
            for buckets in range(1, layers + 1):
                program = mp.schedules.ddp(layers, buckets, ranks)
                mp.verify(program)
                stages = [stage for start, stop in program.goal.buckets for stage in range(start, stop)]
                assert sorted(stages) == list(range(layers))


@pytest.mark.parametrize("name", PIPELINES)
def test_the_text_form_reads_back(name):
    program = build(name, 3, 5)
    assert from_text(to_text(program)) == program


def test_the_text_form_of_a_ddp_step_reads_back():
    for program in (build("ddp", 3, layers=7, buckets=3), build("ddp-naive", 2, layers=4)):
        assert from_text(to_text(program)) == program


def order(program, rank):
    return " ".join(map(str, program.ranks[rank]))


def test_orders_are_those_of_the_drawings():
    assert order(naive(3, 2), 1) == "F1.0 B1.0 F1.1 B1.1"
    assert order(gpipe(3, 2), 2) == "F2.0 F2.1 B2.0 B2.1"
    assert order(one_f_one_b(4, 6), 1) == "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 F1.5 B1.3 B1.4 B1.5"
    assert order(zb_h1(3, 4), 1) == "F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3"
    assert order(interleaved(2, 4), 0).startswith("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1")
    assert order(zbv(2, 4), 0).startswith("F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0")
    assert order(dualpipev(2, 4), 1) == (
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2&B1.0 F1.3&B2.1 F2.3&B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3"
    )


def test_builders_give_the_order_of_computation_only():
    for builder in PIPELINES.values():
        text = to_text(builder(3, 4))
        assert not set("<>!") & set(text)


def test_one_rank_needs_no_messages():
    for name in PIPELINES:
        assert build(name, 1, 3).messages_sent() == [0]


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


def test_lowering_names_what_nobody_makes():
    program = mp.program.Program("half", mp.program.TrainingStep(2, 1), ((), (Forward(1, 0), Backward(1, 0))))
    with pytest.raises(mp.errors.ProgramError, match=r"rank 1 does F1.0, which needs A0.0, and no rank makes that"):
        mp.schedules.lower(program)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("1f1", 4, 8), {}, "there is no schedule '1f1'; did you mean '1f1b'"),
        (("1f1b", 0, 8), {}, "ranks=0"),
        (("1f1b", 4, 0), {}, "microbatches=0"),
        (("1f1b", 4), {}, "no microbatches"),
        (("1f1b", 4, 8), {"stages_per_rank": 2}, "schedule '1f1b' does not take stages_per_rank; it takes no options"),
        (("interleaved", 4, 8), {"stages_per_rank": 0}, "stages_per_rank=0"),
        (("interleaved", 4, 8), {"layers": 2}, "does not take layers; it takes stages_per_rank"),
        (("ddp", 4, 8), {}, "microbatches=8: 'ddp' has none"),
        (("ddp", 4), {"layers": 3, "buckets": 4}, "buckets=4: 3 layers can be put into 1 to 3 buckets"),
        (("ddp-naive", 4), {"layers": 0}, "layers=0"),
    ],
)
def test_what_cannot_be_built_is_named(arguments, options, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        build(*arguments, **options)


# ── the step of DataParallel ────────────────────────────────────────────────────────────────────────────────────────


def test_ranks_may_have_any_numbers_of_micro_batches():
    for ranks in (1, 2, 3):
        for each in itertools.product(range(3), repeat=ranks):
            if not any(each):
                continue
            for overlap in (True, False):
                options = {"buffers": True, "weights": True, "order": True, "samples": True, "loss": True}
                program = data_parallel_step(2, ranks, each, overlap=overlap, **options)
                mp.verify(program)
                mp.simulate(program)
                assert program.goal.microbatches == sum(each)
                assert from_text(to_text(program)) == program
            gone = [rank for rank, count in enumerate(each) if not count]
            program = data_parallel_step(2, ranks, each, buffers=True, weights=True, joining=True, gone=gone)
            mp.verify(program)
            assert [OptimizerStep() in ops for ops in program.ranks] == [count > 0 for count in each]


def test_a_rank_that_sits_out_updates_its_weights_when_the_sums_have_come():
    trace = mp.simulate(data_parallel_step(2, 2, [1, 0]), mp.Costs(latency=1))
    update = next(event for event in trace.by_rank[1] if event.op == OptimizerStep())
    assert update.start == max(event.end for event in trace.by_rank[1] if event.kind == "collective")


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 2), {}, "at least 1 each"),
        ((1, 2, [1]), {}, "2 ranks need as many numbers"),
        ((1, 2, [1, -1]), {}, "2 ranks need as many numbers, from 0"),
        ((1, 2, 0), {}, "at least 1 rank needs a micro-batch"),
        ((1, 2), {"sums": False}, "would drift apart"),
        ((1, 2), {"gone": [1]}, "only while joining"),
        ((1, 2, [1, 1]), {"gone": [1], "joining": True}, "only ranks without micro-batches"),
        ((1, 2), {"gone": [2], "joining": True}, "only ranks without micro-batches"),
        ((1, 2), {"gone": [0, 1], "joining": True}, "at least 1 rank needs a micro-batch"),
    ],
)
def test_what_is_no_step_is_refused(arguments, options, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        data_parallel_step(*arguments, **options)
