"""Save a training run so that it can go on after a crash, and never trust a checkpoint that was damaged.

```
checkpoints/
  step-00000100/
    part-00000.safetensors  the tensors that rank 0 wrote, of model and optimizer, some whole, some a range of one
    part-00001.safetensors  those of rank 1; every rank writes its own, and no tensor is sent to another
    state.json              where each tensor's ranges are; what is not a tensor: step, sampler position, random state
    manifest.json           size and sha256 of all the others; written last
  step-00000200/
  .step-00000300-writing/   a save that was cut off; the next save removes it
```

The rules:
- A checkpoint gets its name only when all of it is on the disk, so a folder called `step-…` was once complete.
- Older checkpoints are removed only after the new one is in place.
- Reading compares every byte with the manifest, so damage is found before anything is used.
- Nothing is pickled: reading a checkpoint never runs code that came with it.
- It is that of the whole model: any number of ranks, in any layout, can read what any other has written.
- What one rank cannot do is an error on every rank.

`checkpoint_values.py` makes JSON of an optimizer's state, `tensor_file.py` writes tensors, `checkpoint_reader.py` reads
a checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.layout import Part
from microparallel.errors import CheckpointError
from microparallel.files import tensor_file
from microparallel.files.checksum import Checksum
from microparallel.files.state_memory import Slot
from microparallel.files.tensor_file import DTYPES, Piece
from microparallel.topology import available_memory
from microparallel.train.checkpoint_folder import (
    check_keep,
    clear_leftovers,
    complete,
    failing_in_one_line,
    hidden,
    make_folder,
    newest_first,
    part_name,
    remove_all_but,
)
from microparallel.train.checkpoint_reader import Checkpoint, open_checkpoint, verify
from microparallel.train.checkpoint_values import Reference, TensorTable, decode, encode, merge

Value = TypeVar("Value")


def save(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor | Part],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    *,
    comms: Comms | None = None,
    first_names: Mapping[str, str] | None = None,
    by_rank: dict[str, Any] | None = None,
    keep: int = 3,
    keep_every: int | None = None,
    finite: bool = True,
) -> Path:
    """Write the checkpoint of one step into `folder`, then remove all but the newest `keep` up to that step.

    Every rank calls it with what it holds; a tensor that several ranks hold must have the same bits on all of them.
    Checkpoints of later steps, left by a run that was resumed from an earlier one, are not touched.

    Args:
        folder: the same on every rank, on a disk that all of them see.
        step: after which this is.
        model: this rank's tensors by name, whole or parts.
        optimizer_state: what `optimizer.state_dict()` returns; or a part of it, whose tensors may be parts.
        state: whatever JSON can hold; that of rank 0 is saved.
        comms: the ranks; None for one process.
        first_names: for each name of a tensor that another rank may hold under another name (tied weights), the first
            of its names.
        by_rank: what else each rank keeps, such as residuals of compressed gradients; tensors that differ between ranks
            stand under different keys.
        keep: how many checkpoints are left.
        keep_every: checkpoints whose step is a multiple of this are never removed.
        finite: whether all weights are finite numbers; one that has others neither counts as kept nor removes any.
    """
    check_keep(keep, keep_every)
    ranks = Ranks(comms)
    path, tensors = folder / f"step-{step:08d}", TensorTable()
    # What cannot be stored is found before the disk is touched.
    offers = ranks.do(lambda: _offer(model, optimizer_state, by_rank or {}, first_names or {}, tensors))
    own_state = ranks.on_first(lambda: encode(state, "state", None))
    record = {"step": step, "finite": finite, **_put_together(offers), "state": own_state}
    try:
        ranks.on_first(lambda: make_folder(path))
        sums = ranks.do(lambda: _write_part(path, ranks, tensors, record["tensors"]))
        files = {name: Checksum(**written) for one in sums for name, written in one.items()}
        ranks.on_first(lambda: complete(path, json.dumps(record).encode("ascii"), files))
    except CheckpointError:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                clear_leftovers(folder)
        raise
    ranks.on_first(lambda: remove_all_but(keep, folder, step, keep_every))
    return path


def copy(
    slots: Sequence[Slot],
    choose: Callable[[], int | None],
    step: int,
    model: Mapping[str, Tensor | Part],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    *,
    comms: Comms | None = None,
    first_names: Mapping[str, str] | None = None,
    by_rank: dict[str, Any] | None = None,
    finite: bool = True,
) -> int | None:
    """Copy into one of the slots in memory what `save` would write; returns its number.

    Every rank calls it, and copies its own part. `choose` says which slot, on rank 0 alone; None if none is free: then
    nothing is copied. A rank that is killed in between leaves that slot without a record.

    Raises:
        CheckpointError: something cannot be stored, or there is not enough memory; the same on every rank.
    """
    ranks, tensors = Ranks(comms), TensorTable()
    own_state: list[Any] = []

    def describe() -> dict[str, Any]:
        offer = _offer(model, optimizer_state, by_rank or {}, first_names or {}, tensors)
        if ranks.rank == 0:
            own_state.append(encode(state, "state", None))
            offer |= {"slot": (number := choose())}
            if number is not None:
                with _refused_in_one_line(ranks.rank):
                    slots[number].clear()
                    offer |= {"room": _room(slots[number])}
        return offer

    offers = ranks.do(describe)
    number: int | None = offers[0]["slot"]
    if number is None:
        return None
    slot = slots[number]
    together = _put_together(offers)
    needed, room = _bytes(together["tensors"]), offers[0]["room"]
    if room is not None and needed > room:
        raise CheckpointError(f"a copy of the state in memory takes {needed:,} bytes, and {room:,} are to be had")
    ranks.do(lambda: _copy_part(slot, ranks.rank, tensors, together["tensors"]))
    if ranks.rank == 0:
        record = {"step": step, "finite": finite, **together, "state": own_state[0]}
        with contextlib.suppress(OSError):  # what is cut off is no record, and the writer will say so
            Path(slot.record).write_bytes(json.dumps(record).encode("ascii"))
    return number


def require_storable(
    step: int,  # noqa: ARG001 as `save` is called
    model: Mapping[str, Tensor | Part],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    *,
    comms: Comms | None = None,
    first_names: Mapping[str, str] | None = None,
    by_rank: dict[str, Any] | None = None,
    finite: bool = True,  # noqa: ARG001
) -> None:
    """Raise the CheckpointError that `save` would raise for what a checkpoint cannot hold; nothing is written."""
    ranks, tensors = Ranks(comms), TensorTable()
    _put_together(ranks.do(lambda: _offer(model, optimizer_state, by_rank or {}, first_names or {}, tensors)))
    ranks.on_first(lambda: encode(state, "state", None))


def _room(slot: Slot) -> int | None:
    """The bytes that a slot may take: what it has, and half of the memory that nobody uses."""
    free = available_memory()
    return None if free is None else slot.bytes + free // 2


def _bytes(index: Mapping[str, Any]) -> int:
    return sum(math.prod(about["shape"]) * DTYPES[about["dtype"]].itemsize for about in index.values())


def _copy_part(slot: Slot, rank: int, tensors: TensorTable, index: Mapping[str, Any]) -> None:
    file = part_name(rank)
    with _refused_in_one_line(rank):
        tensor_file.write_into_memory(slot.file(file), _pieces(file, tensors, index))


@contextlib.contextmanager
def _refused_in_one_line(rank: int) -> Iterator[None]:
    """Turn what the system says about the memory of another process, or of none, into one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"rank {rank} cannot copy its state into memory: {error.strerror or error}") from error


