"""What ranks were seen to do is the program that the library itself has for it."""

from itertools import pairwise

import pytest
import torch

from microparallel import collectives
from microparallel.learn.catalogue import find_exercise
from microparallel.learn.exam import Exam
from microparallel.learn.graders import (
    buckets,
    comms,
    loss_scaling,
    powersgd,
    ring_all_reduce,
    ring_halves,
    sharded_linear,
    zero_2,
)
from microparallel.learn.graders._collectives import contribution, program_of
from microparallel.learn.graders._during_backward import program_of as program_of_passes
from microparallel.learn.graders._pipeline_steps import microbatch_suspects, take_steps
from microparallel.learn.holes import solved
from microparallel.learn.log import calls
from microparallel.program import (
    Collective,
    Delta,
    Forward,
    ForwardStages,
    Free,
    Join,
    OptimizerStep,
    Recv,
    Send,
    halves,
)
from microparallel.schedules import ddp, gpipe, lower, one_f_one_b, zero
from microparallel.verifier import verify


@pytest.fixture
def exam(warm_ranks, tmp_path):
    def of(name, change=lambda text: text):
        exercise = find_exercise(name)
        file = tmp_path / exercise.file
        file.write_text(change(solved(exercise.solution.read_text("utf-8"))), "utf-8")
        return Exam(file, warm_ranks)

    yield of
    warm_ranks.replace_ranks()


def ring(exam, ranks):
    found = exam.run(ring_all_reduce._reduce, ranks, 2 * ranks, torch.float64)
    given = [contribution(rank, 2 * ranks) for rank in range(ranks)]
    return program_of(Collective("all-reduce", ranks), given, exam.rows, found)


def test_the_ring(exam):
    assert ring(exam("ring-all-reduce"), 4).ranks == collectives.build("ring", 4).ranks


def test_copies_that_are_sent_are_known_by_their_numbers(exam):
    seen = ring(
        exam(
            "ring-all-reduce",
            lambda text: text.replace("slices[send % ranks], after", "slices[send % ranks].clone(), after"),
        ),
        3,
    )
    assert seen.ranks == collectives.build("ring", 3).ranks


def test_what_no_program_can_say_makes_none(exam):
    seen = ring(
        exam(
            "ring-all-reduce",
            lambda text: text.replace("        request.wait()\n", "        request.wait()\n        tensor.add_(0.5)\n"),
        ),
        2,
    )
    assert seen is None


@pytest.mark.parametrize(
    ("name", "function", "schedule"), [("1f1b", "one_f_one_b_step", one_f_one_b), ("gpipe", "gpipe_step", gpipe)]
)
def test_a_pipeline_s_step(exam, name, function, schedule):
    _, [program] = take_steps(exam(name), 3, 10, 5, steps=1, function=function, suspects=microbatch_suspects)
    for mine, wanted in zip(program.ranks, lower(schedule(3, 5)).ranks, strict=True):
        assert list(mine) == [*(op for op in wanted if not isinstance(op, Free)), OptimizerStep()]


def test_buckets(exam):
    watched = exam("buckets").run(buckets._watch, 2, "plain", 1, 1, allowed=("all_reduce",))
    passes = [mine[0] for mine in watched]
    program = program_of_passes(passes, buckets._right_groups(1))
    verify(program)
    for mine, wanted in zip(program.ranks, ddp(6, 6, 2).ranks, strict=True):
        assert [op for op in mine if op != Join()] == [op for op in wanted if op != OptimizerStep()]


@pytest.mark.parametrize("half", ["reduce-scatter", "all-gather"])
def test_a_half_of_the_ring(exam, half):
    one, ranks = exam("ring-halves"), 4
    found = one.run(ring_halves._do, ranks, half, 2 * ranks, torch.float64)
    given = [ring_halves._given(half, rank, ranks, 2 * ranks, torch.float64) for rank in range(ranks)]
    seen = program_of(Collective(half, ranks), given, one.rows, found)
    assert seen.ranks == collectives.build(half, ranks).ranks


def test_zero_2(exam):
    """A gradient that is let go is seen to be gone when the next one comes; the last one of a step, never."""
    one, ranks, turns = exam("zero-2"), 2, 3
    results = one.run(zero_2._train, ranks, "momentum", turns, allowed=("reduce_scatter", "all_gather"))
    for row, trained, wanted in zip(one.rows, results, zero(2, 6, ranks, turns).ranks, strict=True):
        seen = [op for op in zero_2._operations(row, trained, 0, ranks) if not isinstance(op, ForwardStages)]
        assert seen == [op for op in wanted if not isinstance(op, Forward) and op != last_free(wanted)]


def last_free(ops):
    return [op for op in ops if isinstance(op, Free)][-1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_that_are_gathered_on_demand(exam, ranks):
    """They are ZeRO-3 without prefetching. That a gradient is let go is seen by its size, and not in the program."""
    one = exam("sharded-linear")
    passes = one.run(sharded_linear._once, ranks, sharded_linear._THREE, allowed=("reduce_scatter", "all_gather"))
    for rank, wanted in enumerate(zero(3, 3, ranks, prefetch=0).ranks):
        seen = sharded_linear._operations(rank, ranks, passes[rank], one.rows[rank])
        assert seen == [op for op in wanted[:-1] if not (isinstance(op, Free) and isinstance(op.value, Delta))]


def test_loss_scaling(exam):
    """One number decides; then the gradients are averaged, or nothing more is sent."""
    one, plan = exam("loss-scaling"), loss_scaling._ONE_RANK
    for did, row in zip(one.run(loss_scaling._train, 2, plan, allowed=("all_reduce",)), one.rows, strict=True):
        for step, taken in enumerate(did.taken):
            seen = loss_scaling._operations(loss_scaling._of_step(did, row, step), 0)
            rest = [*(f"*U{number}@dp" for number in range(6)), "S"] if taken else []
            assert list(map(str, seen)) == ["*:overflow@dp", *rest]
        assert did.taken == [True, False, True, False, False, False, True]


def test_two_all_reduces_for_a_matrix(exam):
    one = exam("powersgd")
    did, _ = one.run(powersgd._average, 2, 2, 1, allowed=("all_reduce",))
    made = [calls(one.rows[0][start:stop]) for start, stop in pairwise(did.begins[0])]
    seen = [powersgd._operations(0, number, reduces, 2) for number, reduces in enumerate(made)]
    names = [" ".join(map(str, ops)) for ops in seen]
    assert names == ["*:P0@dp *U0@dp", "*U1@dp", "*:P2@dp *U2@dp", "*:P3@dp *U3@dp"]


@pytest.mark.parametrize("answered", [True, False])
def test_a_barrier_tells_everybody_of_everybody(exam, answered):
    one = exam("comms")
    one.run(comms._barrier, 4, allowed=("send_tensor", "recv_tensor"))
    program = comms._knowledge(one.rows, answered)
    verify(program)
    received = [
        {op.value.start for op in ops if isinstance(op, Recv)} | {rank} for rank, ops in enumerate(program.ranks)
    ]
    assert received == [{0, 1, 2, 3}] * 4
    assert not any(halves(op) for ops in program.ranks for op in ops)
    assert sum(isinstance(op, Send) for ops in program.ranks for op in ops) == 12
