"""Every lab in examples/, and every command its docstring tells a learner to try, does what it says."""

import os
import re
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import blocks
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = sorted(path.name for path in EXAMPLES.rglob("*.py"))

LEARNT = r"^conclusion: one process reads \d+\.\d% of the digits held back .*\n.* [\d,]+ samples/s"
EQUAL_TO_WHOLE_BATCH = "^conclusion: averaging gradients equals the whole batch: the two copies are identical"
EQUAL_TO_UNCUT = "^conclusion: in all 8 steps the gradients equal those of the uncut network, bit for bit"
MESSAGE_COST = r"^conclusion: a message below \d+ (B|KiB|MiB) is mostly latency"
EXPOSED = r"^conclusion: communication that no computation hides: \d+\.\d ms by hand,\n.* ms in \d bucket"
UTILISED = r"^conclusion: with naive a rank computes \d+ % of the time, with 1f1b \d+ %;\n"
FILLED = r"with naive a rank computes [12]\d % of the time, with 1f1b [345]\d %;\n +1f1b keeps 10 .* gpipe 16$"
DEADLOCK = r"^deadlock: 0 → 1 → 0\. Each waits for the next"
SAME_BITS = "going on from step {}\n(.*\n)*conclusion: all weights are the same, to the last bit$"
LEFT_OUT = r"^conclusion: weights differ by up to \S+: something was not in the checkpoint$"
SAVED = r"^conclusion: the saved model, whole in one process, has the pipeline's loss:\n"
GPU = torch.cuda.is_available()
WHERE_IT_LIES = (
    r"^conclusion: where the tensor lies, by hand, it takes \d+\.\d+ of gloo's time,\n" if GPU else "torch sees no GPU"
)

# command as a learner types it → arguments that make it quick, exit code, what it says
CALLS = {
    "monolith.py": ("--steps 200", 0, LEARNT),
    "monolith.py --width 256": ("--steps 120", 0, LEARNT),
    "monolith.py --batch 8": ("--steps 300", 0, LEARNT),
    "monolith.py --device cuda": ("--steps 200", *((0, LEARNT) if GPU else (2, "torch sees no GPU"))),
    "monolith.py --init default": ("--steps 20", 1, r"^it did not learn: \d+\.\d% of the unseen digits read"),
    "manual_data_parallel.py": ("--steps 8", 0, EQUAL_TO_WHOLE_BATCH),
    "manual_data_parallel.py --batch 3": ("--steps 8", 0, EQUAL_TO_WHOLE_BATCH),
    "manual_data_parallel.py --forget": ("--steps 8", 0, r"^conclusion: without averaging the copies drift: 0\.\d+"),
    "manual_pipeline.py": ("--steps 8", 0, EQUAL_TO_UNCUT),
    "manual_pipeline.py --cut 4": ("--steps 8", 0, EQUAL_TO_UNCUT),
    "manual_pipeline.py --batch 256": ("--steps 8", 0, EQUAL_TO_UNCUT),
    "hooks_demo.py": ("--steps 3", 0, EXPOSED),
    "hooks_demo.py --link 0": ("--steps 3", 0, EXPOSED),
    "hooks_demo.py --bucket 100": ("--steps 1 --width 128", 0, EXPOSED.replace(r"\d bucket", "1 bucket")),
    "hooks_demo.py --bucket 0.1": ("--steps 1 --width 128 --depth 4", 0, EXPOSED),
    "pipeline_utilisation.py": ("--ranks 2 --steps 3", 0, UTILISED),
    "pipeline_utilisation.py --play 5": ("--steps 2 --play 10", 0, FILLED),
    "pipeline_utilisation.py --microbatches 8": ("--steps 1 --play 2", 0, UTILISED),
    "pipeline_utilisation.py --ranks 2": ("--steps 1 --play 2", 0, UTILISED),
    "pipeline_utilisation.py --width 32": ("--ranks 1 --steps 1", 0, UTILISED),
    "pipeline_utilisation.py --device cuda": (
        "--ranks 2 --steps 1",
        *((0, r"^GPU 0 +\d+ % busy") if GPU else (1, "torch sees no GPU")),
    ),
    "pipeline_deadlock.py": ("--limit 1", 1, DEADLOCK),
    "pipeline_deadlock.py --fix": ("--limit 30", 0, "^conclusion: 1f1b comes to its end when sends do not wait"),
    "pipeline_deadlock.py --schedule gpipe": ("--limit 30", 0, "^conclusion: gpipe comes to its end even with"),
    "pipeline_deadlock.py --microbatches 1": ("--limit 30", 0, "^conclusion: 1f1b comes to its end even with"),
    "pipeline_deadlock.py --ranks 3": ("--limit 1", 1, DEADLOCK.replace("0 → 1 → 0", "1 → 2 → 1")),
    "train_pipeline.py": ("--steps 2 --width 32", 0, SAVED),
    "train_pipeline.py --ranks 2 --schedule gpipe": ("--steps 2 --width 32", 0, SAVED),
    "train_pipeline.py --schedule interleaved": ("--steps 2 --width 32 --ranks 2", 0, SAVED),
    "train_pipeline.py --batch 50": ("--steps 2 --width 32 --ranks 2", 0, SAVED),
    "survive.py": ("--steps 5 --kill 1:3", 0, SAME_BITS.format(3)),
    "survive.py --every 10": ("--steps 5 --every 2 --kill 1:3", 0, SAME_BITS.format(2)),
    "survive.py --forget sampler": ("--steps 5 --kill 1:3", 0, LEFT_OUT),
    "survive.py --forget optimizer": ("--steps 5 --kill 1:3", 0, LEFT_OUT),
    "one_gpu.py": ("--rounds 5", 0 if GPU else 1, WHERE_IT_LIES),
    "one_gpu.py --ranks 4": ("--rounds 5", 0 if GPU else 1, WHERE_IT_LIES),
    "one_gpu.py --size 0.004": ("--rounds 5", 0 if GPU else 1, WHERE_IT_LIES),
    "ping_pong.py": ("--rounds 5", 0, MESSAGE_COST),
    "ping_pong.py --rounds 100": ("--rounds 10", 0, MESSAGE_COST),
    "ping_pong.py --device cuda": ("--rounds 5", *((0, MESSAGE_COST) if GPU else (1, "torch sees no GPU"))),
}

