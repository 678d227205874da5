"""Read a checkpoint: compare every byte with the manifest, then read what is asked for, tensors or ranges of them.

```
stored_model["w"] ─▶ StoredTensor, shape (4, 3)    elements 0 to 5     part-00000.safetensors, "model.w[0:5]"
                                                            5 to 12    part-00001.safetensors, "model.w[5:12]"
```

Which ranges make up a tensor stands in `state.json`. In format 1 a tensor is always one range: it has one file for all
tensors of the model, and one for those of the optimizer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microparallel.errors import CheckpointError
from microparallel.files.state_memory import Slot
from microparallel.files.tensor_file import DTYPES, Checksum, TensorFile, checksum
from microparallel.train.checkpoint_folder import FORMAT, MANIFEST, STATE, manifest
from microparallel.train.checkpoint_values import decode

_OF_MODEL, _OF_OPTIMIZER = "model.safetensors", "optimizer.safetensors"  # of format 1
_PART = re.compile(r"part-\d{5,}\.safetensors")


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StoredRange:
    """The elements from `start` to `stop` of a tensor: all that a file holds under one name."""

    file: TensorFile
    name: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint, which is read from the disk when it is asked for.

    Attributes:
        name: what it is called in the checkpoint.
        dtype: of its elements.
        shape: of the whole tensor.
        ranges: one after another, from its first element to its last.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ranges: tuple[StoredRange, ...]

    def __post_init__(self) -> None:
        """Refuse ranges that overlap, leave something out, or are not what their files hold."""
        position = 0
        for one in self.ranges:
            entry = one.file.entries[one.name]
            if one.start != position or one.stop <= one.start:
                raise ValueError(f"{self.name} has the elements {one.start} to {one.stop} where {position} is next")
            if (entry.dtype, entry.numel) != (self.dtype, one.stop - one.start):
                raise ValueError(f"{self.name} is not what {one.file.path.name} holds as {one.name}")
            position = one.stop
        if position != self.numel:
            raise ValueError(f"{self.name} has {self.numel} elements, and {position} are stored")

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Read some of the flattened elements, or all: a new tensor on the CPU, with one dimension."""
        stop = self.numel if stop is None else stop
        if not 0 <= start <= stop <= self.numel:
            raise CheckpointError(f"{self.name} has {self.numel} elements in the checkpoint, not {start} to {stop}")
        # torch allocates the memory itself, so it is aligned as it was in the run that was saved
        elements = torch.empty(stop - start, dtype=self.dtype)
        for one in self.ranges:
            first, last = max(start, one.start), min(stop, one.stop)
            if first < last:
                try:
                    one.file.read(one.name, first - one.start, elements[first - start : last - start])
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"{one.file.path} cannot be read any more: {error}") from error
        return elements

    def whole(self) -> Tensor:
        """Read all of it."""
        return self.read().view(self.shape)


def replace_tensors(value: Any, replace: Callable[[StoredTensor], Any]) -> Any:
    """A copy of a nested value, with what `replace` returns in place of each stored tensor."""
    if isinstance(value, StoredTensor):
        return replace(value)
    if isinstance(value, dict):
        return {key: replace_tensors(part, replace) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_tensors(part, replace) for part in value)
    return value


def read_whole(value: Any) -> Any:
    """The value with its stored tensors read; what was stored once (tied weights) is one tensor again."""
    tensors: dict[StoredTensor, Tensor] = {}

    def read(stored: StoredTensor) -> Tensor:
        if stored not in tensors:
            tensors[stored] = stored.whole()
        return tensors[stored]

    return replace_tensors(value, read)


class StateReader:
    """Reads what a rank needs of an optimizer's state, from `{index: {key: a stored tensor or a number}}`."""

    def __init__(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        self._state = state

    def __call__(self, index: int, key: str, start: int = 0, stop: int | None = None) -> Any:
        """The flattened elements from `start` to `stop`, or all, in one dimension; a number as it is."""
        value = self._state[index][key]
        return value.read(start, stop) if isinstance(value, StoredTensor) else value

    def shapes(self, index: int) -> dict[str, tuple[int, ...] | None]:
        """What there is of a parameter's state: the shape of each whole tensor, and None for what is not a tensor."""
        stored = self._state.get(index, {})
        return {key: value.shape if isinstance(value, StoredTensor) else None for key, value in stored.items()}


# ── a checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Checkpoint:
    """What was saved. Its tensors stay on the disk until they are asked for; then they are on the CPU.

    Attributes:
        step: after which it was saved.
        state: what is not a tensor, of neither model nor optimizer.
        stored_model: the model's tensors by name.
        stored_optimizer: the optimizer's state, with a `StoredTensor` in place of each tensor.
        files: the size of every file, by name, but for the manifest.
        stored_by_rank: what else ranks have kept, each for itself.
    """

    step: int
    state: dict[str, Any]
    stored_model: dict[str, StoredTensor]
    stored_optimizer: dict[str, Any]
    files: dict[str, int]
    stored_by_rank: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """The whole model's tensors, for `load_state_dict`."""
        model: dict[str, Tensor] = read_whole(self.stored_model)
        return model

    @cached_property
    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's state, for `load_state_dict`."""
        state: dict[str, Any] = read_whole(self.stored_optimizer)
        return state


def open_checkpoint(path: Path) -> Checkpoint:
    """Read everything but the tensors of a checkpoint that was verified."""
    with _in_one_line(path, STATE):
        text = (path / STATE).read_bytes()
    try:
        format, files = read_manifest(path)
        record = json.loads(text)
        tensors = _tensors_of_format_1(path) if format == 1 else _tensors(record, path.__truediv__)
        return described(record, *tensors, {name: written.bytes for name, written in files.items()})
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is whole, but not a checkpoint of this library ({error!r})") from error


def open_memory(slot: Slot) -> Checkpoint:
    """Read everything but the tensors of a state in memory."""
    record = slot.read_record()
    try:
        return described(record, *_tensors(record, slot.file), {})
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"the state in memory cannot be read ({error!r})") from error


