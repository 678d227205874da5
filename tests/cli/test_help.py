"""Help is there at once, and torch is not imported for it."""

import subprocess
import sys

import pytest

VERBS = [
    [],
    *([verb] for verb in ("train", "compare", "analyze", "report", "why", "draw", "simulate", "verify", "doctor")),
    ["learn"],
    *(["learn", verb] for verb in ("init", "list", "check", "hint", "reset", "solution")),
    ["bench", "allreduce"],
    ["bench", "dp"],
    ["bench", "pp"],
    ["bench", "predict"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "main")
def test_help_shows_an_example(microparallel, verb):
    result = microparallel(*verb, "--help")
    assert result.returncode == 0
    assert "microparallel train --ranks 4" in result.stdout or "Examples" in result.stdout


def test_no_help_imports_torch():
    """One process asks for all of it, one after the other."""
    program = (
        "import sys\n"
        "from microparallel.cli import main\n"
        f"for verb in {VERBS!r}:\n"
        "    sys.argv = ['microparallel', *verb, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as ended: print(verb, 'ended with', ended.code, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    for verb in VERBS:
        assert f"{verb} ended with 0 False" in result.stdout


def test_the_package_itself_is_quick_to_import():
    program = (
        "import sys, microparallel\n"
        "print('torch' in sys.modules, hasattr(microparallel, 'launch'), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split() == ["False", "True", "True"]


def test_version():
    result = subprocess.run(
        [sys.executable, "-m", "microparallel", "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.startswith("microparallel 0.")