WRONG_CALLS = {
    "monolith.py --batch 0": "at least 1",
    "manual_data_parallel.py --batch 1": "at least 2",
    "manual_pipeline.py --cut 16": "from 1 to 15",
    "hooks_demo.py --bucket 0": "above 0",
    "hooks_demo.py --link nan": "at least 0",
    "ping_pong.py --rounds 0": "at least 1",
    "one_gpu.py --ranks 1": "at least 2",
    "one_gpu.py --size nan": "from 0.001 to 4000",
    "survive.py --every 0": "at least 1",
    "pipeline_utilisation.py --batch 3": "4 micro-batches need a sample each",
    "pipeline_utilisation.py --play 0": "above 0 ms",
    "pipeline_deadlock.py --ranks 1": "from 2 to 16",
    "pipeline_deadlock.py --limit nan": "above 0 seconds",
    "train_pipeline.py --batch 7": "8 micro-batches need an image each",
}


def test_every_example_is_covered():
    assert set(SCRIPTS) == {command for command in CALLS if " " not in command}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_of_a_docstring_is_covered(script):
    suggested = re.findall(r"python examples/(\S+\.py .*?)(?:  |\n)", (EXAMPLES / script).read_text())
    assert suggested
    assert set(suggested) <= CALLS.keys()


# Commands of which a page of the course shows what they print: the page's own test runs those.
IN_LESSONS = {step.command for page in DOCS.rglob("*.md") for step in blocks.steps_of(page) if step.expected}


# These start ranks of their own, which have to import torch.
START_RANKS = {"survive.py --every 10", "survive.py --forget sampler", "survive.py --forget optimizer"}
# These differ in one setting from others.
ALIKE = {
    *("monolith.py --width 256", "manual_pipeline.py --cut 4", "hooks_demo.py --link 0", "hooks_demo.py --bucket 100"),
    *("pipeline_utilisation.py --microbatches 8", "pipeline_utilisation.py --width 32", "train_pipeline.py --batch 50"),
}


def call(command):
    slow = f"python examples/{command}" in IN_LESSONS or command in START_RANKS | ALIKE
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [call(command) for command in CALLS])
def test_reaches_its_conclusion(command, tmp_path, call_here, fresh):
    quickly, exit_code, says = CALLS[command]
    call = f"{command} {quickly}"
    real = fresh or command == "manual_pipeline.py"
    finished = in_a_process_of_its_own(call, tmp_path) if real else call_here(call)
    assert finished.returncode == exit_code, finished.stdout + finished.stderr
    assert re.search(says, finished.stderr if exit_code else finished.stdout, re.MULTILINE), finished.stdout
    assert exit_code or not finished.stderr
    assert all(len(line) <= 100 for line in finished.stdout.splitlines())
    assert not list(tmp_path.iterdir())


def in_a_process_of_its_own(call, folder):
    """As a learner calls it. It takes seconds to import torch, so only one lab is called like this every time."""
    script, *arguments = call.split()
    return subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments],
        cwd=folder,  # neither the repository nor examples/: a lab runs from anywhere
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def call_here(tmp_path, monkeypatch, capfd, quick_ranks):
    """Call a lab in this process, in an empty folder; the answer is what `subprocess.run` would give."""
    monkeypatch.chdir(tmp_path)

    def call(command):
        script, *arguments = command.split()
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        code, words = 0, ""
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as ended:
            code, words = (1, ended.code) if isinstance(ended.code, str) else (ended.code, "")
        except Exception:
            code, words = 1, traceback.format_exc()
        output, errors = capfd.readouterr()
        return subprocess.CompletedProcess(command, code, output, errors + words)

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_question_and_commands_to_copy(script, monkeypatch, call_here):
    monkeypatch.setenv("COLUMNS", "100")
    finished = call_here(f"{script} --help")
    assert finished.returncode == 0
    assert "\nQuestion   " in finished.stdout
    assert f"python examples/{script} --" in finished.stdout
    assert all(len(line) <= 100 for line in finished.stdout.splitlines())


@pytest.mark.parametrize("command", WRONG_CALLS)
def test_a_wrong_call_is_refused_with_the_fix(command, call_here):
    finished = call_here(command)
    assert finished.returncode == 2
    assert WRONG_CALLS[command] in finished.stderr
