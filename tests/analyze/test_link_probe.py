"""The link between two hosts is measured; here both are this machine."""

import socket
import time

import pytest

from microparallel.analyze import link_probe
from microparallel.analyze.link_probe import WORD_LENGTH, Door, measure

WORD = "w" * WORD_LENGTH
AHEAD = 7.5


@pytest.fixture
def door():
    door = Door("127.0.0.1", WORD, lambda: time.time_ns() + round(AHEAD * 1e9))
    yield door
    door.close()


def test_a_link_is_measured_both_ways_and_clocks_within_the_error(door):
    found = measure("127.0.0.1", door.port, WORD)
    assert 0 < found.spread[0] <= found.round_trip <= found.spread[1]
    assert found.there > 1e6 and found.back > 1e6
    assert 0 < found.clock_error < 1 and abs(found.ahead - AHEAD) <= found.clock_error


def test_a_stranger_is_not_let_in(door):
    for said in (b"x" * WORD_LENGTH + link_probe.PING + b"?", b"GET / HTTP/1.1\r\n\r\n".ljust(99)):
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as stranger:
            stranger.sendall(said)
            assert _said(stranger) == b""
    assert measure("127.0.0.1", door.port, WORD).round_trip > 0  # and others still are


def _said(stranger):
    try:
        return stranger.recv(100)
    except ConnectionResetError:
        return b""


def test_a_host_that_falls_silent_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(link_probe, "_SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        measure("127.0.0.1", silent.getsockname()[1], WORD)
    with pytest.raises(ConnectionRefusedError):
        measure("127.0.0.1", silent.getsockname()[1] if silent.fileno() > 0 else 1, WORD)
