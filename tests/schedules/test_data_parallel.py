"""Data-parallel steps are right for any number of layers, buckets, ranks and micro-batches."""

import itertools

import pytest

import microparallel as mp
from microparallel.program import OptimizerStep, from_text, to_text
from microparallel.schedules import build, data_parallel_step


def test_ddp_takes_any_number_of_layers_and_buckets():
    for ranks in (1, 2, 5):
        for layers in range(1, 7):
            mp.verify(build("ddp-naive", ranks, layers=layers))
            for buckets in range(1, layers + 1):
                program = mp.schedules.ddp(layers, buckets, ranks)
                mp.verify(program)
                stages = [stage for start, stop in program.goal.buckets for stage in range(start, stop)]
                assert sorted(stages) == list(range(layers))


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
