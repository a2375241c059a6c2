"""Each rung of the teaching ladder says which rung it is derived from; its page says what its tables say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LADDER = ROOT / "kernels/ladder"
RUNGS = {path.name.split("_")[0]: path for path in [*LADDER.glob("*.cu"), *LADDER.glob("backward/*.cu")]}
PAGES = {page.stem: page for page in (ROOT / "docs/ladder").rglob("*.md") if "## Profiled" in page.read_text()}


@pytest.mark.parametrize("rung", sorted(RUNGS))
def test_a_rung_names_the_rung_before_it(rung):
    base = re.search(r"// From (\w+):", RUNGS[rung].read_text())
    assert base[1] in RUNGS if base else rung == "00"


def numbers(row: str) -> list[float]:
    return [float(number) for cell in row.split("|")[2:] for number in re.findall(r"\d[\d.]*", cell)[:1]]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_shares_below_a_table_are_in_it(page):
    """A share is a cell, or what the second of two cells saves of the first."""
    below = PAGES[page].read_text().split("## Profiled")[1]
    rows = [line for line in below.splitlines() if line.startswith("|")]
    cells = {cell for row in rows for cell in re.findall(r"(\d+) %", row)}
    pairs = [pair for pair in map(numbers, rows) if len(pair) == 2 and pair[0]]
    saved = {f"{100 * (1 - after / before):.0f}" for before, after in pairs}
    prose = " ".join(line for line in below.splitlines() if not line.startswith("|"))
    machine = {"60"} if page == "10" else set()  # mma.sync on an H200, which docs/ladder/README.md has
    assert set(re.findall(r"(\d+) %", prose)) <= cells | saved | machine


def steps() -> dict[str, float]:
    """Full speed over the rung before it, by rung, in the order of the table."""
    found = re.findall(r"^\| \[(\w+?)_.*?\| ([\d.]+) x \| [\d.]+ x \|$", (LADDER / "README.md").read_text(), re.MULTILINE)
    return {rung: float(step) for rung, step in found if not rung.startswith("b")}


SINCE = {"of all": "00", "since tiles in shared memory": "03"}


@pytest.mark.parametrize("page", [page for page in sorted(PAGES) if "largest step" in PAGES[page].read_text()])
def test_the_largest_step_is_the_largest(page):
    words = re.search(r"The largest step ([\w ]+)", PAGES[page].read_text())[1]
    rungs = list(steps())
    before = SINCE[words]
    others = rungs if words == "of all" else rungs[rungs.index(before) + 1 : rungs.index(page)]
    assert others
    assert all(steps()[page] >= steps()[rung] for rung in others)
