"""Steps whose parameters are gathered on demand: what computation waited for, and what other options would give."""

import itertools
from dataclasses import replace

import pytest

import microparallel as mp
from microparallel.program import (
    AllGather,
    Backward,
    Bucket,
    Forward,
    Join,
    Observed,
    OptimizerStep,
    Parameters,
    ReduceScatter,
)
from microparallel.schedules import data_parallel_step, fully_sharded_step
from microparallel.simulator.fitted import Fitted, RecordedCosts
from microparallel.simulator.gathering import choices_of, options_of, waits_of
from microparallel.trace import Sizes

SIZES = Sizes(parameters=[4, 8, 12], gradients=[4, 8, 12], optimizer=[8, 16, 24], activations=[1, 1, 1])


def step(units=3, gather=0.5, summing=0.25, sizes=SIZES, **options):
    """Two ranks whose forwards take 1, backwards 2, and the optimizer 1."""
    program = fully_sharded_step(units, 2, **options)
    seconds, sizes_of, sent = {}, {}, {}
    times = {Forward: 1.0, Backward: 2.0, OptimizerStep: 1.0, AllGather: gather, ReduceScatter: summing}
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            seconds[rank, op] = times.get(type(op), 0.0)
            if isinstance(op, AllGather | ReduceScatter):
                sizes_of[rank, op] = 100.0
                sent[rank, op] = (1, 50.0)
    return Fitted(program, RecordedCosts(seconds=seconds, exchanged=sizes_of, counts=sent, sizes=sizes))


def test_without_prefetch_every_stage_waits_for_its_gather():
    waits = waits_of(step(prefetch=0).simulate())
    gathers = [one for one in waits if one.what == "gather"]
    assert [(one.unit, one.stage, one.phase) for one in gathers] == [
        *((unit, unit, "forward") for unit in (0, 1, 2)),
        *((unit, unit, "backward") for unit in (2, 1, 0)),
    ]
    assert [one.exposed for one in gathers] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert all(one.bytes == 100 and one.hidden == pytest.approx(0) for one in gathers)
    sums = [one for one in waits if one.what == "sum"]
    assert [one.unit for one in sums] == [2, 1, 0]
    assert str(sums[-1]) == "the sum of unit 0, before the optimizer"
    assert str(gathers[1]) == "the gather of unit 1, before its forward"


def test_with_prefetch_only_the_first_gather_of_a_pass_is_exposed():
    gathers = [one for one in waits_of(step(prefetch=1).simulate()) if one.what == "gather"]
    assert [one.exposed > 0 for one in gathers] == [True, False, False, True, False, False]
    assert [one.hidden for one in gathers[1:3]] == pytest.approx([0.5, 0.5])


def test_a_step_without_gathers_has_no_waits_and_no_choices():
    program = data_parallel_step(2, 2)
    assert waits_of(mp.simulate(program)) == []
    assert choices_of(Fitted(program, RecordedCosts())) == []
    assert options_of(mp.collectives.build("ring", 2)) is None


def test_what_was_let_go_is_waited_for_again():
    """F0 F1 B1 B0, each behind its gather; the unit between forward and backward is let go, and gathered again."""
    program = mp.schedules.zero(3, 2, 2, prefetch=0)
    costs = step(units=2, sizes=None).costs
    assert mp.simulate(program, costs).makespan == pytest.approx(2 * 1.5 + 2 * 2.5 + 2 * 0.25 + 1)


ALL = {
    "units": [1, 2, 4],
    "ranks": [2, 4],
    "prefetch": [0, 1, 3],
    "reshard_after_forward": [True, False],
    "overlap": [True, False],
    "at_once": [True, False],
}


