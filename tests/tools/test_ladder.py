"""Each rung of the teaching ladder says which rung it is derived from."""

import re
from pathlib import Path

import pytest

LADDER = Path(__file__).resolve().parents[2] / "kernels/ladder"
RUNGS = {path.name.split("_")[0]: path for path in [*LADDER.glob("*.cu"), *LADDER.glob("backward/*.cu")]}


@pytest.mark.parametrize("rung", sorted(RUNGS))
def test_a_rung_names_the_rung_before_it(rung):
    base = re.search(r"// From (\w+):", RUNGS[rung].read_text())
    assert base[1] in RUNGS if base else rung == "00"
