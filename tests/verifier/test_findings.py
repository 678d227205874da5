"""What is found can be asked for its parts: nobody has to read them out of the text."""

import pytest

from microparallel.errors import ProgramError
from microparallel.program import Act, Backward, Bucket, Delta, Recv, Send, Slices, from_text
from microparallel.verifier import Deadlock, Miscounted, Missing, NeverReduced, Unmatched, Unreached, verify


def found(goal, *rows, sends="rendezvous"):
    ranks = "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
    with pytest.raises(ProgramError) as caught:
        verify(from_text(f"program p\ngoal: {goal}\n{ranks}\n"), sends)
    return caught.value


def test_the_two_ends_of_a_message():
    error = found("all-reduce of 2 slices", ">C0@1 <+C1@1", ">C1@0 <+C1@0")
    assert isinstance(error, Unmatched)
    assert (error.sender, error.receiver, error.number) == (0, 1, 1)
    assert (error.send, error.recv) == (Send(Slices(0, 1), 1), Recv(Slices(1, 2), 0, reduce=True))
    error = found("all-reduce of 2 slices", ">C0@1", "")
    assert (error.number, error.send, error.recv) == (1, Send(Slices(0, 1), 1), None)
    error = found("all-reduce of 2 slices", "", "<C0@0")
    assert (error.sender, error.send, error.recv) == (0, None, Recv(Slices(0, 1), 0))


def test_who_waits_and_where():
    error = found("all-reduce of 1 slice", ">C0@1 <+C0@1", ">C0@0 <+C0@0", sends="blocking")
    assert isinstance(error, Deadlock)
    assert [(wait.rank, wait.place, wait.on) for wait in error.waits] == [(0, 0, 1), (1, 0, 0)]


def test_what_a_slice_ends_with():
    error = found("all-reduce of 1 slice", "<+C0@1", ">C0@0")
    assert isinstance(error, Unreached)
    assert (error.rank, error.index) == (1, 0)
    assert error.found == {(1, 0): 1}
    assert error.wanted == {(0, 0): 1, (1, 0): 1}


def test_what_an_operation_lacks():
    error = found("training step of 1 stage, 1 micro-batch", "B0.0 F0.0")
    assert isinstance(error, Missing)
    assert (error.rank, error.place, error.op, error.value) == (0, 0, Backward(0, 0), Act(0, 0))
    error = found("training step of 1 stage, 1 micro-batch, buckets 0:1", "F0.0 *U0@dp B0.0")
    assert error.value == Delta(0, 0)


def test_what_does_not_happen_once():
    error = found("training step of 1 stage, 2 micro-batches", "F0.0 B0.0")
    assert isinstance(error, Miscounted)
    assert (error.stage, error.microbatch) == (0, 1)


def test_what_is_never_summed():
    goal = "training step of 1 stage, 2 micro-batches, buckets 0:1"
    error = found(goal, "F0.0 B0.0 *U0@dp", "F0.1 B0.1")
    assert isinstance(error, NeverReduced)
    assert (error.rank, error.stage, error.bucket) == (1, 0, Bucket(0))
