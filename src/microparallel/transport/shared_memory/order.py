"""In which order ranks read and write a tensor: by the host alone, or also by marks of the GPU that they share.

On the host a tensor may be read as soon as a rank has posted it. A GPU runs behind the host: what a rank has posted may
not be computed yet, and what a rank has taken may not be read yet. So the slot of a message has two words that GPUs
write, and wait for: `ready` and `read`.

```
host, sender      post ──────────▶
GPU, sender       ▒▒ compute ▒ ready := n                       wait for read ≥ n ▒ write ▒
host, receiver          take ────▶
GPU, receiver           wait for ready ≥ n ▒▒ read ▒ read := n
```

The hosts meet once, to say where the tensor lies; no thread waits for the GPU. What a thread's stream has to wait for
and to write is collected in `Marks`, and handed over in one call before what depends on it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Marks(Protocol):
    """What a thread lets its device wait for and write, next. Message number 0: the host's order is enough."""

    def after(self, address: int, number: int) -> None:
        """What follows waits until the word at this address has come to a number."""

    def write(self, address: int, number: int) -> None:
        """When what came before is done, the word at this address becomes this number."""

    def hand_over(self) -> None:
        """Hand what was collected to the device: before something that depends on it, and before waiting for a peer."""


class Order(Protocol):
    """How a rank keeps its device in order with those of other ranks."""

    def is_kept_for(self, tensor: torch.Tensor) -> bool:
        """Whether messages with this tensor need a number, as those with a tensor on the GPU do."""

    def marks(self) -> Marks:
        """The marks of the calling thread."""

    def here(self) -> Any:
        """What the calling thread has let its device do so far, and perhaps a little more: a point, for `join`."""

    def join(self, point: Any) -> None:
        """Let the device do what the calling thread asks from now on after it has come to that point."""


class NoMarks:
    """What a thread has done on the CPU is done: there is nothing to mark."""

    def after(self, address: int, number: int) -> None:
        """Nothing to wait for."""

    def write(self, address: int, number: int) -> None:
        """Nobody waits for it."""

    def hand_over(self) -> None:
        """Nothing was collected."""


_NO_MARKS = NoMarks()


class HostOrder:
    """The order of ranks that compute on the CPU."""

    def is_kept_for(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """It is for no tensor."""
        return False

    def marks(self) -> NoMarks:
        """There are none."""
        return _NO_MARKS

    def here(self) -> None:
        """There is one order only."""

    def join(self, point: Any) -> None:
        """Nothing to do."""
