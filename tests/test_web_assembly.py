"""The pure half runs unchanged in a WebAssembly Python, as in a browser, and says there what it says in CPython."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYODIDE = "pyodide@314.0.7"  # CPython 3.14 for WebAssembly, with its standard library


@pytest.fixture
def pyodide(pytestconfig):
    """The folder of pyodide, which npm fetches once into pytest's cache."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("no node and npm to run WebAssembly with; `apt-get install nodejs npm` enables this test")
    folder = Path(os.path.relpath(pytestconfig.cache.mkdir(PYODIDE), ROOT))
    packages = ROOT / folder / "node_modules"
    if not (packages / ".package-lock.json").exists():  # npm writes this file last
        fetch(folder)
    return packages / "pyodide"


def fetch(folder):
    """Let npm install pyodide, or skip the test with the command that would."""
    command = ["npm", "install", "--no-save", "--ignore-scripts", "--engine-strict", "--prefix", str(folder), PYODIDE]
    quick_to_give_up = {**os.environ, "npm_config_fetch_retries": "1"}
    try:
        subprocess.run(command, cwd=ROOT, env=quick_to_give_up, timeout=120, capture_output=True, check=True)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm could not install {PYODIDE} ({reason(error)}); `{shlex.join(command)}` enables this test")


def reason(error):
    """Why npm failed, in a few words: its error's code, or how long it was waited for."""
    lines = (error.stderr or b"").decode(errors="replace").splitlines()
    codes = (line.removeprefix("npm error ") for line in lines if line.startswith("npm error code"))
    return next(codes, str(error).rpartition("' ")[2])


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
