"""Ranks that are forked from a process which has imported torch already."""

import os

import pytest

import microparallel as mp
from microparallel.world.nursery import Nursery, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="ranks cannot be forked here")


@pytest.fixture(scope="module")
def nursery():
    with Nursery(["microparallel.world.connect"]) as nursery:
        yield nursery


def who(comms):
    return comms.rank, os.getpid(), os.getppid()


def test_ranks_are_children_that_stay_and_can_be_replaced(nursery):
    with mp.Pool(nursery) as pool:
        first = pool.run(who, 2, device="cpu")
        assert [rank for rank, _, _ in first] == [0, 1]
        assert {parent for _, _, parent in first} == {os.getpid()}
        assert pool.run(who, 2, device="cpu") == first
        pool.replace_ranks()
        second = pool.run(who, 2, device="cpu")
    assert not {pid for _, pid, _ in first} & {pid for _, pid, _ in second}


def test_a_nursery_that_has_ended_says_so():
    nursery = Nursery([])
    nursery.close()
    with mp.Pool(nursery) as pool, pytest.raises(mp.LaunchError, match="has ended"):
        pool.run(who, 1, device="cpu")
