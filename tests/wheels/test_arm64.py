"""The wheels for 64-bit Arm, imported and run by Debian's Python for it under QEMU."""

import shutil

import arm64_python
import pytest
import symbols
import wheels as tool
from test_wheels import FIRST_RESULT

pytestmark = pytest.mark.long_tail

SUITES = ("bookworm", "trixie")  # Python 3.11 and 3.13: a wheel of its own, and that of the stable ABI
MACHINE = "aarch64"
MODELS = ("cortex-a57", "neoverse-n1", "max")  # an old one, one with products of halves, and one with everything

OPTIONS_AND_HALVES = """
import numpy, flash_attention
(finding,) = [f for f in flash_attention.doctor() if f["subject"] == "CPU"]
print(finding["detail"])
rng = numpy.random.default_rng(7)
q, k, v = (rng.standard_normal((1, n, h, 72)) for n, h in ((37, 4), (83, 2), (83, 2)))
s = numpy.einsum("bqhd,bkhd->bhqk", q, k.repeat(2, 2)) / 72**0.5
s = numpy.where(numpy.arange(83) <= numpy.arange(37)[:, None] + 46, s, -numpy.inf)
p = numpy.exp(s - s.max(-1, keepdims=True))
out = numpy.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v.repeat(2, 2))
for dtype, allowed in ((numpy.float32, 1e-5), (numpy.float16, 4e-3)):
    for queries in (37, 2):
        ours = flash_attention.attention(*(x.astype(dtype) for x in (q[:, -queries:], k, v)), causal=True)
        assert ours.dtype == dtype and abs(ours - out[:, -queries:]).max() < allowed, (dtype, queries)
"""


@pytest.fixture(scope="module", params=SUITES)
def python(request, tmp_path_factory):
    try:
        made = arm64_python.make(tmp_path_factory.mktemp("arm64"), request.param)
    except arm64_python.Unavailable as missing:
        pytest.skip(str(missing))
    yield made
    shutil.rmtree(made.root.parent)


@pytest.fixture(scope="module")
def packages(python, wheels):
    """The wheel for that Python, unpacked as pip does, and NumPy's."""
    ours = wheel_for(wheels, python.version)
    try:
        numpy = arm64_python.fetch("numpy", python, python.root.parent)
    except arm64_python.Unavailable as missing:
        pytest.skip(str(missing))
    folder = python.root.parent / "ours"
    shutil.unpack_archive(ours, folder, "zip")
    return folder, numpy


def wheel_for(folder, version):
    tag = "cp312-abi3" if version not in ("3.10", "3.11") else f"cp{version.replace('.', '')}-"
    found = sorted(folder.glob(f"exact_attention-*-{tag}*_{MACHINE}.whl"))
    if not found:
        pytest.skip(f"no wheel for Python {version} on {MACHINE} was built")
    return found[-1]


def test_first_result(python, packages):
    python.run(FIRST_RESULT, *packages)
    said = python.run("import platform, flash_attention as f; print(platform.machine(), f.__version__)", *packages)
    assert said.split() == [MACHINE, tool.version()]


@pytest.mark.parametrize("cpu", MODELS)
def test_every_kind_of_processor(python, packages, cpu):
    assert "neon" in python.run(OPTIONS_AND_HALVES, *packages, cpu=cpu)


def test_one_that_is_asked_for_and_is_not_here_is_refused(python, packages):
    program = "import flash_attention as f\ntry: f.doctor(); f.devices()\nexcept Exception as e: print(e)"
    assert "no avx2" in python.run(program, *packages, FLASH_ATTENTION_CPU_ISA="avx2")


def test_it_asks_for_no_newer_system_than_manylinux_2_28(python, packages):
    (library,) = (packages[0] / "flash_attention").glob("_core*.so")
    if shutil.which(symbols.tool_for(MACHINE)) is None:
        pytest.skip(f"no {symbols.tool_for(MACHINE)}")
    found = symbols.newest(library, MACHINE)
    assert found["GLIBC"] <= (2, 28)
    assert "GLIBCXX" not in found and "CXXABI" not in found  # linked statically
