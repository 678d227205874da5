"""Values as JSON, their tensors by name in files beside it; and the values of several ranks put together.

```
{"betas": (0.9, 0.999), 0: tensor}   ⇄   {"$dict": [["betas", {"$tuple": [0.9, 0.999]}], [0, {"$tensor": "state.0"}]]}
```

JSON has neither tuples nor keys that are numbers, and an optimizer's state has both; hence the words with a `$`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microparallel.data_parallel.layout import Part
from microparallel.errors import CheckpointError
from microparallel.files.tensor_file import DTYPES

_WORD = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


@dataclass(frozen=True)
class Reference:
    """Stands in a value for a tensor that is stored under this name."""

    name: str


class TensorTable:
    """Collects the tensors that one rank holds, whole or a part of each, by the names they are stored under.

    Attributes:
        parts: by name; what has two names (tied weights) is there once.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, tensor: Tensor | Part, place: str) -> str:
        """Take a tensor in and return the name it is stored under: its own, or that of the same tensor before it."""
        if not isinstance(tensor, Tensor | Part):
            raise CheckpointError(f"{place} is a {type(tensor).__name__}, and only tensors can be stored there")
        part = tensor if isinstance(tensor, Part) else Part(tensor, 0, tuple(tensor.shape))
        held = part.tensor
        if held.layout != torch.strided or held.is_meta:
            raise CheckpointError(f"{place} is {held.layout} on {held.device}; only dense tensors can be stored")
        if held.dtype not in DTYPES.values():
            raise CheckpointError(f"{place} is of {held.dtype}, which safetensors cannot store")
        memory = (held.device, held.data_ptr(), held.dtype, held.shape, held.stride(), part.start, part.shape)
        if held.numel() and memory in self._names:
            return self._names[memory]
        self._names[memory] = name
        self.parts[name] = part
        return name


def encode(value: Any, place: str, tensors: TensorTable | None) -> Any:
    """Return what JSON can hold of a value; its tensors go into the table, where there is one.

    `place` is where the value stands ("optimizer.state.0.exp_avg"): it names tensors, and the culprit in an error. No
    two places of a value have the same name.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Reference):
        return {"$tensor": value.name}
    if isinstance(value, Tensor | Part) and tensors is not None:
        return {"$tensor": tensors.add(place, value, place)}
    if isinstance(value, list | tuple):
        parts = [encode(part, f"{place}.{index}", tensors) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [[key, encode(part, f"{place}.{_written(key)}", tensors)] for key, part in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "use numbers, text, None, and lists, tuples or dicts of them"
    )


def _written(key: str | int) -> str:
    """A key within the name of a place; "a.b" and "0" are quoted, since {"a": {"b": …}} and {0: …} are other places."""
    if isinstance(key, int):
        return str(int(key))
    return key if _WORD.fullmatch(key) else json.dumps(key)


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the value that `encode` was given, with what `tensor` returns in place of each tensor."""
    if isinstance(value, list):
        return [decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensor(value["$tensor"])
    if "$tuple" in value:
        return tuple(decode(part, tensor) for part in value["$tuple"])
    if "$dict" in value:
        return {key: decode(part, tensor) for key, part in value["$dict"]}
    return {key: decode(part, tensor) for key, part in value.items()}


def merge(values: Sequence[Any]) -> Any:
    """Put the values of several ranks together: dicts become one with the keys of all, otherwise the first counts.

    ```
    rank 0     {"state": {0: …, 1: …}, "param_groups": […]}
    rank 1     {"state": {1: …, 2: …}, "param_groups": […]}
    together   {"state": {0: …, 1: …, 2: …}, "param_groups": […]}
    ```
    """
    if not all(isinstance(value, dict) for value in values):
        return values[0]
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: merge([value[key] for value in values if key in value]) for key in keys}
