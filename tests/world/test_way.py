"""Which address a rank is reached at, by which interface, and what is said where there is none."""

import os

import pytest
import torch.distributed as dist

import microparallel as mp
from microparallel.topology import ALONE
from microparallel.transport import interfaces
from microparallel.transport.interfaces import address_towards, interface_of, is_loopback, take_the_way
from microparallel.world.roll_call import Answer, places, roll_call
from microparallel.world.way import require_reach

HERE, THERE = Answer("here", "127.0.0.1", False, False, 0), Answer("there", "10.9.9.9", False, False, 1)


@pytest.fixture
def unset(monkeypatch):
    """No interface is chosen, and none stays chosen after the test."""
    monkeypatch.setattr(interfaces, "_told", {})
    for name in (interfaces.GLOO, interfaces.NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_address_towards_this_machine_is_that_of_its_loopback_interface():
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None


@pytest.mark.parametrize(
    ("address", "is_own"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("alpha", False)]
)
def test_loopback_addresses(address, is_own):
    assert is_loopback(address) is is_own


def test_a_name_that_no_host_has():
    with pytest.raises(mp.errors.UsageError, match=r"MASTER_ADDR=nobody\.invalid: .* knows no host of that name"):
        address_towards("nobody.invalid", 1)


@pytest.mark.usefixtures("unset")
def test_ranks_of_one_machine_use_its_loopback_interface_unless_the_user_has_chosen(monkeypatch):
    assert take_the_way([HERE, HERE], 0) == "127.0.0.1"
    assert (os.environ[interfaces.GLOO], os.environ[interfaces.NCCL]) == ("lo", "=lo")
    monkeypatch.setenv(interfaces.GLOO, "no-such-interface")
    with pytest.raises(mp.errors.UsageError, match=r"GLOO_SOCKET_IFNAME=no-such-interface: .*; it has lo"):
        take_the_way([HERE, HERE], 0)


@pytest.mark.usefixtures("unset")
def test_the_choice_of_one_world_is_none_of_the_user_s_in_the_next():
    take_the_way([HERE, HERE], 0)
    os.environ[interfaces.GLOO] = interfaces._told[interfaces.GLOO] = "lo"
    assert take_the_way([HERE, HERE], 0) == "127.0.0.1"


def test_a_world_of_one_machine_tries_nothing():
    require_reach(dist.HashStore(), [HERE, HERE], 0, "127.0.0.1", 1)


def test_two_machines_of_one_name_are_told_apart():
    twin = Answer("here", "10.9.9.8", False, False, 1)
    assert places([HERE, THERE]) == ["here", "there"]
    assert places([HERE, twin, twin]) == ["here of rank 0", "here of rank 1", "here of rank 1"]


def test_a_rank_alone_answers_for_itself():
    (only,) = roll_call(ALONE, dist.HashStore(), nccl=False, shm=True)
    assert (only.machine, only.shm, only.address) == (0, True, "127.0.0.1")
