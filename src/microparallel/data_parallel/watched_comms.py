"""A Comms that is watched: when did each gradient's all-reduce leave, and when was it back?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from microparallel.comms import Comms, Request
from microparallel.errors import CommsTimeout


class Flight:
    """An all-reduce under way, with the times at which it left and was back, in seconds of `time.perf_counter`."""

    def __init__(self, request: Request[torch.Tensor], cargo: tuple[str, ...], size: int, left: float) -> None:
        self.cargo = cargo  # the names of the parameters whose gradients it carries
        self.size = size  # bytes
        self.left = left
        self.back = float("nan")
        self._request = request
        self._landed = threading.Event()
        self._result: torch.Tensor
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Return the averaged tensor when it is back."""
        if not self._landed.wait(timeout):
            raise CommsTimeout(f"{self._request} was not back after {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._result

    def land(self, link_seconds: float) -> None:
        """Wait until it is back, and write down when that was."""
        try:
            self._result = self._request.wait()
            if link_seconds:
                time.sleep(link_seconds)
        except BaseException as error:
            self._error = error
        self.back = time.perf_counter()
        self._landed.set()


class WatchedComms:
    """Stands before a Comms and passes everything on; asynchronous all-reduces of gradients are written down.

    A request does not say when it was complete, only that it is once it has been waited for. So a thread waits for
    each of them, in the order in which they left, and looks at the clock.

    Args:
        comms: the one that does the work.
        cargo_of: the names of the parameters whose gradients a tensor holds, if it holds any.
        link_seconds: play a slower network: each all-reduce keeps the link busy for so much longer, one after another.
            What is waited for at once (counting samples, say) is not slowed down.
    """

    def __init__(
        self, comms: Comms, cargo_of: Callable[[torch.Tensor], tuple[str, ...]], link_seconds: float = 0.0
    ) -> None:
        self.flights: list[Flight] = []
        self._comms = comms
        self._cargo_of = cargo_of
        self._link_seconds = link_seconds
        self._in_the_air: SimpleQueue[Flight | None] = SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="microparallel watched all-reduces", daemon=True)
        self._watcher.start()

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", algorithm: str = "auto", async_op: bool = False
    ) -> torch.Tensor | Flight:
        """Combine everybody's tensor, in place, on every rank: see `Comms.all_reduce`."""
        cargo = self._cargo_of(tensor)
        if not async_op and not cargo:
            return self._comms.all_reduce(tensor, op, algorithm)
        left = time.perf_counter()
        flight = Flight(self._comms.all_reduce(tensor, op, algorithm, async_op=True), cargo, tensor.nbytes, left)
        if cargo:
            self.flights.append(flight)
        self._in_the_air.put(flight)
        return flight if async_op else flight.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comms, name)

    def stop_watching(self) -> None:
        """Let the thread end, after everything is back."""
        self._in_the_air.put(None)
        self._watcher.join()

    def _watch(self) -> None:
        while (flight := self._in_the_air.get()) is not None:
            flight.land(self._link_seconds)
