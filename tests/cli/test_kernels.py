"""The verbs about compiled kernels: compile and cache. Every test has a cache of its own."""

import json
import os
import subprocess
from unittest.mock import ANY

import pytest


@pytest.fixture
def with_cache(command, tmp_path):
    """Runs the command with an empty cache."""

    def run(*words: object, code: int = 0) -> dict:
        done = command(
            *words, "--json", code=code, env={**os.environ, "FLASH_ATTENTION_CACHE_DIR": str(tmp_path / "cache")}
        )
        return json.loads(done.stdout)

    return run


@pytest.fixture
def nvrtc(doctors_report):
    """Skips where it is not here."""
    if not next(f for f in doctors_report["findings"] if f["subject"] == "NVRTC")["ok"]:
        pytest.skip("NVRTC is not here")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.usefixtures("nvrtc")
def test_compile_needs_no_gpu_and_fills_the_cache(with_cache, arch):
    words = ["compile", "--arch", arch, "--dtype", "fp16", "--head-dim", 64, "--kernel", "forward/portable"]
    first = with_cache(*words)
    assert first and all(k["compiled"] and k["registers"] > 0 and k["spill_bytes"] == 0 for k in first)
    assert not any(k["compiled"] for k in with_cache(*words))
    listed = with_cache("cache")
    assert listed["intact"] and len(listed["files"]) == len(first)
    assert all(arch in file["kernel"] for file in listed["files"])
    size = with_cache("cache", "size")
    assert size["kernels"] == len(first) and size["bytes"] == sum(file["bytes"] for file in listed["files"]) > 0


@pytest.mark.usefixtures("nvrtc")
def test_a_damaged_file_is_found_and_clear_removes_it(with_cache):
    with_cache("compile", "--arch", "sm_80", "--dtype", "fp16", "--kernel", "forward/portable")
    path = with_cache("cache")["files"][0]["path"]
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"damage")
    assert not with_cache("cache", "verify", code=1)["intact"]
    assert with_cache("cache", "clear")["freed_bytes"] > 0
    assert with_cache("cache")["files"] == []


@pytest.mark.usefixtures("nvrtc")
def test_compile_fails_where_nothing_can_be_kept(with_cache, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)  # others could put their code there
    done = with_cache("compile", "--arch", "sm_80", "--dtype", "fp16", "--kernel", "forward/portable", code=1)
    assert done[0]["compiled"] and done[0]["path"] == ""


def test_the_emulator_runs_without_a_cache(with_cache, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    words = ["--device", "emulator", "--kernel", "forward/portable", "--seq-q", 8, "--heads", 1, "--head-dim", 8]
    with_cache("run", *words)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cpu_has_nothing_to_compile(command):
    done = subprocess.run([command.path, "compile", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "--device: got cpu, allowed: cuda" in done.stderr


def test_passes_of_derivatives_have_plans(command):
    for flag, kernel in (("--tangent", "cpu/tangent"), ("--second", "cpu/second")):
        assert command.json("plan", flag, "--seq-q", 64, "--device", "cpu")["plan"]["kernel"] == kernel


def test_a_tile_can_be_set_and_is_refused_by_name(command):
    words = ["plan", "--device", "cuda", "--arch", "sm_80", "--dtype", "bf16", "--head-dim", "64"]
    plan = command.json(*words, "--tile", "32,96")["plan"]
    assert (plan["kernel"], plan["block_q"], plan["block_kv"]) == ("forward/sm80", 32, 96)
    for kernel in ("forward/sm80@32x96", "@32x96"):
        assert command.json(*words, "--kernel", kernel)["plan"] == plan | {"candidates": ANY}
    assert "NAME@QxKV: got '32', allowed: two whole numbers" in command(*words, "--kernel", "@32", code=2).stderr
    assert "tile: got (48, 64), allowed are 32, 64 and 128 queries" in command(*words, "--tile", "48,64", code=2).stderr
    assert "--tile: got '48', allowed: two whole numbers" in command(*words, "--tile", "48", code=2).stderr


def test_wheels_have_the_main_kernel_of_programs_that_hide_keys(command, tmp_path):
    """It is one for all of them: a new program compiles the kernel that makes its words alone. By a stand-in for NVRTC."""
    stand_in = command.path.parent / "fakes" / "libfake_nvrtc_13.so"
    if not stand_in.exists():
        pytest.skip("no tests are built here")
    settings = {**os.environ, "FLASH_ATTENTION_NVRTC": str(stand_in), "FLASH_ATTENTION_CACHE_DIR": str(tmp_path / "cache")}

    def kernels(*words):
        done = command("compile", *words, "--device", "cuda", "--arch", "sm_90", "--json", env=settings)
        return {kernel["kernel"] for kernel in json.loads(done.stdout)}

    shape = ["--dtype", "bf16", "--head-dim", 128, "--heads", 8, "--seq-q", 8192]
    core = kernels("--core")
    for mask in ("documents:300", "prefix:77", "documents_both:1000"):
        new = kernels(*shape, "--mask", mask) - core
        assert [kernel.split()[0] for kernel in new] == ["mask/tile_map"], mask
