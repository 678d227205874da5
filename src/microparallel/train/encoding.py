"""Turn the values of a checkpoint into JSON and back: numbers as they are, tensors by name into a file beside it.

```
{"betas": (0.9, 0.999), 0: tensor}   ⇄   {"$dict": [["betas", {"$tuple": [0.9, 0.999]}], [0, {"$tensor": "0"}]]}
```

JSON has neither tuples nor keys that are numbers, and an optimizer's state has both; hence the words with a `$`.
"""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from microparallel.errors import CheckpointError


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
