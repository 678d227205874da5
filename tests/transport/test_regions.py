"""Tensors of torch's own that are moved to where peers can read them."""

import gc
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from microparallel.errors import CommsError, PeerGone
from microparallel.transport.shared_memory import regions
from microparallel.transport.shared_memory.peers import Peers, RankStatus
from microparallel.transport.shared_memory.regions import OwnRegions, TheirRegions
from microparallel.transport.shared_memory.segment import create_segment

LARGE = 2**18  # floats: a megabyte


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def status():
    return RankStatus(create_segment(8192)[1])


@pytest.fixture
def own(sockets, status, monkeypatch):
    monkeypatch.setenv("MICROPARALLEL_MOVE", "1")
    return OwnRegions({1: sockets[0]}, status)


@pytest.fixture
def theirs(sockets, status):
    return TheirRegions(0, sockets[1], status)


def moved(own, tensor):
    """Whether a tensor is moved when it comes for the second time."""
    own.move_what_comes_again(tensor)
    assert own.find(tensor) is None, "it came for the first time"
    own.move_what_comes_again(tensor)
    return own.find(tensor) is not None


def test_what_comes_again_is_read_where_it_lies(own, theirs):
    tensor = torch.arange(LARGE, dtype=torch.float32)
    view = tensor[1000:].view(-1, 2)
    assert moved(own, tensor)
    number, offset = own.find(view)
    assert offset == 4000
    seen = theirs.bytes_of(number).view(torch.float32)
    assert torch.equal(seen, tensor)
    view[0, 0] = -1.0  # every view of it has moved along
    assert seen[1000] == tensor[1000] == -1.0


def test_several_regions_are_told_apart(own, theirs):
    tensors = [torch.full((LARGE + index,), float(index)) for index in range(5)]
    assert all(moved(own, tensor) for tensor in tensors)
    for tensor in reversed(tensors):
        number, _ = own.find(tensor)
        assert torch.equal(theirs.bytes_of(number).view(torch.float32), tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(LARGE - 1),
        lambda: torch.zeros(2 * LARGE)[:LARGE],
        lambda: torch.zeros(LARGE).share_memory_(),
        lambda: torch.from_numpy(torch.zeros(LARGE).numpy()),
    ],
    ids=["small", "part of another", "shared already", "NumPy's"],
)
def test_what_stays_where_it_is(own, make):
    tensor = make()
    address = tensor.data_ptr()
    assert not moved(own, tensor)
    assert tensor.data_ptr() == address


def test_an_array_that_looks_at_a_tensor_keeps_it_in_place(own):
    tensor = torch.zeros(LARGE)
    array = tensor.numpy()
    assert not moved(own, tensor)
    tensor.fill_(1.0)
    assert array.all()


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def maps():
    return sum("/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_peers_forget_what_is_gone_and_need_no_descriptors(own, theirs):
    held = open_descriptors(), maps()
    tensor = torch.ones(LARGE)
    assert moved(own, tensor)
    number, _ = own.find(tensor)
    assert theirs.bytes_of(number).any()
    assert (open_descriptors(), maps()) == (held[0] + 1, held[1] + 2)  # torch's own descriptor; the map of each
    del tensor
    gc.collect()
    own.announce_gone()
    theirs.refresh()
    assert (open_descriptors(), maps()) == held
    with pytest.raises(CommsError):
        theirs.bytes_of(number)


def test_others_may_keep_what_is_gone_here(own):
    """torch gives moved memory to other processes, such as the receiver of a queue."""
    tensor = torch.ones(LARGE)
    assert moved(own, tensor)
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
    elsewhere = torch.UntypedStorage._new_shared_fd_cpu(os.dup(descriptor), size)
    del tensor
    gc.collect()
    own.announce_gone()
    assert torch.tensor(elsewhere, dtype=torch.uint8).any()


def test_a_process_that_was_forked_takes_nothing_from_its_parent(own):
    tensors = [torch.ones(LARGE)]
    assert moved(own, tensors[0])
    child = os.fork()
    if child == 0:
        tensors.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tensors[0].all()


def test_a_rank_that_is_late_reads_notices_in_order(own, theirs):
    first, second = torch.ones(LARGE), torch.zeros(LARGE)
    assert moved(own, first)
    del first
    gc.collect()
    assert moved(own, second)
    own.announce_gone()
    number, _ = own.find(second)
    assert not theirs.bytes_of(number).any()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_moved_unless_the_environment_says_so(sockets, status, monkeypatch, value):
    monkeypatch.delenv("MICROPARALLEL_MOVE", raising=False)
    if value is not None:
        monkeypatch.setenv("MICROPARALLEL_MOVE", value)
    assert not moved(OwnRegions({1: sockets[0]}, status), torch.zeros(LARGE))


def no_room(_):
    return SimpleNamespace(f_bavail=1, f_frsize=4096)


def no_folder(path):
    raise FileNotFoundError(path)


@pytest.mark.parametrize("statvfs", [no_room, no_folder])
def test_without_room_tensors_are_copied_as_before(own, monkeypatch, statvfs):
    monkeypatch.setattr(regions.os, "statvfs", statvfs)
    assert not moved(own, torch.zeros(LARGE))


def test_a_peer_that_is_gone_gets_no_notice(own, sockets):
    sockets[1].close()
    assert not moved(own, torch.zeros(LARGE))


def test_memory_that_was_not_handed_over(theirs, sockets, status):
    with pytest.raises(CommsError):
        theirs.bytes_of(1)
    status.count_notice()
    with pytest.raises(CommsError, match="not handed over memory that it announced"):
        theirs.bytes_of(1)
    status.count_notice()
    sockets[0].close()
    with pytest.raises(PeerGone) as gone:
        theirs.bytes_of(1)
    assert gone.value.ranks == (0,)


def test_unread_notices_do_not_hide_that_a_peer_is_gone(own, sockets):
    segments = {rank: create_segment(8192)[1] for rank in range(2)}
    peers = Peers(1, range(2), segments, {0: sockets[1]})
    assert moved(own, torch.zeros(LARGE))
    peers.require_alive(0)
    sockets[0].close()
    with pytest.raises(PeerGone) as gone:
        peers.require_alive(0)
    assert gone.value.ranks == (0,)
