"""The DreamBooth notebook is clean and runs from top to bottom."""

from pathlib import Path

import pytest

from places import REPO

NOTEBOOK = REPO / "examples" / "dreambooth.ipynb"

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")


def test_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


@pytest.mark.full("platform")
def test_notebook_teaches_a_subject_and_shows_before_and_after(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (at,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell("base_steps, max_steps = 5, 3"))
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert len(pictures) == 2, "the photos, and before and after"
    assert "steps              5 in" in text and "steps              3 in" in text and "error:" not in text, text
    assert (tmp_path / "runs/dreambooth-digits/pipeline/model_index.json").is_file()
    assert len(list((tmp_path / "runs/dreambooth-digits-class-images").rglob("*.png"))) == 240
