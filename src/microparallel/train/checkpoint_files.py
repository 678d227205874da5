"""One plain safetensors file from a checkpoint, and a checkpoint from one plain file.

```
step-00000100/                            weights.safetensors    embed.weight, head.weight, …
  part-00000.safetensors
  part-00001.safetensors     ◀─────▶      all.safetensors        model.embed.weight, …, optimizer.state.0.exp_avg, …,
  state.json                 (--whole)                           and what is no tensor, as JSON, in the metadata
```

Plain means that `safetensors.torch.load_file` reads it, and `load_state_dict` takes what that returns: tied weights
stand in the file under each of their names, since the format cannot have two names for the same bytes. The metadata
says which of them are tied. One tensor at a time is in memory.

The way back: the weights come from the file, and everything else (optimizer, random numbers, position in the data) from
a checkpoint of the run, whose place the new one takes. What was there is kept under another name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from microparallel.files.tensor_file import Kind, TensorFile, TensorWriter
from microparallel.text import nearest
from microparallel.train.checkpoint_folder import (
    BEST,
    MANIFEST,
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
from microparallel.train.checkpoint_reader import Checkpoint, StoredRange, StoredTensor
from microparallel.train.checkpoint_values import Reference, decode, encode
from microparallel.train.guard import is_finite as all_finite

_WHOLE = "checkpoint"  # in the metadata of a file: all of a checkpoint that is not a tensor
_BROKEN = (KeyError, TypeError, ValueError, AttributeError)  # what reading a file of another making may raise


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
    tied = _tied(checkpoint.stored_model)
    metadata = {"format": "pt", "step": str(checkpoint.step)}  # transformers reads files of this format alone
    if whole:
        tensors, record = _described(checkpoint, finite)
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


def _tied(model: Mapping[str, StoredTensor]) -> dict[str, str]:
    """For each further name of a tensor, the first of its names."""
    first: dict[StoredTensor, str] = {}
    return {name: first[stored] for name, stored in model.items() if first.setdefault(stored, name) != name}


def _described(checkpoint: Checkpoint, finite: bool) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Give every tensor of a checkpoint a name of its own; the rest is what JSON can hold, with these names in it."""
    named: dict[str, StoredTensor] = {}
    names: dict[StoredTensor, str] = {}

    def reference(stored: StoredTensor, name: str) -> Reference:
        if stored not in names:
            while name in named:  # format 1 has two files, so two tensors may have the same name
                name += "'"
            names[stored], named[name] = name, stored
        return Reference(names[stored])

    def referring(value: Any) -> Any:
        if isinstance(value, StoredTensor):
            return reference(value, value.name)
        if isinstance(value, dict):
            return {key: referring(part) for key, part in value.items()}
        return type(value)(map(referring, value)) if isinstance(value, list | tuple) else value

    record = {
        "step": checkpoint.step,
        "finite": finite,
        "model": {name: reference(one, f"model.{name}").name for name, one in checkpoint.stored_model.items()},
        "optimizer": encode(referring(checkpoint.stored_optimizer), "optimizer", None),
        "by_rank": encode(referring(checkpoint.stored_by_rank), "by_rank", None),
        "state": encode(checkpoint.state, "state", None),
    }
    return named, record


def _write(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], tell: Callable[[int], None]
) -> None:
    """Write a file, reading each tensor once, whatever its names are."""
    names: dict[StoredTensor, list[str]] = {}
    for name, stored in tensors.items():
        names.setdefault(stored, []).append(name)
    kinds = {name: (stored.dtype, stored.shape) for name, stored in tensors.items()}
    with TensorWriter(path, kinds, metadata) as file:
        for stored, own in names.items():
            tensor = stored.whole()
            for name in own:
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
        rest: where what is not weights comes from; None if all comes from the file.
        tensors: how many the model has; tied ones count once.
        changed: how many of them have other values than before; None if there was no checkpoint of that step.
        kept: what was there before, under its new name.
        newer: steps of later checkpoints, which a run would rather go on from.
        was_best: whether the checkpoint it replaces was the best by validation; then none is marked now.
        warnings: one for each checkpoint that was damaged and therefore skipped.
    """

    path: Path
    step: int
    rest: Path | None
    tensors: int
    changed: int | None
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
        return _import_all(place, file, begin)
    finally:
        lock.release()


def _import_weights(place: Place, file: TensorFile, begin: Begin) -> Imported:
    """Put the weights of a file in the place of a checkpoint's."""
    path, base, warnings = open_newest(place, begin)
    _require_fit({name: (one.dtype, one.shape) for name, one in file.entries.items()}, file, base, path)
    new = replace(base, stored_model=_model_of(file, base))
    _require_sound(file, new, base)
    changed = _count_changes(new, base)
    result = _imported(place, path, new, changed, path, warnings)
    return _put(result, new, is_finite(path), begin) if changed else result


