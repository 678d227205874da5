"""The work queue: the order of collectives, which thread runs them, and how they end."""

import itertools
import threading
import time

import pytest

from microparallel.comms import work_queue
from microparallel.comms.work_queue import BackgroundDelay, WorkQueue
from microparallel.errors import CommsError, TransportTimeout


@pytest.fixture
def queue():
    queue = WorkQueue()
    yield queue
    queue.close()


def test_waiting_runs_those_before_it(queue):
    done = []
    works = [queue.append(lambda _, number=number: done.append(number)) for number in range(3)]
    works[1].wait()
    assert done == [0, 1]
    assert not works[2].done and works[2].ended is None
    assert works[0].ended <= works[1].ended
    works[2].wait()
    assert done == [0, 1, 2]


def test_the_queues_thread_runs_what_no_thread_waits_for(queue):
    ran = threading.Event()
    queue.append(lambda _: ran.set())
    queue.run_in_background()
    assert ran.wait(20)


def test_an_error_belongs_to_its_own_work(queue):
    error = CommsError("lost")

    def fail(_):
        raise error

    failing, fine = queue.append(fail), queue.append(lambda _: None)
    fine.wait()
    for _ in range(2):
        with pytest.raises(CommsError) as raised:
            failing.wait()
        assert raised.value is error


def test_a_callback_may_wait_for_other_work(queue):
    results = []
    finished = threading.Event()

    def outer():
        inner = queue.append(lambda _: results.append("inner"))
        nested = threading.Event()
        inner.then(nested.set)
        queue.run_in_background()
        assert nested.wait(20)
        results.append("outer")
        finished.set()

    gate = threading.Event()
    work = queue.append(lambda _: gate.wait(20))
    work.then(outer)
    queue.run_in_background()
    gate.set()
    assert finished.wait(20)
    assert results == ["inner", "outer"]


def test_callbacks_of_what_is_done_run_at_once(queue):
    work = queue.append(lambda _: None)
    work.wait()
    called = []
    work.then(lambda: called.append(True))
    assert called


def test_waiting_gives_up(queue):
    gate = threading.Event()
    begun = threading.Event()
    queue.append(lambda _: (begun.set(), gate.wait(20)))
    queue.run_in_background()
    assert begun.wait(20)
    later = queue.append(lambda _: None)
    with pytest.raises(TransportTimeout):
        later.wait(0.01)
    gate.set()
    later.wait()


def test_work_knows_its_deadline(queue):
    deadlines = []
    queue.append(deadlines.append, 5.0).wait()
    queue.append(deadlines.append).wait()
    queue.append(deadlines.append, 5.0).wait(1.0)
    assert deadlines[1] is None
    assert deadlines[2] < deadlines[0] + 5


def test_what_has_not_run_when_the_queue_closes_never_runs():
    queue = WorkQueue()
    called = []
    work = queue.append(lambda _: called.append("run"))
    work.then(lambda: called.append("callback"))
    queue.close()
    for closed in (work, queue.append(lambda _: called.append("late"))):
        with pytest.raises(CommsError, match="closed"):
            closed.wait()
    assert called == ["callback"]


def test_what_is_ready_runs_up_to_the_first_that_is_not(queue):
    done = []
    ready = [True, True, False, True]
    for number in range(4):
        queue.append(lambda _, number=number: done.append(number), ready=lambda number=number: ready[number])
    queue.run_ready()
    assert done == [0, 1]
    ready[2] = True
    queue.run_ready()
    assert done == [0, 1, 2, 3]


@pytest.fixture
def computing(monkeypatch):
    """The caller computes all the time, as far as its processor clock says."""
    clock = itertools.count()
    monkeypatch.setattr(work_queue.time, "clock_gettime", lambda _: next(clock))


def test_a_delayed_thread_runs_when_its_caller_waits(queue):
    ran = threading.Event()
    queue.append(lambda _: ran.set())
    queue.run_in_background(delay=1000)
    assert ran.wait(20)


@pytest.mark.usefixtures("computing")
def test_a_thread_is_delayed_while_its_caller_computes_but_not_for_ever(queue):
    ran = threading.Event()
    begun = time.monotonic()
    queue.append(lambda _: ran.set())
    queue.run_in_background(delay=0.1)
    assert ran.wait(20)
    assert time.monotonic() - begun >= 0.1


@pytest.mark.usefixtures("computing")
def test_a_delay_can_be_ended(queue):
    ran = threading.Event()
    work = queue.append(lambda _: ran.set())
    queue.run_in_background(delay=1000)
    assert not work.done
    queue.end_delay()
    assert ran.wait(20)


def test_ending_a_delay_wakes_no_thread_that_is_not_delayed(queue):
    work = queue.append(lambda _: None)
    for _ in range(3):  # as one who polls
        queue.end_delay()
    assert not work.done
    work.wait()


@pytest.mark.usefixtures("computing")
def test_a_queue_closes_though_its_thread_is_delayed():
    queue = WorkQueue()
    work = queue.append(lambda _: None)
    queue.run_in_background(delay=1000)
    queue.close()
    with pytest.raises(CommsError):
        work.wait()


# ── how long the queue's thread is delayed ──────────────────────────────────────────────────────────────────────────


class Clocks:
    """The world's time, and the processor time of the thread that computes."""

    now = used = 0.0

    def pass_by(self, seconds, computing=0.0):
        self.now += seconds
        self.used += computing


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: clocks.now)
    monkeypatch.setattr(work_queue.time, "clock_gettime", lambda _: clocks.used)
    return clocks


@pytest.fixture
def delay(clocks):
    delay = BackgroundDelay()
    assert delay.next_look() == 0.0
    delay.begin(0.05)
    return delay


def test_a_delay_lasts_while_the_thread_computes(delay, clocks):
    for _ in range(4):
        assert delay.next_look() == pytest.approx(0.01)
        clocks.pass_by(0.01, computing=0.005)
    assert delay.next_look() > 0.0
    clocks.pass_by(0.02, computing=0.02)
    assert delay.next_look() == 0.0  # not for ever


def test_a_delay_ends_when_the_thread_waits(delay, clocks):
    clocks.pass_by(0.011, computing=0.00005)  # it has computed until it began to wait
    assert delay.next_look() == 0.0
    clocks.pass_by(0.011, computing=0.01)
    assert delay.next_look() == 0.0


def test_two_looks_in_one_moment_do_not_make_a_thread_wait(delay, clocks):
    clocks.pass_by(0.01, computing=0.01)
    assert delay.next_look() > 0.0
    assert delay.next_look() > 0.0


def test_beginning_again_begins_anew(delay, clocks):
    clocks.pass_by(0.04, computing=0.04)
    delay.begin(0.05)
    clocks.pass_by(0.04, computing=0.04)
    assert delay.next_look() > 0.0


def test_a_delay_that_was_ended_is_over(delay):
    delay.end()
    assert delay.next_look() == 0.0


def test_a_thread_that_is_gone_does_not_compute(delay, clocks, monkeypatch):
    def gone(_):
        raise OSError

    monkeypatch.setattr(work_queue.time, "clock_gettime", gone)
    clocks.pass_by(0.01)
    assert delay.next_look() == 0.0
