"""Bare `microparallel learn`: check the current exercise each time it is saved, until the learner quits.

A background thread checks; the main thread looks at the file and at the keys, and draws the whole screen anew when
something has changed. Nothing but ordinary terminal codes, so that it works over ssh.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.text import Text

from microparallel.cli import learn_view
from microparallel.learn.catalogue import EXERCISES, Exercise
from microparallel.learn.checking import Checker
from microparallel.learn.holes import solved
from microparallel.learn.verdict import Step, Verdict
from microparallel.learn.workspace import Workspace

_LOOKS = 0.2  # seconds between two looks at the file
_END = "\x04"  # Ctrl-D
_KEYS = (
    ("n", "next"),
    ("p", "previous"),
    ("h", "hint"),
    ("l", "list"),
    ("c", "check"),
    ("r", "reset"),
    ("s", "solution"),
    ("q", "quit"),
)


class Watch:
    """The current exercise, what is known of it, and what the screen shows."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._exercise = workspace.current or EXERCISES[-1]
        self._console = learn_view.console()
        self._checker = Checker()
        self._check: _Check | None = None
        self._again = True  # a check is due
        self._seen = self._look_at_files()
        self._shown: object = None
        self._panel: RenderableType | None = None  # a hint, the list, a question
        self._asks_reset = False

    def run(self) -> int:
        """Watch until the learner quits."""
        with self._checker, _keys_one_by_one():
            while True:
                self._follow_the_learner()
                self._note_a_finished_check()
                self._check_if_due()
                self._draw_if_changed()
                key = _next_key(_LOOKS)
                if key in ("q", "Q", _END):
                    place = learn_view.unbroken(f"\nwhere you were is in {self._workspace.folder / 'progress.txt'}")
                    learn_view.say(place, self._console)
                    return 0
                if key:
                    self._press(key)

    # ── the files, and the check ────────────────────────────────────────────────────────────────────────────────

    def _look_at_files(self) -> dict[Exercise, tuple[float, int] | None]:
        return {exercise: _state(self._workspace.path(exercise)) for exercise in EXERCISES}

    def _follow_the_learner(self) -> None:
        """Check what the learner has saved; if that is another exercise, it becomes the current one."""
        before, self._seen = self._seen, self._look_at_files()
        saved = [exercise for exercise, state in self._seen.items() if state != before[exercise]]
        if saved and self._exercise not in saved and self._seen[saved[0]] is not None:
            self._go_to(saved[0])
        elif self._exercise in saved:
            self._again, self._panel = True, None

    def _note_a_finished_check(self) -> None:
        if self._check is not None and self._check.verdict is not None and self._check.is_new:
            self._check.is_new = False
            if self._check.verdict.passed:
                self._workspace.note_passed(self._check.exercise)
            self._shown = None

    def _check_if_due(self) -> None:
        busy = self._check is not None and self._check.verdict is None
        if self._again and not busy and self._seen[self._exercise] is not None:
            self._again = False
            self._check = _Check(self._checker, self._exercise, self._workspace.path(self._exercise))

    def _go_to(self, exercise: Exercise) -> None:
        self._exercise, self._again, self._panel = exercise, True, None
        self._workspace.go_to(exercise)

    # ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _press(self, key: str) -> None:
        asked, self._asks_reset = self._asks_reset, False
        match "" if asked and key.lower() != "y" else key.lower():
            case "y" if asked:
                backup = self._workspace.reset(self._exercise)
                self._panel = Text(f"as it was at first; yours is {backup}")
            case "n" | "p" as direction:
                at = EXERCISES.index(self._exercise) + (1 if direction == "n" else -1)
                self._go_to(EXERCISES[at % len(EXERCISES)])
            case "h":
                self._panel = self._hint()
            case "l":
                self._panel = learn_view.exercises(self._workspace)
            case "c":
                self._again, self._panel = True, None
            case "s":
                self._panel = self._solution()
            case "r":
                self._asks_reset = True
                self._panel = Text("put it back as it was at first? (yours is kept beside it)  y / n", "bold yellow")
            case _:  # back to the check
                self._panel = None
        self._shown = None

    def _hint(self) -> RenderableType:
        number = min(self._workspace.hints.get(self._exercise.name, 0) + 1, 3)
        self._workspace.note_hint(self._exercise, number)
        return Group(Text(f"hint {number} of 3", "bold"), Markdown(self._exercise.hints[number - 1]))

    def _solution(self) -> RenderableType:
        if self._exercise.name not in self._workspace.passed:
            command = f"microparallel learn solution {self._exercise.name} --show"
            return learn_view.unbroken(f"once yours has passed; or now: {command}")
        return Syntax(solved(self._exercise.solution.read_text("utf-8")), "python", background_color="default")

    # ── the screen ──────────────────────────────────────────────────────────────────────────────────────────────

    def _draw_if_changed(self) -> None:
        check = self._check
        known = None if check is None else (len(check.steps), check.verdict)
        now = (self._exercise, self._console.size, known, self._seen[self._exercise], id(self._panel))
        if now == self._shown:
            return
        self._shown = now
        self._console.clear()
        learn_view.say(self._screen(), self._console)

    def _screen(self) -> RenderableType:
        path = self._workspace.path(self._exercise)
        parts = [learn_view.progress(self._workspace), "", learn_view.heading(self._exercise, path), ""]
        if self._panel is not None:
            return Group(*parts, self._panel, "", _key_line(("any other", "back")))
        if not path.exists():
            parts.append(
                learn_view.unbroken(f"{path} is not there: microparallel learn init puts it back", style="bold red")
            )
        elif self._check is not None and self._check.exercise == self._exercise:
            parts += [learn_view.step(step) for step in list(self._check.steps)]
            verdict = self._check.verdict
            if verdict is None:
                parts.append(Text("checking …", "dim"))
            else:
                parts.append(learn_view.outcome(verdict))
                following = self._workspace.next_after(self._exercise)
                if verdict.passed and following is not None:
                    parts.append(Text.assemble("next (n): ", (following.name, "bold"), f" · {following.title}"))
        return Group(*parts, "", _key_line())


class _Check(threading.Thread):
    """One check, done in the background."""

    def __init__(self, checker: Checker, exercise: Exercise, path: Path) -> None:
        super().__init__(daemon=True)
        self._checker, self.exercise, self._path = checker, exercise, path
        self.steps: list[Step] = []
        self.verdict: Verdict | None = None
        self.is_new = True
        self.start()

    def run(self) -> None:
        try:
            self.verdict = self._checker.check(self.exercise, self._path, self.steps.append)
        except Exception as error:  # the watch goes on, and says what happened
            self.verdict = Verdict(self.exercise.name, False, self.steps, f"it could not be checked: {error}")


def _key_line(*more: tuple[str, str]) -> Text:
    line = Text()
    for key, meaning in (*_KEYS, *more):
        line.append(f" {key}", "bold").append(f" {meaning} ", "dim")
    return line


def _state(path: Path) -> tuple[float, int] | None:
    """What changes when a file is saved."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime, found.st_size


def _next_key(timeout: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], timeout)
    if not ready:
        return ""
    pressed = os.read(sys.stdin.fileno(), 64)
    if not pressed:
        return "q"  # the terminal is gone
    return pressed.decode(errors="replace")[:1]  # an arrow key is several characters, of which the first means nothing


@contextlib.contextmanager
def _keys_one_by_one() -> Iterator[None]:
    """Get keys as they are pressed, without printing them; afterwards the terminal is as it was."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