def _import_all(place: Place, file: TensorFile, begin: Begin) -> Imported:
    """Put all of a file in the place of the checkpoint of its step, if there is one."""
    new, finite = _checkpoint_in(file)
    with contextlib.suppress(CheckpointError):  # there is none that is whole: then anything fits
        path, newest, _ = open_newest(Place(place.folder), begin)
        _require_fit({name: (one.dtype, one.shape) for name, one in new.stored_model.items()}, file, newest, path)
    target, changed = place.folder / f"step-{new.step:08d}", None
    with contextlib.suppress(CheckpointError):
        changed = _count_changes(new, open_newest(Place(place.folder, target), begin)[1])
    return _put(_imported(place, target, new, changed, None, []), new, finite, begin)


def _imported(
    place: Place, path: Path, new: Checkpoint, changed: int | None, rest: Path | None, warnings: list[str]
) -> Imported:
    """What is to be done, before it is done."""
    if path.name != f"step-{new.step:08d}":
        raise ConfigError(f"{path} is not a checkpoint that a run goes on from; name the run")
    return Imported(
        path=path,
        step=new.step,
        rest=rest,
        tensors=len({*new.stored_model.values()}),
        changed=changed,
        kept=None,
        newer=sorted(step for step in checkpoints(place.folder) if step > new.step),
        was_best=best_of(place.folder)[0] == new.step and changed != 0,
        warnings=warnings,
    )


# ── whether it fits ───────────────────────────────────────────────────────────────────────────────────────────────────


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


def _stored(file: TensorFile, name: str) -> StoredTensor:
    """A tensor of a file, to be read later."""
    entry = file.entries[name]
    ranges = (StoredRange(file, name, 0, entry.numel),) if entry.numel else ()
    return StoredTensor(name, entry.dtype, entry.shape, ranges)


def _checkpoint_in(file: TensorFile) -> tuple[Checkpoint, bool]:
    """The checkpoint that was exported whole into this file, and whether its weights are finite."""
    tensors = {name: _stored(file, name) for name in file.entries}
    try:
        record = json.loads(file.metadata[_WHOLE])
        checkpoint = Checkpoint(
            step=int(record["step"]),
            state=dict(decode(record["state"], _no_tensor)),
            stored_model={name: tensors[stored] for name, stored in record["model"].items()},
            stored_optimizer=dict(decode(record["optimizer"], tensors.__getitem__)),
            files={},
            stored_by_rank=dict(decode(record["by_rank"], tensors.__getitem__)),
        )
        if checkpoint.step < 0:
            raise ValueError(f"step {checkpoint.step}")
        return checkpoint, record["finite"] is not False
    except _BROKEN as error:
        raise DataError(
            f"--import {file.path}: what it says about its checkpoint cannot be understood ({error!r}); export it again"
        ) from error


def _no_tensor(name: str) -> Any:
    raise ValueError(f"a tensor, {name}, where there can be none")


def _require_fit(found: Mapping[str, Kind], file: TensorFile, base: Checkpoint, path: Path) -> None:
    """Refuse a file whose names, shapes or dtypes are not those of the run's model; names the first that differs."""
    model = base.stored_model
    names = _names(model)
    others = [name for name in found if name not in model]
    start = f"--import {file.path} does not fit the model of {path}:"
    for name, stored in model.items():
        if name in found:
            wanted: Kind = (stored.dtype, stored.shape)
            if found[name] != wanted:
                fix = "convert it" if found[name][1] == wanted[1] else "import it into a run of such a model"
                raise DataError(f"{start} {name} is {_kind(found[name])}, and the model's is {_kind(wanted)}; {fix}")
        elif not any(other in found for other in names[stored]):  # of tied weights, one name is enough
            near = nearest(name, others)
            fix = "" if near is None else f", but {near}; rename that if it is the same"
            raise DataError(f"{start} it has no {name}{fix}")
    if others:
        raise DataError(f"{start} {others[0]} is no tensor of the model; leave it out of the file")


