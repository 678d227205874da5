"""One plain safetensors file from a checkpoint, and a checkpoint from one plain file.

```
step-00000100/                            weights.safetensors    embed.weight, head.weight, …
  part-00000.safetensors
  part-00001.safetensors     ◀─────▶      all.safetensors        model.embed.weight, …, optimizer.state.0.exp_avg, …,
  state.json                 (--whole)                           and what is no tensor, as JSON, in the metadata
```

Plain means that `safetensors.torch.load_file` reads it, and `load_state_dict` takes what that returns: tied weights
stand in the file under each of their names, since the format cannot have two names for the same bytes. Names are in
order, so the same weights make the same bytes, however many ranks wrote the checkpoint. One tensor at a time is in
memory.

The way back: the weights come from the file, and everything else (optimizer, random numbers, position in the data) from
a checkpoint of the run, whose place the new one takes. What was there is kept under another name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microparallel.errors import CheckpointError, ConfigError, DataError
from microparallel.files.atomic import written_aside
from microparallel.files.checksum import checksum
from microparallel.files.lock import FolderLock
from microparallel.files.tensor_file import Entry, TensorFile, TensorWriter
from microparallel.text import nearest
from microparallel.train.checkpoint_folder import (
    BEST,
    best_of,
    checkpoints,
    clear_leftovers,
    complete,
    failing_in_one_line,
    hidden,
    is_finite,
    make_folder,
    part_name,
)
from microparallel.train.checkpoint_listing import Begin, Place, in_silence, name_before, open_newest, select
from microparallel.train.checkpoint_reader import Checkpoint, StoredTensor, all_of, described, replace_tensors
from microparallel.train.checkpoint_values import Reference, encode
from microparallel.train.guard import is_finite as all_finite

_WHOLE = "checkpoint"  # in the metadata of a file: all of a checkpoint that is not a tensor
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, RecursionError)  # what a file of another making may raise


# ── a file from a checkpoint ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Exported:
    """What a file holds: so many tensors, in so many bytes; and names of tied weights → the first of their names."""

    path: Path
    tensors: int
    bytes: int
    tied: dict[str, str]


def export(
    checkpoint: Checkpoint, path: Path, *, whole: bool = False, finite: bool = True, begin: Begin = in_silence
) -> Exported:
    """Write the model of a checkpoint, or `whole` all of it, into one file; after an error, there is no new file."""
    tied = {name: first for first, *others in _names(checkpoint.stored_model).values() for name in others}
    metadata = {"format": "pt", "step": str(checkpoint.step)}  # transformers reads files of this format alone
    if whole:
        tensors, record = _named(checkpoint, finite)
        metadata[_WHOLE] = json.dumps(record)
    else:
        tensors = checkpoint.stored_model
        if tied:
            metadata["tied"] = json.dumps(tied)
    try:
        with written_aside(path) as aside:
            _write(aside, tensors, metadata, begin(f"writing {path.name}", _bytes_of(tensors)))
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"--export {path} cannot be written: {error.strerror or error}; make room, or choose another place"
        ) from error
    return Exported(path, len(tensors), size, tied)


def _names(model: Mapping[str, StoredTensor]) -> dict[StoredTensor, list[str]]:
    """All names of each tensor, in order: tied weights have several."""
    names: dict[StoredTensor, list[str]] = {}
    for name, stored in sorted(model.items()):
        names.setdefault(stored, []).append(name)
    return names


def _named(checkpoint: Checkpoint, finite: bool) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Give every tensor of a checkpoint a name of its own; the rest is what JSON can hold, with these names in it."""
    named: dict[str, StoredTensor] = {}
    names: dict[StoredTensor, str] = {}

    def reference(stored: StoredTensor, name: str) -> Reference:
        if stored not in names:
            while name in named:  # format 1 has two files, so two tensors may have the same name
                name += "'"
            names[stored], named[name] = name, stored
        return Reference(names[stored])

    def encoded(value: Any, place: str) -> Any:
        return encode(replace_tensors(value, lambda stored: reference(stored, stored.name)), place, None)

    record = {
        "step": checkpoint.step,
        "finite": finite,
        "model": {name: reference(one, f"model.{name}").name for name, one in checkpoint.stored_model.items()},
        "optimizer": encoded(checkpoint.stored_optimizer, "optimizer"),
        "by_rank": encoded(checkpoint.stored_by_rank, "by_rank"),
        "state": encode(checkpoint.state, "state", None),
    }
    return named, record


