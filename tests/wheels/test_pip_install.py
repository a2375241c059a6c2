"""`pip install .` as a user types it, with an isolated build, gives everything that the README promises."""

import subprocess
import sys
from pathlib import Path

import pytest
from empty_environment import Environment

pytestmark = pytest.mark.long_tail

ROOT = Path(__file__).resolve().parents[2]


def test_pip_install_takes_arrays_of_jax(tmp_path):
    pytest.importorskip("jax")
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    made = Environment(tmp_path / "environment", sys.executable)
    library = ROOT / "build" / "release" / "libflash_attention_internal.a"  # its objects are not what is tested
    setting = f"cmake.define.FLASH_ATTENTION_BUILT_LIBRARY={library if library.exists() else ''}"
    made.install("--config-settings", setting, checkout)
    made.lend("jax")
    made.run("""
import flash_attention, jax, numpy
q, k, v = (jax.random.normal(jax.random.key(i), (2, 24, 4, 64)) for i in range(3))
ours = flash_attention.attention(q, k, v, causal=True)
theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
assert isinstance(ours, jax.Array) and abs(numpy.asarray(ours) - numpy.asarray(theirs)).max() < 1e-5
""")
