"""The verbs that compute: run, bench, plan, doctor."""

import json
import os
import pty
import signal
import subprocess
import time

import pytest

SMALL = ["--device", "cpu", "--seq-q", "70", "--heads", "4", "--head-dim", "32"]


@pytest.mark.parametrize("dtype", ["float32", "fp16", "bf16"])
@pytest.mark.parametrize("backward", [[], ["--backward"]])
@pytest.mark.parametrize("standard", [[], ["--standard"]])
def test_run_is_right(command, dtype, backward, standard):
    result = command.json("run", *SMALL, "--causal", "--kv-heads", 2, "--dtype", dtype, *backward, *standard)
    assert result["ok"] and result["kernel"] and result["time"]["samples"] >= 1
    assert [a["tensor"] for a in result["accuracy"]] == (["dq", "dk", "dv"] if backward else ["out", "lse"])
    assert all(0 < a["relative_rms"] < a["allowed"] for a in result["accuracy"])


@pytest.mark.parametrize(
    "option",
    [
        ["--window", "20,5"],
        ["--softcap", "3"],
        ["--alibi"],
        ["--dropout", "0.2"],
        ["--seq-kv", "33"],
        ["--head-dim-v", "64"],
        ["--mask", "documents:20"],
        ["--mask", "documents_both:30", "--kv-heads", "2"],
        ["--mask", "prefix:9"],
        ["--mask", "sink_window:3,12"],
        ["--mask", "dilated:30,3", "--causal"],
        ["--key-indices", "9"],
        ["--key-indices", "100", "--kv-heads", "2", "--list-heads", "2", "--causal", "--seq-kv", "90"],
        ["--key-blocks", "3", "--key-block-size", "16,8", "--list-heads", "4"],
        ["--key-blocks", "2", "--key-block-size", "1,16", "--causal", "--seq-kv", "50"],
        ["--key-indices", "0"],
    ],
)
@pytest.mark.parametrize("backward", [[], ["--backward"]])
def test_every_option_of_run(command, option, backward):
    assert command.json("run", *SMALL, *option, *backward)["ok"]


@pytest.mark.parametrize(
    "sizes",
    [
        ["--batch", "0", "--seq-q", "64"],
        ["--seq-q", "0", "--seq-kv", "64"],
        ["--seq-q", "64", "--seq-kv", "0"],
        ["--seq-q", "1", "--seq-kv", "1"],
    ],
)
def test_empty_and_tiny_problems(command, sizes):
    words = ["--device", "cpu", "--heads", "2", *sizes]
    assert command.json("run", *words)["ok"]
    assert command.json("run", *words, "--backward")["ok"]


def test_masks_count_what_they_show(command):
    """Four documents of a quarter: their triangles have a quarter of the causal pairs, and a bit of the diagonal."""
    words = ["--device", "cpu", "--heads", "2", "--seq-q", "256", "--head-dim", "16"]
    causal = command.json("run", *words, "--causal")["flops"]
    shown = command.json("run", *words, "--mask", "documents:64")["flops"]
    assert shown / causal == pytest.approx(4 * 64 * 65 / (256 * 257))


def test_flops_of_a_mask_inside_of_chunks(command):
    """Chunks of 64 and documents of 64 hide the same pairs."""
    words = ["--device", "cpu", "--seq-q", 256, "--no-check", "--chunk", 64]
    plain, masked = (command.json("run", *words, *mask)["flops"] for mask in ([], ["--mask", "documents_both:64"]))
    assert plain == pytest.approx(masked)


@pytest.mark.parametrize("text", ["documents", "documents:0", "documents:3,4", "dilated:3", "rings:3", "prefix:x"])
def test_masks_that_do_not_exist(command, text):
    result = command("run", *SMALL, "--mask", text, code=2)
    assert f"--mask: got '{text}', allowed: documents:LENGTH" in result.stderr


