"""Shared memory between ranks that are threads here: they need no processes to read each other's segments."""

import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import microparallel as mp
from microparallel.transport.shared_memory import SharedMemoryTransport
from microparallel.transport.shared_memory import segment as arena
from microparallel.transport.shared_memory import transport as transport_module
from microparallel.transport.shared_memory.channel import SLOTS
from microparallel.transport.shared_memory.segment import Arena, create_segment


def everywhere(ranks, function):
    """Run function(transport) as every rank; its results in rank order."""
    store = dist.HashStore()

    def rank_of_many(rank):
        transport = SharedMemoryTransport(store, rank, range(ranks), timeout=20.0)
        try:
            return function(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(rank_of_many, range(ranks)))


def test_messages_arrive_by_tag_in_order():
    def talk(transport):
        if transport.rank == 0:
            for number, tag in enumerate([5, 6, 5, 6]):
                transport.isend(torch.full((3,), float(number)), 1, tag).wait()
            return None
        found = []
        for tag in (6, 5, 5, 6):
            into = torch.empty(3)
            transport.irecv(into, 0, tag).wait()
            found.append(into[0].item())
        return found

    assert everywhere(2, talk)[1] == [1.0, 0.0, 2.0, 3.0]


def test_waiting_for_a_later_receive_takes_the_earlier_first():
    def talk(transport):
        if transport.rank == 0:
            for number in range(3):
                transport.isend(torch.tensor([number]), 1).wait()
            return None
        into = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
        works = [transport.irecv(tensor, 0) for tensor in into]
        works[2].wait()
        assert [tensor.item() for tensor in into] == [0, 1, 2]
        works[0].wait()
        return True

    assert everywhere(2, talk)[1]


def test_more_messages_than_slots():
    count = 3 * SLOTS + 5

    def talk(transport):
        if transport.rank == 0:
            for number in range(count):
                transport.isend(torch.tensor([number]), 1)
            return None
        into = torch.empty(1, dtype=torch.int64)
        found = []
        for _ in range(count):
            transport.irecv(into, 0).wait()
            found.append(into.item())
        return found

    assert everywhere(2, talk)[1] == list(range(count))


def test_what_lies_in_the_segment_is_not_copied():
    """The receiver sees a change that the sender makes after it has offered: it reads the very same memory."""
    changed = threading.Event()

    def talk(transport):
        if transport.rank == 0:
            tensor = transport.empty((4,), torch.float32)
            tensor.fill_(1.0)
            sent = transport.offer(tensor, 1)
            assert not sent.copied
            tensor.fill_(2.0)
            changed.set()
            sent.wait()
            return None
        changed.wait(10)
        borrowed = transport.borrow(0)
        seen = borrowed.bytes().view(torch.float32).clone()
        borrowed.give_back()
        return seen.tolist()

    assert everywhere(2, talk)[1] == [2.0] * 4


def test_what_lies_elsewhere_is_copied_at_once():
    changed = threading.Event()

    def talk(transport):
        if transport.rank == 0:
            tensor = torch.ones(4)
            transport.offer(tensor, 1, copy=transport.copy(tensor)).wait()
            tensor.fill_(2.0)
            changed.set()
            return None
        changed.wait(10)
        return transport.borrow(0).bytes().view(torch.float32).tolist()

    assert everywhere(2, talk)[1] == [1.0] * 4


def test_a_message_of_another_size_is_an_error_and_does_not_block_the_next():
    def talk(transport):
        if transport.rank == 0:
            transport.isend(torch.zeros(3), 1).wait()
            transport.isend(torch.ones(2), 1).wait()
            return None
        with pytest.raises(mp.errors.CommsError, match="rank 0 sent 12 bytes, and 8 were expected"):
            transport.irecv(torch.empty(2), 0).wait()
        into = torch.empty(2)
        transport.irecv(into, 0).wait()
        return into.tolist()

    assert everywhere(2, talk)[1] == [1.0, 1.0]


def test_copies_are_given_back():
    def talk(transport):
        for _ in range(20):
            if transport.rank == 0:
                transport.isend(torch.zeros(1000), 1).wait()
                transport.irecv(torch.empty(1), 1).wait()
            else:
                transport.irecv(torch.empty(1000), 0).wait()
                transport.isend(torch.zeros(1), 0).wait()
        transport._reclaim(1)
        return len(transport._staged[1])

    assert max(everywhere(2, talk)) <= 1


def test_tensors_give_their_memory_back():
    def fill(transport):
        transport._arena.give_back(transport._arena.take(64), 64)
        before = list(transport._arena._free)
        tensor = transport.empty((10, 100), torch.float64)
        view = tensor[3]
        view.fill_(1.0)
        del tensor
        gc.collect()
        assert list(transport._arena._free) != before  # the view still lives
        del view
        gc.collect()
        transport._arena.give_back(transport._arena.take(64), 64)  # the next `take` frees what was left
        return list(transport._arena._free) == before

    assert everywhere(1, fill) == [True]


def test_empty_shapes():
    assert everywhere(1, lambda transport: transport.empty((0, 3), torch.int8).shape)[0] == (0, 3)
    assert everywhere(1, lambda transport: transport.empty((), torch.int8).shape)[0] == ()


def test_the_arena_joins_free_neighbours():
    descriptor, segment = create_segment(4096)
    os.close(descriptor)
    pieces = Arena(segment)
    places = [pieces.take(1000) for _ in range(5)]
    assert places == sorted(set(places)) and all(place % 64 == 0 for place in places)
    for index in (1, 3, 0, 4, 2):
        pieces.give_back(places[index], 1000)
    assert pieces._free == [(places[0], places[0] + 2**24)]


