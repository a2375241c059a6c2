"""README.md and docs/results.md hold what `flash-attention report` makes of bench/results/: nothing was written by hand."""

import re
from pathlib import Path

import pytest
import report

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
