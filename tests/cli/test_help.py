"""Help is there at once, and torch is not imported for it."""

import subprocess
import sys

import pytest

VERBS = [[], *([verb] for verb in ("train", "compare", "draw", "simulate", "verify", "doctor")), ["bench", "allreduce"]]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "main")
def test_help_shows_an_example_without_importing_torch(verb):
    program = (
        "import sys\n"
        f"sys.argv = ['microparallel', *{verb!r}, '--help']\n"
        "from microparallel.cli import main\n"
        "try: main()\n"
        "finally: print('torch imported:', 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0
    assert "torch imported: False" in result.stdout
    assert "microparallel train --ranks 4" in result.stdout or "Examples" in result.stdout


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
