"""The pure half runs unchanged in a WebAssembly Python, as in a browser, and says there what it says in CPython."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import from_npm
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pyodide():
    """The folder of pyodide: what the playground's pages run, which npm fetches once."""
    if not shutil.which("node"):
        pytest.skip("no node to run WebAssembly with; `apt-get install nodejs npm` enables this test")
    if trouble := from_npm.fetch():
        pytest.skip(f"{trouble}; `python docs/tools/from_npm.py` fetches pyodide, and enables this test")
    return from_npm.FETCHED / "node_modules" / "pyodide"


def told_by(*command):
    """The story (pure_story.py) that this command prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.timeout(240)  # 6 to 21 seconds on two busy cores; the rest is for npm on a slow line
def test_a_web_assembly_python_says_of_programs_what_cpython_says(pyodide):
    here = told_by(sys.executable, "-P", ROOT / "tests" / "pure_story.py")
    there = told_by("node", ROOT / "tests" / "pure_story.mjs", pyodide, ROOT)
    assert (here["platform"], there["platform"]) == (sys.platform, "emscripten")
    assert list(there["readings"]) == ["ring", "1f1b", "ddp"]
    for name, readings in here["readings"].items():
        assert there["readings"][name].keys() == readings.keys()
        different = [reader for reader, text in readings.items() if there["readings"][name][reader] != text]
        assert not different, f"{name}: {', '.join(different)}"
    assert there["needed"] == here["needed"]
