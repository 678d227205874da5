"""In which order ranks read and write a tensor: by the host alone, or also by events of the GPU they share.

On the host a tensor may be read as soon as a rank has posted it. A GPU runs behind the host: what a rank posts may not
be computed yet, and what a rank has taken may not be read yet. So of a tensor on a GPU each message carries the numbers
of two events: the reader's stream waits for the sender's, the sender's stream for the reader's.

```
host, sender      post ─────────────▶ taken?  ┐ waits for the host of the reader
GPU, sender       ▒▒ compute ▒ e1             └ before it writes: waits for e2
host, reader              take
GPU, reader                    after e1: ▒▒ read ▒ e2
```

No thread waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Order(Protocol):
    """How a rank keeps its device in order with those of other ranks. Event number 0: the host's order is enough."""

    def offered(self, tensor: torch.Tensor) -> int:
        """Before this rank posts a tensor: returns the number of the event after which it may be read."""

    def before_reading(self, source: int, event: int) -> None:
        """Before the calling thread lets its device read what a rank has posted with this event."""

    def has_been_read(self, event: int) -> int:
        """After it has let its device read what was posted with this event: returns its own event, which says so."""

    def before_writing(self, reader: int, event: int) -> None:
        """Before the calling thread lets its device write to what a rank has read, with that rank's event."""

    def has_read(self, reader: int, event: int) -> bool:
        """Whether the reader's device has come to this event."""

    def wait_until_read(self, reader: int, event: int) -> None:
        """Return when the reader's device has come to this event."""

    def free_when(self, event: int, free: Callable[[], bool]) -> None:
        """Let an event of this rank stand for something else as soon as `free()` says so."""

    def now(self) -> Any:
        """The end of what the calling thread has let its device do so far: a point, for `join`."""

    def join(self, point: Any) -> None:
        """Let the device do what the calling thread asks from now on after it has come to that point."""


class HostOrder:
    """The order of ranks that compute on the CPU: what a thread has done is done, and there are no events."""

    def offered(self, tensor: torch.Tensor) -> int:  # noqa: ARG002
        """There is no event."""
        return 0

    def before_reading(self, source: int, event: int) -> None:
        """Nothing to wait for."""

    def has_been_read(self, event: int) -> int:  # noqa: ARG002
        """There is no event."""
        return 0

    def before_writing(self, reader: int, event: int) -> None:
        """Nothing to wait for."""

    def has_read(self, reader: int, event: int) -> bool:  # noqa: ARG002
        """It has."""
        return True

    def wait_until_read(self, reader: int, event: int) -> None:
        """Nothing to wait for."""

    def free_when(self, event: int, free: Callable[[], bool]) -> None:
        """There are no events."""

    def now(self) -> None:
        """There is one order only."""

    def join(self, point: Any) -> None:
        """Nothing to do."""
