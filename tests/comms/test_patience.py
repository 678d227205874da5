"""Patience with a thread that computes."""

import pytest

from microparallel.comms import work_queue as module
from microparallel.comms.work_queue import Patience


class Clocks:
    """The world's time, and the processor time of the thread that asks."""

    now = used = 0.0

    def pass_by(self, seconds, computing=0.0):
        self.now += seconds
        self.used += computing


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(module.time, "monotonic", lambda: clocks.now)
    monkeypatch.setattr(module.time, "clock_gettime", lambda _: clocks.used)
    return clocks


@pytest.fixture
def asked(clocks):
    patience = Patience()
    assert patience.nap() == 0.0
    patience.ask(0.05)
    return patience


def test_it_lasts_while_the_thread_computes(asked, clocks):
    for _ in range(4):
        assert asked.nap() == pytest.approx(0.01)
        clocks.pass_by(0.01, computing=0.005)
    assert asked.nap() > 0.0
    clocks.pass_by(0.02, computing=0.02)
    assert asked.nap() == 0.0  # not for ever


def test_it_ends_when_the_thread_waits(asked, clocks):
    clocks.pass_by(0.011, computing=0.00005)  # it has computed until it began to wait
    assert asked.nap() == 0.0
    clocks.pass_by(0.011, computing=0.01)
    assert asked.nap() == 0.0


def test_two_looks_in_one_moment_do_not_make_a_thread_wait(asked, clocks):
    clocks.pass_by(0.01, computing=0.01)
    assert asked.nap() > 0.0
    assert asked.nap() > 0.0


def test_asking_again_begins_anew(asked, clocks):
    clocks.pass_by(0.04, computing=0.04)
    asked.ask(0.05)
    clocks.pass_by(0.04, computing=0.04)
    assert asked.nap() > 0.0


def test_it_can_be_ended(asked):
    asked.end()
    assert asked.nap() == 0.0


def test_a_thread_that_is_gone_does_not_compute(asked, clocks, monkeypatch):
    def gone(_):
        raise OSError

    monkeypatch.setattr(module.time, "clock_gettime", gone)
    clocks.pass_by(0.01)
    assert asked.nap() == 0.0
