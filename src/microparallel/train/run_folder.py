"""The folder a training run leaves behind.

```
runs/20250131-093000-mlp/
  config.toml      what it was told; `--config` takes it again
  metrics.jsonl    one JSON object a line, as training goes on
  summary.json     how it ended
  checkpoints/     what `--resume` goes on from
  lock             held by the process that writes here; says which that is
  flight           while it runs, and after a failure: the flight recorder's files (`microparallel why`)
  trace.json       with `--trace`, what every rank did in some steps; trace-chrome.json is for Perfetto,
                   predicted.json what the simulator makes of one of them
```
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from microparallel.errors import ConfigError, MicroparallelError
from microparallel.files.atomic import sync_folder, write_atomically
from microparallel.files.lock import FolderLock
from microparallel.text import without_nan
from microparallel.train.config import TrainConfig, config_text

AUTO = "auto"  # in place of the folder of a run to resume: go on if there is one, else begin


class RunFolder:
    """One run's folder: `create` a new one or `open` an old one, write into it, and `close` it (or use `with`).

    Only one process may have it open to write: `create` and `take` lock it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.metrics_file = path / "metrics.jsonl"
        self.summary_file = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.trace_file = path / "trace.json"
        self.chrome_file = path / "trace-chrome.json"
        self.predicted_file = path / "predicted.json"
        self._lock: FolderLock | None = None
        self._metrics: BinaryIO | None = None
        self._unwritten: list[bytes] = []  # lines of metrics.jsonl that found no room on the disk yet
        self._config_text = b""

    @classmethod
    def create(cls, out: Path | str | None, config: TrainConfig) -> RunFolder:
        """Make the folder of a new run, `default_path` where `out` is None, and write the configuration into it."""
        try:
            path = _new_default_folder(config) if out is None else _new_folder(Path(out))
            run = cls(path)
            run.take()
            run.write_config(config)
            sync_folder(path.parent)
        except OSError as error:
            folder = "runs" if out is None else f"--out {out}"
            raise ConfigError(
                f"{folder} cannot be written: {error.strerror or error}; choose an --out that you may write to"
            ) from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Take up the folder of an earlier run, to resume it."""
        run = cls(Path(path))
        if not run.config_file.is_file():
            what = "there is no config.toml in it" if run.path.is_dir() else "there is no such folder"
            raise ConfigError(f"{path} is not the folder of a run: {what}; name one such as runs/20250131-093000-mlp")
        return run

    @classmethod
    def take_up(cls, path: Path | str, config: TrainConfig) -> RunFolder:
        """Lock the folder of a run whose state is in memory; what somebody has removed of it is made again."""
        run = cls(Path(path))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.take()
            if not run.config_file.exists():
                run.write_config(config)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}; make room there") from error
        return run

    def take(self) -> None:
        """Lock the folder until it is closed, or raise a ConfigError that says which process has it."""
        self._lock = FolderLock(self.path / "lock", str(self.path))

    def point_to_flight(self, flight: Path | None) -> Callable[..., None]:
        """Let `microparallel why RUN` find the flight recorder's files; the function returned removes the link again.

        Called with an error, that function leaves the link there, so that one can ask why.
        """
        pointer = self.path / "flight"
        with suppress(OSError):  # not every file system knows links
            pointer.unlink(missing_ok=True)
            if flight is not None:
                pointer.symlink_to(flight)

        def remove(kind: type[BaseException] | None, *_: object) -> None:
            if kind is None or not self.metrics_file.exists():
                pointer.unlink(missing_ok=True)

        return remove

    @staticmethod
    def default_path(config: TrainConfig, now: datetime) -> Path:
        """Return runs/<time>-<model>, with a number behind it where that folder is already there."""
        model = re.sub(r"[^\w.-]", "-", config.model)
        name = f"{now:%Y%m%d-%H%M%S}-{model}"
        candidates = (Path("runs", name + (f"-{number}" if number > 1 else "")) for number in itertools.count(1))
        return next(path for path in candidates if not path.exists())

    def write_config(self, config: TrainConfig) -> None:
        """Write what the run was told to config.toml, all of it or nothing."""
        # Without its own place, so that `--config` can take it again for a new run.
        self._config_text = config_text(replace(config, out=None)).encode("utf-8")
        if not self.config_file.is_file() or self.config_file.read_bytes() != self._config_text:
            write_atomically(self.config_file, self._config_text)

    def make_again_if_removed(self) -> bool:
        """If somebody has removed the folder while the run goes on, make it again; returns whether that was so."""
        if self.config_file.exists():
            return False
        self.close()
        self.path.mkdir(parents=True, exist_ok=True)
        self.take()
        write_atomically(self.config_file, self._config_text)
        return True

    def append_metrics(self, record: dict[str, Any]) -> OSError | None:
        """Add one line to metrics.jsonl, and flush it, so that a program that follows the file sees it at once.

        A number that is not finite becomes null, since JSON has no word for it. If the disk is full, the error is
        returned, and the line is kept, to be written with the next one.
        """
        self._unwritten.append(json.dumps(without_nan(record), allow_nan=False).encode() + b"\n")
        return self.write_what_is_left()

    def write_what_is_left(self) -> OSError | None:
        """Write the lines that found no room before; returns the error if there is still none."""
        written = -1
        try:
            if self._metrics is None:
                self._metrics = self.metrics_file.open("ab", buffering=0)
            written = self._metrics.seek(0, os.SEEK_END)
            while self._unwritten:
                line = self._unwritten[0]
                if self._metrics.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += len(line)
                del self._unwritten[0]
        except OSError as error:
            if self._metrics is not None and written >= 0:
                with suppress(OSError):
                    self._metrics.truncate(written)  # no half of a line stays
            return error
        return None

    def last_step(self) -> int:
        """The last step that has a line in metrics.jsonl; 0 if none has."""
        with suppress(OSError, ValueError):
            lines = self.metrics_file.read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        return 0

    def truncate_metrics(self, after_step: int) -> None:
        """Drop the records of steps beyond this one, which the resumed run will write again.

        Lines that are not JSON are dropped too: a crash may have cut the last one in two.
        """
        self._close_metrics()
        if not self.metrics_file.exists():
            return
        with _failing_in_one_line(self.metrics_file):
            before = self.metrics_file.read_bytes()
            lines = [line + b"\n" for line in before.splitlines() if _is_record_up_to(after_step, line)]
            kept = b"".join(lines)
            if before.startswith(kept):  # a file that gets shorter needs no room, which there may not be
                os.truncate(self.metrics_file, len(kept))
            else:
                write_atomically(self.metrics_file, kept)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write how the run ended to summary.json, all of it or nothing."""
        text = json.dumps(without_nan(summary), indent=2, allow_nan=False) + "\n"
        with _failing_in_one_line(self.summary_file):
            write_atomically(self.summary_file, text.encode("utf-8"))

    @classmethod
    def clear_if_nothing_happened(cls, path: Path) -> None:
        """Do what `remove_if_nothing_happened` does, from another process, unless the folder is in use."""
        folder = cls(path)
        if folder.config_file.is_file():
            with suppress(ConfigError, OSError):
                folder.take()
                folder.remove_if_nothing_happened()
                folder.close()

    def remove_if_nothing_happened(self) -> None:
        """Leave no folder behind of a run that failed in its first step, or before it."""
        saved = {path.name for path in self.checkpoints.glob("step-*")}
        if not self.metrics_file.exists() and not self.summary_file.exists() and saved <= {"step-00000000"}:
            self.close()
            (self.path / "flight").unlink(missing_ok=True)
            self.config_file.unlink(missing_ok=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            with suppress(OSError):  # not empty: these files are not ours
                self.path.rmdir()
                if self.path.parent == Path("runs"):
                    self.path.parent.rmdir()

    def close(self) -> None:
        """Close metrics.jsonl, and let another process have the folder."""
        self._close_metrics()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.release()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            metrics.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _new_default_folder(config: TrainConfig) -> Path:
    while True:
        path = RunFolder.default_path(config, datetime.now())
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()  # only one of two runs that start in the same second can make it
        except FileExistsError:
            continue
        return path


def check_new(path: Path) -> None:
    """Refuse a folder that a new run must not write into, without touching it."""
    if (path / "config.toml").exists() and not (path / "checkpoints").exists():
        raise ConfigError(f"--out {path} holds a run without a checkpoint; remove that folder, or choose another")
    if (path / "config.toml").exists():
        raise ConfigError(f"--out {path} holds a run already; go on with it by --resume, or choose another --out")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path} is a file, not a folder; choose another --out")
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"--out {path} holds other files; choose a new or an empty folder")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"--out {path} cannot be written: {there} is not a folder that you may write to; choose another"
        )


def _new_folder(path: Path) -> Path:
    check_new(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _is_record_up_to(step: int, line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("step", 0) <= step


@contextmanager
def _failing_in_one_line(path: Path) -> Iterator[None]:
    """Turn what the system says about a full disk or a lost folder into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise MicroparallelError(f"cannot write {path}: {error.strerror or error}") from error
