"""What observers are told of calls that two threads see the end of."""

import threading
import time

from microparallel.observe.flight_recorder import NoLog
from microparallel.observe.observer import Activity, ObservedCall
from microparallel.program import Observed


class SlowToTell:
    """An observer whose thread has to wait when it is told of an end."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.told = []

    def begins(self, activity):
        pass

    waits = begins

    def ends(self, activity):
        self.inside.set()
        self.go_on.wait(20)
        self.told.append(activity.ended)


def test_a_call_has_ended_before_what_its_caller_does_next():
    observer = SlowToTell()
    call = ObservedCall(
        NoLog().collective("all_reduce", "all_reduce", 4), [observer], Activity(Observed("x", "collective"))
    )
    thread = threading.Thread(target=call.completes)  # the transport's thread is the first to see it
    thread.start()
    assert observer.inside.wait(20)
    call.ends()  # the caller does not wait for that thread,
    next_begins = time.perf_counter()
    observer.go_on.set()
    thread.join(20)
    assert len(observer.told) == 1 and observer.told[0] <= next_begins  # and the end is told once, as it was


class NotesEnds(SlowToTell):
    """An observer that waits for nothing."""

    def ends(self, activity):
        self.told.append(activity.ended)


def test_a_call_that_two_threads_tell_of_has_ended_when_it_had():
    """As two works of a queue, whose callbacks two threads run: the first one's thread may come last."""
    observer = NotesEnds()
    calls = [
        ObservedCall(NoLog().collective("x", "x", number), [observer], Activity(Observed("x", "collective")))
        for number in range(2)
    ]
    for number, call in enumerate(calls):
        call.ended_at = float(number)
    for call in reversed(calls):
        call.ends()
    assert observer.told == [1.0, 0.0]
