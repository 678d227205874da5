"""The schedule of a pipeline, as a user names it: one of ours in any letter case, or a file with a program."""

from __future__ import annotations

from pathlib import Path

from microparallel.errors import ConfigError, DataError, ProgramError
from microparallel.program import Program, TrainingStep, from_text
from microparallel.schedules import PIPELINES
from microparallel.text import did_you_mean


def canonical(schedule: str) -> str:
    """The name as it is written here, or the whole path of a file: a run goes on from wherever it is resumed."""
    if schedule.lower() in PIPELINES:
        return schedule.lower()
    return str(Path(schedule).absolute())


def schedule_of(name: str) -> str | Program:
    """What `mp.Pipeline` takes."""
    return name.lower() if name.lower() in PIPELINES else _read(Path(name))


def require_schedule(name: str, given: str) -> None:
    """Refuse what is neither the name of a schedule nor a file, with the nearest name."""
    if name.lower() in PIPELINES or Path(name).is_file():
        return
    otherwise = f"choose one of {', '.join(PIPELINES)}, or a file with a program"
    raise ConfigError(f"{given}: {did_you_mean(name.lower(), PIPELINES, otherwise)}")


def microbatches_of(name: str) -> int | None:
    """How many micro-batches a file's program has; None for a schedule of ours, which takes any number."""
    program = schedule_of(name)
    return None if isinstance(program, str) else _goal(program, name).microbatches


def require_fit(name: str, ranks: int, microbatches: int | None, samples: int) -> None:
    """Refuse a file whose program is for other ranks, for other micro-batches, or for more of them than samples."""
    program = schedule_of(name)
    if isinstance(program, str):
        return
    cut = _goal(program, name).microbatches
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


def _goal(program: Program, name: str) -> TrainingStep:
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
