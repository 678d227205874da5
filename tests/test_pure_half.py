"""The pure half works where neither torch nor anything else is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A fresh environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def run(python, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([python, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def story(bare_python):
    """What the bare Python tells, after it has imported every module of the pure half."""
    result = run(bare_python, "-P", ROOT / "tests" / "pure_story.py")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("package", ["numpy", "rich", "torch", "typer"])
def test_the_environment_is_bare(bare_python, package):
    assert f"No module named '{package}'" in run(bare_python, "-c", f"import {package}").stderr


def test_importing_the_package_imports_no_module_of_it(bare_python):
    ask = "import sys, microparallel; print([name for name in sys.modules if name.startswith('microparallel')])"
    result = run(bare_python, "-c", ask)
    assert result.stdout == "['microparallel']\n", result.stderr


def test_the_contract_holds_every_module_that_a_program_s_readers_need(story):
    assert len(story["pure"]) >= 9
    held = [name for name in story["needed"] if any(f"{name}.".startswith(f"{pure}.") for pure in story["pure"])]
    assert story["needed"] == ["microparallel", *held]


@pytest.mark.parametrize("name", ["ring", "1f1b", "ddp"])
def test_a_program_is_built_verified_simulated_and_drawn(story, name):
    readings = story["readings"][name]
    assert readings["program read back is the same"] == "True"
    assert readings["verified, rendezvous sends"] == "right"
    assert float(readings["simulated, makespan"]) > 0
    for form in ("text", "svg", "html"):
        assert len(readings[f"program as {form}"]) > 100
