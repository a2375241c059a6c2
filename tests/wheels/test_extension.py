"""The extension of the installed package, which is linked as the wheels are: quick enough for every run."""

import platform
from pathlib import Path

import flash_attention._core
import pytest
import symbols

LIBRARY = Path(flash_attention._core.__file__)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="linked for this system alone")
def test_it_asks_for_no_newer_system_than_manylinux_2_28():
    found = symbols.newest(LIBRARY)
    assert found["GLIBC"] <= (2, 28)
    assert found["GCC"] <= (7, 0, 0)
    assert "GLIBCXX" not in found and "CXXABI" not in found  # linked statically


def test_it_fits_in_a_wheel():
    assert LIBRARY.stat().st_size < 6_600_000  # 2.6 MB compressed; tools/wheels.py checks the wheel itself
