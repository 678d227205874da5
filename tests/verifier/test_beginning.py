"""A program that is not finished: each beginning of a right one is right, and what is wrong already is told at once."""

from dataclasses import replace

import pytest

import microparallel as mp
from microparallel.program import Walk
from microparallel.verifier import Missing, Unreached, verify_beginning

PROGRAMS = {
    "1f1b": lambda: mp.schedules.build("1f1b", 2, 3),
    "zbv": lambda: mp.schedules.build("zbv", 2, 2),
    "ring": lambda: mp.collectives.build("ring", 3),
    "broadcast": lambda: mp.collectives.build("broadcast", 4),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_beginning_of_a_right_program_is_right(name):
    program = PROGRAMS[name]()
    done = [0] * program.world_size
    for cursor in Walk(program):
        done[cursor.rank] += 1
        if any(
            ops[place - 1 : place] and str(ops[place - 1]).startswith(">")
            for ops, place in zip(program.ranks, done, strict=True)
        ):
            continue  # what was sent last has not been received
        begun = replace(program, ranks=tuple(ops[:place] for ops, place in zip(program.ranks, done, strict=True)))
        rest = [ops[place:] for ops, place in zip(program.ranks, done, strict=True)]
        try:
            verify_beginning(begun, rest)
        except mp.errors.ProgramError as error:
            assert "never receives" in str(error)


def test_a_sum_waits_for_gradients_that_are_still_to_be_made():
    goal = mp.program.TrainingStep(1, 2, ((0, 1),))
    ranks = "rank 0: F0.0 *U0@dp\nrank 1: F0.1 *U0@dp\n"
    begun = mp.program.from_text(f"program x\ngoal: training step of 1 stage, 2 micro-batches, buckets 0:1\n{ranks}")
    assert begun.goal == goal
    verify_beginning(begun)  # nothing is to come, so there is nothing to wait for
    with pytest.raises(Missing, match=r"needs D0\.[01]"):
        verify_beginning(begun, [[mp.program.Backward(0, rank)] for rank in range(2)])


def test_an_operation_that_lacks_its_input_is_named():
    text = "program x\ngoal: training step of 2 stages, 1 micro-batch\nrank 0:\nrank 1: F1.0\n"
    with pytest.raises(Missing, match=r"needs A0\.0"):
        verify_beginning(mp.program.from_text(text))


def test_a_sum_that_has_a_part_twice_is_wrong_already():
    text = "program x\ngoal: all-reduce of 1 slice\nrank 0: >C0@1 >C0@1\nrank 1: <+C0@0 <+C0@0\nrank 2:\n"
    with pytest.raises(Unreached, match="rank 0's part 2 times"):
        verify_beginning(mp.program.from_text(text))


def test_what_no_rank_holds_any_more_is_lost():
    text = "program x\ngoal: all-reduce of 1 slice\nrank 0: >C0@1\nrank 1: <C0@0\n"
    with pytest.raises(mp.errors.ProgramError, match="rank 1's part of slice 0 any more"):
        verify_beginning(mp.program.from_text(text))


def test_a_limit_on_activations_holds_from_the_beginning():
    text = "program x\ngoal: training step of 1 stage, 2 micro-batches\nrank 0: F0.0 F0.1\n"
    verify_beginning(mp.program.from_text(text), max_activations=2)
    with pytest.raises(mp.errors.ProgramError, match="holds 2 activations"):
        verify_beginning(mp.program.from_text(text), max_activations=1)
