"""What to train on: the digits that ship with the package, and datasets of the user's own.

A `Split` holds training data and, perhaps, validation data. Whatever they are made of, the training loop asks them for
two things only: `len(data)`, and `data.batch(indices)`. (Text is in `text.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import safetensors.torch
import torch
from torch.utils.data import default_collate

from microparallel.errors import DataError, UsageError
from microparallel.train import user_code


class Dataset(Protocol):
    """What the training loop needs of data."""

    def __len__(self) -> int:
        """Count the samples."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return one sample, a pair (input, target)."""
        ...

    def batch(self, indices: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Return the samples with these numbers as (inputs, targets); for no numbers, a batch of size zero."""
        ...


@dataclass(frozen=True)
class Split:
    """Data to learn from, and data held back to measure on."""

    training: Dataset
    validation: Dataset | None
    description: str
    """One line for people."""


class TensorData:
    """A dataset whose samples are the rows of two tensors."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{len(inputs)} inputs and {len(targets)} targets: each input needs one target")
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows with these numbers."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)


class CollatedData:
    """A user's dataset, its samples put together into batches as torch's DataLoader would."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def batch(self, indices: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Collate the samples with these numbers."""
        if not indices:  # nothing to collate: the shape of an empty batch is known from a batch of one
            inputs, targets = self.batch([0])
            return first_samples(inputs, 0), first_samples(targets, 0)
        samples = [user_code.call(self.dataset.__getitem__, f"sample {index} of the data", index) for index in indices]
        try:
            inputs, targets = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise DataError(f"samples {list(indices)[:4]} … cannot be put together in a batch: {error}") from error
        return inputs, targets


def digits(seed: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    """Load 1797 handwritten digits of 8 by 8 pixels: 80 % to train on, 20 % held back.

    Inputs are 64 pixels, scaled from 0..16 by (pixel - 5) / 16 to about zero mean and a range of one; targets are the
    digits 0 to 9. `seed` decides which images are held back and nothing else: leave it alone, so that every run is
    measured on the same images. (Source and licence: `digits/LICENSE`.)
    """
    file = resources.files("microparallel.train") / "digits" / "digits.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    order = torch.randperm(len(tensors["labels"]), generator=torch.Generator().manual_seed(seed))
    images = ((tensors["images"].to(dtype) - 5) / 16)[order]
    labels = tensors["labels"].to(torch.int64)[order]
    held_back = len(order) // 5
    return Split(
        training=TensorData(images[held_back:], labels[held_back:]),
        validation=TensorData(images[:held_back], labels[:held_back]),
        description=f"handwritten digits, {len(order) - held_back} to train on and {held_back} held back",
    )


def from_user(spec: str) -> Split:
    """Load a dataset of the user's own, named as `my_module:make_dataset`.

    The function is called without arguments. It returns a dataset, or a pair (training, validation) of them, where a
    dataset is anything with `__len__` and `__getitem__` whose samples are pairs (input, target).
    """
    try:
        made = user_code.call(user_code.load(spec, "dataset"), f"dataset {spec!r}")
        training, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        _check(training, f"training data of {spec!r}")
        if validation is not None:
            _check(validation, f"validation data of {spec!r}")
    except DataError:
        raise
    except UsageError as error:
        raise DataError(str(error)) from error.__cause__
    held_back = "" if validation is None else f" and {len(validation)} held back"
    return Split(
        training=CollatedData(training),
        validation=None if validation is None else CollatedData(validation),
        description=f"{spec}, {len(training)} samples to train on{held_back}",
    )


def _check(dataset: Any, place: str) -> None:
    """Stop at once at what would otherwise fail in the middle of a step, on every rank."""
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"{place}: {type(dataset).__name__} has no {' and no '.join(missing)}: "
            "return a list, or a torch.utils.data.Dataset with both"
        )
    if len(dataset) == 0:
        raise DataError(f"{place}: it is empty: return at least one sample")
    sample = user_code.call(dataset.__getitem__, f"sample 0 of the {place}", 0)
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise DataError(
            f"sample 0 of the {place} is {type(sample).__name__}, not a pair (input, target): "
            "return pairs; two tensors become such a dataset by torch.utils.data.TensorDataset(inputs, targets)"
        )


def first_samples(batch: Any, count: int) -> Any:
    """Cut a batch, which may be a tensor or a nest of them, to its first samples."""
    return chosen_samples(batch, slice(count))


def chosen_samples(batch: Any, chosen: slice) -> Any:
    """Cut a batch, which may be a tensor or a nest of them, to some of its samples."""
    if isinstance(batch, torch.Tensor):
        return batch[chosen]
    if isinstance(batch, Mapping):
        return {key: chosen_samples(value, chosen) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [chosen_samples(value, chosen) for value in batch]
    return batch
