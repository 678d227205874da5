"""Which checkpoints there are, what each of them is, and which one is meant.

```
runs/first                             a run
runs/first/checkpoints                 its checkpoints
runs/first/checkpoints/step-00000100   one of them
```

A look at a checkpoint reads its manifest and compares the sizes of its files; `verify` reads every byte.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from microparallel.errors import CheckpointError, ConfigError
from microparallel.text import show_some
from microparallel.train.checkpoint_folder import (
    MANIFEST,
    best_of,
    checkpoints,
    folders,
    is_finite,
    newest_first,
    part_name,
)
from microparallel.train.checkpoint_reader import Checkpoint, open_checkpoint, read_manifest, verify

# Called with what is done next, and with how many bytes; what it returns is told how many bytes of it were done.
Begin = Callable[[str, int], Callable[[int], None]]

# What an import has replaced stays beside the checkpoints, under a name that no run takes for one of its own.
_BEFORE = "before-import-"
_CHECKPOINT = re.compile(rf"(?:{_BEFORE})?step-(?P<step>\d{{8,}})(?:-\d+)?")

_LEFT_OVER = {
    "writing": "a save that is under way, or was cut off; the next save removes it",
    "removing": "a removal that was cut off; the next save removes it",
    "replaced": "a checkpoint whose step was saved again; the next save removes it",
    "": "what an import has replaced; remove it if you do not need it",
}


def in_silence(what: str, size: int) -> Callable[[int], None]:  # noqa: ARG001
    """Tell nobody how far it is."""
    return lambda _: None


# ── where ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Place:
    """What a user has named: the folder that holds checkpoints, and the one of them that is meant, if it is one."""

    folder: Path
    only: Path | None = None

    @property
    def run(self) -> Path:
        """The folder whose lock says that a run writes here."""
        return self.folder.parent if (self.folder.parent / "config.toml").is_file() else self.folder

    def steps(self) -> dict[int, Path]:
        """Step → path of those that are meant."""
        if self.only is not None:
            return {_step_of(self.only): self.only}
        try:
            return dict(sorted(checkpoints(self.folder).items()))
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be read: {error.strerror or error}; check who may read it"
            ) from error


def find(path: Path) -> Place:
    """Say which checkpoints are meant by the folder of a run, by that of its checkpoints, or by that of one of them."""
    if not path.is_dir():
        what = "this is a file" if path.exists() else "there is no such folder"
        raise ConfigError(f"{path}: {what}; name the folder of a run, such as runs/20250131-093000-mlp")
    whole = path.resolve()
    if _CHECKPOINT.fullmatch(whole.name):
        parent = path.parent if path.name == whole.name else whole.parent
        return Place(parent, parent / whole.name)
    if (path / "checkpoints").is_dir() or (path / "config.toml").is_file():
        return Place(path / "checkpoints")
    if whole.name == "checkpoints" or folders(path):
        return Place(path)
    raise ConfigError(
        f"{path} is not the folder of a run: it has neither a config.toml nor checkpoints; "
        "name one such as runs/20250131-093000-mlp"
    )


def _step_of(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None  # `find` has asked
    return int(match["step"])


def select(place: Place, wanted: str | None) -> Place:
    """Take the one that --step names: a number, or "best"; without, the place as it is."""
    if wanted is None:
        return place
    there = place.steps()
    if wanted == "best":
        step, _ = best_of(place.folder)
        if step is None:
            raise ConfigError(
                f"--step best: no checkpoint in {place.folder} is marked as the best; name one of {_listed(there)}"
            )
    elif wanted.isascii() and wanted.isdigit():
        step = int(wanted)
    else:
        raise ConfigError(f"--step {wanted}: a whole number is needed, or best; name one of {_listed(there)}")
    if step not in there:
        where = place.folder if place.only is None else place.only
        raise ConfigError(f"--step {wanted}: {where} has no checkpoint of step {step}; it has {_listed(there)}")
    return replace(place, only=there[step])


def _listed(steps: Sequence[int] | dict[int, Path]) -> str:
    return show_some([str(step) for step in sorted(steps, reverse=True)], most=8) or "none"


def open_newest(place: Place, begin: Begin = in_silence) -> tuple[Path, Checkpoint, list[str]]:
    """Compare the newest checkpoint with its manifest, and open it; with a warning for each that is damaged.

    If one of them was named, it is that or none.
    """
    paths = [place.only] if place.only is not None else [place.folder / name for name in newest_first(place.folder)]
    if not paths:
        raise CheckpointError(f"{place.folder} holds no checkpoint; a run writes its first one before its first step")
    warnings: list[str] = []
    for path in paths:
        try:
            check(path, begin)
            return path, open_checkpoint(path), warnings
        except CheckpointError as error:
            warnings.append(str(error))
    raise CheckpointError(
        warnings[0]
        if len(paths) == 1
        else f"no checkpoint in {place.folder} can be used" + "".join(f"\n  {warning}" for warning in warnings)
    )


def check(path: Path, begin: Begin = in_silence) -> None:
    """Compare every byte of a checkpoint with its manifest, or raise a CheckpointError that says what differs."""
    size = _look(path)[0]
    verify(path, tell=begin(f"verifying {path.name}", size))


# ── what they are ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Listed:
    """One checkpoint.

    Attributes:
        step: after which it was saved.
        path: its folder.
        bytes: of all its files; None if its manifest cannot be read.
        ranks: how many have written it; None if its manifest cannot be read.
        saved: when, in seconds since 1970.
        finite: whether all weights were finite when it was saved.
        newest: whether no other has a later step.
        best: whether it was the best by validation.
        loss: of the validation, if it was the best.
        damage: what is wrong with it, in a line; None if nothing was found.
    """

    step: int
    path: Path
    bytes: int | None
    ranks: int | None
    saved: float
    finite: bool
    newest: bool
    best: bool
    loss: float | None
    damage: str | None


@dataclass(frozen=True)
class LeftOver:
    """A folder beside the checkpoints that is none: what a save left that was cut off, or what an import replaced."""

    path: Path
    bytes: int
    what: str


def list_checkpoints(place: Place, *, thoroughly: bool = False, begin: Begin = in_silence) -> list[Listed]:
    """Look at each checkpoint that is meant, in the order of their steps; `thoroughly`: compare every byte."""
    best, loss = best_of(place.folder)
    newest = max(checkpoints(place.folder), default=None)
    found = []
    for step, path in place.steps().items():
        size = ranks = damage = None
        try:
            size, ranks = _look(path)
            if thoroughly:
                check(path, begin)
        except CheckpointError as error:
            if not path.exists():  # a run that goes on has removed it meanwhile
                continue
            damage = str(error)
        kept = path.name.startswith(_BEFORE)
        is_best = step == best and not kept
        found.append(
            Listed(
                step=step,
                path=path,
                bytes=size,
                ranks=ranks,
                saved=_time_of(path),
                finite=is_finite(path),
                newest=step == newest and not kept,
                best=is_best,
                loss=loss if is_best else None,
                damage=damage,
            )
        )
    return found


def left_over(place: Place) -> list[LeftOver]:
    """What else is in the folder that this library has made; nothing if a single checkpoint is meant."""
    if place.only is not None or not place.folder.is_dir():
        return []
    used = {*place.steps().values()}
    others = {path: kind for path, _, kind in folders(place.folder) if kind and path not in used}
    others |= {path: "" for path in sorted(place.folder.glob(f"{_BEFORE}*")) if _CHECKPOINT.fullmatch(path.name)}
    return [LeftOver(path, _size_of(path), _LEFT_OVER[kind]) for path, kind in others.items()]


def name_before(path: Path) -> Path:
    """A free name for a checkpoint that an import is about to replace."""
    names = (
        f"{_BEFORE}{path.name}{end}" for end in itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    )
    return next(other for name in names if not (other := path.with_name(name)).exists())


def _look(path: Path) -> tuple[int, int]:
    """How many bytes a checkpoint has, and how many ranks have written it; raises if a file has another size."""
    _, files = read_manifest(path)
    for name, written in files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is damaged: {name} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {name}: {error.strerror or error}") from error
        if size != written.bytes:
            raise CheckpointError(f"{path} is damaged: {name} has {size} bytes, and {written.bytes} were written")
    before_the_number = part_name(0).partition("0")[0]
    parts = sum(name.startswith(before_the_number) for name in files)  # format 1 has none: rank 0 wrote it all
    return sum(written.bytes for written in files.values()), max(parts, 1)


def _size_of(path: Path) -> int:
    """The bytes of all files in a folder, which another process may be changing."""
    size = 0
    for file in path.rglob("*"):
        try:
            size += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return size


def _time_of(path: Path) -> float:
    """When a checkpoint was complete: then its manifest was written, which may be missing now."""
    for file in (path / MANIFEST, path):
        try:
            return file.stat().st_mtime
        except OSError:
            continue
    return 0.0
