"""Every schedule is right for every number of ranks and micro-batches, and what cannot be built is named."""

import pytest

import microparallel as mp
from microparallel.program import from_text, to_text
from microparallel.schedules import (
    PIPELINES,
    build,
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


def test_one_rank_needs_no_messages():
    for name in PIPELINES:
        assert build(name, 1, 3).messages_sent() == [0]


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
