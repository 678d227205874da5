"""Attempts that meet at one store, as under torchrun: none takes what another has left there for its own."""

import json
import threading

import pytest
import torch.distributed as dist

from microparallel.errors import TransportTimeout
from microparallel.topology.placement import Placement
from microparallel.world.attempt import agree_on_attempt, missing_from_attempt


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank, ranks=3):
    return Placement(rank, ranks, rank, ranks, hosts_store=False, shared_store=True)


def join(store, ranks, timeout=20):
    """Let these ranks join, each in a thread and with a connection of its own; returns the threads and the names."""
    names = {}

    def run(rank):
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        names[rank] = agree_on_attempt(place(rank), own, timeout)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads, names


@pytest.mark.parametrize("old", [{}, {"attempt": "old"}, {"attempt": "old", "old/go": '["a 1 1", "b 2 2", "c 3 3"]'}])
@pytest.mark.parametrize("first_comes", ["last", "first"])
def test_all_ranks_of_an_attempt_have_one_new_name(store, old, first_comes):
    for key, value in old.items():
        store.set(key, value)
    others, names = join(store, [1, 2])
    if first_comes == "last":
        store.wait(["old/came/1", "old/came/2"] if old else [])  # they have read the old name
    first, name = join(store, [0])
    for thread in (*others, *first):
        thread.join(20)
    assert names[1] == names[2] == name[0] != "old"


def test_a_smaller_world_leaves_no_place_for_a_rank_of_a_larger_one(store):
    store.set("attempt", "old")
    store.set("old/go", json.dumps(["a 1 1"]))
    assert missing_from_attempt(place(2), store) == [0]
    with pytest.raises(TransportTimeout, match=r"rank 0 of this attempt was not there within 0\.3 s"):
        agree_on_attempt(place(2), store, 0.3)


def test_who_has_not_come(store):
    assert missing_from_attempt(place(1), store) == [0]
    threads, _ = join(store, [0, 2])
    while missing_from_attempt(place(0), store) != [1]:  # the test's own timeout ends this
        pass
    last, _ = join(store, [1])
    for thread in (*threads, *last):
        thread.join(20)
    assert missing_from_attempt(place(1), store) == []
