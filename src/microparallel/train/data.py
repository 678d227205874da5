"""What to train on: the digits that ship with the package, text, and datasets of the user's own.

A `Split` holds training data and, perhaps, validation data. Whatever they are made of, the training loop asks them for
two things only: `len(data)`, and `data.batch(indices)`. A `Stream` has neither: its samples just come.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch.utils.data import IterableDataset, default_collate

from microparallel.errors import DataError, UsageError
from microparallel.train import user_code

_MOST_HELD_BACK = 1000  # windows: measuring on more takes longer and tells no more


class Dataset(Protocol):
    """What the training loop needs of data."""

    def __len__(self) -> int:
        """Count the samples."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return one sample: a tuple whose last value is the target, or a dict."""
        ...

    def batch(self, indices: Sequence[int]) -> Any:
        """Return the samples with these numbers put together; for no numbers, a batch of size zero."""
        ...


@dataclass(frozen=True)
class Split:
    """Data to learn from, and data held back to measure on."""

    training: Dataset | Stream
    validation: Dataset | Stream | None
    description: str
    """One line for people."""


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


# ── digits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def digits(seed: int = 0, dtype: torch.dtype = torch.float32) -> Split:
    """Load 1797 handwritten digits of 8 by 8 pixels: 80 % to train on, 20 % held back.

    Inputs are 64 pixels, scaled from 0..16 by (pixel - 5) / 16 to about zero mean and a range of one; targets are the
    digits 0 to 9. `seed` decides which images are held back and nothing else: leave it alone, so that every run is
    measured on the same images. (Source and licence: `digits/LICENSE`.)
    """
    file = resources.files("microparallel.train") / "digits" / "digits.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    order = torch.randperm(len(tensors["labels"]), generator=torch.Generator().manual_seed(seed), device="cpu")
    images = ((tensors["images"].to(dtype) - 5) / 16)[order]
    labels = tensors["labels"].to(torch.int64)[order]
    held_back = len(order) // 5
    return Split(
        training=TensorData(images[held_back:], labels[held_back:]),
        validation=TensorData(images[:held_back], labels[:held_back]),
        description=f"handwritten digits, {len(order) - held_back} to train on and {held_back} held back",
    )


# ── the user's own ────────────────────────────────────────────────────────────────────────────────────────────────────


Collate = Callable[[list[Any]], Any]


class CollatedData:
    """A user's dataset, its samples put together as torch's DataLoader would, or by the user's function."""

    def __init__(self, dataset: Any, collate: Collate = default_collate) -> None:
        self.dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def batch(self, indices: Sequence[int]) -> Any:
        """Collate the samples with these numbers."""
        if not indices:  # nothing to collate: the shape of an empty batch is known from a batch of one
            return first_samples(self.batch([0]), 0)
        samples = [user_code.call(self.dataset.__getitem__, f"sample {index} of the data", index) for index in indices]
        return collated(samples, self._collate, f"samples {list(indices)[:4]} …")


