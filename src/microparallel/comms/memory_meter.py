"""What one rank holds while it is recorded: its parameters, gradients and optimizer state by stage, and activations.

Nothing is stored or replaced in torch's graph to measure activations. When a forward has ended, the meter walks through
the graph below its outputs, and keeps a weak reference to the memory of each tensor that the graph has saved. Memory
whose reference has expired is free again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from microparallel.observe.observer import Activity
from microparallel.program import Act, Forward, Free, Grad, Op, halves
from microparallel.torch_private import pytree, saved_by
from microparallel.trace import Sizes

# step → stage → parameters, gradients, optimizer, gathered parameters
Written = Mapping[str, Mapping[str, Sequence[int | None]] | None]


class MemoryMeter:
    """Measures what a rank holds; the recorder calls it in the thread that computes.

    Attributes:
        held: how many bytes of activations there are now.
    """

    def __init__(self) -> None:
        self.held = 0
        self._sizes: dict[StorageWeakRef, int] = {}  # of each piece of memory that holds activations
        self._of: defaultdict[int, set[StorageWeakRef]] = defaultdict(set)  # those of each micro-batch
        self._ending: set[int] = set()  # micro-batches whose memory is being freed
        self._state: dict[int, set[StorageWeakRef]] = {}  # the parameters' memory, by stage
        self._given: set[StorageWeakRef] = set()  # that of buffers and the batch
        self._microbatch = 0  # of the last forward
        self._walked: set[Node] = set()  # at the last forward's outputs, until the backward begins
        self._parameters: defaultdict[int, dict[int, Sequence[torch.Tensor]]] = defaultdict(dict)  # by step and stage
        self._shards: dict[tuple[int, int], Sequence[torch.Tensor]] = {}  # of these, what an optimizer updates instead
        self._unclear: set[int] = set()  # steps in which two models have a stage of the same number
        self._optimizer: defaultdict[int, dict[torch.Tensor, int]] = defaultdict(dict)  # by step and parameter

    # ── activations ─────────────────────────────────────────────────────────────────────────────────────────────

    def begins(self, activity: Activity, step: int) -> int:
        """An operation begins that computes, or frees; returns how many bytes of activations there are."""
        self._walked = set()
        self._drop_freed(activity.op)
        if activity.parameters:
            self._note_parameters(activity.parameters, step)
            self._shards |= {(step, stage): mine for stage, mine in (activity.shards or {}).items()}
            self._given = {memory for memory, _ in map(_memory_of, activity.given)}
        return self.held

    def ends(self, activity: Activity) -> int:
        """It has ended; returns how many bytes of activations there are now."""
        for half in halves(activity.op)[:1]:
            self._microbatch = half.microbatch
            self._walked = self._add(activity.kept)
        self._drop_freed(activity.op)
        return self.held

    def torch_begins(self, op: Op, roots: Iterable[Any]) -> int:
        """A backward of torch's begins at these tensors, or an optimizer; returns how many bytes there are.

        There may be more below these tensors than a forward has returned: that of the loss.
        """
        self._add(root for root in roots if isinstance(root, torch.Tensor))
        self._walked = set()
        self._drop_freed(op)
        return self.held

    def _add(self, tensors: Iterable[torch.Tensor]) -> set[Node]:
        """Count what these tensors, and the graph below them, keep; returns the nodes at which the graph begins."""
        kept = list(tensors)
        nodes = {tensor.grad_fn for tensor in kept if tensor.grad_fn is not None} - self._walked
        outside = self._given.union(*self._state.values())
        for tensor in (*kept, *_saved_below(nodes, self._walked)):
            memory, size = _memory_of(tensor)
            if memory not in outside and memory not in self._sizes:
                self._sizes[memory] = size
                self._of[self._microbatch].add(memory)
                self.held += size
        return nodes

    def _drop_freed(self, op: Op) -> None:
        """Look which memory is free again: of the operation's micro-batches, and of those whose backward has begun."""
        mine = _microbatches(op)
        if not any(isinstance(half, Forward) for half in halves(op)):
            self._ending |= set(mine)
        for microbatch in self._ending.union(mine):
            freed = {memory for memory in self._of[microbatch] if memory.expired()}  # type: ignore[no-untyped-call]
            self._of[microbatch] -= freed
            self.held -= sum(self._sizes.pop(memory) for memory in freed)
            if not self._of[microbatch]:
                self._ending.discard(microbatch)

    # ── parameters, gradients and the optimizer's state ─────────────────────────────────────────────────────────

    def _note_parameters(self, parameters: Mapping[int, Sequence[torch.Tensor]], step: int) -> None:
        for stage, mine in parameters.items():
            known = self._parameters[step].get(stage)
            if known is None:
                self._parameters[step][stage] = mine
                self._state[stage] = {memory for memory, _ in map(_memory_of, mine)}
            elif known is not mine and list(map(id, known)) != list(map(id, mine)):
                self._unclear.add(step)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """An optimizer has updated its parameters: what it keeps for each of them is there now.

        An optimizer that keeps its state in parts says how large the whole state of a parameter is (`state_bytes`).
        """
        if hasattr(optimizer, "state_bytes"):
            self._optimizer[step] |= optimizer.state_bytes()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kept = pytree.tree_leaves(optimizer.state.get(parameter, {}))
                size = sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor))
                self._optimizer[step][parameter] = size

    def written(self) -> Written:
        """For each step and stage the bytes of parameters, gradients, optimizer state and gathered parameters.

        A parameter that two stages of this rank share counts in the first of them. The optimizer's are None where no
        optimizer made a step, and all of a step where two models have stages of the same number.
        """
        found: dict[str, dict[str, Sequence[int | None]] | None] = {}
        for step, stages in self._parameters.items():
            seen: set[torch.Tensor] = set()
            sizes: dict[str, Sequence[int | None]] = {}
            for stage, parameters in sorted(stages.items()):
                mine = [parameter for parameter in parameters if parameter not in seen]
                seen.update(mine)
                state = self._optimizer.get(step)
                shards = self._shards.get((step, stage), mine)
                kept = [one.numel() * shard.element_size() for one, shard in zip(mine, shards, strict=True)]
                sizes[str(stage)] = [
                    sum(kept),
                    sum(size for size, parameter in zip(kept, mine, strict=True) if parameter.requires_grad),
                    None if state is None else _state_of(sum(kept), shards, state),
                    sum(parameter.nbytes for parameter in mine),
                ]
            found[str(step)] = None if step in self._unclear else sizes
        return found


