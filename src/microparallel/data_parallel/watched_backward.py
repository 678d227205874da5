"""A backward as observers are told of it: one operation for each bucket, which ends with the last of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from microparallel.observe import Activity, Observer, Told
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
        self._observers = observers
        self._missing = list(sizes)
        self._microbatch = microbatch
        self._at = 0
        self._told: Told | None = None
        self.goes_on()

    def arrives(self, bucket: int) -> None:
        """A gradient of this bucket has been accumulated, in a backward after which nothing leaves."""
        self._missing[bucket] -= 1
        while self._at < len(self._missing) and self._missing[self._at] <= 0:
            self.ends()
            self.goes_on()

    def goes_on(self) -> None:
        """The backward of the next bucket begins, if there is one."""
        if self._told is None and self._at < len(self._missing):
            operation = Backward(len(self._missing) - 1 - self._at, self._microbatch)
            self._told = Told(self._observers, Activity(operation)).__enter__()

    def ends(self) -> None:
        """The backward of this bucket has ended, and it may leave."""
        if self._told is not None:
            self._told.__exit__()
            self._told = None
            self._at += 1

    def end(self) -> None:
        """Backward has ended: what has not come by now does not come."""
        while self._at < len(self._missing):
            self.goes_on()
            self.ends()
