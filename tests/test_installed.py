"""The package works where it was installed from a wheel, far from any clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from microparallel.learn.catalogue import EXERCISES

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BACKEND = """
import torch
import torch.distributed as dist

dist.init_process_group("microparallel")  # torch finds it by itself
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(dist.get_backend(), total.item())
dist.destroy_process_group()
"""
LAUNCH = """
import microparallel as mp
import torch

print(mp.launch(lambda comms: comms.all_reduce(torch.tensor([comms.rank])).item(), ranks=3))
"""


def run(*words, folder, **environment):
    """Run a command as if there were no clone and no other environment; returns what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=inherited | {"NO_COLOR": "1", "COLUMNS": "100"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder in which `python -m build` has left a source distribution, and a wheel that was built out of it."""
    folder = tmp_path_factory.mktemp("built")
    # With hatchling installed nothing is fetched.
    isolation = ["--no-isolation"] if find_spec("hatchling") else []
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run(sys.executable, "-m", "build", *isolation, "--outdir", folder, ROOT, folder=folder, **constraints)
    return folder


def new_environment(folder):
    """A virtual environment with what the package needs, borrowed from here, and without the package."""
    run(sys.executable, "-m", "venv", folder, folder=folder.parent)
    names = [requirement.partition(">")[0] for requirement in PROJECT["project"]["dependencies"]]
    borrowed = {str(distribution(name).locate_file("")) for name in names}
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(borrowed)))
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder of the commands of an environment into which the wheel was installed."""
    commands = new_environment(tmp_path_factory.mktemp("environment") / "new")
    (wheel,) = built.glob("*.whl")
    run(commands / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, folder=built)
    return commands


def tracked(*folders):
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone knows its files")
    return set(subprocess.check_output(["git", "ls-files", "-z", *folders], cwd=ROOT, text=True).split("\0")[:-1])


def test_the_wheel_has_every_file_of_the_package(built):
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    code = {path.removeprefix("src/") for path in tracked("src")}
    exercises = {f"microparallel/learn/{path}" for path in tracked("exercises")}
    assert code | exercises <= inside
    assert {path.partition("/")[0] for path in inside} == {
        "microparallel",
        wheel.name[: -len("-py3-none-any.whl")] + ".dist-info",
    }


def test_the_source_distribution_has_every_file_of_the_clone(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert tracked() <= inside


def test_the_commands_work(installed, tmp_path):
    def microparallel(*words):
        return run(installed / "microparallel", *words, folder=tmp_path)

    place = run(installed / "python", "-c", "import microparallel; print(microparallel.__file__)", folder=tmp_path)
    assert place.startswith(str(installed.parent))
    assert "Distributed training you can read" in microparallel("--help")
    assert "3 steps" in microparallel("train", "--ranks", "2", "--steps", "3", "--trace", "--out", "runs/mine")
    microparallel("report", "runs/mine")
    assert "rank 3" in microparallel("draw", "1f1b", "--ranks", "4")
    microparallel("draw", "ring", "--ranks", "4", "--html", "ring.html")
    assert (tmp_path / "ring.html").stat().st_size > 1000
    assert "transports" in microparallel("doctor")


def test_the_exercises_work(installed, tmp_path):
    def learn(*words):
        return run(installed / "microparallel", "learn", *words, folder=tmp_path)

    assert f"{len(EXERCISES)} exercises are now in my_work/" in learn("init")
    track, file = "data_parallel", "01_manual_averaging.py"
    solution = next(
        installed.parent.glob(f"lib/*/site-packages/microparallel/learn/exercises/solutions/{track}/{file}")
    )
    shutil.copy(solution, tmp_path / "my_work" / track / file)
    assert "passed" in learn("check", "manual-averaging")
    assert learn("hint", "manual-averaging").strip()


def test_scripts_and_the_torch_backend_work(installed, tmp_path):
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "backend.py").write_text(BACKEND)
    assert run(installed / "python", "launch.py", folder=tmp_path) == "[3, 3, 3]\n"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "backend.py"]
    assert "microparallel 3.0\n" in run(installed / "python", *torchrun, folder=tmp_path)


def test_it_can_be_installed_from_a_repository(tmp_path):
    tracked()
    commands = new_environment(tmp_path / "new")
    address = f"git+file://{ROOT}"
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run(commands / "python", "-m", "pip", "install", "--no-deps", address, folder=tmp_path, **constraints)
    assert run(commands / "microparallel", "--version", folder=tmp_path).startswith("microparallel ")
