"""Save a training run so that it can go on after a crash, and never trust a checkpoint that was damaged.

```
checkpoints/
  step-00000100/
    model.safetensors       the model's tensors
    optimizer.safetensors   the optimizer's tensors
    state.json              everything that is not a tensor: step, settings, sampler position, random state
    manifest.json           size and sha256 of the three above; written last
  step-00000200/
  .step-00000300-writing/   a save that was cut off; the next save removes it
```

The rules:
- A checkpoint gets its name only when all of it is on the disk, so a folder called `step-…` was once complete.
- Older checkpoints are removed only after the new one is in place.
- Reading compares every byte with the manifest, so damage is found before anything is used.
- Nothing is pickled: reading a checkpoint can never run somebody's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from microparallel.errors import CheckpointError
from microparallel.train.atomic import sync_folder, write_durably
from microparallel.train.encoding import TensorTable, decode, encode

FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved, with every tensor on the CPU: hand the parts to the `load_state_dict` of model and optimizer."""

    step: int
    model: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    state: dict[str, Any]


def save(
    folder: Path,
    step: int,
    model_tensors: dict[str, Tensor],
    optimizer_state: dict[str, Any],
    state: dict[str, Any],
    *,
    keep: int = 3,
) -> Path:
    """Write the checkpoint of one step into `folder`, then remove all but the newest `keep` up to that step.

    `optimizer_state` is what `optimizer.state_dict()` returns; `state` may hold whatever JSON can.
    Checkpoints of later steps, left by a run that was resumed from an earlier one, are not touched.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep} would remove the checkpoint just saved; try keep=1 or more")
    # Everything is put together in memory first: what cannot be stored is found before the disk is touched.
    files = _files(step, model_tensors, optimizer_state, state)
    path = folder / f"step-{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        _clear_leftovers(folder)
        _put_in_place(path, files)
    except OSError as error:
        with contextlib.suppress(OSError):
            _clear_leftovers(folder)
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error.strerror or error}; "
            "make room or choose another --out (earlier checkpoints are as they were)"
        ) from error
    _remove_all_but(keep, folder, step)
    return path


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, or raise a CheckpointError that says what is wrong with it."""
    files = _verified_files(path)
    try:
        record = json.loads(files[STATE])
        # clone: memory that torch allocated itself is aligned as that of the run that was saved
        model = {name: tensor.clone() for name, tensor in safetensors.torch.load(files[MODEL]).items()}
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(files[OPTIMIZER]).items()}
        return Checkpoint(
            step=record["step"],
            model={name: model[stored] for name, stored in record["model"].items()},
            optimizer_state=decode(record["optimizer"], tensors),
            state=decode(record["state"], {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is whole, but not a checkpoint of this library ({error!r})") from error


def latest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Read the newest checkpoint that is not damaged, with a one-line warning for each that had to be skipped."""
    try:
        found = _checkpoints(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}; check who may read it") from error
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint to resume from; start a new run without --resume")
    warnings: list[str] = []
    for step in sorted(found, reverse=True):
        try:
            return load(found[step]), warnings
        except CheckpointError as error:
            warnings.append(str(error))
    listing = "".join(f"\n  {warning}" for warning in warnings)
    raise CheckpointError(f"no checkpoint in {folder} can be used; start a new run without --resume{listing}")


def _files(
    step: int, model_tensors: dict[str, Tensor], optimizer_state: dict[str, Any], state: dict[str, Any]
) -> dict[str, bytes]:
    """Return the bytes of every file of a checkpoint, in the order they are to be written."""
    model, optimizer = TensorTable(), TensorTable()
    record = {
        "step": step,
        # name in the model → name in the file: two names of one tensor (tied weights) are stored once
        "model": {name: model.add(name, tensor, f"model tensor {name}") for name, tensor in model_tensors.items()},
        "optimizer": encode(optimizer_state, "optimizer", optimizer),
        "state": encode(state, "state", None),
    }
    files = {MODEL: model.to_bytes(), OPTIMIZER: optimizer.to_bytes(), STATE: json.dumps(record).encode("ascii")}
    files[MANIFEST] = _manifest(files)
    return files


def _manifest(files: dict[str, bytes]) -> bytes:
    """Return the one right manifest of these files, byte for byte, so that damage to the manifest shows too."""
    sums = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return json.dumps({"format": FORMAT, "files": sums}, indent=2).encode("ascii")


def _verified_files(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a checkpoint after comparing them with the manifest."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}; its name looks like checkpoints/step-00000100")
    files: dict[str, bytes] = {}
    for name in (MODEL, OPTIMIZER, STATE, MANIFEST):
        try:
            files[name] = (path / name).read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is damaged: {name} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {name}: {error.strerror or error}") from error
    manifest = files.pop(MANIFEST)
    if manifest != _manifest(files):
        raise CheckpointError(f"{path} {_difference(manifest, files)}")
    return files


def _difference(manifest: bytes, files: dict[str, bytes]) -> str:
    """Say in words why these files do not belong to this manifest."""
    try:
        record = json.loads(manifest)
        if record["format"] > FORMAT:
            return f"has format {record['format']}, and this version reads {FORMAT}; install a newer microparallel"
        for name, data in files.items():
            written = record["files"][name]
            if written["bytes"] != len(data):
                return f"is damaged: {name} has {len(data)} bytes, and {written['bytes']} were written"
            if written["sha256"] != hashlib.sha256(data).hexdigest():
                return f"is damaged: the bytes of {name} are not those that were written (its sha256 differs)"
    except (KeyError, TypeError, ValueError):
        return f"is damaged: {MANIFEST} cannot be understood"
    return f"is damaged: {MANIFEST} was changed"


# The folders `checkpoints/` may hold; `kind` is empty for a checkpoint that has its name. The hidden kinds:
#   writing    not complete                      removing   a removal that was cut off
#   replaced   the earlier checkpoint of a step that is being saved again, valid until the new one has the name
_FOLDER = re.compile(r"(?P<hidden>\.?)step-(?P<step>\d{8,})(?:-(?P<kind>writing|removing|replaced))?")


def _folders(folder: Path) -> list[tuple[Path, int, str]]:
    """List the path, step and kind of everything in `folder` that `save` made."""
    if not folder.is_dir():
        return []
    matches = [(path, _FOLDER.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [
        (path, int(match["step"]), match["kind"] or "")
        for path, match in matches
        if match and bool(match["hidden"]) == bool(match["kind"])
    ]


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return step → path of every checkpoint there, complete or damaged later."""
    folders = _folders(folder)
    replaced = {step: path for path, step, kind in folders if kind == "replaced"}
    return replaced | {step: path for path, step, kind in folders if not kind}


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}-{kind}")


def _put_in_place(path: Path, files: dict[str, bytes]) -> None:
    """Write the files aside, wait until they are on the disk, and only then give the folder its name."""
    writing, replaced = _hidden(path, "writing"), _hidden(path, "replaced")
    writing.mkdir()
    for name, data in files.items():
        write_durably(writing / name, data)
    sync_folder(writing)
    if path.exists():
        path.rename(replaced)  # a folder cannot be renamed over another; `latest` reads this one in between
    writing.rename(path)
    sync_folder(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _clear_leftovers(folder: Path) -> None:
    """Remove what a save that was cut off left behind, and give a replaced checkpoint its name back."""
    for path, step, kind in _folders(folder):
        named = folder / f"step-{step:08d}"
        if kind == "replaced" and not named.exists():
            path.rename(named)
        elif kind:
            shutil.rmtree(path)


def _remove_all_but(keep: int, folder: Path, step: int) -> None:
    """Remove the oldest checkpoints up to this step until `keep` are left."""
    found = _checkpoints(folder)
    for old in sorted((other for other in found if other <= step), reverse=True)[keep:]:
        # Renamed first: a removal that is cut off must not leave what looks like a damaged checkpoint.
        removing = _hidden(found[old], "removing")
        try:
            found[old].rename(removing)
            shutil.rmtree(removing)
        except OSError as error:
            raise CheckpointError(
                f"step {step} is saved, but the older {found[old]} cannot be removed: {error.strerror or error}; "
                "remove it by hand, or raise --keep"
            ) from error
