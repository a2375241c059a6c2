"""One pair of versions is promised, documented and tested."""

import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import run_tests  # noqa: E402
import torch_versions  # noqa: E402


def test_the_documented_versions_are_the_tested_ones():
    oldest, newest = torch_versions.versions()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch>={oldest.removesuffix('.0')}" in extras["torch"]
    page = " ".join((ROOT / "docs" / "python.md").read_text().split())
    assert f"torch {oldest} is the oldest and torch {newest} the newest version" in page


def test_both_are_jobs_of_the_long_tail():
    names = [name for name, _ in run_tests.with_torch_versions()]
    assert [f"torch {version}" for version in torch_versions.versions()] == names[1:]
