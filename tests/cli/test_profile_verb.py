"""profile with a stand-in for Nsight Compute and for the driver; report without and with the package."""

import os
import sys

import pytest

STALL = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
NAMES = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", STALL, "sm__cycles_elapsed.max")
ANSWER = f"""==PROF== Connected to process 1
"ID","Kernel Name",{",".join(f'"{name}"' for name in NAMES)}
"","","usecond","Mbyte","byte","inst","cycle"
"0","first 'half'","10.0","1.5","2,000","0.25","1,000"
"1","kernel","1,000.0","100","1000000","n/a","1,749,000"
"""


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


@pytest.fixture
def on_a_fake_gpu(command, tmp_path):
    driver = command.path.parent / "fakes" / "libfake_cuda.so"
    if not driver.exists():
        pytest.skip("the stand-in for the driver is not built")
    environment = {**os.environ, "PATH": str(tmp_path), "FLASH_ATTENTION_DRIVER": str(driver)}
    return lambda *words, code=0: command("profile", "--device", "cuda", *words, code=code, env=environment)


def test_counters_stand_beside_the_prediction(on_a_fake_gpu, tmp_path):
    program(tmp_path, "ncu", f'echo "$@" > {tmp_path}/asked\n/bin/cat <<END\n{ANSWER}END\n')
    text = on_a_fake_gpu("forward/sm90", "--dtype", "bf16", "--heads", 16, "--seq-q", 4096, "--head-dim", 128).stdout
    assert "kernel   forward/sm90" in text and "first 'half'" in text and "barrier 0.25" in text
    flops, tensors = 4 * 16 * 4096 * 4096 * 128, 4 * 16 * 4096 * 128 * 2
    assert f"the call: 1.010 ms, {flops / 1.01e-3 / 1e12:.1f} TFLOP/s" in text
    assert f"DRAM traffic 102.5 MB; predicted {tensors / 1e6:.4g} MB" in text
    assert f"predict {100 * flops / (132 * 4096 * 1.75e6):.1f} % of its peak" in text
    asked = (tmp_path / "asked").read_text()
    assert all(name in asked for name in NAMES) and "--launch-skip" not in asked
    words = asked.split()[asked.split().index("--target") + 1 :]
    assert words[0] == "forward/sm90" and words[words.index("--head-dim") + 1] == "128" and "--json" not in words


def test_a_backward_kernel_is_counted_without_its_forward_pass(on_a_fake_gpu, tmp_path):
    program(tmp_path, "ncu", f'echo "$@" > {tmp_path}/asked\n/bin/cat <<END\n{ANSWER}END\n')
    assert "backward/portable" in on_a_fake_gpu("backward/portable").stdout
    assert "--launch-skip 1 " in (tmp_path / "asked").read_text()


def test_what_is_missing_is_said(on_a_fake_gpu, command, tmp_path):
    assert "ncu: not found; install Nsight Compute" in on_a_fake_gpu(code=3).stderr
    program(tmp_path, "ncu", "echo ERR_NVGPUCTRPERM >&2\nexit 1\n")
    assert "ERR_NVGPUCTRPERM" in on_a_fake_gpu(code=3).stderr
    program(tmp_path, "ncu", "echo nothing\n")
    assert "ncu: reported no launch" in on_a_fake_gpu(code=3).stderr
    assert "counts on NVIDIA GPUs alone" in command("profile", "--device", "cpu", code=3).stderr


def test_report_says_what_it_needs(command, tmp_path):
    assert "report: got no file" in command("report", code=2).stderr
    file = tmp_path / "a.json"
    file.write_text("{}")
    nothing = {**os.environ, "PATH": str(tmp_path)}
    assert "there is no python3 on the PATH" in command("report", str(file), code=3, env=nothing).stderr
    program(tmp_path, "python3", "exit 1\n")
    assert "does not find the flash_attention package" in command("report", str(file), code=3, env=nothing).stderr


def test_report_hands_over(command, tmp_path):
    program(tmp_path, "python3", f'[ "$1" = -c ] && exit 0\necho "$@"\nexec {sys.executable} -c "raise SystemExit(2)"\n')
    environment = {**os.environ, "PATH": str(tmp_path)}
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        file.write_text("{}")
    done = command("report", *map(str, files), "--output", "x.html", "--force", code=2, env=environment)
    assert done.stderr.strip() == f"-m flash_attention report {files[0]} {files[1]} --output x.html --force"
