"""Profiling with a stand-in for Nsight Compute: what is asked of it, and what becomes of its answer."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
profile_kernel = pytest.importorskip("profile_kernel")
from cases import Case  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "profile_kernel.py"
STALL = profile_kernel.STALL_COUNTER.format("barrier")
NAMES = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "launch__registers_per_thread", STALL)
ANSWER = f"""==PROF== Connected to process 1
"ID","Kernel Name",{",".join(f'"{name}"' for name in NAMES)}
"","","usecond","Mbyte","byte","register/thread","inst"
"0","delta","10.0","1.5","2,000","32","0.1"
"1","kernel","1,000.0","100","1000000","168","n/a"
"""


def test_numbers_and_units():
    first, second = profile_kernel.parse(ANSWER)
    assert first["kernel"] == "delta" and first["gpu__time_duration.sum"] == pytest.approx(10_000)
    assert first["dram__bytes_read.sum"] == pytest.approx(1.5e6) and first["dram__bytes_write.sum"] == 2000
    assert second["gpu__time_duration.sum"] == pytest.approx(1e6) and second[STALL] is None
    with pytest.raises(ValueError, match="ncu: reported no launch"):
        profile_kernel.parse("==PROF== nothing")


def test_the_call_is_set_beside_the_formulas():
    case = Case(4, 4096, 16, 128)
    text = "\n".join(profile_kernel.lines_of(profile_kernel.parse(ANSWER), case, "forward"))
    tflops = case.flops("forward") / 1.01e-3 / 1e12
    assert f"the call: 1010 us, {tflops:.4g} TFLOP/s" in text
    assert f"102.5 MB; every tensor once would be {case.bytes('forward') / 1e6:.4g} MB" in text
    assert "barrier 0.10" in text and text.count("tensor pipe                -") == 2


@pytest.fixture
def run(warm_python, tmp_path):
    """The script; programs are found in the test's folder alone."""
    return lambda *arguments: warm_python(SCRIPT, *arguments, PATH=str(tmp_path))


def test_with_a_stand_in(run, tmp_path):
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n/bin/cat <<END\n{ANSWER}END\n')
    ncu.chmod(0o755)
    done = run("sdpa_flash", "--seq", "1024", "--mask", "causal")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sdpa_flash, forward, B1 L1024 H16 D128 bfloat16 causal\n") and "the call:" in done.stdout
    asked = (tmp_path / "asked").read_text()
    assert "--profile-from-start off" in asked and asked.rstrip().endswith("sdpa_flash --seq 1024 --mask causal --target")
    assert all(counter in asked for counter in profile_kernel.COUNTERS)
    ncu.write_text("#!/bin/sh\necho no permission >&2\nexit 1\n")
    done = run("sdpa_flash")
    assert done.returncode == 2 and "ncu: failed" in done.stderr and "no permission" in done.stderr


def test_without_nsight_compute_it_says_so(run):
    done = run("sdpa_flash")
    assert done.returncode == 2 and "ncu: not found; allowed: Nsight Compute on the PATH" in done.stderr
