"""What a learner's code holds in memory: a watch sees the tensors that a rank makes, and which are still there."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from microparallel.torch_private import backward_engine, pytree, saved_by

_collecting = threading.Lock()


def collect_garbage() -> None:
    """Free what only refers to itself. Two ranks take turns: Python lets a second collection do nothing."""
    with _collecting:
        gc.collect()


class MemoryWatch(TorchFunctionMode):
    """Sees every tensor that a rank's thread makes while the watch is entered, and says which are in memory.

    What the exam itself keeps of a call does not count: the calls of comms go through the watch.

    Attributes:
        held: by a place in the rank's row, which of the rows of numbers were in memory then.
    """

    def __init__(self, comms: Any, names: Sequence[str], rows: Sequence[torch.Tensor]) -> None:
        """Watch these calls of comms; `rows` are numbers that the rank has for a moment only, such as other ranks'."""
        super().__init__()
        self.held: dict[int, list[int]] = {}
        self._comms, self._rows = comms, rows
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._paused = False
        for name in names:
            setattr(comms, name, functools.partial(self._watched, getattr(comms, name)))

    # ── what is made ────────────────────────────────────────────────────────────────────────────────────────────

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch calls this in place of each of its functions."""
        found = func(*args, **(kwargs or {}))
        if not self._paused:
            if getattr(func, "__name__", "").startswith(("empty", "new_empty")) and found.is_floating_point():
                found.fill_(float("nan"))  # what was in this memory before must not be found in it
            self._note(found)
        return found

    def backward(self, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """As `outputs.backward(gradient)`; torch hides from a mode what that calls."""
        backward_engine()((outputs,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _note(self, found: Any) -> None:
        tensors = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        self._made += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

    def _watched(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A call of comms: what it returns counts, and what the exam copies meanwhile does not."""
        self.look()
        with self._pause():
            found = call(*arguments, **named)
        if hasattr(found, "wait"):
            return _WatchedRequest(self, found)
        self._note(found)
        return found

    def waited(self, request: Any, timeout: float | None) -> Any:
        """Wait for a request of the learner's: what it brings counts."""
        with self._pause():
            found = request.wait(timeout)
        self._note(found)
        return found

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Write down which of the rows of numbers are in memory now, all of them or some of their numbers."""
        with self._pause():
            found = self._found()
            if found:  # perhaps in something that only waits for the garbage collector
                collect_garbage()
                found = self._found()
        self.held[len(self._comms.row)] = found

    def holds(self, numbers: int) -> bool:
        """Whether a piece of memory for so many numbers was made and is still there."""
        if any(len(row) >= numbers for row in self._memory()):
            collect_garbage()
        return any(len(row) >= numbers for row in self._memory())

    def saved(self, outputs: torch.Tensor) -> bool:
        """Whether autograd has saved numbers of these rows for the backward of these outputs."""
        nodes, found = [outputs.grad_fn], False
        with self._pause():
            while nodes:
                node = nodes.pop()
                if node is not None:
                    nodes += [below for below, _ in node.next_functions]
                    found |= any(bool(_within(tensor.detach().reshape(-1), self._rows)) for tensor in saved_by(node))
        return found

    def _found(self) -> list[int]:
        return sorted({index for memory in self._memory() for index in _within(memory, self._rows)})

    def _memory(self) -> list[torch.Tensor]:
        """Each piece of memory that was made and is still there, as a row of float64."""
        self._made = [one for one in self._made if one() is not None]
        alive = {storage.data_ptr(): storage for one in self._made if (storage := one()) is not None}
        with self._pause():
            return [
                torch.empty(0, dtype=torch.float64).set_(storage)
                for storage in alive.values()
                if storage.nbytes() % 8 == 0
            ]


class _WatchedRequest:
    """A request that the learner's code waits for."""

    def __init__(self, watch: MemoryWatch, request: Any) -> None:
        self._watch, self._request = watch, request

    def wait(self, timeout: float | None = None) -> Any:
        """Return what the request brings."""
        return self._watch.waited(self._request, timeout)


def _within(memory: torch.Tensor, rows: Sequence[torch.Tensor]) -> list[int]:
    """Which of the rows have numbers that are in this memory."""
    return [index for index, row in enumerate(rows) if bool(torch.isin(row, memory).any())]