def _write(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], tell: Callable[[int], None]
) -> None:
    """Write a file, reading each tensor once, whatever its names are."""
    kinds = {name: (stored.dtype, stored.shape) for name, stored in sorted(tensors.items())}
    with TensorWriter(path, kinds, metadata) as file:
        for stored, names in _names(tensors).items():
            tensor = stored.whole()
            for name in names:
                file.write(name, tensor)
                tell(tensor.nbytes)


def _bytes_of(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(one.numel * one.dtype.itemsize for one in tensors.values())


# ── a checkpoint from a file ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Imported:
    """What an import has done.

    Attributes:
        path: the checkpoint that is new.
        step: its step.
        tensors: how many the model has; tied ones count once.
        whole: whether everything came from the file; otherwise weights alone.
        kept: what was there before, under its new name; None if nothing was.
        newer: steps of later checkpoints, which a run would rather go on from.
        was_best: whether the checkpoint it replaces was the best by validation; then none is marked now.
        warnings: one for each checkpoint that was damaged and therefore skipped.
    """

    path: Path
    step: int
    tensors: int
    whole: bool
    kept: Path | None
    newer: list[int]
    was_best: bool
    warnings: list[str]


def import_file(place: Place, path: Path, step: str | None = None, begin: Begin = in_silence) -> Imported:
    """Make a checkpoint from a file: its weights, and the rest of the newest checkpoint, or of that of a step.

    A file that was exported `whole` brings the rest with it. After an error, all is as it was.
    """
    file = _open(path)
    try:
        lock = FolderLock(place.run / "lock", str(place.run))
    except OSError as error:
        raise ConfigError(f"{place.run} cannot be written: {error.strerror or error}; check who may") from error
    try:
        with failing_in_one_line(place.folder):
            clear_leftovers(place.folder)  # now: what is read below must not get another name meanwhile
        if _WHOLE not in file.metadata:
            return _import_weights(select(place, step), file, begin)
        if step is not None:
            raise ConfigError(f"--step {step}: {path} holds a whole checkpoint, with its own step; leave --step out")
        return _import_all(place.folder, file, begin)
    finally:
        lock.release()


def _import_weights(place: Place, file: TensorFile, begin: Begin) -> Imported:
    """Put the weights of a file in the place of a checkpoint's."""
    path, base, warnings = open_newest(place, begin)
    if path.name != f"step-{base.step:08d}":
        raise ConfigError(f"{path} is not a checkpoint that a run goes on from; name the run")
    _require_fit(file.entries, file, base, path)
    model, finite = _model_of(file, base)
    done = _put(place.folder, replace(base, stored_model=model), finite or is_finite(path), begin)
    return replace(done, whole=False, warnings=warnings)


def _import_all(folder: Path, file: TensorFile, begin: Begin) -> Imported:
    """Put all of a file in the place of the checkpoint of its step, if there is one."""
    tensors = all_of(file)
    try:
        record = json.loads(file.metadata[_WHOLE])
        new = described(record, tensors, tensors, {})
        if not isinstance(new.step, int) or new.step < 0:
            raise ValueError(f"step {new.step}")
    except _BROKEN as error:
        raise DataError(
            f"--import {file.path}: what it says about its checkpoint cannot be understood ({error!r}); export it again"
        ) from error
    with contextlib.suppress(CheckpointError):  # where none is whole, any model fits
        path, newest, _ = open_newest(Place(folder), begin)
        _require_fit(new.stored_model, file, newest, path)
    return _put(folder, new, record.get("finite") is not False, begin)


def _open(path: Path) -> TensorFile:
    try:
        file = TensorFile(path)
        if not isinstance(file.metadata, dict):
            raise ValueError("its metadata are no dictionary")
    except OSError as error:
        raise DataError(f"--import {path}: {error.strerror or error}; name a safetensors file") from error
    except _BROKEN as error:
        raise DataError(f"--import {path}: not a safetensors file, or a damaged one ({error})") from error
    return file


# ── whether it fits ───────────────────────────────────────────────────────────────────────────────────────────────────


def _require_fit(
    found: Mapping[str, StoredTensor] | Mapping[str, Entry], file: TensorFile, base: Checkpoint, path: Path
) -> None:
    """Refuse a file whose names, shapes or dtypes are not those of the run's model; names the first that differs."""
    start = f"--import {file.path} does not fit the model of {path}:"
    others = [name for name in found if name not in base.stored_model]
    for stored, names in _names(base.stored_model).items():
        given = [name for name in names if name in found]
        if not given:  # of tied weights, one name is enough
            near = nearest(names[0], others)
            fix = "" if near is None else f", but {near}; rename that if it is the same"
            raise DataError(f"{start} it has no {names[0]}{fix}")
        for name in given:
            if (kind := _kind(found[name])) != (wanted := _kind(stored)):
                fix = "convert it" if found[name].shape == stored.shape else "import it into a run of such a model"
                raise DataError(f"{start} {name} is {kind}, and the model's is {wanted}; {fix}")
    if others:
        raise DataError(f"{start} {others[0]} is no tensor of the model; leave it out of the file")


def _kind(one: StoredTensor | Entry) -> str:
    return f"{str(one.dtype).removeprefix('torch.')} of shape {list(one.shape)}"


def _model_of(file: TensorFile, base: Checkpoint) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors of a file by all names that the model has for each, and whether all of them are finite.

    Refuses tied weights that differ, and numbers that are not finite where the run's own are.
    """
    there, finite = all_of(file), True
    model: dict[str, StoredTensor] = {}
    for before, names in _names(base.stored_model).items():
        first, *others = [name for name in names if name in there]
        tensor = there[first].whole()
        for other in others:
            if not torch.equal(_bits(tensor), _bits(there[other].whole())):
                raise DataError(
                    f"--import {file.path}: {first} and {other} are one tensor in the model, and differ in the file; "
                    "leave one of them out"
                )
        if not _finite(tensor):
            # A buffer may be infinite for good reasons (a mask): then it is so in the run as well.
            if _finite(before.whole()):
                raise DataError(f"--import {file.path}: {first} is not finite, so a run could not go on from it")
            finite = False
        model |= dict.fromkeys(names, there[first])
    return {name: model[name] for name in base.stored_model}, finite


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return all_finite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)  # torch cannot sum 8-bit numbers


# ── writing it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _put(folder: Path, checkpoint: Checkpoint, finite: bool, begin: Begin) -> Imported:
    """Write a checkpoint as one rank would; one that has its place is kept under another name."""
    path, file = folder / f"step-{checkpoint.step:08d}", part_name(0)
    tensors, record = _named(checkpoint, finite)
    index = {
        name: {
            "dtype": str(one.dtype).removeprefix("torch."),
            "shape": one.shape,
            "parts": [[file, name, 0, one.numel]] if one.numel else [],
        }
        for name, one in tensors.items()
    }
    text = json.dumps({**record, "tensors": index}).encode("ascii")
    stored = {name: one for name, one in tensors.items() if one.numel}
    kept = name_before(path) if path.exists() else None
    was_best = best_of(folder)[0] == checkpoint.step
    try:
        make_folder(path)
        with failing_in_one_line(path):
            part = hidden(path, "writing") / file
            _write(part, stored, {}, begin(f"writing {path.name}", _bytes_of(stored)))
            sums = {file: checksum(part)}
        complete(path, text, sums, keep_old_as=kept)
        if was_best:  # the validation has not seen these weights
            with failing_in_one_line(path):
                (folder / BEST).unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            clear_leftovers(folder)
        raise
    newer = sorted(step for step in checkpoints(folder) if step > checkpoint.step)
    return Imported(path, checkpoint.step, len(_names(checkpoint.stored_model)), True, kept, newer, was_best, [])
