"""What a run was made of when it was saved, so that a run that goes on with something else says so.

A fingerprint is stored in each checkpoint. What it knows: the sources of the user's own code, the number of samples and
the bits of three of them, the versions of torch and of this library, and the parameters in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from microparallel.errors import CheckpointError
from microparallel.train import user_code
from microparallel.train.config import TrainConfig
from microparallel.train.data import Dataset, Stream
from microparallel.train.random_state import own_randomness

_SPECS = ("model", "data", "loss", "collate", "optimizer", "schedule_lr")


def fingerprint(config: TrainConfig, data: Dataset | Stream, parameters: Sequence[str]) -> dict[str, Any]:
    """What this run is made of, as values that JSON holds; no rank needs another for it."""
    return {
        "code": code_of(config),
        "samples": data.length if isinstance(data, Stream) else len(data),
        "data": None if isinstance(data, Stream) else _data(data),
        "parameters": [*parameters],
        **versions(),
    }


def versions() -> dict[str, str]:
    """The versions of the libraries that decide what a run computes."""
    return {"torch": torch.__version__, "microparallel": _version()}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, each in a few words; raises a CheckpointError if parameters are in another order.

    An optimizer's state belongs to a parameter by its number, so in another order it would be another one's.
    """
    if then["parameters"] != now["parameters"] and sorted(then["parameters"]) == sorted(now["parameters"]):
        first, other = next(
            pair for pair in zip(then["parameters"], now["parameters"], strict=True) if len({*pair}) > 1
        )
        raise CheckpointError(
            f"the model's parameters are in another order than when this was saved: {first} stood where now {other} "
            "is; the optimizer's state goes by that order, so restore it"
        )
    found = []
    if then["samples"] != now["samples"]:
        found.append(f"{then['samples']} samples then, {now['samples']} now")
    elif then["data"] != now["data"]:
        found.append("other samples of the same number")
    files = then["code"].keys() & now["code"].keys()
    if edited := sorted(name for name in files if then["code"][name] != now["code"][name]):
        found.append(f"other code in {', '.join(edited)}")
    found += [
        f"{name} {then[name]} then, {now[name]} now" for name in ("torch", "microparallel") if then[name] != now[name]
    ]
    return found


def code_of(config: TrainConfig) -> dict[str, str]:
    """The checksums of the files that the user's own functions stand in, by the names of their modules."""
    specs = [getattr(config, name) or "" for name in _SPECS] + (config.metric or "").split()
    modules = {spec.partition(":")[0] for spec in specs if user_code.is_spec(spec)}
    found = {}
    for name in sorted(modules):
        file = user_code.file_of(name)
        if file is not None and file.is_file():
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def _data(data: Dataset) -> str | None:
    """A checksum of the first sample, the middle one and the last; None if they cannot be compared."""
    digest = hashlib.sha256()
    with own_randomness("fingerprint"):  # samples that are changed at random are changed alike each time
        try:
            for number in sorted({0, len(data) // 2, len(data) - 1}):
                _add(digest, data.batch([number]))
        except Exception:  # the user's own code: what is wrong with it shows when it is used
            return None
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(str((value.dtype, value.shape)).encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    else:
        digest.update(repr(value).encode() if isinstance(value, str | int | float | bool | None) else b"?")


def _version() -> str:
    try:
        return metadata.version("microparallel")
    except metadata.PackageNotFoundError:
        return "unknown"
