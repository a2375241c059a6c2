"""The wheel of kernels compiled ahead of time: what is in it is found without NVRTC, and comes before NVRTC."""

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import kernels_wheel
import pytest
from empty_environment import Environment

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "build" / "release" / "flash-attention"
PROBLEM = ["--dtype", "float32", "--head-dim", "32", "--seq-q", "128"]  # a kernel that compiles in a second


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    words = [sys.executable, "tools/kernels_wheel.py", "--output", str(folder), "--arch", "sm_80", "--arch", "sm_120"]
    done = subprocess.run([*words, "--", *PROBLEM], cwd=ROOT, capture_output=True, text=True)
    if "NVRTC, which compiles" in done.stderr:
        pytest.skip("no NVRTC here")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("exact_attention_kernels-*-py3-none-any.whl")
    return path


def compile_with(folder: Path, arch: str, **settings: str) -> subprocess.CompletedProcess:
    """The command of that folder, with nothing in its caches."""
    (folder / "home").mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **settings}
    command = [
        str(folder / "package" / "flash-attention"),
        "compile",
        "--device",
        "cuda",
        "--arch",
        arch,
        "--json",
        *PROBLEM,
    ]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def installed(wheel, tmp_path):
    """As pip leaves it: the package of kernels beside the one that the library is in."""
    (tmp_path / "package").mkdir()
    shutil.copy(COMMAND, tmp_path / "package")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    return tmp_path


@pytest.mark.parametrize("settings", [{"FLASH_ATTENTION_NVRTC": "/nowhere"}, {"FLASH_ATTENTION_JIT": "off"}, {}], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_its_kernels_are_found_without_a_compiler(installed, arch, settings):
    done = compile_with(installed, arch, **settings)
    assert done.returncode == 0, done.stderr
    for kernel in json.loads(done.stdout):
        assert not kernel["compiled"]
        assert Path(kernel["path"]).parent == installed / "flash_attention_kernels"


def test_without_it_the_compiler_is_missed(installed):
    shutil.rmtree(installed / "flash_attention_kernels")
    done = compile_with(installed, "sm_80", FLASH_ATTENTION_NVRTC="/nowhere")
    assert done.returncode != 0 and "NVRTC, which compiles the GPU kernels, was not found" in done.stderr


def test_a_kernel_that_it_does_not_have_is_looked_for_elsewhere(installed):
    done = compile_with(installed, "sm_86", FLASH_ATTENTION_NVRTC="/nowhere")
    assert done.returncode != 0 and "NVRTC" in done.stderr


def test_the_record_lists_what_is_there(wheel):
    archive = zipfile.ZipFile(wheel)
    (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
    rows = {row[0]: row for row in csv.reader(io.StringIO(archive.read(record).decode()))}
    assert set(rows) == set(archive.namelist())
    for name, given, size in rows.values():
        if name == record:
            continue
        data = archive.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert given == f"sha256={expected}" and int(size) == len(data)
    assert sum(name.endswith(".cubin") for name in rows) == 2


def test_the_architectures_of_the_release():
    assert kernels_wheel.ARCHS == ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.mark.long_tail
def test_pip_installs_it(wheel, tmp_path):
    environment = Environment(tmp_path / "environment", sys.executable)
    environment.install("--no-index", wheel)
    assert "ahead of time" in environment.run("import flash_attention_kernels as k; print(k.__doc__)")