def _state_of(whole: int, shards: Sequence[torch.Tensor], state: Mapping[torch.Tensor, int]) -> int:
    """How large the optimizer's state is for parameters of so many bytes: this rank's shards say it, in proportion."""
    kept = sum(shard.nbytes for shard in shards)
    mine = sum(state.get(shard, 0) for shard in shards)
    return mine if kept == whole else round(mine * whole / kept) if kept else 0


def sizes_of(by_rank: Sequence[Written]) -> dict[int, Sizes]:
    """The sizes of each step, from those that all ranks have written; a step that is not clear has none."""
    found = {}
    for step in sorted({int(step) for written in by_rank for step in written}):
        ranks = [written[str(step)] for written in by_rank if str(step) in written]
        stages = sorted({int(stage) for sizes in ranks for stage in sizes or ()})
        if None in ranks or stages != list(range(len(stages))):
            continue
        columns = [[sizes[str(stage)] for sizes in ranks if sizes and str(stage) in sizes] for stage in stages]
        parameters, gradients, optimizer, gathered = (
            [_most(each[kind] for each in column) for column in columns] for kind in range(4)
        )
        found[step] = Sizes(
            parameters=[size or 0 for size in parameters],
            gradients=[size or 0 for size in gradients],
            optimizer=None if None in optimizer else [size or 0 for size in optimizer],
            activations=None,  # they were measured at each computation
            gathered=None if gathered == parameters else [size or 0 for size in gathered],
        )
    return found


def _most(sizes: Iterable[int | None]) -> int | None:
    """The most that a rank has; None if some rank does not know it."""
    known = list(sizes)
    return None if None in known else max(size or 0 for size in known)


def _microbatches(op: Op) -> list[int]:
    if isinstance(op, Free):
        return [op.value.microbatch] if isinstance(op.value, Act | Grad) else []
    return [half.microbatch for half in halves(op)]


def _memory_of(tensor: torch.Tensor) -> tuple[StorageWeakRef, int]:
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]


def _saved_below(nodes: Iterable[Node], walked: set[Node]) -> Iterable[torch.Tensor]:
    """What autograd's graph has saved at these nodes and below them, but not from those that were walked before."""
    seen = {*nodes, *walked}
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        yield from saved_by(node)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
