"""The pure half works where neither torch nor anything else is installed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PURE = next(contract["source_modules"] for contract in CONTRACTS if contract["type"] == "forbidden")

WHOLE_STORY = """
import microparallel as mp
for program in (mp.collectives.build("ring", 4), mp.schedules.build("1f1b", 4, 8), mp.schedules.build("ddp", 2)):
    mp.verify(program)
    trace = mp.simulate(program, mp.Costs(latency=1))
    assert trace.makespan > 0
    assert mp.program.from_text(mp.program.to_text(program)) == program
    for form in ("text", "svg", "html"):
        assert len(mp.draw(program, as_=form)) > 100
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A fresh environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def run(python, code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_environment_is_bare(bare_python):
    assert "No module named 'torch'" in run(bare_python, "import torch").stderr


def test_every_pure_package_imports(bare_python):
    assert len(PURE) >= 9
    result = run(bare_python, "\n".join(f"import {module}" for module in PURE))
    assert result.returncode == 0, result.stderr


def test_a_program_is_built_verified_simulated_and_drawn(bare_python):
    result = run(bare_python, WHOLE_STORY)
    assert result.returncode == 0, result.stderr
