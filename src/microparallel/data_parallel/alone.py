"""A rank without others: nothing is averaged, and observers are told what it computes as its program says.

```
F0:1.0 B0.0 F0:1.1 B0.1 S      two micro-batches, of which the first is inside of no_sync()
```
"""

from __future__ import annotations

import functools

from microparallel.comms import Comms
from microparallel.data_parallel.watched_backward import WatchedBackward
from microparallel.torch_private import at_end_of_backward


class Alone:
    """Counts the backwards of the one rank: the next micro-batch is 0 again after one that was not local.

    Attributes:
        microbatch: the number of the next.
    """

    def __init__(self, comms: Comms) -> None:
        self.microbatch = 0
        self._comms = comms
        self._running = False
        self._watched: WatchedBackward | None = None  # this backward, if there are observers

    def prepare(self) -> None:
        """Forget a backward that an error has cut short; the model calls this before a forward."""
        self._running = False
        self._end_watch()

    def backward_begins(self, local: bool) -> None:
        """The engine has come to what the model returned; it may do so several times in one backward."""
        if self._running:
            return
        self._running = True
        if self._comms.observers:
            self._watched = WatchedBackward(self._comms.observers, [1], self.microbatch)
        at_end_of_backward(functools.partial(self._backward_ends, local))

    def _backward_ends(self, local: bool) -> None:
        self._running = False
        self._end_watch()
        self.microbatch = self.microbatch + 1 if local else 0

    def _end_watch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.end()