def test_the_options_of_a_program_are_found_again():
    for values in itertools.product(*ALL.values()):
        options = dict(zip(ALL, values, strict=True))
        for others in (
            {},
            {"microbatches": 2, "norm": True, "weights": True},
            {"microbatches": (0, 2, 1, 1)[: options["ranks"]], "samples": True, "loss": True, "buffers": True},
            {"replicas": 2, "order": True, "algorithm": "direct"},
            {"microbatches": (0, 2, 1, 1)[: options["ranks"]], "order": True},
            {"microbatches": 2, "overflow": True},
        ):
            program = fully_sharded_step(**options, **others)
            found = options_of(program)
            assert found is not None, (options, others)
            assert found.program() == program, (options, others)
    last = (2, 1, 2)  # the last stage uses the first unit again
    assert options_of(fully_sharded_step(3, 2, last=last)).program() == fully_sharded_step(3, 2, last=last)


def test_joins_where_a_rank_happened_to_wait_do_not_matter_but_other_gathers_do():
    program = fully_sharded_step(3, 2)
    waited = replace(program, ranks=tuple((*ops[:4], Join(), *ops[4:]) for ops in program.ranks))
    assert options_of(waited).program() == program
    extra = AllGather(Parameters(0), "dp")
    on_demand = replace(program, ranks=tuple((*ops[:4], extra, *ops[4:]) for ops in program.ranks))
    assert options_of(on_demand) is None


def test_other_options_are_simulated_with_the_recorded_costs_and_their_memory():
    now, *others = choices_of(step(prefetch=1))
    assert now.now and not any(one.now for one in others)
    assert [(one.prefetch, one.reshard_after_forward) for one in (now, *others)] == [
        *((prefetch, True) for prefetch in (1, 0, 2)),
        (1, False),
    ]
    none, two, kept = others
    # Forward: 0.5 + 3; backward: 0.5 + 3 × 2; then the last sum, and the optimizer.
    assert now.seconds == pytest.approx(3.5 + 6.5 + 0.25 + 1)
    assert none.seconds == pytest.approx(now.seconds + 4 * 0.5 + 2 * 0.25)  # a gather stands behind the sum before it
    assert two.seconds == pytest.approx(now.seconds)  # prefetch 1 hides all that can be hidden
    assert kept.seconds == pytest.approx(now.seconds - 0.5)
    # A half of 24 bytes, and the largest units that are whole at a time.
    assert [one.weights for one in (now, none, two, kept)] == [12 + 20, 12 + 12, 12 + 24, 12 + 24]
    assert now.memory > none.memory
    assert now.sent == 9 * 50 and kept.sent == 6 * 50


def test_without_sizes_there_is_no_memory_and_without_overlap_there_is_one_choice_more():
    *_, last = found = choices_of(step(overlap=False, sizes=None))
    assert all(one.weights is None and one.memory is None for one in found)
    assert last.overlap and last.seconds < found[0].seconds
    assert [one.seconds for one in found[1:3]] == pytest.approx([found[0].seconds] * 2)  # prefetch alone hides nothing


def test_pieces_between_which_a_rank_waited_are_one_computation():
    whole = step()
    program, costs = whole.program, whole.costs
    piece = Observed("B1.0", "backward", 0)
    place = program.ranks[0].index(Backward(1, 0))
    ops = (*program.ranks[0][: place + 1], Join(), piece, *program.ranks[0][place + 1 :])
    seconds = {**costs.seconds, (0, Backward(1, 0)): 0.5, (0, piece): 1.5}
    cut = Fitted(replace(program, ranks=(ops, program.ranks[1])), replace(costs, seconds=seconds))
    assert choices_of(cut) == choices_of(whole)


def test_the_sum_that_ends_last_is_waited_for_by_the_optimizer():
    *_, last = waits_of(step(summing=3.0).simulate())
    assert (last.what, last.unit, last.stage, last.phase) == ("sum", 0, None, "optimizer")
    assert last.seconds > 0 and last.seconds == last.exposed + last.waiting


def test_bucket_numbers_are_turned_into_units():
    program = fully_sharded_step(3, 2)
    assert ReduceScatter(Bucket(0, 0), "dp") in program.ranks[0]
    first = next(one for one in waits_of(step().simulate()) if one.what == "sum")
    assert first.unit == 2
