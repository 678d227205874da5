"""`microparallel checkpoints`: what a run has saved, whether it is whole, and weights in and out as one plain file."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from microparallel.cli import flags
from microparallel.errors import CheckpointError, ConfigError
from microparallel.text import count, show_age, show_size, show_some, without_nan

if TYPE_CHECKING:
    from microparallel.train.checkpoint_files import Exported, Imported
    from microparallel.train.checkpoint_listing import Begin, LeftOver, Listed, Place

EXAMPLES = flags.examples(
    ("microparallel checkpoints runs/first", "which there are: step, size, age, how many ranks wrote each, the best"),
    (
        "microparallel checkpoints runs/first --verify",
        "compare every byte with what was written; exit code 1 if one is damaged",
    ),
    (
        "microparallel checkpoints runs/first --export weights.safetensors --step best",
        "the model in one file: model.load_state_dict(safetensors.torch.load_file('weights.safetensors'))",
    ),
    (
        "microparallel checkpoints runs/first --import weights.safetensors",
        "go on with other weights: those of the file, and everything else of the newest checkpoint",
    ),
    (
        "microparallel checkpoints runs/first --export all.safetensors --whole",
        "optimizer, random numbers and position in the data too; --import brings all of it back, bit for bit",
    ),
)
_LARGE = 100 * 10**6  # bytes from which on a line says what is being done, where there is no terminal for a bar


def checkpoints(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The folder of a run, its checkpoints/, or one step-… in it.", show_default=False
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with the manifests.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the model of one checkpoint into one safetensors file."),
    ] = None,
    import_: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Make a checkpoint with the weights of a safetensors file and everything else of an existing one, "
            "whose place it takes.",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Which checkpoint is meant: its step, or best.", show_default="the newest that is whole"
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --export: everything, also the optimizer's state.")
    ] = False,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> int:
    """List a run's checkpoints, verify them, take weights out as one plain file or put them in.

    A file has tied weights under each of their names; an import takes it with one of them, too. What an import
    replaces is kept beside it, under another name. A run that is going on can be looked at, but nothing is imported.
    """
    chosen = [name for name, value in (("--verify", verify), ("--export", export), ("--import", import_)) if value]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: one at a time; --export and --import verify what they read")
    if whole and export is None:
        raise ConfigError(
            "--whole says what --export writes; add --export FILE (--import sees by itself what a file has)"
        )

    from microparallel.train import checkpoint_listing as listing

    place = listing.find(run)
    with _progress(not quiet) as begin:
        if export is not None:
            return _export(listing.select(place, step), export, whole, begin, json)
        if import_ is not None:
            return _import(place, import_, step, begin, json)
        chosen_place = listing.select(place, step)
        found = listing.list_checkpoints(chosen_place, thoroughly=verify, begin=begin)
        others = listing.left_over(chosen_place)
    if json:
        about = [asdict(one) | {"saved": _iso(one.saved)} for one in found]
        left = [asdict(one) for one in others]
        print(_as_json({"folder": place.folder, "verified": verify, "checkpoints": about, "left_over": left}))
    else:
        _show(place, found, others, verify)
    if verify and not found:
        raise CheckpointError(f"{place.folder} holds no checkpoint to verify")
    return 1 if verify and any(one.damage for one in found) else 0


def _as_json(value: dict[str, Any]) -> str:
    return json_format.dumps(without_nan(value), indent=2, default=str, allow_nan=False)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


# ── a list ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _show(place: Place, found: Sequence[Listed], others: Sequence[LeftOver], verified: bool) -> None:
    if not found:
        print(f"no checkpoints in {place.folder}")
    else:
        Console(highlight=False).print(_table(found, verified))
        whole = [one for one in found if one.damage is None]
        checked = ", every byte is as it was written" if whole and verified else ""
        size = show_size(sum(one.bytes or 0 for one in whole))
        print(f"{count(len(whole), 'checkpoint')} in {place.folder}, {size}{checked}")
    for one in found:
        if one.best:
            print(f"best by validation: step {one.step}, loss {one.loss:.4f}")
    for one in found:
        if one.damage is not None:
            print(f"damaged: {one.damage}")
    for other in others:
        print(f"left over: {other.path.name} ({show_size(other.bytes)}): {other.what}")


def _table(found: Sequence[Listed], verified: bool) -> Table:
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("step", "size", "age", "ranks")]
    table = Table(*numbers, "", box=None, pad_edge=False)
    for one in found:
        marks = {
            "newest": one.newest,
            "best": one.best,
            "not finite": not one.finite,
            "damaged": one.damage is not None,
            "whole": verified and one.damage is None,
        }
        table.add_row(
            str(one.step),
            "?" if one.bytes is None else show_size(one.bytes),
            show_age(time.time() - one.saved),
            "?" if one.ranks is None else str(one.ranks),
            ", ".join(mark for mark, true in marks.items() if true),
        )
    return table


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _export(place: Place, file: Path, whole: bool, begin: Begin, json: bool) -> int:
    from microparallel.train.checkpoint_files import export
    from microparallel.train.checkpoint_folder import is_finite
    from microparallel.train.checkpoint_listing import open_newest

    flags.require_writable(file, "--export")
    if file.resolve().parent in [path.resolve() for path in place.steps().values()]:
        raise ConfigError(f"--export {file}: this would damage the checkpoint it is in; choose another place")
    path, checkpoint, warnings = open_newest(place, begin)
    finite = is_finite(path)
    written = export(checkpoint, file, whole=whole, finite=finite, begin=begin)
    _warn(warnings if finite else [*warnings, f"the weights of {path} are not finite"])
    if json:
        about = asdict(written) | {"checkpoint": path, "step": checkpoint.step, "whole": whole, "finite": finite}
        print(_as_json(about))
    else:
        print(_words_of_export(written, checkpoint.step, whole))
    return 0


def _words_of_export(written: Exported, step: int, whole: bool) -> str:
    what = "all" if whole else "the model"
    lines = [
        f"wrote {written.path} ({show_size(written.bytes)}): {what} of step {step}, {count(written.tensors, 'tensor')}"
    ]
    if written.tied and not whole:
        pairs = [f"{name} is {first}" for name, first in written.tied.items()]
        lines.append(f"tied weights stand there under each of their names: {show_some(pairs)}")
    return "\n".join(lines)


def _import(place: Place, file: Path, step: str | None, begin: Begin, json: bool) -> int:
    from microparallel.train.checkpoint_files import import_file

    done = import_file(place, file, step, begin)
    _warn(done.warnings)
    if json:
        print(_as_json(asdict(done)))
    else:
        print(_words_of_import(place, file, done))
    return 0


def _words_of_import(place: Place, file: Path, done: Imported) -> str:
    tensors = count(done.tensors, "tensor")
    what = f"all of {file}" if done.whole else f"the weights of {file} ({tensors}), everything else as it was"
    lines = [f"made {done.path}: {what}"]
    if done.kept is not None:
        lines.append(f"what was there is kept as {done.kept}; remove it if you do not need it")
    if done.was_best:
        lines.append(
            "it was the best by validation; these weights are yet to be measured, so none is marked as the best"
        )
    if done.newer:
        newer = ", ".join(map(str, done.newer))
        lines.append(
            f"a run goes on from the newest: remove the checkpoints of later steps ({newer}) to go on from this one"
        )
    elif (place.run / "config.toml").is_file():
        lines.append(f"go on with: microparallel train --resume {place.run}")
    return "\n".join(lines)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


@contextmanager
def _progress(shown: bool) -> Iterator[Begin]:
    """Show how far it is: a bar on a terminal; elsewhere a line when something large begins."""
    console = Console(stderr=True, highlight=False)
    if shown and console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, expand=True, transient=True) as bar:

            def begin(what: str, size: int) -> Callable[[int], None]:
                task = bar.add_task(what, total=size)
                return lambda done: bar.advance(task, done)

            yield begin
    else:

        def say(what: str, size: int) -> Callable[[int], None]:
            if shown and size >= _LARGE:
                console.print(f"{what} ({show_size(size)})", soft_wrap=True)
            return lambda _: None

        yield say
