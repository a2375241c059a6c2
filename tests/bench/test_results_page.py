"""README.md and docs/results.md hold what `flash-attention report` makes of bench/results/: nothing was written by hand."""

import re
import statistics
from pathlib import Path

import pytest
import report
import report.cells

ROOT = Path(__file__).resolve().parents[2]


def command_of_the_page() -> list[str]:
    """The arguments of the command that docs/results.md names, patterns replaced by files."""
    line = re.search(r"^    flash-attention report (.*)$", (ROOT / "docs/results.md").read_text(), re.MULTILINE)[1]
    files = []
    for word in line.split(" --headline ")[0].split():
        files += sorted(ROOT.glob(word))
    return [path.as_posix() for path in files]


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_page_is_what_the_command_writes(page, tmp_path):
    copy = tmp_path / "page.md"
    copy.write_text((ROOT / page).read_text())
    report.write_markdown([report.load(path) for path in command_of_the_page()], copy)
    assert copy.read_text() == (ROOT / page).read_text()


def test_the_picture_is_what_the_command_draws(tmp_path):
    files = [report.load(path) for path in command_of_the_page()]
    drawn = report.write_headline(files, tmp_path / "forward_h200.svg")[0]
    assert drawn.read_text() == (ROOT / "docs/images/forward_h200.svg").read_text()


def near(text: str, found: list[float]) -> bool:
    """Whether a figure is one of these, rounded as it is written."""
    digits = len(text.partition(".")[2])
    return any(round(value, digits) == float(text) for value in found)


def figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))


def test_the_first_figures_are_those_of_the_notes():
    """README.md's reasons, and where others are faster."""
    readme, notes = (ROOT / "README.md").read_text(), (ROOT / "docs/lab/peers.md").read_text()
    known = [float(figure) for figure in figures(notes)]
    reasons = re.search(r"## Why\n(.*?)\nMeasured on", readme, re.DOTALL)[1]
    others = re.search(r"\*\*Others are faster\*\*(.*?)In float32", readme, re.DOTALL)[1]
    lost = [1 - ratio for ratio in known if 0.9 < ratio < 1]
    for line in re.split(r"\n(?=- )", reasons.strip()):
        figured = figures(line.replace("FlashAttention-3", ""))
        assert figured and all(near(figure, known) for figure in figured), line
    for share in re.findall(r"([\d.]+) %", others):
        assert near(share, [100 * part for part in lost]), share
    assert "b920bb19" in notes and "b920bb19" in readme


def test_the_figures_of_float32_are_those_of_the_record():
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(
        r"In float32 the default is ([\d.]+) \(forward\) and ([\d.]+) \(backward\).*?least ([\d.]+) and ([\d.]+) ",
        readme,
        re.DOTALL,
    )
    every = report.cells.cells([report.load(ROOT / "bench/results/h200/fp32.json")])
    found = []
    for which in ("forward", "backward"):
        ratios = [cell.ratio for cell in every if cell.name == "ours" and cell.which == which and cell.other]
        found += [statistics.geometric_mean(ratios), min(ratios)]
    assert [float(figure) for figure in said.groups()] == [round(found[i], 2) for i in (0, 2, 1, 3)]
