"""The notebook runs from its first cell to its last, in a kernel of its own."""

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
    if can_fork() and not fresh:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(FORKS))
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()
    assert printed(notebook) == before != []
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs(notebook)) == 6