class Stream:
    """A user's IterableDataset: samples that come one after another, perhaps without an end that is known."""

    def __init__(self, dataset: Any, collate: Collate = default_collate) -> None:
        self.dataset = dataset
        self._collate = collate

    @property
    def length(self) -> int | None:
        """How many samples a pass has, if the dataset says so."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    @property
    def has_state(self) -> bool:
        """Whether the dataset can say where it stands, and go on from there."""
        return all(hasattr(self.dataset, name) for name in ("state_dict", "load_state_dict"))

    def collate(self, samples: list[Any], place: str) -> Any:
        """Put some samples together."""
        return collated(samples, self._collate, place)


def collated(samples: list[Any], collate: Collate, place: str) -> Any:
    """Put samples together in a batch; an error says which samples, and what to do."""
    plain = [dict(one) if isinstance(one, Mapping) else one for one in samples]
    if collate is not default_collate:
        return user_code.call(collate, f"--collate, given {place},", samples)
    try:
        return default_collate(plain)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{place} cannot be put together in a batch: {reason}; samples of different lengths need "
            "--collate my_module:collate, which pads them"
        ) from error


def from_user(spec: str, collate: str | None = None) -> Split:
    """Load a dataset of the user's own, named as `my_module:make_dataset`.

    The function is called without arguments. It returns a dataset, or a pair (training, validation) of them, where a
    dataset is anything with `__len__` and `__getitem__`, or a torch IterableDataset. Samples are tuples whose last
    value is the target, or dicts. `collate` names a function that makes a batch of a list of samples.
    """
    try:
        put_together = default_collate if collate is None else user_code.load(collate, "collate")
        made = user_code.call(user_code.load(spec, "dataset"), f"dataset {spec!r}")
        training, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        first = _checked(training, f"training data of {spec!r}", put_together)
        second = None if validation is None else _checked(validation, f"validation data of {spec!r}", put_together)
    except DataError:
        raise
    except UsageError as error:
        raise DataError(str(error)) from error.__cause__
    held_back = "" if second is None else f" and {_size(second).removesuffix(' samples')} held back"
    return Split(training=first, validation=second, description=f"{spec}, {_size(first)} to train on{held_back}")


def _size(data: CollatedData | Stream) -> str:
    if isinstance(data, CollatedData):
        return f"{len(data)} samples"
    return "a stream of samples" if data.length is None else f"a stream of {data.length} samples"


def _checked(dataset: Any, place: str, collate: Collate) -> CollatedData | Stream:
    """Stop at once at what would otherwise fail in the middle of a step, on every rank."""
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and hasattr(dataset, "state_dict")):
        return Stream(dataset, collate)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"{place}: {type(dataset).__name__} has no {' and no '.join(missing)}: "
            "return a list, a torch.utils.data.Dataset with both, or an IterableDataset"
        )
    if len(dataset) == 0:
        raise DataError(f"{place}: it is empty: return at least one sample")
    sample = user_code.call(dataset.__getitem__, f"sample 0 of the {place}", 0)
    fits = isinstance(sample, Mapping) or (isinstance(sample, tuple | list) and len(sample) > 1)
    if not fits and collate is default_collate:
        raise DataError(
            f"sample 0 of the {place} is {type(sample).__name__}, not a pair (input, target) nor a dict: "
            "return pairs; two tensors become such a dataset by torch.utils.data.TensorDataset(inputs, targets)"
        )
    return CollatedData(dataset, collate)


# ── text: any UTF-8 file or folder, or the sources of Python itself ───────────────────────────────────────────────────


class TextData:
    """Windows of text, to train a language model on.

    Tokens are bytes. The text is cut into windows that meet but do not overlap; the input is a window, and the target
    is the same window one byte later:

    ```
    context = 4      T h e _ q u i c k _ f …
    window 0  input  T h e _           target    h e _ q
    window 1  input          q u i c   target            u i c k
    ```

    The bytes are kept as bytes, and become the 64-bit numbers that models take batch by batch.
    """

    def __init__(self, windows: torch.Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.windows[index].to(torch.int64)
        return window[:-1], window[1:]

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the windows with these numbers as (inputs, targets), both of shape (windows, context)."""
        windows = self.windows.index_select(0, torch.tensor(indices, dtype=torch.int64)).to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def text(path: Path | str | None = None, context: int = 64) -> Split:
    """Cut text into windows of `context` bytes: the last tenth, at most 1000 windows, is held back.

    A folder gives all files below it, in the order of their paths; hidden ones, `__pycache__` and those that are not
    UTF-8 are left out. No path at all gives the sources of the running Python's standard library, so that there is
    always something to train on.
    """
    if context < 1:
        raise UsageError(f"context={context}: a window needs at least 1 byte")
    try:
        corpus, name = _standard_library() if path is None else _read(Path(path))
    except OSError as error:
        raise DataError(
            f"text {error.filename} cannot be read ({error.strerror}): check its permissions, or name another"
        ) from error
    # Every window but the first begins at the last target of the one before it: one byte is needed beyond the windows.
    count = max(0, len(corpus) - 1) // context
    if count < 2:
        raise DataError(
            f"{name}: {len(corpus)} bytes are fewer than two windows of context={context}, which take "
            f"{2 * context + 1}: give a longer text or a shorter context"
        )
    windows = torch.frombuffer(corpus, dtype=torch.uint8).unfold(0, context + 1, context)
    held_back = max(1, min(_MOST_HELD_BACK, count // 10))
    return Split(
        training=TextData(windows[:-held_back]),
        validation=TextData(windows[-held_back:]),
        description=f"{name}, {len(corpus):,} bytes: {count - held_back} windows of {context} to train on "
        f"and {held_back} held back",
    )


def _read(path: Path) -> tuple[bytearray, str]:
    return _read_folder(path) if path.is_dir() else _read_file(path)


def _standard_library() -> tuple[bytearray, str]:
    """Read the top-level modules of the running Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(f"this Python has no sources of its standard library in {folder}: name a text file or folder")
    return _join(files, f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library")


def _read_folder(folder: Path) -> tuple[bytearray, str]:
    """Read every file below a folder that is text."""
    files = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    regular = sorted(file for file in files if file.is_file())
    if not regular:
        raise DataError(f"text folder {folder} has no files that are not hidden: name a folder with text in it")
    return _join(regular, str(folder))


def _join(files: Sequence[Path], name: str) -> tuple[bytearray, str]:
    corpus = bytearray()
    skipped = 0
    for file in files:
        content = file.read_bytes()
        if _first_bad_byte(content) is None:
            corpus += content
        else:
            skipped += 1
    if skipped == len(files):
        raise DataError(f"text folder {name}: none of its {len(files)} files is UTF-8 text: name one with text in it")
    left_out = f", {skipped} not UTF-8 left out" if skipped else ""
    return corpus, f"{name} ({len(files) - skipped} files{left_out})"


def _read_file(file: Path) -> tuple[bytearray, str]:
    """Read one file, which must be text."""
    if not file.exists():
        raise DataError(f"text {file} does not exist: check the path (it is taken from {Path.cwd()})")
    if not file.is_file():
        raise DataError(f"text {file} is neither a file nor a folder: name one of these")
    content = file.read_bytes()
    if not content:
        raise DataError(f"text {file} is empty: name a file with text in it")
    offset = _first_bad_byte(content)
    if offset is not None:
        raise DataError(
            f"text {file} is not UTF-8 text: byte {offset} is 0x{content[offset]:02x}; "
            "name a text file, or convert this one to UTF-8"
        )
    return bytearray(content), str(file)


def _raise(error: OSError) -> None:
    """Make `os.walk` report a folder it cannot enter, which it would pass over in silence."""
    raise error


def _first_bad_byte(content: bytes) -> int | None:
    """Find the first byte that no text has: one that breaks UTF-8, or a zero, which UTF-8 allows and text does not."""
    zero = content.find(0)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if zero == -1 else min(zero, error.start)
    return None if zero == -1 else zero
