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
    # 3.0 MB compressed; tools/wheels.py checks the wheel itself. A twentieth more than before derivatives on GPUs, caches of
    # 4 bits, 8 bits on sm_89 and forward/sm100 came: most of it is their kernels' sources.
    assert LIBRARY.stat().st_size < 7_200_000
