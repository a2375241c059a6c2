"""`flash-attention stress`: what it reports, and that a problem is the same when it is asked for again."""

import json
import os
import shutil


def test_the_report_counts(command):
    report = command.json("stress", "--device", "cpu", "--problems", 12)
    assert report["problems"] == 12 and report["differences"] == []
    assert sum(report["kernels"].values()) == report["calls"] >= 2 * 12  # twice, and backward where there is one


def test_a_problem_can_be_repeated(command):
    reports = [command.json("stress", "--device", "cpu", "--seed", 5, "--problem", 7) for _ in range(2)]
    assert reports[0]["problems"] == 1 and reports[0]["kernels"] == reports[1]["kernels"]


def test_an_unknown_kernel_is_named(command):
    assert "there is no kernel 'forward/none'" in command("stress", "--kernel", "forward/none", code=2).stderr


def test_a_difference_is_told_with_its_command(command, tmp_path):
    """In the emulator, by the tree's kernels with one line changed: ALiBi, softcap and bias are applied to half a score."""
    for part in ("kernels", "src/emulator/runtime"):
        shutil.copytree(command.path.parents[2] / part, tmp_path / part)
    score = tmp_path / "kernels/tile/score.cuh"
    text = score.read_text()
    assert "args.scale" in text
    score.write_text(text.replace("args.scale", "(args.scale * 0.5f)"))
    environment = {**os.environ, "FLASH_ATTENTION_KERNEL_DIR": str(tmp_path / "kernels")}
    flags = ["--device", "emulator", "--arch", "sm_80", "--kernel", "forward/portable", "--problems", 8, "--json"]
    report = json.loads(command("stress", *flags, code=1, env=environment).stdout)
    difference = report["differences"][0]
    assert difference["lines"] and "--kernel forward/portable --seed 1 --problem" in difference["command"]
