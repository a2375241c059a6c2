"""Wheels as a user gets them: in empty environments, without a compiler, within seconds."""

import re
import sys
import time
import zipfile

import interpreters
import pytest
import wheels as tool
from empty_environment import Environment

pytestmark = pytest.mark.long_tail

HERE = "{}.{}".format(*sys.version_info[:2])
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
INSTALL_TO_RESULT_S, IMPORT_S = 20, 0.1

FIRST_RESULT = """
import numpy, flash_attention
q, k, v = (numpy.random.default_rng(i).standard_normal((2, 33, 4, 64), dtype=numpy.float32) for i in range(3))
out = flash_attention.attention(q, k, v, causal=True)
s = numpy.einsum('bqhd,bkhd->bhqk', q.astype(float), k) / 8
s = numpy.where(numpy.tril(numpy.ones((33, 33), bool)), s, -numpy.inf)
p = numpy.exp(s - s.max(-1, keepdims=True))
p /= p.sum(-1, keepdims=True)
assert abs(out - numpy.einsum('bhqk,bkhd->bqhd', p, v)).max() < 1e-5
"""


def wheel_for(wheels, version):
    """The wheel that pip would take, or a skip."""
    tag = f"cp{version.replace('.', '')}-cp" if version < "3.12" else "cp312-abi3"
    found = sorted(wheels.glob(f"exact_attention-*-{tag}*_{tool.HERE}.whl"))
    if not found:
        pytest.skip(f"no wheel for Python {version} was built")
    return found[-1]


@pytest.fixture(params=PYTHONS)
def environment(request, tmp_path):
    command = interpreters.find(request.param)
    if command is None:
        pytest.skip(f"no Python {request.param} here")
    made = Environment(tmp_path / "environment", command)
    made.version = request.param
    return made


@pytest.fixture
def environment_here(tmp_path):
    made = Environment(tmp_path / "environment", sys.executable)
    made.version = HERE
    return made


def test_numpy_alone_from_install_to_first_result(wheels, environment):
    environment.install("numpy")
    wheel = wheel_for(wheels, environment.version)
    start = time.monotonic()
    environment.install("--no-index", "--no-deps", wheel)
    environment.run(FIRST_RESULT)
    assert time.monotonic() - start < INSTALL_TO_RESULT_S


def test_import_needs_nothing_and_is_quick(wheels, environment):
    environment.install("--no-index", wheel_for(wheels, environment.version))
    timed = "import time; t = time.perf_counter(); import flash_attention; print(time.perf_counter() - t)"
    assert min(float(environment.run(timed)) for _ in range(5)) < IMPORT_S
    assert "cpu" in environment.run("import flash_attention; print(flash_attention.devices(), flash_attention.doctor())")
    assert environment.run("import flash_attention as f; print(f.__version__)").strip() == tool.version()


def test_torch(wheels, environment_here):
    environment_here.lend("torch")
    environment_here.install("--no-index", "--no-deps", wheel_for(wheels, HERE))
    environment_here.run("""
import torch, flash_attention
q, k, v = (torch.randn(2, 4, 40, 64, requires_grad=True) for _ in range(3))
ours = flash_attention.scaled_dot_product_attention(q, k, v, is_causal=True)
theirs = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
gradients = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (ours, theirs)]
assert (ours - theirs).abs().max() < 1e-5 and all((a - b).abs().max() < 1e-4 for a, b in zip(*gradients))
""")


def test_jax(wheels, environment_here):
    environment_here.lend("jax")
    environment_here.install("--no-index", "--no-deps", wheel_for(wheels, HERE))
    environment_here.run("""
import jax, numpy
from flash_attention.jax import dot_product_attention
q, k, v = (jax.random.normal(jax.random.key(i), (2, 24, 4, 64)) for i in range(3))
ours = dot_product_attention(q, k, v, is_causal=True)
assert abs(numpy.asarray(ours) - numpy.asarray(jax.nn.dot_product_attention(q, k, v, is_causal=True))).max() < 1e-5
""")


def test_what_is_in_a_wheel(wheels):
    for wheel in wheels.glob("exact_attention-*.whl"):
        assert wheel.stat().st_size <= 3_500_000
        assert re.search(r"manylinux_2_(1\d|2[0-8])_(x86_64|aarch64)", wheel.name), wheel.name
        files = zipfile.ZipFile(wheel)
        names = files.namelist()
        assert not [name for name in names if "libstdc++" in name or name.startswith("flash_attention.libs")]
        assert any(name.endswith("licenses/LICENSE") for name in names) and "flash_attention/py.typed" in names
        (metadata,) = (files.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        needs = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
        assert needs and all("extra ==" in need for need in needs)  # none without asking
        assert any(need.startswith("nvidia-cuda-nvrtc") and "cuda" in need for need in needs)


def test_it_carries_the_kernels_of_most_calls(wheels, environment_here):
    wheel = wheel_for(wheels, HERE)
    if not any(name.endswith(".pack") for name in zipfile.ZipFile(wheel).namelist()):
        pytest.skip("it was made without NVRTC")
    environment_here.install("--no-index", "--no-deps", wheel)
    said = environment_here.run(
        "import flash_attention; print([finding['detail'] for finding in flash_attention.doctor()])"
    )
    kernels = re.search(r"flash_attention_kernels: (\d+) kernels, \d+ bytes'", said)  # and none of them damaged
    assert kernels and int(kernels.group(1)) > 150, said


def test_the_sdist_builds_without_a_network(wheels, tmp_path):
    (archive,) = wheels.glob("exact_attention-*.tar.gz")
    made = Environment(tmp_path / "environment", sys.executable)
    made.install("scikit-build-core", "nanobind", "ninja")
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    path = f"{made.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    made.install("--no-index", "--no-build-isolation", archive, PATH=path, **nowhere)
    assert made.run("import flash_attention as f; print(f.__version__)").strip() == tool.version()