def load(path: Path, comms: Comms | None = None) -> Checkpoint:
    """Read one checkpoint, or raise a CheckpointError that says what is wrong with it.

    With `comms`, every rank calls it: each compares some of the files with the manifest, and all raise the same error.
    """
    ranks = Ranks(comms)
    ranks.do(lambda: verify(path, ranks.rank, ranks.world_size))
    opened: list[Checkpoint] = []
    ranks.do(lambda: opened.append(open_checkpoint(path)))
    return opened[0]


def latest(folder: Path, comms: Comms | None = None) -> tuple[Checkpoint, list[str]]:
    """Read the newest checkpoint that is not damaged, with a one-line warning for each that had to be skipped.

    With `comms`, every rank calls it, and all get the same one: rank 0 says which there are.
    """
    ranks = Ranks(comms)
    found = ranks.do(lambda: newest_first(folder))[0]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint to resume from; start a new run without --resume")
    ranks.do(lambda: _require_any(folder, found, ranks.rank))
    warnings: list[str] = []
    for name in found:
        try:
            return load(folder / name, comms), warnings
        except CheckpointError as error:
            warnings.append(str(error))
    listing = "".join(f"\n  {warning}" for warning in warnings)
    raise CheckpointError(f"no checkpoint in {folder} can be used; start a new run without --resume{listing}")


