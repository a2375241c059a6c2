"""`flash-attention ladder` on a machine without a GPU: rungs emulated, counted and compared; differences; refusals."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_LONG_TAIL = os.environ.get("FLASH_ATTENTION_TEST_ALL") == "1"

counted_once = {}


@pytest.fixture
def rungs(command):
    if not counted_once:
        some = () if WITH_LONG_TAIL else ("00", "01", "02", "03", "07", "13", "b0", "d0")
        flags = {**os.environ, "FLASH_ATTENTION_CXX_FLAGS": "-O0 -g0"}  # to compile takes longer than to run
        words = ("ladder", *some, "--device", "emulator", "--seq", 96, "--head-dim", 64)
        results = command.json(*words, env=flags)["results"]
        counted_once.update({result["kernel"]: result for result in results})
    return counted_once


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
    assert "--update: got single rungs" in command("ladder", "06", "--update", code=2).stderr
    assert "--diff: got 1 rungs" in command("ladder", "--diff", "01", code=2).stderr
    assert "no place for the table" in command("ladder", "--update", "--root", "/nonexistent", code=2).stderr


def test_steps_on_the_cpu(command):
    results = command.json("ladder", "--device", "cpu", "--seq", 100, "--causal", "--seconds", 0.01)["results"]
    names = [result["kernel"] for result in results]
    assert names == ["ladder/c0_scalar", "ladder/c1_blocked", "ladder/c2_simd", "ladder/c3_threads", "cpu/prefill"]
    for result in results:
        assert result["ok"] and result["time"]["samples"] >= 1
        assert result["best_flops_per_second"] > 0 and result["peak_flops_per_second"] > 0


@pytest.mark.long_tail  # measures the peaks again
def test_a_step_of_the_cpu_needs_no_device(command):
    text = command("ladder", "c1", "--seq", 64, "--seconds", 0.01).stdout
    assert "ladder/c1_blocked" in text and "cpu/prefill" in text and "ladder/c0_scalar" not in text
    assert "c1_blocked   online softmax" in text


def test_diff_of_the_cpu(command):
    text = command("ladder", "--diff", "c2", "c3").stdout
    assert text.startswith("--- src/cpu/ladder/c2_simd.h\n+++ src/cpu/ladder/c3_threads.h\n")
    assert "\n-namespace c2_simd {\n+namespace c3_threads {\n" in text


def test_a_rung_on_the_wrong_device(command):
    assert "none of the named rungs runs" in command("ladder", "03", "--device", "cpu", code=2).stderr
    assert "none of the named rungs runs" in command("ladder", "c0", "--device", "emulator", code=2).stderr


def measured(rung, heads, seq, causal, tflops):
    case = {"batch": 4 if seq == 4096 else 1, "seq": seq, "heads": heads, "head_dim": 128, "heads_kv": heads}
    case |= {"causal": causal, "dtype": "bfloat16", "window": 0, "dropout_p": 0.0, "lengths": []}
    row = {"case": case, "baseline": f"ladder/{rung}", "pass": "forward"}
    return row | {"ms": 1.0, "p10": 1.0, "p90": 1.0, "samples": 3, "tflops": tflops}


def test_update_writes_the_table_and_the_plots(command, tmp_path):
    for folder in ("kernels/ladder", "bench/results/h200", "docs/ladder"):
        (tmp_path / folder).mkdir(parents=True)
    for script in ("visualize_ladder.py", "package.py", "cases.py"):
        (tmp_path / "bench" / script).write_text((ROOT / "bench" / script).read_text())
    (tmp_path / "python").symlink_to(ROOT / "python")
    (tmp_path / "bench" / "report").symlink_to(ROOT / "bench" / "report")
    page = tmp_path / "kernels/ladder/README.md"
    page.write_text((ROOT / "kernels/ladder/README.md").read_text())
    rows = [measured("00_standard", 16, 4096, False, 2.0), measured("01_naive", 16, 4096, False, 5.0)]
    rows += [measured("01_naive", 16, 4096, True, 2.5), measured("01_naive", 16, 512, False, 4.0)]
    head = {"format": "flash_attention.results/1", "kind": "speed", "machine": {"device": "NVIDIA Test"}}
    head |= {"versions": {}, "commit": "", "date": "", "command": "", "rows": rows}
    (tmp_path / "bench/results/h200/ladder.json").write_text(json.dumps(head))
    before = page.read_text()
    command("ladder", "--update", "--root", tmp_path, "--device", "emulator")
    table = {line.split("]")[0][3:]: line for line in page.read_text().splitlines() if line.startswith("| [")}
    assert table["01_naive"].endswith("| 5.00 | 2.50 | 2.50 x | - |") and "| 2.00 | - |" in table["00_standard"]
    assert "NVIDIA Test" in page.read_text() and page.read_text().startswith(before[:200])
    images = {image.stem: image.read_text() for image in (tmp_path / "docs/ladder/images").glob("*.svg")}
    assert len(images) == 2 and all("16 heads" in image for image in images.values())
    assert all(
        bar in images["ladder_staircase"] for bar in ("ours, 00: 2<", "ours, 01: 5<")
    )  # of each rung that was measured


EXERCISES = {"01": "error    out", "02": "error    out", "03": "race: writes", "04": "error    out", "06": "error    out"}
EXERCISES |= {"09": "copy_async of thread", "10": "error    out", "13": "dead-lock", "b1": "error    dk"}
RUNG_FILES = {rung.name[: rung.name.index("_")]: rung for rung in (ROOT / "kernels/ladder").rglob("*_*.cu")}
FAST = {**os.environ, "FLASH_ATTENTION_CXX_FLAGS": "-O0 -g0"}


def exercise(command, folder, word, *flags, code=0):
    return command("ladder", "--exercise", word, "--folder", folder, *flags, env=FAST, code=code)


@pytest.mark.parametrize("word", EXERCISES)
def test_an_exercise_is_the_rung_with_one_change(command, tmp_path, word):
    folder, original = tmp_path / "work", RUNG_FILES[word]
    text = exercise(command, folder, word).stdout
    copy = folder / original.relative_to(ROOT)
    assert str(copy) in text and f"--exercise {word} --check" in text and "?" in text
    changed = [line for line in copy.read_text().splitlines() if line not in original.read_text().splitlines()]
    assert len(changed) <= 1 and copy.read_text() != original.read_text()
    other = [file for file in (folder / "kernels").rglob("*.cu*") if file != copy]
    assert len(other) > 100
    assert all(file.read_text() == (ROOT / file.relative_to(folder)).read_text() for file in other)


@pytest.mark.parametrize(
    "word", [word if word in ("02", "03") else pytest.param(word, marks=pytest.mark.long_tail) for word in EXERCISES]
)
def test_an_exercise_is_found_wrong_and_then_repaired(command, tmp_path, word):
    folder, original = tmp_path / "work", RUNG_FILES[word]
    exercise(command, folder, word)
    wrong = exercise(command, folder, word, "--check", code=1).stdout
    assert "is not repaired. This call is wrong:" in wrong and EXERCISES[word] in wrong
    assert f"FLASH_ATTENTION_KERNEL_DIR={folder}/kernels FLASH_ATTENTION_EMULATOR_SEED=" in wrong
    copy = folder / original.relative_to(ROOT)
    copy.write_text(original.read_text())
    assert "is right: full and causal, in 3 orders" in exercise(command, folder, word, "--check").stdout
    copy.write_text(original.read_text().replace("// The idea:", "not C++"))
    assert "error:" in exercise(command, folder, word, "--check", code=1).stdout


def test_another_repair_is_right_too(command, tmp_path):
    exercise(command, tmp_path / "work", "02")
    copy = tmp_path / "work/kernels/ladder/02_coalesced.cu"
    repaired = copy.read_text().replace("window_right ? i :", "window_right ? args.seq_kv - (args.seq_q - i) :")
    assert repaired != copy.read_text()
    copy.write_text(repaired)
    assert "not word for word the library's" in exercise(command, tmp_path / "work", "02", "--check").stdout


def test_refusals_of_exercises(command, tmp_path):
    assert "--exercise: got '05', allowed: 01, 02, 03" in exercise(command, tmp_path / "a", "05", code=2).stderr
    assert "there is no" in exercise(command, tmp_path / "a", "03", "--check", code=2).stderr
    exercise(command, tmp_path / "a", "03")
    assert "may hold your work" in exercise(command, tmp_path / "a", "03", code=2).stderr
    assert "allowed with --exercise RUNG" in command("ladder", "--check", code=2).stderr
    assert "got rungs beside it" in command("ladder", "06", "--exercise", "03", code=2).stderr
    assert "--folder: /proc/none" in exercise(command, "/proc/none", "03", code=2).stderr
