"""`microparallel learn`, from copying the exercises to the last one."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from microparallel.learn.catalogue import EXERCISES, find_exercise
from microparallel.learn.holes import solved

PING_PONG = find_exercise("ping-pong")


@pytest.fixture
def started(microparallel, tmp_path):
    assert microparallel("learn", "init").returncode == 0
    return tmp_path / "my_work"


def solve(folder, exercise):
    (folder / exercise.track / exercise.file).write_text(solved(exercise.solution.read_text("utf-8")), "utf-8")


def test_init_says_where_to_begin_and_never_overwrites(microparallel, tmp_path):
    first = microparallel("learn", "init")
    assert f"{len(EXERCISES)} exercises are now in my_work/" in first.stdout
    assert EXERCISES[0].file in first.stdout
    (tmp_path / "my_work" / EXERCISES[0].track / EXERCISES[0].file).write_text("mine")
    assert "nothing was changed" in microparallel("learn", "init").stdout
    assert (tmp_path / "my_work" / EXERCISES[0].track / EXERCISES[0].file).read_text() == "mine"


def test_commands_and_paths_are_never_broken_in_two(microparallel):
    begin = microparallel("learn", "init", COLUMNS=40).stdout
    path = f"my_work/{EXERCISES[0].track}/{EXERCISES[0].file}"
    assert f"begin with {path}, and run: microparallel learn" in begin.splitlines()
    refused = microparallel("learn", COLUMNS=40).stdout.splitlines()
    assert f"{path} · lesson: docs/{EXERCISES[0].lesson}.md" in refused
    assert f"for a hint: microparallel learn hint {EXERCISES[0].name}" in refused
    absent = microparallel("learn", "list", "--folder", "a/folder/that/is/not/there", COLUMNS=40).stdout.splitlines()
    assert absent[-1].endswith("yet: microparallel learn init puts them there")


def test_check_refuses_then_passes_and_is_remembered(microparallel, started):
    before = microparallel("learn", "check", "ping-pong")
    assert before.returncode == 1
    assert "still to be written" in before.stdout
    assert "microparallel learn hint ping-pong" in before.stdout
    solve(started, PING_PONG)
    after = microparallel("learn", "check", "ping-pong", "--json")
    assert after.returncode == 0
    assert json.loads(after.stdout)["passed"] is True
    rows = {row["name"]: row for row in json.loads(microparallel("learn", "list", "--json").stdout)}
    assert rows["ping-pong"]["passed"]
    assert sum(row["passed"] for row in rows.values()) == 1
    assert "✓  ping-pong" in microparallel("learn", "list").stdout


def test_hints_say_more_each_time(microparallel, started):
    shown = [microparallel("learn", "hint", "hooks").stdout for _ in range(4)]
    assert [re.search(r"hint (\d) of 3", text)[1] for text in shown] == ["1", "2", "3", "3"]
    assert "hint 1 of 3" in microparallel("learn", "hint", "hooks", "--step", "1").stdout


def test_the_solution_is_shown_when_asked_for(microparallel, started):
    refused = microparallel("learn", "solution", "ping-pong")
    assert refused.returncode == 2
    assert "has not passed yet" in refused.stderr
    shown = microparallel("learn", "solution", "ping-pong", "--show")
    assert shown.returncode == 0
    compile(shown.stdout, "solution", "exec")
    assert "hole" not in shown.stdout


def test_reset_keeps_yours(microparallel, started, monkeypatch):
    path = started / PING_PONG.track / PING_PONG.file
    path.write_text("mine")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert microparallel("learn", "reset", "ping-pong").returncode == 1  # nobody has agreed
    assert path.read_text() == "mine"
    assert microparallel("learn", "reset", "ping-pong", "--yes").returncode == 0
    assert path.read_bytes() == PING_PONG.task.read_bytes()
    assert [backup.read_text() for backup in path.parent.glob("*.backup")] == ["mine"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["check", "nothing-like-it"], "there is no exercise"),
        (["check", "ring-all-reduce"], "microparallel learn init"),
        ([], "microparallel learn init"),
        (["reset"], "see --help"),
    ],
)
def test_wrong_calls_get_one_line(microparallel, words, answer):
    result = microparallel("learn", *words)
    assert result.returncode == 2
    assert answer in result.stderr
    assert result.stderr.count("\n") == 1


class Terminal:
    """A terminal with a program in it."""

    def __init__(self, command, folder):
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, words, seconds=40):
        deadline = time.monotonic() + seconds
        while words not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{words!r} did not come; the screen was {self.seen!r}"
            self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._ours, 65536).decode(errors="replace"))

    def press(self, keys):
        self.seen = ""
        os.write(self._ours, keys.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_watching(microparallel, started):
    """One life with it: an exercise that is not done, a hint, the list, a file that is saved, the next one, the end."""
    (started / "progress.txt").write_text("current ping-pong\n")
    terminal = Terminal([sys.executable, "-m", "microparallel", "learn"], started.parent)
    try:
        terminal.wait_for("still to be written")
        terminal.press("h")
        terminal.wait_for("hint 1 of 3")
        terminal.press("é")  # means nothing
        terminal.wait_for("still to be written")
        terminal.press("l")
        terminal.wait_for("Pipeline parallelism")
        terminal.press("r")
        terminal.wait_for("y / n")
        terminal.press("n")
        terminal.wait_for("still to be written")
        solve(started, PING_PONG)
        terminal.wait_for("ping-pong passed")
        terminal.press("N")
        terminal.wait_for(EXERCISES[EXERCISES.index(PING_PONG) + 1].name)
        terminal.seen = ""
        solve(started, find_exercise("manual-split"))  # whoever saves another one works on that
        terminal.wait_for("manual-split passed")
        terminal.press("s")
        terminal.wait_for("def ")
        terminal.press("q")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
    assert "passed ping-pong" in (started / "progress.txt").read_text()
    assert "hints ping-pong 1" in (started / "progress.txt").read_text()
    assert not list((started / PING_PONG.track).glob("*.backup"))
