"""The folder of checkpoints: what its names mean, giving a checkpoint its name, removing old ones. Needs no torch.

A checkpoint is written in a hidden folder and gets its name last (`complete`); the process that does so may be one of
its own, started in a moment, so this file imports nothing but Python's own library.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from microparallel.errors import CheckpointError
from microparallel.files.atomic import sync_folder, write_atomically, write_durably
from microparallel.files.checksum import Checksum, checksum_of

FORMAT = 2
STATE, MANIFEST = "state.json", "manifest.json"
BEST = "best.json"  # beside the checkpoints: the name of the best


def part_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"part-{rank:05d}.safetensors"


def manifest(files: Mapping[str, Checksum], format: int = FORMAT) -> bytes:
    """Return the one right manifest of these files, byte for byte, so that damage to the manifest shows too."""
    sums = {name: asdict(written) for name, written in files.items()}
    return json.dumps({"format": format, "files": sums}, indent=2).encode("ascii")


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_folder(path: Path) -> None:
    """Remove what an earlier save left, and make the folder that all ranks write into."""
    with failing_in_one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent.parent)
        clear_leftovers(path.parent)
        hidden(path, "writing").mkdir()


def complete(path: Path, text: bytes, files: dict[str, Checksum], keep_old_as: Path | None = None) -> None:
    """Add what rank 0 alone writes, wait until all names are on the disk, and only then give the folder its name.

    A checkpoint that had this name is removed, unless it is to be kept under another.
    """
    writing, replaced = hidden(path, "writing"), hidden(path, "replaced")
    with failing_in_one_line(path):
        write_durably(writing / STATE, text)
        write_durably(writing / MANIFEST, manifest({**files, STATE: checksum_of(text)}))
        sync_folder(writing)
        if path.exists():
            path.rename(replaced)  # a folder cannot be renamed over another; `latest` reads this one in between
        writing.rename(path)
        sync_folder(path.parent)
        if replaced.exists() and keep_old_as is not None:
            replaced.rename(keep_old_as)
            sync_folder(path.parent)
        elif replaced.exists():
            shutil.rmtree(replaced)


@contextlib.contextmanager
def failing_in_one_line(path: Path, who: str = "") -> Iterator[None]:
    """Turn what the system says into one line that names the checkpoint and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {who}{error.strerror or error}; "
            "make room or choose another folder (earlier checkpoints are as they were)"
        ) from error


# ── its folder ────────────────────────────────────────────────────────────────────────────────────────────────────────

# The folders `checkpoints/` may hold; `kind` is empty for a checkpoint that has its name. The hidden kinds:
#   writing    not complete                      removing   a removal that was cut off
#   replaced   the earlier checkpoint of a step that is being saved again, valid until the new one has the name
_FOLDER = re.compile(r"(?P<hidden>\.?)step-(?P<step>\d{8,})(?:-(?P<kind>writing|removing|replaced))?")


def folders(folder: Path) -> list[tuple[Path, int, str]]:
    """List the path, step and kind of everything in `folder` that `save` made."""
    if not folder.is_dir():
        return []
    matches = [(path, _FOLDER.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    return [
        (path, int(match["step"]), match["kind"] or "")
        for path, match in matches
        if match and bool(match["hidden"]) == bool(match["kind"])
    ]


def newest_first(folder: Path) -> list[str]:
    """Return the names of all checkpoints there, complete or damaged later."""
    try:
        found = checkpoints(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}; check who may read it") from error
    return [found[step].name for step in sorted(found, reverse=True)]


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return step → path of every checkpoint there, complete or damaged later."""
    present = folders(folder)
    replaced = {step: path for path, step, kind in present if kind == "replaced"}
    return replaced | {step: path for path, step, kind in present if not kind}


def hidden(path: Path, kind: str) -> Path:
    """The hidden folder beside a checkpoint for what is being done to it: writing, removing, replaced."""
    return path.with_name(f".{path.name}-{kind}")


def clear_leftovers(folder: Path) -> None:
    """Remove what a save that was cut off left behind, and give a replaced checkpoint its name back."""
    for path, step, kind in folders(folder):
        named = folder / f"step-{step:08d}"
        if kind == "replaced" and not named.exists():
            path.rename(named)
        elif kind:
            shutil.rmtree(path)


def check_keep(keep: int, keep_every: int | None) -> None:
    """Refuse numbers of checkpoints to keep that make no sense."""
    if keep < 1:
        raise CheckpointError(f"keep={keep} would remove the checkpoint just saved; try keep=1 or more")
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every={keep_every} is no number of steps; try keep_every=1000")


def remove_all_but(keep: int, folder: Path, step: int, keep_every: int | None = None) -> None:
    """Of the checkpoints up to this step, keep the newest `keep` that are finite, and remove the others.

    The best one and multiples of `keep_every` stay, too. Of those that are not finite only the newest stays: a run that
    went wrong cannot push good states out.
    """
    found = checkpoints(folder)
    steps = sorted((other for other in found if other <= step), reverse=True)
    finite = [other for other in steps if is_finite(found[other])]
    spoilt = [other for other in steps if other not in finite]
    best, _ = best_of(folder)
    for old in finite[keep:] + spoilt[1:]:
        if old == best or (keep_every is not None and old % keep_every == 0):
            continue
        # Renamed first: a removal that is cut off must not leave what looks like a damaged checkpoint.
        removing = hidden(found[old], "removing")
        try:
            found[old].rename(removing)
            shutil.rmtree(removing)
        except OSError as error:
            raise CheckpointError(
                f"step {step} is saved, but the older {found[old]} cannot be removed: {error.strerror or error}; "
                "remove it by hand, or keep more"
            ) from error


def is_finite(path: Path) -> bool:
    """Whether a checkpoint was saved with finite weights only; so it is with one that does not say otherwise."""
    try:
        return json.loads((path / STATE).read_bytes()).get("finite", True) is not False
    except (OSError, ValueError, AttributeError):
        return True


def mark_best(path: Path, loss: float) -> None:
    """Write down that this checkpoint is the best by validation; the one before is no longer."""
    with failing_in_one_line(path):
        write_atomically(path.parent / BEST, json.dumps({"name": path.name, "loss": loss}).encode("ascii"))


def best_of(folder: Path) -> tuple[int | None, float]:
    """The step and the loss of the best checkpoint; no step, and an infinite loss, if none was marked."""
    try:
        about = json.loads((folder / BEST).read_bytes())
        match = _FOLDER.fullmatch(about["name"])
        return (None, math.inf) if match is None else (int(match["step"]), float(about["loss"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None, math.inf
