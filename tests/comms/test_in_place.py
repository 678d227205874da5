"""Programs over tensors that ranks read in place, with a stand-in for the GPU's streams.

A stream does one thing after another, and stands still where it waits for a word. So does a thread: here the CPU does
at once what a stream would do later. If the threads come to their end, so do streams, with the same result.
"""

import ctypes
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microparallel.collectives import ALL_REDUCES, all_reduce_program
from microparallel.comms.in_place import Views, perform_in_place, plan_of, plans_of
from microparallel.comms.interpreter import COMBINE, Memory, Sums, rank_program
from microparallel.transport.shared_memory.works import CallState

LONGEST = 20.0  # seconds for which a word is waited for


class MarksNow:
    """Does what a stream would do, in the thread that asks for it."""

    def __init__(self):
        self._asked = []

    def after(self, address, number):
        self._asked.append((False, address, number & 0xFFFFFFFF))

    def write(self, address, number):
        self._asked.append((True, address, number & 0xFFFFFFFF))

    def hand_over(self):
        asked, self._asked = self._asked, []
        for writes, address, number in asked:
            word = ctypes.c_uint32.from_address(address)
            deadline = time.monotonic() + LONGEST
            if writes:
                word.value = number
            while not writes and (word.value - number) % 2**32 >= 2**31:
                assert time.monotonic() < deadline, "the streams of these ranks would wait for each other for ever"
                time.sleep(0)


class OrderNow:
    """An order that is kept for every tensor, as a GPU's is for those that lie there."""

    def __init__(self):
        self._threads = threading.local()

    def is_kept_for(self, tensor):
        return True

    def marks(self):
        if not hasattr(self._threads, "marks"):
            self._threads.marks = MarksNow()
        return self._threads.marks

    def here(self):
        return None

    def join(self, point):
        pass


def as_on_a_gpu(comms):
    """The transport of these ranks, with messages that are ordered as those of tensors on a GPU are."""
    transport = comms._group.transport
    transport.order, transport.at_once = OrderNow(), True
    return transport


def in_place(comms, algorithm, sizes, dtype, op):
    transport, results = as_on_a_gpu(comms), []
    views = Views()
    plan = plan_of(rank_program("all-reduce", algorithm, comms.world_size, comms.rank))
    for number, size in enumerate(sizes):
        tensor = comms.empty((size,), dtype=dtype).copy_(contribution(comms.rank, size, dtype))
        sums = Sums(memory := Memory(tensor, plan.slices), COMBINE[op])
        call = CallState("all_reduce", number, 1000 + number, adds_to_sent=False, at_once=True)
        perform_in_place(plan, memory, sums, transport, views, call, 20.0)
        results.append(tensor.clone())
    comms.barrier()
    return results


def contribution(rank, size, dtype):
    values = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (8 * values).to(dtype)


CAN = [
    (algorithm, ranks)
    for algorithm in ALL_REDUCES
    for ranks in (2, 3, 4, 5)
    if plans_of(all_reduce_program(algorithm, ranks))
]


def test_programs_of_slices_that_do_not_add_to_what_they_sent_are_performed_in_place():
    assert {algorithm for algorithm, ranks in CAN} >= {"direct", "ring", "tree"}
    assert "gather-add" not in {algorithm for algorithm, ranks in CAN}  # it keeps what arrives apart


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize(("algorithm", "ranks"), CAN)
def test_the_sum_is_that_of_the_same_program_over_messages(warm_ranks, algorithm, ranks, dtype):
    sizes = [1, ranks - 1, 7, 1000]
    results = warm_ranks.run(in_place, ranks, algorithm, sizes, dtype, "sum", transport="shm", timeout=40)
    expected = warm_ranks.run(over_messages, ranks, algorithm, sizes, dtype, transport="shm", timeout=40)
    for one, other in zip(results, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert torch.equal(mine, theirs)


def over_messages(comms, algorithm, sizes, dtype):
    return [comms.all_reduce(contribution(comms.rank, size, dtype), algorithm=algorithm) for size in sizes]


def again_and_again(comms, algorithm, times):
    """More calls than a channel has slots, with nothing in between."""
    transport = as_on_a_gpu(comms)
    views = Views()
    plan = plan_of(rank_program("all-reduce", algorithm, comms.world_size, comms.rank))
    tensor = comms.empty((50,), dtype=torch.float64).fill_(1)
    for number in range(times):
        call = CallState("all_reduce", number, number, adds_to_sent=False, at_once=True)
        sums = Sums(memory := Memory(tensor, plan.slices), COMBINE["max"])
        perform_in_place(plan, memory, sums, transport, views, call, 20.0)
        tensor += comms.rank == number % comms.world_size
    comms.barrier()
    return tensor.tolist()


def test_slots_are_used_again(warm_ranks):
    for result in warm_ranks.run(again_and_again, 3, "direct", 300, transport="shm", timeout=50):
        assert set(result) <= {300.0, 301.0}


@settings(max_examples=8)
@given(
    st.sampled_from(sorted(ALL_REDUCES)),
    st.integers(2, 5),
    st.integers(0, 60),
    st.sampled_from(["sum", "min", "product"]),
)
def test_messages_that_are_ordered_as_on_a_gpu(warm_ranks, algorithm, ranks, size, op):
    """Every program, also those that are performed message by message."""
    results = warm_ranks.run(ordered, ranks, algorithm, size, op, transport="shm", timeout=40)
    plain = warm_ranks.run(reduced, ranks, algorithm, size, op, transport="shm", timeout=40)
    assert all(torch.equal(one, plain[0]) for one in results)


def reduced(comms, algorithm, size, op):
    return comms.all_reduce(contribution(comms.rank, size, torch.float64), op, algorithm=algorithm)


def ordered(comms, algorithm, size, op):
    as_on_a_gpu(comms)
    result = comms.empty((size,), dtype=torch.float64).copy_(contribution(comms.rank, size, torch.float64))
    comms.all_reduce(result, op, algorithm=algorithm)
    comms.barrier()
    return result.clone()
