"""The table of allowed includes finds a wrong edge, and the house has none."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_includes  # noqa: E402


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An empty house; returns a function that puts a file into it."""
    monkeypatch.setattr(check_includes, "ROOT", tmp_path)

    def put(path: str, text: str = "") -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return put


def test_the_house_has_no_wrong_edge():
    assert check_includes.wrong_edges() == []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("src/plan/a.cpp", "src/cuda/b.h"),
        ("src/support/a.h", "src/plan/b.h"),
        ("src/cpu/a.cpp", "src/api/b.h"),
        ("kernels/abi/a.h", "kernels/tile/b.cuh"),
        ("kernels/ptx/a.cuh", "kernels/tile/b.cuh"),
        ("kernels/forward/a.cuh", "src/plan/b.h"),
        ("cli/a.cpp", "src/plan/b.h"),
        ("include/flash_attention/a.h", "src/api/b.h"),
    ],
)
def test_a_wrong_edge_is_found(house, source, target):
    house(target)
    house(source, f'#include "{target.removeprefix("src/").removeprefix("kernels/")}"\n')
    wrong = check_includes.wrong_edges()
    assert len(wrong) == 1 and wrong[0].startswith(f"{source}: includes {target}")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("src/api/a.cpp", "src/cuda/b.h"),
        ("src/plan/a.cpp", "kernels/abi/b.h"),
        ("kernels/forward/a.cuh", "kernels/tile/b.cuh"),
        ("cli/a.cpp", "src/cuda/memory.h"),
        ("src/cpu/tile/a.h", "src/cpu/b.h"),
    ],
)
def test_an_allowed_edge_is_not(house, source, target):
    house(target)
    house(source, f'#include "{target.removeprefix("src/").removeprefix("kernels/")}"\n')
    assert check_includes.wrong_edges() == []


def test_no_file_names_an_algorithm_without_its_header():
    assert check_includes.without_algorithm() == []


def test_an_algorithm_without_its_header_is_found(house):
    house("src/plan/a.cpp", "int f() { return std::find_if(a, b, c) - a; }")
    house("src/plan/b.cpp", '#include "plan/c.h"\nint g() { return std::clamp(1, 2, 3); }')
    house("src/plan/c.h", "#include <algorithm>")
    assert check_includes.without_algorithm() == ["src/plan/a.cpp: names std::find_if without #include <algorithm>"]
