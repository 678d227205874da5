"""The notebook runs from its first cell to its last, in a kernel of its own; its checks tell right from wrong."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from microparallel.world.fork_server import can_fork

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "course.ipynb"


# Run before its first cell, so that the ranks of its cells need not all import torch.
FORKS = f"""
import sys; sys.path.append({str(NOTEBOOK.parents[1] / "docs" / "tools")!r})
import commands, microparallel.world.fork_server, microparallel.world.rank_process as rank_process
rank_process.subprocess = commands.forking(microparallel.world.fork_server.ForkServer())
"""


# What the tasks use of the other cells: the imports, the pool, and the training in one process.
FOR_TASKS = ("cell-02", "cell-12", "oracle")

# By task: what to replace in its answer, by what, so that it is wrong in a typical way; and what its check then says.
WRONG = {
    "bytes": ("2 * 5 * 120 / 6", "2 * 5 * 120", "MB that rank 0 sends: you predict 1200, the simulation has fewer"),
    "ring": ("<+C1@2", "<C1@2", "rank 0 ends with rank 1's part + rank 2's part in slice 1"),
    "average": (" / len(copies)", "", "copy 0 of 2: a gradient is the sum of all copies'; divide it"),
    "buckets": ("min(range", "max(range", "latency 0: you choose buckets=1, and the step takes 27; 24.375 is possible"),
    "shard": ("comms.broadcast(parameter, src=index % comms.world_size)", "pass", "what the other rank has updated?"),
    "order": ("F0.2 B0.0 F0.3", "F0.2 F0.3 B0.0", "rank 0 holds 4 activations at once, and may hold 3"),
    "limit": ("W1.0 F1.2 I1.2 W1.1", "F1.2 I1.2 W1.0 W1.1", "rank 1 holds 3 activations at once, and 2 are allowed"),
}


def run(notebook, fresh):
    """Run all cells; a cell that raises an error fails the test."""
    if can_fork() and not fresh:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(FORKS))
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()


def tasks(notebook, part):
    """The cells of one part of the tasks ("attempt", "check" or "answer"), by the task's name."""
    return {cell.id.removeprefix(f"{part}-"): cell for cell in notebook.cells if cell.id.startswith(f"{part}-")}


def folded(cell):
    """The code in a folded answer."""
    found = re.fullmatch(r"<details>\n<summary>.*?```python\n(.*?)```(.*)</details>", cell.source, re.DOTALL)
    assert found and "```" not in found[2]
    return found[1]


def paste(answers, notebook):
    attempts = tasks(notebook, "attempt")
    assert list(answers) == list(attempts) == list(WRONG)
    for name, cell in attempts.items():
        cell.source = answers[name]


def checks(notebook):
    """What the check of each task has printed."""
    return {name: "".join(one.text for one in cell.outputs) for name, cell in tasks(notebook, "check").items()}


def printed(notebook):
    """The lines that are the same on every machine: neither the version of torch, nor what rounding has left."""
    texts = [output["text"] for output in outputs(notebook) if output.get("name") == "stdout"]
    return [line for line in "".join(texts).splitlines() if not line.startswith("torch") and "e-" not in line]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # those of the notebook's own machinery
def test_it_runs_and_shows_what_it_showed(fresh):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    before = printed(notebook)
    run(notebook, fresh)
    assert printed(notebook) == before != []
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs(notebook)) == 6
    verdicts = checks(notebook)
    assert list(verdicts) == list(WRONG)
    assert all(text.startswith("○ not solved yet") for text in verdicts.values())


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # those of the notebook's own machinery
def test_with_the_folded_answers_every_check_passes(fresh):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    paste({name: folded(cell) for name, cell in tasks(notebook, "answer").items()}, notebook)
    run(notebook, fresh)
    verdicts = checks(notebook)
    assert list(verdicts) == list(WRONG)
    assert {name: text for name, text in verdicts.items() if not text.startswith("✓")} == {}


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # those of the notebook's own machinery
def test_a_typical_wrong_answer_is_refused_in_words(fresh):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    answers = {name: folded(cell) for name, cell in tasks(notebook, "answer").items()}
    for name, (right, wrong, _) in WRONG.items():
        assert right in answers[name]
        answers[name] = answers[name].replace(right, wrong)
    paste(answers, notebook)
    of_tasks = [cell.id for part in ("attempt", "check") for cell in tasks(notebook, part).values()]
    notebook.cells = [cell for cell in notebook.cells if cell.id in (*FOR_TASKS, *of_tasks)]
    run(notebook, fresh)
    verdicts = checks(notebook)
    for name, (_, _, words) in WRONG.items():
        assert verdicts[name].startswith("✗")
        assert words in verdicts[name]
        assert "Traceback" not in verdicts[name]