Tensors = Mapping[str, StoredTensor]


def described(record: Any, model: Tensors, others: Tensors, files: dict[str, int]) -> Checkpoint:
    """The checkpoint that a `state.json` describes, with the model's tensors and all others by their stored names."""
    return Checkpoint(
        step=record["step"],
        state=decode(record["state"], _no_tensor),
        stored_model={name: model[stored] for name, stored in record["model"].items()},
        stored_optimizer=decode(record["optimizer"], others.__getitem__),
        files=files,
        stored_by_rank=decode(record.get("by_rank", {}), others.__getitem__),
    )


def _tensors(record: Any, file_of: Callable[[str], Path]) -> tuple[Tensors, Tensors]:
    """The tensors that the index in `state.json` describes."""
    names = {file for about in record["tensors"].values() for file, *_ in about["parts"]}
    files = {name: TensorFile(file_of(name)) for name in names if _PART.fullmatch(name)}
    tensors = {
        name: StoredTensor(
            name,
            DTYPES[about["dtype"]],
            tuple(about["shape"]),
            tuple(StoredRange(files[file], stored, start, stop) for file, stored, start, stop in about["parts"]),
        )
        for name, about in record["tensors"].items()
    }
    return tensors, tensors


def _tensors_of_format_1(path: Path) -> tuple[Tensors, Tensors]:
    """The tensors of the model, and those of the optimizer: each has a file of its own, without an index."""
    model, optimizer = (TensorFile(path / name) for name in (_OF_MODEL, _OF_OPTIMIZER))
    return all_of(model), all_of(optimizer)


def all_of(file: TensorFile) -> dict[str, StoredTensor]:
    """Every tensor of a file, to be read later."""
    return {
        name: StoredTensor(name, one.dtype, one.shape, (StoredRange(file, name, 0, one.numel),) if one.numel else ())
        for name, one in file.entries.items()
    }


def _no_tensor(name: str) -> Any:
    raise ValueError(f"a tensor, {name}, where there can be none")


# ── whether the bytes are those that were written ─────────────────────────────────────────────────────────────────────


def verify(path: Path, share: int = 0, shares: int = 1, tell: Callable[[int], None] = lambda _: None) -> None:
    """Compare a checkpoint with its manifest, or this rank's share of its files; a file is read a block at a time.

    `tell` is told how many bytes each block has.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}; its name looks like checkpoints/step-00000100")
    _, files = read_manifest(path)
    for name, written in list(files.items())[share::shares]:
        with _in_one_line(path, name):
            found = checksum(path / name, tell)
        if found.bytes != written.bytes:
            raise CheckpointError(
                f"{path} is damaged: {name} has {found.bytes} bytes, and {written.bytes} were written"
            )
        if found != written:
            raise CheckpointError(
                f"{path} is damaged: the bytes of {name} are not those that were written (its sha256 differs)"
            )


def read_manifest(path: Path) -> tuple[int, dict[str, Checksum]]:
    """The format of a checkpoint, and what each of its files must have."""
    with _in_one_line(path, MANIFEST):
        text = (path / MANIFEST).read_bytes()
    try:
        record = json.loads(text)
        format = int(record["format"])
        if format > FORMAT:
            raise CheckpointError(
                f"{path} has format {format}, and this version reads {FORMAT} and older; install a newer microparallel"
            )
        files = {name: Checksum(**written) for name, written in record["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST} cannot be understood") from error
    if not _are_files_of(format, set(files)) or text != manifest(files, format):
        raise CheckpointError(f"{path} is damaged: {MANIFEST} was changed")
    return format, files


def _are_files_of(format: int, names: set[str]) -> bool:
    """Whether a checkpoint of this format can have files of these names."""
    if format == 1:
        return names == {_OF_MODEL, _OF_OPTIMIZER, STATE}
    return format == FORMAT and STATE in names and all(map(_PART.fullmatch, names - {STATE}))


@contextmanager
def _in_one_line(path: Path, name: str) -> Iterator[None]:
    """Turn what the system says about a file into an error that names the checkpoint and the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is damaged: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {name}: {error.strerror or error}") from error
