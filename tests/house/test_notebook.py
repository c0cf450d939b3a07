"""The example notebook is clean and runs from top to bottom."""

from pathlib import Path

import pytest

from places import REPO

NOTEBOOK = REPO / "examples" / "quickstart.ipynb"

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")


def test_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert [cell.source.splitlines()[0].partition("  #")[0] for cell in tagged] == ["max_steps = 360"]


def test_notebook_trains_and_shows_curves_and_pictures(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (at,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell("max_steps = 20"))
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert len(pictures) == 2, "the curves and the grid of samples"
    assert "step 20/20" in text
    assert "pictures show the digit that was asked for" in text
    assert (tmp_path / "runs/quickstart/pipeline/model_index.json").is_file()
