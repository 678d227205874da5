"""A bucket: gradients side by side in one flat tensor, which is all-reduced as a whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.data_parallel.layout import offsets
from microparallel.data_parallel.skipped_steps import is_finite
from microparallel.program import AllReduce, ReduceScatter
from microparallel.torch_private import (
    copy_all,
    current_stream_address,
    largest_of_each,
    references_to,
    tensors_in_memory_of,
)

_AFTER_COUNTS = 1  # numbers behind the counts: how many gradients are not finite


class FlatBucket:
    """The gradients of some parameters, and what all ranks must know about them, in one message.

    ```
    gradient 0 │ gradient 1 │ … │ for each: how many ranks have one │ how many are not finite
    ```

    On a CPU a gradient is moved into the buffer when it comes, since it is in the cache then. On a GPU all are moved
    together when the bucket leaves, by few kernels: there the host has no time for one each.

    `parameter.grad` becomes a view of the buffer, so nothing is copied when the sum arrives. A gradient that
    the user keeps stays as it is: if something still holds one of the last pass when gradients begin anew
    (`zero_grad`), the bucket begins a new buffer and leaves the old one alone.

    Args:
        parameters: whose gradients it holds, all of one dtype and on one device.
        comms: the ranks.
        number: its place among the buckets of the model.
        overwrites: always use the same buffer, also if something still holds gradients of an earlier pass.

    Attributes:
        buffer: the flat tensor that is all-reduced.
        views: for each parameter, its gradient's place in the buffer.
        ranks_with_gradient: after the all-reduce, for each parameter the number of ranks that have a gradient for it.
        ready: for each parameter, whether this rank's gradient has come.
        missing: how many gradients are not ready.
        not_finite: how many gradients of this rank are known to be infinite or not a number.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comms: Comms, number: int = 0, *, overwrites: bool = False
    ) -> None:
        self.parameters = parameters
        self.number = number
        self._overwrites = overwrites
        self._comms = comms
        begins, self._stop = offsets(parameters)
        self._places = [(one.size(), _strides(one), at) for one, at in zip(parameters, begins, strict=True)]
        self.not_finite = 0
        self.ready = [False] * len(parameters)
        self.missing = len(parameters)
        self.request: Request[Any] | None = None
        self._together = moves_together(parameters[0].device)
        self._came: list[int] = []  # whose gradients have come and are not in the buffer
        self._multiplied_by = 1.0  # by which these are multiplied
        self._streams: set[int] = set()  # on which they were made
        self._looked_at: tuple[list[int], torch.Tensor] | None = None  # of which gradients, whether each is finite
        self._lay_out()

    def _lay_out(self) -> None:
        """Begin a buffer, and in it the place of every gradient."""
        length, first = self._stop + len(self.parameters) + _AFTER_COUNTS, self.parameters[0]
        if first.device.type == "cpu":
            self.buffer = self._comms.empty((length,), first.dtype)
        else:
            self.buffer = torch.empty(length, dtype=first.dtype, device=first.device)
        self.buffer.zero_()
        at_first = self.buffer.storage_offset()
        self.views = [self.buffer.as_strided(size, strides, at_first + at) for size, strides, at in self._places]
        self.ranks_with_gradient = self.buffer[self._stop : -_AFTER_COUNTS]
        self._not_finite_on_all = self.buffer[-1]
        self._addresses = [view.data_ptr() for view in self.views]
        self._handed_out = [False] * len(self.parameters)
        self._open = False  # whether something of this pass is in the buffer
        self._holders_at_first = self._holders()  # which are this bucket alone

    def _holders(self) -> list[int]:
        """How many hold each gradient's place: in Python, in C++; and how many tensors lie in the buffer's memory."""
        in_python = [sys.getrefcount(view) for view in self.views]
        return [*in_python, *map(references_to, self.views), tensors_in_memory_of(self.buffer)]

    @property
    def fits(self) -> bool:
        """Whether gradients still fit into their places; not after `module.double()`, `.to(device)` and the like."""
        return all(
            view.dtype is parameter.dtype and view.data_ptr() == address and view.device == parameter.device
            for parameter, view, address in zip(self.parameters, self.views, self._addresses, strict=True)
        )

    def open(self) -> None:
        """Before anything of a pass is put into the buffer: leave it to those who may hold the last pass's gradients.

        A parameter whose `grad` is still its view goes on with it: autograd adds to that gradient in place, as without
        buckets.
        """
        if not self._open:
            if not self._overwrites and self._begins_anew() and self._holders() != self._holders_at_first:
                self._lay_out()
            self._open = True

    def _begins_anew(self) -> bool:
        """Whether a gradient of the last pass is no longer its parameter's: then another may hold it."""
        given = zip(self.parameters, self.views, self._handed_out, strict=True)
        return any(handed_out and parameter.grad is not view for parameter, view, handed_out in given)

    def put(self, index: int, scale: float) -> None:
        """Move the gradient of `parameters[index]` into the buffer, multiplied by `scale`; `grad` is then its view."""
        self.ready[index] = True
        self.missing -= 1
        if self._together:
            self._came.append(index)
            self._multiplied_by = scale
            self._streams.add(current_stream(self.buffer.device))
            return
        if not self._open:
            self.open()
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is view:  # autograd added to the buffer itself
            view.mul_(scale)
        elif gradient is not None:
            torch.mul(gradient, scale, out=view)
            parameter.grad = view
            self._handed_out[index] = True

    def _move_together(self) -> None:
        """Move the gradients that have come and are not in the buffer; places without a gradient hold zeros."""
        came, self._came = self._came, []
        if not came:
            return
        self.open()
        self._wait_for_streams(came)
        elsewhere = [index for index in came if self.parameters[index].grad is not self.views[index]]
        gradients = [(index, self.parameters[index].grad) for index in elsewhere]
        given = [(index, gradient) for index, gradient in gradients if gradient is not None]
        if given:
            with torch.no_grad():
                copy_all([self.views[index] for index, _ in given], [gradient for _, gradient in given])
        if self._multiplied_by != 1.0:
            self.buffer[: self._stop].mul_(self._multiplied_by)
        for index, _ in given:
            self.hand_out(index)

    def _wait_for_streams(self, came: Sequence[int]) -> None:
        """Let this thread's stream wait for the gradients, where autograd made them on others."""
        streams, self._streams = self._streams, set()
        device = self.buffer.device
        others = streams - {current_stream(device)}
        if not others:
            return
        mine = torch.cuda.current_stream(device)
        for other in others:
            mine.wait_stream(torch.cuda.ExternalStream(other, device))  # type: ignore[no-untyped-call]
        for index in came:
            gradient = self.parameters[index].grad
            if gradient is not None:
                gradient.record_stream(mine)  # its memory is not given away before it has been copied

    def look_for_not_finite(self) -> None:
        """Find out which gradients are not finite, without waiting for a GPU's answer: before `start`."""
        self._move_together()
        looked_at = [index for index, ready in enumerate(self.ready) if ready and self.views[index].numel()]
        if looked_at:
            self._looked_at = looked_at, largest_of_each([self.views[index] for index in looked_at]).isfinite()

    def found_not_finite(self) -> list[int]:
        """Which gradients of this rank are not finite, as far as `look_for_not_finite` has looked."""
        if self._looked_at is None:
            return []
        looked_at, finite = self._looked_at
        return [index for index, fine in zip(looked_at, finite.tolist(), strict=True) if not fine]

    def hand_out(self, index: int) -> None:
        """Let `grad` of `parameters[index]` be its view."""
        self.parameters[index].grad = self.views[index]
        self._handed_out[index] = True

    def fill_up(self, scale: float) -> None:
        """Fill the places of missing gradients: with what earlier passes left in `grad`, otherwise with zeros."""
        self.open()
        for index, parameter in enumerate(self.parameters):
            if not self.ready[index] and parameter.grad is not None:
                self.put(index, scale)
            elif not self.ready[index]:
                self.views[index].zero_()

    def fill_with_zeros(self) -> None:
        """Add nothing to the sum: this rank has no gradients in this pass, and takes none."""
        self._came.clear()
        self.open()
        self.buffer.zero_()

    def start(self, comms: Comms, operation: AllReduce | ReduceScatter, overlap: bool) -> None:
        """All-reduce the buffer, which is `operation` of the program: with `overlap` in the background."""
        self._move_together()
        if self._looked_at is None:
            self._not_finite_on_all.fill_(self.not_finite)
        else:
            self._not_finite_on_all.copy_((~self._looked_at[1]).sum())
        if self.missing:
            self.ranks_with_gradient.copy_(torch.tensor(self.ready))
        else:
            self.ranks_with_gradient.fill_(1)
        if overlap:
            self.request = comms.all_reduce(self.buffer, async_op=True, operation=operation)
        else:
            comms.all_reduce(self.buffer, operation=operation)

    def memory(self) -> list[torch.Tensor]:
        """The tensors in which gradients lie."""
        return [self.buffer]

    def wait(self) -> None:
        """Return when the sum is in the buffer."""
        request, self.request = self.request, None  # a request that failed is not waited for again
        if request is not None:
            request.wait()

    @property
    def not_finite_on_all(self) -> torch.Tensor:
        """How many gradients of all ranks are not finite; float16 holds counts up to 65,504."""
        return self._not_finite_on_all

    @property
    def any_not_finite(self) -> bool:
        """Whether some rank had a gradient that is not finite; the same answer on every rank."""
        return bool(self._not_finite_on_all != 0)

    @property
    def sums_are_finite(self) -> bool:
        """After the all-reduce: whether all gradients are finite; the same answer on every rank."""
        return is_finite(self.buffer)

    @property
    def fewest_ranks(self) -> torch.Tensor:
        """How many ranks had a gradient for the parameter that the fewest ranks used."""
        return self.ranks_with_gradient.min()

    def came_late(self, index: int) -> bool:  # noqa: ARG002
        """Whether there is a sum for a parameter that no rank used: not here, where every sum is of this pass."""
        return False

    def reset(self) -> None:
        """Make all gradients missing again, before the next pass."""
        self.ready = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.not_finite = 0
        self._open = False
        self._came.clear()
        self._streams.clear()
        self._looked_at = None