def test_too_little_memory_is_said_before_it_is_touched(monkeypatch):
    monkeypatch.setattr(arena, "available_memory", lambda: 100 * 2**20)

    def ask(transport):
        with pytest.raises(
            mp.errors.CommsError, match=r"shared memory for 1,073,741,824 bytes is needed, and 37,748,736 bytes"
        ):
            transport.empty((2**30,), torch.uint8)
        return transport.empty((10,), torch.uint8).numel()

    assert everywhere(1, ask) == [10]


def addresses():
    return sum(
        int(stop, 16) - int(start, 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:microparallel" in line
        for start, stop in [line.split()[0].split("-")]
    )


def test_a_rank_has_addresses_for_what_is_sent_and_not_for_all_memory():
    def talk(transport):
        return addresses()

    assert max(everywhere(3, talk)) < 64 * 2**20


def test_a_segment_grows_by_parts_that_the_peers_map_when_they_read():
    sizes = [1000, 20 * 2**20, 30 * 2**20, 100 * 2**20]  # more than one part

    def talk(transport):
        if transport.rank == 0:
            tensors = [transport.empty((size,), torch.uint8).fill_(number) for number, size in enumerate(sizes)]
            for tensor in tensors:
                assert not transport.offer(tensor, 1).copied
            for tensor in tensors:
                transport.isend(tensor, 1).wait()
            return len(transport._segment._extents)
        for number, size in enumerate(sizes):
            borrowed = transport.borrow(0)
            assert borrowed.bytes().numel() == size and borrowed.bytes().eq(number).all()
            borrowed.give_back()
        for number, size in enumerate(sizes):
            into = torch.empty(size, dtype=torch.uint8)
            transport.irecv(into, 0).wait()
            assert into.eq(number).all()
        return len(transport._segments[0]._extents)

    parts = everywhere(2, talk)
    assert parts[0] == parts[1] > 1


def test_parts_are_never_joined_and_are_used_again():
    descriptor, segment = create_segment(4096)
    os.close(descriptor)
    pieces = Arena(segment)
    sizes = [16 * 2**20, 16 * 2**20, 40 * 2**20]
    places = [pieces.take(size) for size in sizes]
    for place, size in zip(places, sizes, strict=True):
        pieces.give_back(place, size)
    assert len(pieces._free) == len(segment._extents) == 3
    assert [pieces.take(size) for size in sizes] == places


def test_memory_that_was_not_handed_over():
    descriptor, segment = create_segment(4096)
    os.close(descriptor)
    with pytest.raises(mp.errors.CommsError, match="has not handed over"):
        segment.view(2**20, 10)


def test_few_addresses_are_enough_for_a_part_of_just_the_size(monkeypatch):
    real = arena.mapped

    def few(descriptor, size, *arguments, **options):
        if size > 2**20:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(descriptor, size, *arguments, **options)

    monkeypatch.setattr(arena, "mapped", few)
    descriptor, segment = create_segment(4096)
    os.close(descriptor)
    pieces = Arena(segment)
    assert [pieces.take(900_000) for _ in range(3)] and len(segment._extents) == 3
    with pytest.raises(mp.errors.CommsError, match="2,097,152 bytes of shared memory cannot be mapped"):
        pieces.take(2**21)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings():
    return sum("memfd:microparallel" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_nothing_is_left_open():
    everywhere(3, lambda transport: transport.rank)
    gc.collect()
    before = descriptors(), mappings()
    for _ in range(10):
        everywhere(3, lambda transport: transport.rank)
    gc.collect()
    assert (descriptors(), mappings()) == before


def test_tags_taken_early_around_the_row_of_slots():
    """A slot is filled again as soon as its message is taken; the receiver must not take the new one for the old."""
    rounds = 40

    def talk(transport):
        if transport.rank == 0:
            for number in range(rounds * 20):
                transport.isend(torch.tensor([number]), 1, tag=number % 2)
            return None
        into = torch.empty(1, dtype=torch.int64)
        found = []
        for start in range(0, rounds * 20, 20):  # ten odd ones, then the ten even ones before them
            for tag in (1, 0):
                for index in range(10):
                    transport.irecv(into, 0, tag).wait()
                    found.append(into.item() == start + 2 * index + tag)
        return all(found)

    assert everywhere(2, talk)[1]


class Garbage:
    """A list element whose comparison collects garbage: a piece of memory is given up while another is being taken."""

    def __init__(self, arena, piece, free):
        self._arena, self._piece, self._free = arena, piece, free

    def __iter__(self):
        if self._piece is not None:
            self._arena.leave(*self._piece)
            self._piece = None
        return iter(self._free)


def test_garbage_may_be_collected_while_memory_is_taken():
    descriptor, segment = create_segment(4096)
    os.close(descriptor)
    pieces = Arena(segment)
    start = pieces.take(4096)
    free = pieces._free[0]
    pieces._free[0] = Garbage(pieces, (start, 4096), free)  # looking through the free pieces triggers it
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(pieces.take, 64).result(timeout=10) == free[0]


def test_a_rank_that_only_offers_waits_for_ranks_that_read(monkeypatch):
    """However far behind the others are, a bounded part of the memory is in use."""
    monkeypatch.setattr(transport_module, "_MOST_STAGED", 100_000)
    most = []

    def pass_on(transport):
        for number in range(200):
            if transport.rank == 0:
                tensor = torch.full((10_000,), number, dtype=torch.uint8)
                transport.let_others_catch_up()
                copy = transport.copy(tensor)
                transport.offer(tensor, 1, copy=copy)
                copy.let_go()
                most.append(sum(sent.size for sent in transport._staged[0]))
            else:
                borrowed = transport.borrow(0)
                assert borrowed.bytes().eq(number).all()
                borrowed.give_back()

    everywhere(2, pass_on)
    assert max(most) <= 110_000
