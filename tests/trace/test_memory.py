"""Bytes over time: the formulas of sharding hold exactly, and what is freed is gone."""

from dataclasses import replace

import pytest

import microparallel as mp
from microparallel.program import from_text
from microparallel.schedules import build, ddp, free_dead_values, zero
from microparallel.trace import Sizes

LAYERS = 6
SIZES = Sizes(parameters=4, gradients=4, optimizer=8, activations=0)
WHOLE = 4 * LAYERS


def memory(program, sizes=SIZES, **costs):
    return mp.simulate(program, mp.Costs(sizes=sizes, **costs)).memory


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("gather", ["after", "before"])
def test_the_formulas_of_zero(ranks, microbatches, gather):
    """wΨ, gΨ and kΨ/p in level 1; in level 2 gΨ/p, and the buckets that are on their way."""
    first = memory(zero(1, LAYERS, ranks, microbatches, buckets=3, gather=gather), seconds_per_byte=0.1)
    second = memory(zero(2, LAYERS, ranks, microbatches, buckets=3, gather=gather), seconds_per_byte=0.1)
    for one, two in zip(first, second, strict=True):
        assert one.peak_of("parameters") == two.peak_of("parameters") == WHOLE
        assert one.peak_of("optimizer") == two.peak_of("optimizer") == pytest.approx(2 * WHOLE / ranks)
        assert one.peak_of("gradients") == WHOLE
        assert two.kinds["gradients"][-1][1] == pytest.approx(WHOLE / ranks)  # at the end
        in_flight = 2 * WHOLE / 3  # a bucket that leaves, and the one that backward fills
        assert two.peak_of("gradients") <= WHOLE / ranks + in_flight


def test_data_parallelism_keeps_all_on_every_rank():
    for rank in memory(ddp(LAYERS, 3, 4)):
        assert rank.peak[1] == 4 * WHOLE and rank.at(0) == {
            "parameters": WHOLE,
            "gradients": 0,
            "optimizer": 2 * WHOLE,
            "activations": 0,
            "in flight": 0,
        }


def test_whole_gradients_are_there_until_they_have_left():
    program = from_text(
        "program z\ngoal: training step of 1 stage, 2 micro-batches, buckets 0:1\n"
        "rank 0: F0.0 B0.0 %U0.0@dp !D0.0 S ~T0@dp\nrank 1: F0.1 B0.1 %U0.0@dp !D0.1 S ~T0@dp\n"
    )
    first, _ = memory(program, Sizes(), seconds_per_byte=1)
    # forward until 1, backward until 3, half a byte travels until 3.5
    assert first.kinds["gradients"] == [(0, 0), (1, 4), (3, 6), (3.5, 2)]
    assert first.kinds["activations"] == [(0, 1), (3, 0)]
    assert first.kinds["parameters"] == [(0, 4)] and first.kinds["optimizer"] == [(0, 4)]


def test_parameters_that_are_freed_are_there_between_gather_and_free():
    program = from_text(
        "program three\ngoal: training step of 2 stages, 2 micro-batches, buckets 1:2 0:1, sharded\n"
        "rank 0: ~T1@dp F0.0 !T1 ~T0@dp F1.0 B1.0 %U0@dp !T0 ~T1@dp B0.0 %U1@dp !T1 S\n"
        "rank 1: ~T1@dp F0.1 !T1 ~T0@dp F1.1 B1.1 %U0@dp !T0 ~T1@dp B0.1 %U1@dp !T1 S\n"
    )
    mp.verify(program)
    first, _ = memory(program, seconds_per_byte=0)
    assert first.at(0)["parameters"] == 4 + 4  # both halves, and stage 0 whole
    assert first.peak_of("parameters") == 4 + 4 and first.kinds["parameters"][-1][1] == 4


