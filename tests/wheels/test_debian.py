"""A wheel in a fresh Debian 12 with nothing but Python: needs root, debootstrap and a mirror, and takes minutes."""

import os
import shutil
import subprocess
import time

import pytest
import wheels as tool
from test_wheels import FIRST_RESULT, INSTALL_TO_RESULT_S

pytestmark = pytest.mark.long_tail

SUITE, PYTHON = "bookworm", "3.11"
ALONE = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")
    root = tmp_path_factory.mktemp("debian")
    words = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", SUITE, str(root)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"debootstrap: {done.stdout[-200:]}{done.stderr[-200:]}")
    yield root
    shutil.rmtree(root)


def inside(root, *words):
    done = subprocess.run(["chroot", str(root), *words], capture_output=True, text=True, env=ALONE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_wheel_to_first_result(debian, wheels, tmp_path):
    found = sorted(wheels.glob(f"exact_attention-*-cp{PYTHON.replace('.', '')}-*_{tool.HERE}.whl"))
    if not found:
        pytest.skip(f"no wheel for Python {PYTHON} was built")
    assert not [name for name in ("cc", "gcc", "g++", "clang", "ld") if (debian / "usr" / "bin" / name).exists()]
    packages = debian / "packages"
    fetch = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON, "numpy"]
    done = subprocess.run([*fetch, "--dest", str(packages)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no NumPy: {done.stderr[-200:]}")
    (numpy,) = packages.glob("numpy*.whl")
    wheel = shutil.copy(found[-1], packages)
    inside(debian, "python3", "-m", "venv", "/venv")
    install = ("/venv/bin/pip", "install", "--quiet", "--no-index", "--no-deps")
    inside(debian, *install, f"/packages/{numpy.name}")
    start = time.monotonic()
    inside(debian, *install, f"/packages/{os.path.basename(wheel)}")
    inside(debian, "/venv/bin/python", "-c", FIRST_RESULT)
    assert time.monotonic() - start < INSTALL_TO_RESULT_S
