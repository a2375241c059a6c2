"""The benchmarks are scripts that import each other from their own directory."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import package  # noqa: E402, F401 (makes flash_attention importable, installed or not)


@pytest.fixture
def head():
    """The head of a result file, as machine.facts() writes it."""
    return {
        "machine": {"device": "a machine", "cores": 2},
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789ab",
        "date": "2026-01-01T00:00:00+00:00",
        "command": "bench/benchmark_speed.py --preset quick",
        "ceilings": {"tflops": 700.0, "copy_gbs": 4000.0, "dtype": "bfloat16"},
    }
