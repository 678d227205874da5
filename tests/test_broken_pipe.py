"""A program whose reader has left, as `| head` does: it ends with 1 and says nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from microparallel.broken_pipe import quiet_broken_pipe

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run_without_reader(*command, **environment):
    """Run Python with a standard output that has no reader; returns its exit code and its standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | environment
        ended = subprocess.run(
            [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, env=given
        )
    finally:
        os.close(writing)
    return ended.returncode, ended.stderr


PROGRAM = """
import sys
from microparallel.broken_pipe import quiet_broken_pipe

@quiet_broken_pipe()
def main():
    {body}

main()
"""


@pytest.mark.parametrize("buffered", [True, False], ids=["at the end", "at once"])
@pytest.mark.parametrize("body", ["print(1)", "print(1); sys.exit('a rank has failed')", "print(1); sys.exit(0)"])
def test_it_ends_quietly(body, buffered):
    environment = {} if buffered else {"PYTHONUNBUFFERED": "1"}
    assert run_without_reader("-c", PROGRAM.format(body=body), **environment) == (1, "")


def test_what_prints_nothing_ends_as_it_would():
    assert run_without_reader("-c", PROGRAM.format(body="sys.exit(0)")) == (0, "")


def test_other_errors_are_shown(capsys):
    with pytest.raises(SystemExit, match="it failed"), quiet_broken_pipe():
        sys.exit("it failed")
    with pytest.raises(BrokenPipeError), quiet_broken_pipe():
        raise BrokenPipeError("another pipe, to a rank")


@pytest.mark.parametrize("verb", [["--version"], ["--help"], ["draw", "ring"], ["simulate", "ring", "--json"]], ids=str)
def test_a_verb_ends_quietly(verb):
    assert run_without_reader("-m", "microparallel", *verb) == (1, "")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_lab_does_so(path):
    [main] = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "main"]
    assert [ast.unparse(decorator) for decorator in main.decorator_list] == ["quiet_broken_pipe()"]


@pytest.mark.slow
def test_a_lab_whose_ranks_print_ends_quietly():
    path = next(path for path in EXAMPLES if path.name == "hooks_demo.py")
    assert run_without_reader(str(path), "--steps", "1", "--width", "32") == (1, "")
