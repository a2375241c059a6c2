"""Runs a notebook's cells in one process and stores what they print: `python3 tools/notebook.py examples/emulator.ipynb`.

Cells are plain Python, so neither Jupyter nor a kernel is needed here; in Jupyter they run as they are."""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict, name: str) -> list[str]:
    """What each code cell prints."""
    names, printed = {"__name__": "__main__"}, []
    for number, cell in enumerate(code_cells(notebook), 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        printed.append(out.getvalue())
    return printed


def stored(cell: dict) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def markdown(notebook: dict) -> str:
    """The notebook as a page: its code and what that printed."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts.append(f"```python\n{text}\n```")
            if stored(cell):
                parts.append(f"```text\n{stored(cell).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    notebook = json.loads(path.read_text())
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
