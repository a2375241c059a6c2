"""The documents name files and identifiers that exist, and the project's text names no place outside the project."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "python/README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
ROOMS = ("include", "src", "kernels", "cli", "python", "examples", "bench", "tests", "tools", "cmake", "docs")
PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
SOURCES = {".c", ".cc", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".in", ".py", ".pyi", ".rs", ".sh", ".toml", ".txt", ".yml"}
COMMENTED = {".cpp", ".cu", ".cuh", ".h"}
# docs/lab and the change log remember what is gone, and the page on migration is about the names of others.
EXPLAINING = [path for path in DOCUMENTS if "lab" not in path.parts and path.name != "migration.md"]
# Names of CMake, the kernel, the sanitizers and PyTorch; examples of a suffix; a test that exists for each instruction set.
FOREIGN = {"CMAKE_CXX_COMPILER", "arch_prctl", "ASAN_OPTIONS", "detect_leaks", "emit_nvtx"}
FOREIGN |= {"K_gmem", "K_reg", "cpu_contract_amx_test"}
FOREIGN |= {"ours_fast"}  # in the command of a recorded run: what that commit called precision="fast"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_in_a_document_exist(document):
    text = document.read_text()
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    made = [path for path in missing if path in ("bench/results/",)]  # filled by measurements
    assert [path for path in missing if path not in made] == []


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for path in (ROOT / name for name in listed.stdout.splitlines()) if path.is_file()]


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Every word of the sources, and the names of their files."""
    words = set()
    for path in tracked_files():
        if path.suffix in SOURCES or path.name == "Makefile":
            words |= {path.stem, *re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8", errors="replace"))}
    return frozenset(words)


def identifiers_of(text: str) -> set[str]:
    """Words between backticks that only a program has: with an underscore, or capitals inside. Blocks of code are programs
    of their own; `num_*` names no identifier."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", text)
    words = {word for span in spans for word in re.findall(r"(?<![\w/.*-])[A-Za-z_]\w*(?![\w/*-])", span)}
    return {word for word in words if "_" in word.strip("_") or re.search(r"[a-z][A-Z]", word)}


@pytest.mark.parametrize("document", EXPLAINING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_identifiers_in_a_document_exist(document):
    assert sorted(identifiers_of(document.read_text()) - words_of_the_code() - FOREIGN) == []


@functools.cache
def words_of_the_code_alone() -> frozenset[str]:
    """The same without comments of C++: a name that only a comment has is none."""
    words = set()
    for path in tracked_files():
        if path.suffix in SOURCES:
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"//.*", "", text) if path.suffix in COMMENTED else text
            words |= {path.stem, *re.findall(r"[A-Za-z_]\w*", text)}
    return frozenset(words)


def test_comments_name_what_exists():
    """Identifiers between backticks, and files, in the comments of C++ and CUDA."""
    names = [path.as_posix() for path in tracked_files()]
    patterns = {"failed.cu", "ROOM/NAME_test.cpp"}
    found = []
    for path in tracked_files():
        if path.suffix not in COMMENTED:
            continue
        comments = "\n".join(re.findall(r"//.*", path.read_text(encoding="utf-8", errors="replace")))
        found += [f"{path.name}: {word}" for word in identifiers_of(comments) - words_of_the_code_alone()]
        files = set(re.findall(r"\b((?:\w+/)*\w+\.(?:cuh|h|cpp|cu|md|py))\b", comments)) - patterns
        found += [f"{path.name}: {file}" for file in files if not any(name.endswith("/" + file) for name in names)]
    assert found == []


def test_an_identifier_that_is_gone_is_found():
    text = "`take_no_turns` and `Problem::no_such_field()`, ``` `in_a_block` ``` and `num_*`"
    assert identifiers_of(text) == {"take_no_turns", "no_such_field"}
    assert "make_plan" in words_of_the_code() and "take_no" + "_turns_at_all" not in words_of_the_code()


def test_the_page_of_a_package_index_leads_to_nothing_in_the_tree():
    """An index shows the page alone: a link to a file of the repository would be broken there."""
    page = re.search(r'^readme = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert LINK.findall((ROOT / page).read_text()) == []


def test_no_file_names_a_place_outside_the_project():
    forbidden = re.compile(r"(?<![\w.])/(work|root)/\w|/tmp/(?!\w*\$)[a-z]+\.(sh|md)")
    found = []
    for path in tracked_files():
        if path.suffix in {".png", ".svg", ".json"} or path == Path(__file__).resolve():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in text.splitlines() if forbidden.search(line)]
    assert found == []


def test_speeds_of_the_ladder_are_written_once():
    """By `flash-attention ladder --update`, into kernels/ladder/README.md. The machine's own rates are no rung's speed."""
    rates = re.compile(r"(?:67|989) TFLOP/s")
    pages = [*sorted((ROOT / "kernels/ladder").glob("*.cu")), *sorted((ROOT / "docs/ladder").glob("*.md"))]
    found = []
    for path in pages:
        if path.name == "cpu.md":  # its table is the only one of the CPU's ladder
            continue
        lines = rates.sub("", path.read_text()).splitlines()
        found += [f"{path.name}: {line.strip()}" for line in lines if re.search(r"\d TFLOP/s|TFLOP/s[^a-z]*\d", line)]
    assert found == []
