"""A backward as observers are told of it: one operation for each bucket, which ends with the last of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from microparallel.observe import Activity, Observer
from microparallel.program import Backward


class WatchedBackward:
    """Where one backward stands, in the order of the program: bucket 0 holds the last layers, and is computed first.

    A bucket that is complete before the one it stands behind takes no time: its backward ends with that one's.

    Args:
        observers: who is told.
        sizes: how many gradients each bucket has.
        microbatch: the number of the micro-batch.
    """

    def __init__(self, observers: Sequence[Observer], sizes: Sequence[int], microbatch: int) -> None:
        self._observers = tuple(observers)
        self._missing = list(sizes)
        self._microbatch = microbatch
        self._at = 0
        self._activity = self._begin()

    def arrives(self, bucket: int) -> None:
        """A gradient of this bucket has been accumulated."""
        self._missing[bucket] -= 1
        while self._at < len(self._missing) and self._missing[self._at] <= 0:
            self._go_on()

    def end(self) -> None:
        """Backward has ended: what has not come by now does not come."""
        while self._at < len(self._missing):
            self._go_on()

    def _go_on(self) -> None:
        for observer in self._observers:
            observer.ends(self._activity)
        self._at += 1
        if self._at < len(self._missing):
            self._activity = self._begin()

    def _begin(self) -> Activity:
        activity = Activity(Backward(len(self._missing) - 1 - self._at, self._microbatch))
        for observer in self._observers:
            observer.begins(activity)
        return activity
