"""The notebook about the emulator runs from top to bottom, and what it shows is what it prints."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import notebook  # noqa: E402

PATH = ROOT / "examples/emulator.ipynb"


@pytest.mark.skipif(
    not (ROOT / "build/release/flash-attention").exists(), reason="build/release/flash-attention is not built"
)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_it_prints_what_it_shows(monkeypatch):
    monkeypatch.chdir(PATH.parent)
    book = json.loads(PATH.read_text())
    printed = notebook.run(book, PATH.name)
    shown = [notebook.stored(cell) for cell in notebook.code_cells(book)]
    assert printed == shown, "python3 tools/notebook.py examples/emulator.ipynb writes it again"


def test_it_says_what_the_lesson_is():
    shown = "".join(notebook.stored(cell) for cell in notebook.code_cells(json.loads(PATH.read_text())))
    assert "WRONG" not in shown
    for words in ("32 sectors a request,  12.5% of their bytes", "race: writes shared offset", "dead-lock", "6.48 passes"):
        assert words in shown


def test_jupyter_takes_it():
    """nbformat 4: what a reader of notebooks asks of each cell."""
    book = json.loads(PATH.read_text())
    assert book["nbformat"] == 4 and book["metadata"]["kernelspec"]["name"] == "python3"
    for cell in book["cells"]:
        assert set(cell) >= {"cell_type", "metadata", "source"}
        assert cell["cell_type"] == "markdown" or set(cell) >= {"execution_count", "outputs"}
