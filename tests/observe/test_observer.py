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