def _names(model: Mapping[str, StoredTensor]) -> dict[StoredTensor, list[str]]:
    """All names of each tensor."""
    names: dict[StoredTensor, list[str]] = {}
    for name, stored in model.items():
        names.setdefault(stored, []).append(name)
    return names


def _kind(kind: Kind) -> str:
    dtype, shape = kind
    return f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"


def _model_of(file: TensorFile, base: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors of a file by all names that the model has for each: what was tied is tied."""
    model: dict[str, StoredTensor] = {}
    for names in _names(base.stored_model).values():
        stored = _stored(file, next(name for name in names if name in file.entries))
        model |= dict.fromkeys(names, stored)
    return {name: model[name] for name in base.stored_model}


def _require_sound(file: TensorFile, new: Checkpoint, base: Checkpoint) -> None:
    """Refuse tied weights that differ, and numbers that are not finite where the run's own are."""
    for name, stored in new.stored_model.items():
        if name not in file.entries:
            continue
        tensor = stored.whole()
        if stored.name != name and not _same_bits(tensor, _stored(file, name).whole()):
            raise DataError(
                f"--import {file.path}: {stored.name} and {name} are one tensor in the model, and differ in the file; "
                "leave one of them out"
            )
        # A buffer may be infinite for good reasons (a mask): then it is so in the run as well.
        if not _finite(tensor) and _finite(base.stored_model[name].whole()):
            raise DataError(f"--import {file.path}: {name} is not finite everywhere, so a run could not go on from it")


def _finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return all_finite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)  # torch cannot sum 8-bit numbers


def _count_changes(new: Checkpoint, before: Checkpoint) -> int:
    """How many of the model's tensors have other bits than before."""
    pairs = {(stored, before.stored_model.get(name)) for name, stored in new.stored_model.items()}
    return sum(old is None or not _same_bits(one.whole(), old.whole()) for one, old in pairs)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


# ── writing it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _put(result: Imported, checkpoint: Checkpoint, finite: bool, begin: Begin) -> Imported:
    """Write a checkpoint as one rank would; one that has its place is kept under another name."""
    path, file = result.path, part_name(0)
    tensors, record = _described(checkpoint, finite)
    index = {
        name: {
            "dtype": str(one.dtype).removeprefix("torch."),
            "shape": one.shape,
            "parts": [[file, name, 0, one.numel]] if one.numel else [],
        }
        for name, one in tensors.items()
    }
    text = json.dumps({**record, "tensors": index}).encode("ascii")
    kept = name_before(path.parent, result.step) if path.exists() else None
    try:
        make_folder(path)
        with failing_in_one_line(path):
            written = hidden(path, "writing") / file
            _write(
                written,
                {name: one for name, one in tensors.items() if one.numel},
                {},
                begin(f"writing {path.name}", _bytes_of(tensors)),
            )
            sums = {file: checksum(written)}
            if kept is not None:
                _link(path, kept)
        complete(path, text, sums)
    except BaseException:
        with contextlib.suppress(OSError):
            clear_leftovers(path.parent)
        if kept is not None and _same_manifest(path, kept):  # the new one did not come into its place
            shutil.rmtree(kept, ignore_errors=True)
        raise
    if result.was_best:  # the validation has not seen these weights
        (path.parent / BEST).unlink(missing_ok=True)
    return replace(result, kept=kept)


def _link(path: Path, other: Path) -> None:
    """Give the files of a checkpoint second names in another folder, so that it can be replaced at once."""
    other.mkdir()
    # The manifest last: what has none is no checkpoint.
    for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):
        try:
            os.link(file, other / file.name)
        except OSError:  # not every file system knows links
            shutil.copy2(file, other / file.name)


def _same_manifest(one: Path, other: Path) -> bool:
    try:
        return (one / MANIFEST).read_bytes() == (other / MANIFEST).read_bytes()
    except OSError:
        return (one / MANIFEST).exists()
