"""A learner's folder: the exercises that are being worked on, and a text file that remembers how far they have come.

```
my_work/
  data_parallel/01_manual_averaging.py …
  pipeline/01_manual_split.py …
  sharding/01_ring_halves.py …
  progress.txt                              passed ring-all-reduce 2026-11-16 10:31
```
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from microparallel.errors import ConfigError, DataError
from microparallel.files.atomic import write_atomically
from microparallel.learn.catalogue import EXERCISES, Exercise

_PROGRESS = "progress.txt"
_HEADING = "# How far you have come. `microparallel learn` reads and writes this file; you may edit it too."
_NOW = "%Y-%m-%d %H:%M"


class Workspace:
    """A learner's folder: its progress is read once, and every change is written at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passed: dict[str, str] = {}  # by the exercise's name: when
        self.hints: dict[str, int] = {}  # how many were shown
        self._current: str | None = None
        self._read()

    @property
    def exists(self) -> bool:
        """Whether there are exercises in it."""
        return any(self.path(exercise).exists() for exercise in EXERCISES)

    def path(self, exercise: Exercise) -> Path:
        """Where the learner's file is."""
        return self.folder / exercise.track / exercise.file

    def require(self, exercise: Exercise) -> Path:
        """Where the learner's file is; says what to do if it is not there."""
        path = self.path(exercise)
        if not path.is_file():
            where = "" if str(self.folder) == "my_work" else f" --folder {self.folder}"
            raise ConfigError(f"there is no {path}: `microparallel learn init{where}` puts it there")
        return path

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> list[Path]:
        """Put the exercises there that are not there yet; returns them. What exists is left as it is."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; name a folder for your work (--folder)")
        missing = [exercise for exercise in EXERCISES if not self.path(exercise).exists()]
        try:
            for exercise in missing:
                self.path(exercise).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(exercise.task, self.path(exercise))
            if missing:
                self._write()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot write into {self.folder}: {reason}; choose another --folder") from error
        return [self.path(exercise) for exercise in missing]

    def reset(self, exercise: Exercise) -> Path:
        """Put the exercise's file back as it was at first; returns where the learner's own is kept."""
        path = self.require(exercise)
        backup = path.with_name(f"{path.stem}.{time.strftime('%Y%m%d-%H%M%S')}.backup")
        number = 1
        while backup.exists():
            number += 1
            backup = backup.with_name(f"{backup.stem}-{number}.backup")
        shutil.copy2(path, backup)
        write_atomically(path, exercise.task.read_bytes())
        self.passed.pop(exercise.name, None)
        self.hints.pop(exercise.name, None)
        self._write()
        return backup

    # ── progress ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def current(self) -> Exercise | None:
        """The one to work on: where the learner went last, else the first that has not passed; None when all have."""
        chosen = next((exercise for exercise in EXERCISES if exercise.name == self._current), None)
        if chosen is not None and chosen.name not in self.passed:
            return chosen
        return self.next_after(chosen)

    def next_after(self, exercise: Exercise | None) -> Exercise | None:
        """The next one that has not passed, from there on and then from the beginning."""
        at = EXERCISES.index(exercise) + 1 if exercise is not None else 0
        others = [*EXERCISES[at:], *EXERCISES[:at]]
        return next((one for one in others if one.name not in self.passed and one is not exercise), None)

    def go_to(self, exercise: Exercise) -> None:
        """Remember which one is being worked on."""
        if self._current != exercise.name:
            self._current = exercise.name
            self._write()

    def note_passed(self, exercise: Exercise) -> bool:
        """Remember that an exercise has passed; returns whether it had not passed before."""
        if exercise.name in self.passed:
            return False
        self.passed[exercise.name] = time.strftime(_NOW)
        self._write()
        return True

    def note_hint(self, exercise: Exercise, number: int) -> None:
        """Remember how many hints were shown."""
        if number > self.hints.get(exercise.name, 0):
            self.hints[exercise.name] = number
            self._write()

    def _read(self) -> None:
        names = {exercise.name for exercise in EXERCISES}
        try:
            lines = (self.folder / _PROGRESS).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            path = self.folder / _PROGRESS
            raise DataError(f"{path} cannot be read ({error}); move it away to begin anew") from error
        for line in lines:
            match line.split():
                case ["passed", name, *when] if name in names:
                    self.passed[name] = " ".join(when)
                case ["hints", name, number] if name in names and number.isdigit():
                    self.hints[name] = int(number)
                case ["current", name] if name in names:
                    self._current = name

    def _write(self) -> None:
        lines = [_HEADING]
        if self._current is not None:
            lines.append(f"current {self._current}")
        lines += [f"passed {name} {when}".rstrip() for name, when in self.passed.items()]
        lines += [f"hints {name} {number}" for name, number in self.hints.items()]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / _PROGRESS, ("\n".join(lines) + "\n").encode())
