"""The documents name files that exist, and the project's text names no place outside the project."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = ("include", "src", "kernels", "cli", "python", "examples", "bench", "tests", "tools", "cmake", "docs")
PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_in_a_document_exist(document):
    text = document.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    made = [path for path in missing if path in ("bench/results/",)]  # filled by measurements
    assert [path for path in missing if path not in made] == []


def test_documents_that_explain_are_short():
    """README is for the first minute; docs/kernels explain and docs/lab remember."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs/kernels").glob("*.md"))]
    assert [path.name for path in pages if len(path.read_text().splitlines()) > 120] == []


def test_no_file_names_a_place_outside_the_project():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    forbidden = re.compile(r"(?<![\w.])/(work|root)/\w|/tmp/(?!\w*\$)[a-z]+\.(sh|md)")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".svg", ".json"} or not path.is_file() or path == Path(__file__).resolve():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {line.strip()}" for line in text.splitlines() if forbidden.search(line)]
    assert found == []