def _require_any(folder: Path, names: Sequence[str], rank: int) -> None:
    """Raise a CheckpointError if this rank sees none of the checkpoints that rank 0 sees."""
    if not any((folder / name).is_dir() for name in names):
        raise CheckpointError(
            f"rank {rank} on {socket.gethostname()} cannot find {folder / names[0]}, which rank 0 sees; every rank "
            "reads checkpoints, so keep the run (--out) on a disk that all of them see"
        )


class Ranks:
    """Lets every rank do something on its own, after which either all go on or all raise the same CheckpointError."""

    def __init__(self, comms: Comms | None) -> None:
        self._comms = comms
        self.rank, self.world_size = (0, 1) if comms is None else (comms.rank, comms.world_size)

    def do(self, action: Callable[[], Value]) -> list[Value]:
        """Do it on this rank, wait for the others, and return what all of them got: values that JSON can hold."""
        own: list[Value] = []
        failure: CheckpointError | None = None
        try:
            own.append(action())
        except CheckpointError as error:
            failure = error
        if self._comms is None:
            if failure is not None:
                raise failure
            return own
        answers = gather_json([own, None if failure is None else str(failure)], self._comms)
        if messages := [message for _, message in answers if message is not None]:
            raise CheckpointError(messages[0]) from failure
        return [value for [value], _ in answers]

    def on_first(self, action: Callable[[], Value]) -> Value | None:
        """Do it on rank 0, while the others wait; they get None."""
        own: list[Value] = []
        self.do(lambda: own.append(action()) if self.rank == 0 else None)
        return own[0] if own else None


# ── which rank writes what ────────────────────────────────────────────────────────────────────────────────────────────


def _offer(
    model: Mapping[str, Tensor | Part],
    optimizer_state: dict[str, Any],
    by_rank: dict[str, Any],
    first_names: Mapping[str, str],
    tensors: TensorTable,
) -> dict[str, Any]:
    """Collect this rank's tensors, and describe to the other ranks what it holds."""
    # name in the model → name in the checkpoint: two names of one tensor (tied weights) are stored once
    names = {
        name: tensors.add(f"model.{first_names.get(name, name)}", tensor, f"model tensor {name}")
        for name, tensor in model.items()
    }
    optimizer = encode(optimizer_state, "optimizer", tensors)
    others = encode(by_rank, "by_rank", tensors)
    held = {name: _described(part) for name, part in tensors.parts.items()}
    return {"model": names, "optimizer": optimizer, "by_rank": others, "tensors": held}


def _described(part: Part) -> list[Any]:
    return [str(part.tensor.dtype).removeprefix("torch."), part.shape, part.start, part.stop]


