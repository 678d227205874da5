"""Ranks that make different calls, where one of them makes its call at an awkward moment."""

import socket

import pytest

from microparallel.errors import Mismatch
from microparallel.transport.shared_memory import peers as module
from microparallel.transport.shared_memory.call_log import CallLog, signature_of
from microparallel.transport.shared_memory.peers import STATUS_BYTES, Peers
from microparallel.transport.shared_memory.segment import create_segment


@pytest.fixture
def three():
    """What each of three ranks of this process sees of the others."""
    segments = {rank: create_segment(STATUS_BYTES)[1] for rank in range(3)}
    pairs = {pair: socket.socketpair() for pair in [(0, 1), (0, 2), (1, 2)]}
    ends = {rank: {} for rank in range(3)}
    for (one, other), (here, there) in pairs.items():
        ends[one][other], ends[other][one] = here, there
    everyone = [Peers(rank, range(3), segments, ends[rank]) for rank in range(3)]
    yield everyone
    for one in everyone:
        one.close()


def make(peers, call):
    return peers.call(signature_of(call), call)


def test_a_rank_that_calls_while_others_are_compared_is_named(three, monkeypatch):
    number = make(three[0], "all_reduce")
    make(three[1], "broadcast")
    looked = []

    def looks(logs, real=module.first_difference):
        found = real(logs)
        if not looked:  # rank 2 is not in this answer, and has called before anyone asks whether it has
            looked.append(found)
            make(three[2], "all_reduce")
        return found

    monkeypatch.setattr(module, "first_difference", looks)
    with pytest.raises(Mismatch, match=r"\n  ranks 0, 2: all_reduce\n  rank 1: broadcast$"):
        three[0].disagree(number)
    assert looked == [(1, {0: signature_of("all_reduce"), 1: signature_of("broadcast")})]


def test_a_call_counts_when_it_can_be_read(three, monkeypatch):
    def write(log, number, signature, text, real=CallLog.write):
        assert three[0].missing(number) == [0, 1, 2]  # otherwise another rank would look for it in the log
        real(log, number, signature, text)

    monkeypatch.setattr(CallLog, "write", write)
    assert make(three[0], "all_reduce") == 1
    assert three[1].missing(1) == [1, 2]
