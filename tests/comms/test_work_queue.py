"""Collectives in a line: their order, who runs them, and how they end."""

import itertools
import threading
import time

import pytest

from microparallel.comms import work_queue as patience
from microparallel.comms.work_queue import Line
from microparallel.errors import CommsError, TransportTimeout


@pytest.fixture
def line():
    line = Line()
    yield line
    line.close()


def test_waiting_runs_those_before_it(line):
    done = []
    turns = [line.append(lambda _, number=number: done.append(number)) for number in range(3)]
    turns[1].wait()
    assert done == [0, 1]
    assert not turns[2].done
    turns[2].wait()
    assert done == [0, 1, 2]


def test_a_thread_runs_what_nobody_waits_for(line):
    ran = threading.Event()
    line.append(lambda _: ran.set())
    line.run_in_background()
    assert ran.wait(20)


def test_an_error_belongs_to_its_own_turn(line):
    def fail(_):
        raise CommsError("lost")

    failing, fine = line.append(fail), line.append(lambda _: None)
    fine.wait()
    for _ in range(2):
        with pytest.raises(CommsError, match="lost"):
            failing.wait()


def test_a_callback_may_wait_for_another_turn(line):
    results = []
    finished = threading.Event()

    def outer():
        inner = line.append(lambda _: results.append("inner"))
        nested = threading.Event()
        inner.then(nested.set)
        line.run_in_background()
        assert nested.wait(20)
        results.append("outer")
        finished.set()

    gate = threading.Event()
    turn = line.append(lambda _: gate.wait(20))
    turn.then(outer)
    line.run_in_background()
    gate.set()
    assert finished.wait(20)
    assert results == ["inner", "outer"]


def test_callbacks_of_what_is_done_run_at_once(line):
    turn = line.append(lambda _: None)
    turn.wait()
    called = []
    turn.then(lambda: called.append(True))
    assert called


def test_waiting_gives_up(line):
    gate = threading.Event()
    begun = threading.Event()
    line.append(lambda _: (begun.set(), gate.wait(20)))
    line.run_in_background()
    assert begun.wait(20)
    later = line.append(lambda _: None)
    with pytest.raises(TransportTimeout, match="timed out"):
        later.wait(0.01)
    gate.set()
    later.wait()


def test_a_turn_knows_its_deadline(line):
    deadlines = []
    line.append(deadlines.append, 5.0).wait()
    line.append(deadlines.append).wait()
    line.append(deadlines.append, 5.0).wait(1.0)
    assert deadlines[1] is None
    assert deadlines[2] < deadlines[0] + 5


def test_what_has_not_run_when_the_line_closes_never_runs():
    line = Line()
    called = []
    turn = line.append(lambda _: called.append("run"))
    turn.then(lambda: called.append("told"))
    line.close()
    for closed in (turn, line.append(lambda _: called.append("late"))):
        with pytest.raises(CommsError, match="closed"):
            closed.wait()
    assert called == ["told"]


def test_what_is_ready_runs_up_to_the_first_that_is_not(line):
    done = []
    ready = [True, True, False, True]
    for number in range(4):
        line.append(lambda _, number=number: done.append(number), ready=lambda number=number: ready[number])
    line.run_what_is_ready()
    assert done == [0, 1]
    ready[2] = True
    line.run_what_is_ready()
    assert done == [0, 1, 2, 3]


@pytest.fixture
def computing(monkeypatch):
    """Whoever asked for patience computes all the time, as far as its processor clock says."""
    clock = itertools.count()
    monkeypatch.setattr(patience.time, "clock_gettime", lambda _: next(clock))


def test_a_thread_that_holds_back_runs_the_line_when_its_caller_waits(line):
    ran = threading.Event()
    line.append(lambda _: ran.set())
    line.run_in_background(patience=1000)
    assert ran.wait(20)


@pytest.mark.usefixtures("computing")
def test_a_thread_holds_back_while_its_caller_computes_but_not_for_ever(line):
    ran = threading.Event()
    begun = time.monotonic()
    line.append(lambda _: ran.set())
    line.run_in_background(patience=0.1)
    assert ran.wait(20)
    assert time.monotonic() - begun >= 0.1


@pytest.mark.usefixtures("computing")
def test_a_thread_that_holds_back_can_be_hurried(line):
    ran = threading.Event()
    turn = line.append(lambda _: ran.set())
    line.run_in_background(patience=1000)
    assert not turn.done
    line.hurry()
    assert ran.wait(20)


def test_hurrying_wakes_nobody_who_does_not_hold_back(line):
    turn = line.append(lambda _: None)
    for _ in range(3):  # as one who polls
        line.hurry()
    assert not turn.done
    turn.wait()


@pytest.mark.usefixtures("computing")
def test_a_line_closes_though_its_thread_holds_back():
    line = Line()
    turn = line.append(lambda _: None)
    line.run_in_background(patience=1000)
    line.close()
    with pytest.raises(CommsError, match="closed"):
        turn.wait()