def test_run_says_it_in_words(command):
    lines = command("run", *SMALL).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "problem",
        "device",
        "kernel",
        "time",
        "speed",
        "memory",
        "error",
        "error",
    ]
    assert lines[-1].endswith("ok")


def test_flash_needs_far_less_memory_than_standard(command):
    sizes = ["--device", "cpu", "--seq-q", "2048", "--heads", "4", "--no-check"]
    flash, standard = command.json("run", *sizes), command.json("run", *sizes, "--standard")
    assert standard["peak_extra_bytes"] >= 4 * 2048 * 2048 * 4
    assert flash["peak_extra_bytes"] < standard["peak_extra_bytes"] / 10


def test_bench_writes_what_it_prints(command, tmp_path):
    path = tmp_path / "bench.json"
    done = command("bench", "lengths", *SMALL, "--seconds", "0", "--save", path)
    report = json.loads(path.read_text())
    assert report["complete"] and [r["pass"] for r in report["results"]] == ["standard_forward", "forward"]
    assert all(r["ok"] and r["fraction_of_peak"] > 0 for r in report["results"])
    assert report["peaks"]["flops_per_second"] > 0 and report["peaks"]["read_bytes_per_second"] > 0
    for result in report["results"]:
        assert result["kernel"] in done.stdout


def test_interrupt_keeps_what_was_measured(command, tmp_path):
    path = tmp_path / "bench.json"
    process = subprocess.Popen(
        [command.path, "bench", "forward", "--device", "cpu", "--seconds", "2", "--save", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and '"kernel"' in path.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    report = json.loads(path.read_text())
    assert not report["complete"] and report["results"]
    assert report["results"][0]["kernel"] in stdout
    assert stderr == "", "progress is for terminals"


def test_progress_is_shown_on_a_terminal_only(command):
    leader, follower = pty.openpty()
    process = subprocess.Popen([command.path, "run", *SMALL], stdout=subprocess.PIPE, stderr=follower)
    process.communicate(timeout=60)
    os.close(follower)
    assert b"running" in os.read(leader, 4096)
    os.close(leader)
    assert command("run", *SMALL).stderr == ""


def test_plan_says_why(command):
    plan = command.json("plan", "--device", "cuda", "--arch", "sm_90", "--dtype", "bf16", "--head-dim", 128)["plan"]
    assert plan["candidates"][-1] == {"kernel": plan["kernel"], "rejected_because": ""}
    assert all(c["rejected_because"] for c in plan["candidates"][:-1])
    assert plan["launches"] and all(launch["grid"][0] >= 1 for launch in plan["launches"])


def test_every_listed_kernel_can_be_planned_by_name(command):
    for kernel in command.json("plan", "--list"):
        words = ["--device", kernel["device"], "--kernel", kernel["kernel"], "--dtype", "bf16", "--head-dim", 64]
        words += ["--arch", "sm_90"] if kernel["device"] == "cuda" else []
        words += ["--backward"] if kernel["pass"].endswith("backward") else []
        words += ["--standard"] if kernel["pass"].startswith("standard") else []
        done = subprocess.run([command.path, "plan", *map(str, words)], capture_output=True, text=True)
        assert done.returncode in (0, 2), done.stderr
        assert kernel["kernel"] in done.stdout + done.stderr


def test_doctor_is_healthy(doctors_report):
    report = doctors_report
    assert report["healthy"]
    tests = [f for f in report["findings"] if f["subject"].startswith("self-test cpu")]
    assert len(tests) == 6 and all(f["ok"] for f in tests)


def test_the_emulator_counts_and_never_shows_a_time(command):
    words = ["run", "--device", "emulator", "--arch", "sm_80", "--seq-q", "40", "--heads", "1", "--dtype", "fp16"]
    result = command.json(*words)
    assert result["ok"] and "time" not in result and "flops_per_second" not in result
    assert result["counters"]
    assert "time " not in command(*words).stdout
