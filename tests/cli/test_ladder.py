"""`flash-attention ladder` on a machine without a GPU: every rung emulated, counted and compared; differences; refusals."""

import pytest


@pytest.fixture(scope="module")
def rungs(tmp_path_factory):
    from conftest import Command

    return {
        result["kernel"]: result
        for result in Command().json("ladder", "--device", "emulator", "--seq", 96, "--head-dim", 64)["results"]
    }


def test_every_rung_is_right(rungs):
    assert "ladder/00_standard" in rungs
    assert all(rung["ok"] and rung["accuracy"] for rung in rungs.values())


def test_flops_are_counted(rungs):
    """Each score costs two operations an element for S and two for O; padding and softmax come on top."""
    for name, rung in rungs.items():
        counted = sum(rung["counters"][kind] for kind in ("fma_flops", "mma_flops", "wgmma_flops"))
        assert rung["flops"] <= counted <= 6 * rung["flops"], name


def test_coalescing_and_tiles_save_bytes(rungs):
    sectors = {name: rung["counters"]["global_sectors"] for name, rung in rungs.items()}
    assert sectors["ladder/02_coalesced"] < sectors["ladder/01_naive"] / 4
    assert sectors["ladder/03_row_tile"] < sectors["ladder/02_coalesced"] / 4


def test_diff(command):
    text = command("ladder", "--diff", "00", "01").stdout
    assert text.startswith("--- kernels/ladder/00_standard.cu\n+++ kernels/ladder/01_naive.cu\n")
    assert "-// The idea:  the textbook" in text and "+// The idea:  online softmax" in text


def test_diff_with_itself_is_empty(command):
    assert len(command("ladder", "--diff", "01", "01").stdout.splitlines()) == 2


def test_refusals(command):
    assert "ladder: got 'zz', allowed: 00_standard" in command("ladder", "zz", code=2).stderr
    assert "--diff: got 1 rungs" in command("ladder", "--diff", "01", code=2).stderr
    assert "no place for the table" in command("ladder", "--update", "--root", "/nonexistent", code=2).stderr


def test_steps_on_the_cpu(command):
    results = command.json("ladder", "--device", "cpu", "--seq", 100, "--causal", "--seconds", 0.01)["results"]
    names = [result["kernel"] for result in results]
    assert names == ["ladder/c0_scalar", "ladder/c1_blocked", "ladder/c2_simd", "ladder/c3_threads", "cpu/prefill"]
    for result in results:
        assert result["ok"] and result["time"]["samples"] >= 1
        assert result["best_flops_per_second"] > 0 and result["peak_flops_per_second"] > 0


def test_a_step_of_the_cpu_needs_no_device(command):
    text = command("ladder", "c1", "--seq", 64, "--seconds", 0.01).stdout
    assert "ladder/c1_blocked" in text and "cpu/prefill" in text and "ladder/c0_scalar" not in text
    assert "c1_blocked   online softmax" in text


def test_diff_of_the_cpu(command):
    text = command("ladder", "--diff", "c2", "c3").stdout
    assert text.startswith("--- src/cpu/ladder/c2_simd.h\n+++ src/cpu/ladder/c3_threads.h\n")
    assert 10 <= sum(line.startswith("+") for line in text.splitlines()) <= 20


def test_a_rung_on_the_wrong_device(command):
    assert "none of the named rungs runs" in command("ladder", "03", "--device", "cpu", code=2).stderr
    assert "none of the named rungs runs" in command("ladder", "c0", "--device", "emulator", code=2).stderr