def take_missing(bucket: FlatBucket) -> None:
    """Take the averages of gradients that only other ranks had; a parameter that no rank used keeps `grad` None."""
    counts = bucket.ranks_with_gradient.tolist()
    for index, (ready, ranks) in enumerate(zip(bucket.ready, counts, strict=True)):
        if not ready and (ranks > 0 or bucket.came_late(index)):
            bucket.hand_out(index)


def moves_together(device: torch.device) -> bool:
    """Whether the gradients of a bucket on this device are moved into it together."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> int:
    """The stream of the calling thread on a device, as a number; 0 on a CPU."""
    return current_stream_address(device) if device.type == "cuda" else 0


def numbers_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """One number of each tensor; the host waits once for each device, and not once for each tensor."""
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    found = [0.0] * len(tensors)
    for places in by_device.values():
        together = torch.stack([tensors[place].to(torch.float64) for place in places]).tolist()
        for place, number in zip(places, together, strict=True):
            found[place] = number
    return found


def split(
    parameters: Iterable[nn.Parameter], limit: float, apart: Callable[[nn.Parameter], object] = lambda _: None
) -> list[list[nn.Parameter]]:
    """Share parameters, in the order of their gradients, among buckets; one that has `limit` bytes takes no more.

    A bucket has one dtype and one device, so several buckets may be open at a time. Parameters for which `apart` says
    different things are in different buckets, too.
    """
    full: list[list[nn.Parameter]] = []
    filling: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, apart(parameter))
        filling.setdefault(kind, []).append(parameter)
        if sum(parameter.nbytes for parameter in filling[kind]) >= limit:
            full.append(filling.pop(kind))
    return full + list(filling.values())


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of a gradient: those of its parameter, which optimizers are fastest with."""
    return torch.empty_like(parameter, device="meta").stride()
