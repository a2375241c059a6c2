"""The teaching ladder can be read: small steps, and comments that explain."""

import re
from pathlib import Path

import pytest

LADDER = Path(__file__).resolve().parents[2] / "kernels/ladder"
RUNGS = {path.name.split("_")[0]: path for path in [*LADDER.glob("*.cu"), *LADDER.glob("backward/*.cu")]}


def changed_lines(before: str, after: str) -> int:
    """Lines that go and lines that come, as `flash-attention ladder --diff` shows them: the fewest."""
    a, b = before.splitlines(), after.splitlines()
    longest = [0] * (len(b) + 1)  # of common subsequences of a[..i] and b[..j]
    for line in a:
        diagonal = 0
        for j, other in enumerate(b):
            here = diagonal + 1 if line == other else max(longest[j + 1], longest[j])
            diagonal, longest[j + 1] = longest[j + 1], here
    return len(a) + len(b) - 2 * longest[-1]


def test_changed_lines_are_counted():
    assert changed_lines("a\nb\nc", "a\nc\nd\ne") == 3
    assert changed_lines("a\nb", "a\nb") == 0


@pytest.mark.parametrize("rung", sorted(RUNGS))
def test_a_rung_is_a_small_step(rung):
    text = RUNGS[rung].read_text()
    base = re.search(r"// From (\w+):", text)
    assert base or rung == "00"
    if base:
        assert changed_lines(RUNGS[base[1]].read_text(), text) <= 120


@pytest.mark.parametrize("rung", sorted(RUNGS))
def test_a_rung_has_a_comment_for_every_five_lines_of_code(rung):
    lines = [line.strip() for line in RUNGS[rung].read_text().splitlines()]
    code = sum(bool(line) and not line.startswith("//") for line in lines)
    assert sum("//" in line for line in lines) >= 0.2 * code


def test_folders_fit_in_one_view():
    assert all(len([path for path in folder.iterdir() if path.is_file()]) <= 25 for folder in [LADDER, *LADDER.glob("*/")])
