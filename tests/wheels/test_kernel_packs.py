"""The packs of kernels that wheels carry: found without NVRTC, and never in the way of it."""

import json
import shutil
from pathlib import Path

import kernel_packs
import kernels_wheel
import pytest
from test_kernels_wheel import COMMAND, PROBLEM, compile_with

CAUSAL = [*PROBLEM, "--causal"]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Two kernels of one stem in one pack."""
    try:
        files = [file for words in (PROBLEM, CAUSAL) for file in kernels_wheel.compile_for("sm_80", COMMAND, words)]
    except SystemExit as error:
        if "NVRTC, which compiles" in str(error):
            pytest.skip("no NVRTC here")
        raise
    assert len(files) == 2
    folder = tmp_path_factory.mktemp("packs") / "packs"
    (pack,) = kernel_packs.write_packs(files, folder)
    assert pack.stat().st_size < sum(file.stat().st_size for file in files) / 3
    return folder


@pytest.fixture
def installed(packs, tmp_path):
    """As a wheel leaves it: the packs beside the library."""
    (tmp_path / "package").mkdir()
    shutil.copy(COMMAND, tmp_path / "package")
    shutil.copytree(packs, tmp_path / "package" / "flash_attention_kernels")
    return tmp_path


def pack_of(installed: Path) -> Path:
    (pack,) = (installed / "package" / "flash_attention_kernels").glob("*.pack")
    return pack


@pytest.mark.parametrize("settings", [{"FLASH_ATTENTION_NVRTC": "/nowhere"}, {"FLASH_ATTENTION_JIT": "off"}, {}], ids=str)
def test_its_kernels_are_found_without_a_compiler(installed, settings):
    done = compile_with(installed, "sm_80", **settings)
    assert done.returncode == 0, done.stderr
    (kernel,) = json.loads(done.stdout)
    assert not kernel["compiled"] and Path(kernel["path"]) == pack_of(installed)


def test_a_package_of_kernels_is_asked_first(installed):
    (file,) = kernels_wheel.compile_for("sm_80", COMMAND, PROBLEM)
    (installed / "flash_attention_kernels").mkdir()
    shutil.copy(file, installed / "flash_attention_kernels")
    done = compile_with(installed, "sm_80", FLASH_ATTENTION_JIT="off")
    (kernel,) = json.loads(done.stdout)
    assert Path(kernel["path"]).parent == installed / "flash_attention_kernels"


def test_a_package_that_does_not_have_it_is_not_in_the_way(installed):
    (installed / "flash_attention_kernels").mkdir()
    done = compile_with(installed, "sm_80", FLASH_ATTENTION_JIT="off")
    (kernel,) = json.loads(done.stdout)
    assert Path(kernel["path"]) == pack_of(installed)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-100], lambda data: b"no LZMA at all, but long enough"], ids=["cut", "text"]
)
def test_a_damaged_pack_is_as_none(installed, damage):
    pack = pack_of(installed)
    pack.write_bytes(damage(pack.read_bytes()))
    done = compile_with(installed, "sm_80", FLASH_ATTENTION_NVRTC="/nowhere")
    assert done.returncode != 0 and "NVRTC" in done.stderr
    done = compile_with(installed, "sm_80")
    if done.returncode == 0:  # NVRTC is where the library looks for it
        assert all(kernel["compiled"] for kernel in json.loads(done.stdout))


def test_a_pack_that_others_may_write_to_is_not_taken(installed):
    pack_of(installed).chmod(0o666)
    done = compile_with(installed, "sm_80", FLASH_ATTENTION_NVRTC="/nowhere")
    assert done.returncode != 0 and "NVRTC" in done.stderr
