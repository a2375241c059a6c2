"""Every planted mistake (tools/plants/) still fits its file, and names a test that exists."""

import fnmatch
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from plants.plant import plants_of, rooms  # noqa: E402

PLANTS = [(room, plant) for room in rooms() for plant in plants_of(room)]


def names_of_tests() -> set[str]:
    """Suite.Name of every GoogleTest in tests/."""
    macro = re.compile(r"^(?:TEST|TEST_F|TEST_P)\((\w+), (\w+)\)", re.MULTILINE)
    files = (ROOT / "tests").rglob("*_test.cpp")
    return {f"{suite}.{name}" for file in files for suite, name in macro.findall(file.read_text())}


@pytest.mark.parametrize("room, plant", PLANTS, ids=lambda value: value if isinstance(value, str) else value.says)
def test_a_plant_fits_its_file_and_names_a_test(room, plant):
    assert plant.applied() != (ROOT / plant.file).read_text()
    first, *rest = (word for word in plant.test.split() if "=" not in word)
    if first.startswith("tests/"):
        assert (ROOT / first).exists()
        return
    suites = {name.split(".")[0] for name in names_of_tests()}
    for pattern in rest:
        suite = pattern.split(".")[0].split("/")[-1]  # parametrised: PREFIX/Suite.name/case
        assert fnmatch.filter(suites, suite), f"{room}: no suite for {pattern}"