LATE = "~T0@dp F0.{0} ~T1@dp F1.{0} B1.{0} %U1.0@dp !T0 ~T0@dp B0.{0} %U0.0@dp !D0.{0} !D1.{0} !T0 !T1 S"
GOAL = "goal: training step of 2 stages, 2 micro-batches, buckets 0:1 1:2, sharded\n"


def test_what_a_rank_frees_late_is_there_until_then():
    """A rank comes to a Free when it has computed all that stands before it, as a real rank does."""
    rows = "".join(f"rank {rank}: {LATE.format(rank)}\n" for rank in (0, 1))
    program = from_text(f"program late\n{GOAL}{rows}")
    mp.verify(program)
    first, _ = memory(program, seconds_per_byte=1)
    # Forwards from 0.5 and 2, backwards from 3 and 6. At 5 layer 0 is freed and gathered anew, at 8 all is freed.
    assert first.kinds["parameters"] == [(0, 8), (1.5, 12), (5, 8), (5.5, 12), (8, 4)]
    assert first.kinds["gradients"] == [(0, 0), (3, 4), (5, 6), (6, 10), (8, 8), (8.5, 4)]
    assert first.peak == (8, 12 + 8 + 12)  # the sum's part is there before the gradients and parameters are freed


def test_what_happens_at_one_moment_happens_in_the_order_of_the_program():
    """A rank that gathers the second layer, and then frees the first, holds both for that moment."""
    peaks = []
    for between in ("!T0 ~T1@dp", "~T1@dp !T0"):
        row = f"~T0@dp F0.R {between} F1.R B1.R %U1.0@dp !D1.R !T1 ~T0@dp B0.R %U0.0@dp !D0.R !T0 S"
        rows = "".join(f"rank {rank}: {row.replace('R', str(rank))}\n" for rank in (0, 1))
        program = from_text(f"program now\n{GOAL}{rows}")
        mp.verify(program)
        moments = memory(program, seconds_per_byte=0)[0].moments
        peaks.append(max(sizes["parameters"] for _, sizes in moments))
    assert peaks == [4 + 4, 4 + 8]


def test_the_beginning_of_a_step_holds_what_it_has_not_freed_yet():
    """Only what was done counts; what the rest of the program frees is there until then."""
    program = from_text(f"program late\n{GOAL}rank 0: {LATE.format(0)}\nrank 1: {LATE.format(1)}\n")
    trace = mp.simulate(program, mp.Costs(sizes=SIZES, seconds_per_byte=1))
    begun = replace(trace, events=[event for event in trace.events if event.end <= 5.5])
    assert begun.memory[0].kinds["parameters"] == [(0, 8), (1.5, 12), (5, 8)]
    assert begun.memory[0].kinds["gradients"] == [(0, 0), (3, 4), (5, 6)]


def test_gpipe_holds_more_activations_than_1f1b():
    peaks = {name: mp.simulate(build(name, 4, 8)).memory for name in ("gpipe", "1f1b")}
    assert [rank.peak_of("activations") for rank in peaks["gpipe"]] == [8] * 4
    assert [rank.peak_of("activations") for rank in peaks["1f1b"]] == [4, 3, 2, 1]


def test_the_peak_of_a_trace():
    trace = mp.simulate(free_dead_values(zero(2, 2, 2, 1)), mp.Costs(sizes=Sizes(activations=[10, 20])))
    assert trace.peak_memory == [max(size for _, size in rank.total) for rank in trace.memory]
    assert trace.memory[0].peak[0] == 2 and trace.peak_memory[0] == 8 + 8 + 30 + 4  # when backward begins


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"parameters": [1]}, "parameters has 1 numbers, and the program has 2 stages"),
        ({"gradients": -1}, "gradients=-1 is no number of bytes"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        memory(ddp(2, 1, 2), Sizes(**sizes))


def test_a_collective_has_no_such_memory():
    with pytest.raises(mp.errors.UsageError, match="memory is known for training steps"):
        memory(mp.collectives.build("ring", 2))
