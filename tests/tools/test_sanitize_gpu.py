"""tools/sanitize_gpu.py with a sanitizer that is not one: what it runs, and what it makes of the outcome."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import sanitize_gpu  # noqa: E402
from sanitize_gpu import Run, attempt  # noqa: E402


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_every_kernel_has_the_suite_that_its_tests_are_in():
    own = {kernel: re.search(r"\w+(?=\.)", tests)[0] for kernel, tests in sanitize_gpu.OWN_CASES.items()}
    for kernel, suite in {**sanitize_gpu.SUITES, **own}.items():
        files = (ROOT / "tests/kernels" / kernel.split("/")[0]).glob("*_gpu_test.cpp")
        text = "".join(path.read_text() for path in files)
        assert re.search(rf"^TEST_P\({suite}, ", text, re.MULTILINE), kernel


def test_cases_are_those_of_the_contract():
    text = "".join((ROOT / "tests/support/cases" / name).read_text() for name in ("contract_cases.cpp", "cache_cases.cpp"))
    for case in sanitize_gpu.CASES:
        assert f'"{case}' in text, case


def test_what_a_run_says(tmp_path):
    def outcome(text, limit_s=20):
        return attempt(Run("memcheck", "forward/sm80", (program(tmp_path, "sanitizer", text),)), limit_s)

    assert outcome("echo '[  PASSED  ] 3 tests.'") == ""
    assert outcome("echo 'no difference'") == ""
    assert outcome("echo '[  PASSED  ] 0 tests.'") == "no test ran"
    found = outcome(f"echo '========= Invalid __global__ read of size 4 bytes'; exit {sanitize_gpu.REPORTED}")
    assert found.startswith("reported") and "Invalid __global__ read" in found
    assert "exit code 1" in outcome("echo '[  FAILED  ] x'; exit 1")
    assert "not finished" in outcome("exec sleep 5", limit_s=0.2)


def test_kernels_are_compiled_without_the_sanitizer_first(tmp_path):
    bare = (program(tmp_path, "test", f"echo once >> {tmp_path}/ran"),)
    runs = [Run(tool, "forward/sm80", ("no-such-sanitizer", *bare), bare) for tool in sanitize_gpu.TOOLS]
    sanitize_gpu.compile_kernels(runs, 20, 2)
    assert (tmp_path / "ran").read_text() == "once\n"
    for run in sanitize_gpu.runs("sanitizer", list(sanitize_gpu.TOOLS), ["forward/sm80"], 5):
        assert run.command[-len(run.bare) :] == run.bare


def test_without_a_sanitizer_it_says_so():
    command = [sys.executable, ROOT / "tools/sanitize_gpu.py", "--sanitizer", "no-such-sanitizer"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "CUDA toolkit" in done.stderr


def test_the_list_has_every_tool_and_kernel():
    command = [sys.executable, ROOT / "tools/sanitize_gpu.py", "--list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():  # of several processes the sanitizer would watch none that works
        assert "stress" not in line or "--jobs 1" in line
    for tool in sanitize_gpu.TOOLS:
        assert listing.count(f"--tool {tool}") >= len(sanitize_gpu.SUITES)
