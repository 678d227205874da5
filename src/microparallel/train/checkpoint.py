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
- Nothing is pickled: reading a checkpoint never runs code that came with it.
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
import torch
from safetensors import SafetensorError
from torch import Tensor

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import CheckpointError
from microparallel.train.atomic import sync_folder, write_durably

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


# ── the bytes of a checkpoint, and whether they are those that were written ───────────────────────────────────────────


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


# ── its folder ────────────────────────────────────────────────────────────────────────────────────────────────────────

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


# ── values as JSON, tensors by name in a file beside it ───────────────────────────────────────────────────────────────
# {"betas": (0.9, 0.999), 0: tensor}   ⇄   {"$dict": [["betas", {"$tuple": [0.9, 0.999]}], [0, {"$tensor": "0"}]]}
#
# JSON has neither tuples nor keys that are numbers, and an optimizer's state has both; hence the words with a `$`.


class TensorTable:
    """Collects named tensors for one safetensors file, storing each piece of memory once."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def add(self, name: str, tensor: Tensor, place: str) -> str:
        """Take a tensor in and return the name it is stored under: its own, or that of the same tensor before it."""
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{place} is a {type(tensor).__name__}, and only tensors can be stored there")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"{place} is {tensor.layout} on {tensor.device}; only dense tensors can be stored")
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        while name in self._tensors:  # {"a": {"b": …}} and {"a.b": …} would share a name
            name += "'"
        stored = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that overlap (views of one memory); each gets a copy of its own.
        if stored.untyped_storage().data_ptr() in self._storages:
            stored = stored.clone()
        self._storages.add(stored.untyped_storage().data_ptr())
        self._names[identity] = name
        self._tensors[name] = stored
        return name

    def to_bytes(self) -> bytes:
        """Return the tensors as the bytes of a safetensors file."""
        try:
            return safetensors.torch.save(self._tensors)
        except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
            kinds = ", ".join(sorted({str(tensor.dtype) for tensor in self._tensors.values()}))
            raise CheckpointError(f"safetensors cannot store these tensors (of {kinds}): {error}") from error


def encode(value: Any, place: str, tensors: TensorTable | None) -> Any:
    """Return what JSON can hold of a value; its tensors go into the table, where there is one.

    `place` is where the value stands ("optimizer.state.0.exp_avg"): it names tensors, and the culprit in an error.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and tensors is not None:
        return {"$tensor": tensors.add(place.removeprefix("optimizer.").removeprefix("state."), value, place)}
    if isinstance(value, list | tuple):
        parts = [encode(part, f"{place}.{index}", tensors) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [[key, encode(part, f"{place}.{key}", tensors)] for key, part in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "use numbers, text, None, and lists, tuples or dicts of them"
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(decode(part, tensors) for part in value["$tuple"])
    if "$dict" in value:
        return {key: decode(part, tensors) for key, part in value["$dict"]}
    return {key: decode(part, tensors) for key, part in value.items()}


# ── every rank's state to rank 0 ──────────────────────────────────────────────────────────────────────────────────────


def gather_states(state: dict[str, Any], comms: Comms) -> list[dict[str, Any]]:
    """Every rank's optimizer state, by rank, on rank 0; an empty list on all others.

    States may differ in shape: a rank that never had a sample has none. So they travel as the bytes they are saved as.
    """
    tensors = TensorTable()
    text = json.dumps(encode(state, "optimizer", tensors)).encode()
    content = tensors.to_bytes()
    sizes = gather_json([len(text), len(content)], comms)
    longest = max(map(sum, sizes))
    padded = torch.frombuffer(bytearray((text + content).ljust(longest, b"\0")), dtype=torch.uint8)
    arrived = comms.gather(padded)
    return [_state(part, *size) for part, size in zip(arrived or [], sizes[: len(arrived or [])], strict=True)]


def _state(arrived: torch.Tensor, text: int, content: int) -> dict[str, Any]:
    received = bytes(arrived.numpy())
    tensors = safetensors.torch.load(received[text : text + content])
    state: dict[str, Any] = decode(json.loads(received[:text]), tensors)
    return state
