"""The record of how tensors were made, and its replay on the CPU, which holds few of them at a time.

```
the record                              a replay in which a2 and c1 are wanted
1  a1, s1 = normal_(s0)                 1  a1, s1
2  b1, s2 = normal_(s1)                 4  a2          handed over, and let go with a1
3  c1, s3 = normal_(s2)                 2  b1, s2      b1 is let go: nothing needs it, but s2 is needed
4  a2     = half(a1)                    3  c1, s3      handed over, and let go
5  b2     = half(b1)
```

An operation makes values, changes them and reads them. A value is what a piece of memory holds until it is overwritten
as a whole; the state of the generator (s0, s1, …) is a value, too. So everything follows from what needs what: which
operations are left out, which are done for their random numbers only, and which may be done earlier than they were.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from microparallel.errors import UsageError
from microparallel.torch_private import pytree

Storage = torch.UntypedStorage


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor shows a value: which of its bytes, and in which shape."""

    value: int
    nbytes: int  # of the whole value
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, value: int) -> View:
        """How this tensor shows a value."""
        if tensor.is_neg():
            raise UsageError("deferred_init() cannot record the imaginary part of a conjugate: use -tensor.imag")
        nbytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
        return cls(value, nbytes, tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj())

    def on(self, content: Storage) -> torch.Tensor:
        """The tensor that shows a value's content in this way."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(content, self.offset, self.size, self.stride)
        return tensor.conj() if self.conjugate else tensor

    def memory(self) -> Storage:
        """Memory for the value; anything may be in it."""
        return Storage(self.nbytes, device="cpu")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation of a record.

    Attributes:
        function: what was called.
        arguments: its arguments, and those with names; views stand for tensors.
        results: for each thing that it returned, the view, if that showed a new value.
        reads: the values whose contents it needs.
        writes: the values that it makes or changes.
        draws: the states of the generator before and after it, if it draws random numbers.
        dtype: torch's default at that time.
    """

    function: Callable[..., Any]
    arguments: tuple[Sequence[Any], dict[str, Any]]
    results: list[View | None]
    reads: frozenset[int]
    writes: frozenset[int]
    draws: tuple[View, View] | None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


class Record:
    """The operations of a `deferred_init`, in their order.

    Attributes:
        constants: the values that no operation made: contents of other tensors, and of `torch.tensor([1, 2])`.
        states: the states of generators that are known: where one was seeded, and where values were asked for.
        end: the state of torch's generator at the end of the block.
        versions: how often each tensor of the model had been changed by then.
        is_open: whether the program is still in the block.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[int, Storage] = {}
        self.states: dict[int, Storage] = {}
        self.end: View
        self.versions: Any = WeakIdKeyDictionary()
        self.is_open = True
        self.values = itertools.count()

    def replay(self, wanted: Collection[int], done: Callable[[int, Storage], None]) -> None:
        """Do what the wanted values need; call `done` with each when no operation needs it any more, and let it go."""
        contents: dict[int, Storage] = {}
        missing, last = set(wanted), None
        for operation, let_go in self._plan(wanted):
            self._do(operation, contents)
            if operation.draws:
                last = operation.draws[1].value, contents[operation.draws[1].value]
            for value in let_go:
                content = contents.pop(value)
                if value in missing:
                    missing.remove(value)
                    done(value, content)
                del content
        for value in missing:  # no operation touches these
            done(value, self._known(value))
        if last and self.is_open:  # values were asked for: what was drawn until here need not be drawn for the next
            self.states.setdefault(*last)

    def _do(self, operation: Operation, contents: dict[int, Storage]) -> None:
        """Do an operation on the CPU, and leave torch's generator as it was."""

        def tensor(view: View) -> torch.Tensor:
            if view.value not in contents:
                contents[view.value] = self._known(view.value) if view.value in operation.reads else view.memory()
            return view.on(contents[view.value])

        with torch.no_grad(), torch.random.fork_rng(devices=[]), _default_dtype(operation.dtype):
            if operation.draws:
                torch.set_rng_state(tensor(operation.draws[0]))
            arguments, named = pytree.tree_map_only(View, tensor, operation.arguments)
            results = pytree.tree_leaves(operation.function(*arguments, **named))
            if operation.draws:
                contents[operation.draws[1].value] = torch.get_rng_state().untyped_storage()
        for view, result in zip(operation.results, results, strict=True):
            if view is not None:
                contents[view.value] = result.untyped_storage()
                if View.of(result, view.value) != view:  # the CPU lays it out in another way than the meta device
                    contents[view.value] = view.memory()
                    view.on(contents[view.value]).copy_(result)

    def _known(self, value: int) -> Storage:
        """A copy of the content that a value has before all operations."""
        content = self.constants.get(value, self.states.get(value))
        if content is None:
            raise UsageError("deferred_init() used a tensor of the meta device that was made elsewhere: make it inside")
        copy: Storage = content.clone()  # type: ignore[no-untyped-call]
        return copy

    def _plan(self, wanted: Collection[int]) -> list[tuple[Operation, frozenset[int]]]:
        """What the wanted values need, in an order that holds few values; with each, the values to let go after it.

        A wanted value is made right after the last draw that it needs, and one such value after the other. What an
        operation needs is made for the first one that needs it.
        """
        live, needed = set(wanted) - self.states.keys(), []
        for operation in reversed(self.operations):
            if not live.isdisjoint(operation.writes):
                live.update(value for value in operation.reads | operation.writes if value not in self.states)
                needed.append(operation)
        needed.reverse()

        before: list[set[int]] = []  # for each operation, those that must be done first: they touch the same values
        draw: list[int] = []  # for each operation, the last one that draws what it needs
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(needed):
            earlier = {writer[value] for value in operation.reads | operation.writes if value in writer}
            earlier.update(one for value in operation.writes for one in readers.pop(value, ()))
            before.append(earlier)
            draw.append(number if operation.draws else max((draw[one] for one in earlier), default=-1))
            writer.update(dict.fromkeys(operation.writes, number))
            for value in operation.reads:
                readers[value].append(number)

        turns = [(number, -1) if operation.draws else (len(needed), 0) for number, operation in enumerate(needed)]
        for number in {writer[value] for value in wanted if value in writer}:
            turns[number] = min(turns[number], (draw[number], number))
        for number in reversed(range(len(needed))):
            for one in before[number]:
                turns[one] = min(turns[one], turns[number])

        plan: list[tuple[Operation, frozenset[int]]] = []
        touched_later: set[int] = set()
        for number in sorted(range(len(needed)), key=lambda number: (turns[number], number), reverse=True):
            touched = needed[number].reads | needed[number].writes
            plan.append((needed[number], touched - touched_later))
            touched_later |= touched
        return plan[::-1]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
