"""What a user brings along: functions named as `module:name` (`my_data:make_dataset`), and the schedule of a pipeline.

A schedule is one of ours by its name, in any letter case, or a file with a program.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from microparallel.errors import ConfigError, DataError, ProgramError, UsageError
from microparallel.observe.place import where_raised
from microparallel.program import Program, TrainingStep, from_text
from microparallel.schedules import PIPELINES
from microparallel.text import did_you_mean


def is_spec(text: str) -> bool:
    """Whether a text has the form `module:name`."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def load(spec: str, what: str) -> Callable[..., Any]:
    """Import `module:name` and return the function or class it names.

    The module may lie in the current directory or be installed. `what` says in errors what was being looked for, such
    as "dataset" or "model".
    """
    module_name, _, name = spec.partition(":")
    if not (module_name and name):
        raise UsageError(
            f"{what} {spec!r} does not name a function: write module:function, as in my_module:make_{what}"
        )
    if module_name.endswith(".py") or "/" in module_name:
        raise UsageError(
            f"{what} {spec!r} names a file: name the module instead, "
            f"{Path(module_name).stem}:{name}, from the folder it lies in"
        )
    module = _import(module_name, spec, what)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{what} {spec!r}: module {module_name} has no {name!r}{_nearest(name, functions)}")
    found = getattr(module, name)
    if not callable(found):
        raise UsageError(
            f"{what} {spec!r} is {type(found).__name__}, not a function: name a function that returns the {what}"
        )
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], place: str, *arguments: Any) -> Any:
    """Call a user's function; if it raises, say so beneath the name of the place, with the traceback chained behind."""
    try:
        return function(*arguments)
    except Exception as error:
        raise UsageError(f"{place} raised {type(error).__name__}: {error}{line_of(error)}") from error


def line_of(error: BaseException) -> str:
    """Where in the user's code an exception was raised, to stand behind its words: ` (mine.py:24)`."""
    place = where_raised(error.__traceback__)
    return "" if place is None or place.is_ours else f" ({place.short})"


def file_of(module_name: str) -> Path | None:
    """The file of a user's module, which need not be imported yet; None if there is none."""
    _look_here()
    try:
        module = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return None
    return None if module is None or module.origin is None else Path(module.origin)


def _look_here() -> str:
    """Let Python find modules in the current directory, too; returns its name."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return here


def _import(module_name: str, spec: str, what: str) -> ModuleType:
    here = _look_here()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but imports a missing one is a different mistake, and falls through to the next line.
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            nearby = [path.stem for path in Path(here).glob("*.py")]
            raise UsageError(
                f"{what} {spec!r}: there is no module {error.name!r} in {here} "
                f"nor among the installed ones{_nearest(error.name, nearby)}"
            ) from error
        raise _import_failed(error, module_name, spec, what) from error
    except Exception as error:
        raise _import_failed(error, module_name, spec, what) from error


def _import_failed(error: Exception, module_name: str, spec: str, what: str) -> UsageError:
    return UsageError(f"{what} {spec!r}: importing {module_name} raised {type(error).__name__}: {error}")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Offer the nearest name there is, or list what there is when none is near."""
    names = sorted(known)
    there = f"there is {', '.join(names[:8])}"
    return f"; {did_you_mean(name, names, there)}" if names else ""


# ── a pipeline's schedule ─────────────────────────────────────────────────────────────────────────────────────────────


def canonical_schedule(schedule: str) -> str:
    """The name of a schedule of ours in small letters, or a file's whole path: a run may be resumed from anywhere."""
    if schedule.lower() in PIPELINES:
        return schedule.lower()
    return str(Path(schedule).absolute())


def schedule_of(name: str) -> str | Program:
    """The schedule as `mp.Pipeline` takes it: a name, or the program that is in a file."""
    return name.lower() if name.lower() in PIPELINES else _read(Path(name))


def require_schedule(name: str, given: str) -> None:
    """Refuse what is neither the name of a schedule nor a file, with the nearest name."""
    if name.lower() in PIPELINES or Path(name).is_file():
        return
    otherwise = f"choose one of {', '.join(PIPELINES)}, or a file with a program"
    raise ConfigError(f"{given}: {did_you_mean(name.lower(), PIPELINES, otherwise)}")


def microbatches_of_schedule(name: str) -> int | None:
    """How many micro-batches a file's program has; None for a schedule of ours, which takes any number."""
    program = schedule_of(name)
    return None if isinstance(program, str) else _training_step(program, name).microbatches


def require_fitting_schedule(name: str, ranks: int, microbatches: int | None, samples: int) -> None:
    """Refuse a file whose program is for other ranks, for other micro-batches, or for more of them than samples."""
    program = schedule_of(name)
    if isinstance(program, str):
        return
    cut = _training_step(program, name).microbatches
    given = f"--schedule {name}"
    if program.world_size != ranks:
        raise ConfigError(
            f"{given}: its program is for {program.world_size} ranks, and the pipeline has {ranks}; "
            f"try --pp {program.world_size}"
        )
    if microbatches not in (None, cut):
        raise ConfigError(
            f"{given}: its program has {cut} micro-batches, and --microbatches is {microbatches}; leave that out"
        )
    if cut > samples:
        raise ConfigError(
            f"{given}: its program has {cut} micro-batches, and a pipeline has only {samples} samples; "
            "try a larger --batch"
        )


def _training_step(program: Program, name: str) -> TrainingStep:
    if not isinstance(program.goal, TrainingStep):
        raise ConfigError(f"--schedule {name}: its program is a {program.goal}, and a pipeline runs a training step")
    return program.goal


def _read(path: Path) -> Program:
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"--schedule {path}: it cannot be read as a program: {reason}") from None
    except ProgramError as error:
        raise ConfigError(f"--schedule {path}: {error}; see `microparallel verify {path}`") from None