def _put_together(offers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Say what the checkpoint holds, and which rank writes what; every rank comes to the same result."""
    model = merge([offer["model"] for offer in offers])
    encoded = {
        what: encode(merge([decode(offer[what], Reference) for offer in offers]), what, None)
        for what in ("optimizer", "by_rank")
    }
    names = list(model.values())
    decode(list(encoded.values()), names.append)
    index = _index({name: _holders(name, offers) for name in dict.fromkeys(names)})
    return {"tensors": index, "model": model, **encoded}


def _holders(name: str, offers: Sequence[dict[str, Any]]) -> dict[int, list[Any]]:
    """Which ranks hold a tensor, or some of its elements."""
    holders = {rank: offer["tensors"][name] for rank, offer in enumerate(offers) if name in offer["tensors"]}
    kinds = {f"{dtype} of shape {shape}": rank for rank, (dtype, shape, *_) in holders.items()}
    if len(kinds) > 1:
        places = " and ".join(f"{kind} on rank {rank}" for kind, rank in kinds.items())
        raise CheckpointError(f"{name} is {places}; all ranks must have the same tensor")
    return holders


def _index(held: Mapping[str, dict[int, list[Any]]]) -> dict[str, Any]:
    """For each tensor, its dtype and shape, and which file has which of its elements."""
    rows: dict[tuple[int, ...], list[Segment]] = {}  # the ranks that hold some elements → all that these ranks hold
    for name, holders in held.items():
        for segment, ranks in _segments(name, holders):
            rows.setdefault(ranks, []).append(segment)
    writers: dict[str, list[tuple[int, int, int]]] = {name: [] for name in held}
    for ranks, row in rows.items():
        for segment, rank in _share_out(row, ranks):
            writers[segment.name].append((segment.start, segment.stop, rank))
    index = {}
    for name, holders in held.items():
        dtype, shape, *_ = next(iter(holders.values()))
        parts = [
            [part_name(rank), _stored_name(name, math.prod(shape), start, stop, held), start, stop]
            for start, stop, rank in sorted(writers[name])
        ]
        index[name] = {"dtype": dtype, "shape": shape, "parts": parts}
    return index


@dataclass(frozen=True)
class Segment:
    """The elements from `start` to `stop` of a tensor, each of so many bytes."""

    name: str
    start: int
    stop: int
    itemsize: int


def _segments(name: str, holders: Mapping[int, list[Any]]) -> Iterator[tuple[Segment, tuple[int, ...]]]:
    """Cut a tensor wherever a rank's part of it begins or ends: each segment with the ranks that hold it."""
    dtype, shape, *_ = next(iter(holders.values()))
    numel = math.prod(shape)
    ends = {end for _, _, start, stop in holders.values() for end in (start, stop)}
    for begin, end in itertools.pairwise(sorted({0, numel, *ends})):
        ranks = tuple(rank for rank, (_, _, start, stop) in holders.items() if start <= begin and end <= stop)
        if begin < 0 or end > numel or not ranks:
            who = f"rank {ranks[0]} holds" if ranks else "no rank holds"
            raise CheckpointError(f"{name} has {numel} elements, and {who} those from {begin} to {end}")
        yield Segment(name, begin, end, DTYPES[dtype].itemsize), ranks


def _share_out(row: Sequence[Segment], ranks: Sequence[int]) -> Iterator[tuple[Segment, int]]:
    """Let each rank write as many bytes of what all of these ranks hold.

    ```
    held by ranks 0 and 1, side by side    │ embed            │ w1      │b│ w2      │b│
    half of the bytes each                 rank 0 ─────────────▏rank 1 ──────────────
    ```
    """
    total = sum((one.stop - one.start) * one.itemsize for one in row)
    before = 0  # bytes of the segments in front
    for one in row:
        ends = [one.start + (total * share // len(ranks) - before) // one.itemsize for share in range(len(ranks) + 1)]
        within = [min(max(end, one.start), one.stop) for end in ends]
        for rank, (start, stop) in zip(ranks, itertools.pairwise(within), strict=True):
            if start < stop:
                yield replace(one, start=start, stop=stop), rank
        before += (one.stop - one.start) * one.itemsize


def _stored_name(name: str, numel: int, start: int, stop: int, others: Collection[str]) -> str:
    """What a file calls some elements of a tensor; all of them have the tensor's own name."""
    if stop - start == numel:
        return name
    stored = f"{name}[{start}:{stop}]"
    while stored in others:
        stored += "'"
    return stored


def _pieces(file: str, tensors: TensorTable, index: Mapping[str, Any]) -> dict[str, Piece]:
    """What a rank writes into its file."""
    pieces = {}
    for name, about in index.items():
        for other, stored, start, stop in about["parts"]:
            if other == file:
                part = tensors.parts[name]
                shape = tuple(about["shape"]) if stored == name else (stop - start,)
                pieces[stored] = Piece(part.tensor, start - part.start, stop - part.start, shape)
    return pieces


# ── writing it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write_part(path: Path, ranks: Ranks, tensors: TensorTable, index: Mapping[str, Any]) -> dict[str, Any]:
    """Write this rank's file, if it has anything to write; returns its size and sha256 by its name."""
    file = part_name(ranks.rank)
    pieces = _pieces(file, tensors, index)
    if not pieces:
        return {}
    writing = hidden(path, "writing")
    if not writing.is_dir():
        raise CheckpointError(
            f"rank {ranks.rank} on {socket.gethostname()} cannot find {writing}, which rank 0 has made; every rank "
            "writes its part of a checkpoint, so choose an --out on a disk that all of them see"
        )
    with failing_in_one_line(path, f"rank {ranks.rank}: " if ranks.world_size > 1 else ""):
        return {file: asdict(tensor_file.write(writing / file, pieces))}
