"""The page about other frameworks: every script of it runs, and what it trains is what gloo trains."""

import subprocess
import sys
from pathlib import Path

import blocks
import pytest

from microparallel.world.fork_server import NEEDED, ForkServer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "frameworks.md"
# Importing these takes longer than what they do here: they are imported once for all scripts and their ranks.
FRAMEWORKS = ["accelerate", "lightning.pytorch.strategies", "torch.distributed.fsdp", "torch._dynamo"]
FRAMEWORKS += ["transformers.trainer", "transformers.models.bert.modeling_bert"]
STEPS = blocks.steps_of(PAGE)
SHOWN = [step.file for step in STEPS if not step.runs]  # a command runs these
pytestmark = pytest.mark.timeout(600)  # with --fresh every rank imports its framework


@pytest.fixture(scope="module")
def fork_server(fork_server):
    if not hasattr(fork_server, "fork"):  # with --fresh
        yield fork_server
        return
    with ForkServer([*NEEDED, "microparallel.train.loop", "microparallel.learn.checking", *FRAMEWORKS]) as server:
        yield server


def test_every_script_agrees_with_gloo(fork_server, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("```bash\ntorchrun", "```text\ntorchrun"))
    results = [result for result in blocks.run_page(page, fork_server=fork_server_of(fork_server)) if result.step.runs]
    assert len(results) == 5
    for result in results:
        assert not result.trouble, result.trouble
        assert result.done.output.splitlines()[-1].endswith("agree: True"), result.done.output


def fork_server_of(found):
    return found if hasattr(found, "fork") else None


@pytest.mark.parametrize("name", SHOWN)
def test_under_torchrun_the_backend_is_ours(name, torchrun, tmp_path):
    (step,) = (step for step in STEPS if step.file == name)
    (tmp_path / name).write_text(step.block.text)
    done = torchrun(2, "python", tmp_path / name)
    assert done.returncode == 0, done.stderr
    assert "backend: microparallel" in done.stdout


def test_the_page_s_command_runs_each_of_them():
    assert [step.command.split()[-1] for step in STEPS if "torchrun" in step.command] == SHOWN


@pytest.mark.slow
def test_the_command_works_as_it_stands(tmp_path):
    for step in STEPS:
        if step.file in SHOWN:
            (tmp_path / step.file).write_text(step.block.text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SHOWN[1]]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert "backend: microparallel" in done.stdout, done.stderr
