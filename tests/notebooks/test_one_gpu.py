"""The notebook for one GPU: its cells are Python everywhere, and run where there is a GPU."""

import ast
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "one_gpu.ipynb"


def test_its_cells_are_python():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    for source in code:
        ast.parse(source.replace("%pip", "# %pip").replace("    # %pip", "    pass  # %pip"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="ranks that share a GPU need one")
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # those of the notebook's own machinery
def test_it_runs_from_its_first_cell_to_its_last():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 2
    printed = "".join(output.get("text", "") for output in outputs)
    assert "gloo" in printed and "cuda" in printed
