"""Runs a slice of the GPU's tests and of `stress` under compute-sanitizer: memcheck, racecheck, synccheck.

    tools/sanitize_gpu.py                        all of it; needs a GPU and compute-sanitizer (of the CUDA toolkit)
    tools/sanitize_gpu.py --tool memcheck        one of its tools (may be repeated)
    tools/sanitize_gpu.py --kernel forward/sm90  one kernel (may be repeated)
    tools/sanitize_gpu.py --jobs 8               so many runs side by side
    tools/sanitize_gpu.py --list                 the commands, run none
    tools/sanitize_gpu.py --built                with the programs that are in build/release, built elsewhere

Each kernel goes through a few telling cases of its contract, each pass through some problems of the covering arrays: first
without the sanitizer, under which NVRTC would take minutes, so that all kernels are in the cache. A run that takes longer
than --limit seconds is stopped and counts as not finished. Exits with 1 if a report is not explained in docs/emulator.md,
or if a test failed; with 2 if nothing could run.
"""

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
TOOLS = ("memcheck", "racecheck", "synccheck")
REPORTED = 86  # the exit code of a program in which the sanitizer found something

# Kernel: the suite of its tests on a GPU. tests/tools/test_sanitize_gpu.py holds them against the sources.
SUITES = {
    "forward/portable": "ForwardPortable",
    "forward/sm80": "ForwardSm80",
    "forward/tf32": "ForwardTf32",
    "forward/fp32": "ForwardFp32",
    "forward/sm90": "ForwardSm90",
    "decode/sm80": "DecodeSm80",
    "decode/sm90": "DecodeSm90",
    "backward/portable": "BackwardPortable",
    "backward/sm80": "BackwardSm80",
    "backward/tf32": "BackwardTf32",
    "backward/fp32": "BackwardFp32",
    "backward/sm90": "BackwardSm90",
    "tangent/portable": "TangentPortable",
    "tangent/sm80": "TangentSm80",
    "tangent/sm90": "TangentSm90",
    "second/portable": "SecondPortable",
    "second/sm80": "SecondSm80",
    "second/sm90": "SecondSm90",
}
CASES = (
    "plain",
    "causal_square",
    "packed_causal",
    "packed_tail",
    "head_dim_128",
    "head_dim_256",
    "window",
    "nan_value",
    "everything",
    "paged",
    "paged_packed_queries",
    "left_padding",
)
# Suites with other cases, of which these are enough.
OWN_CASES = {
    "decode/append": "*/GpuAppend.*",
    "decode/narrow": "Bfloat16/NarrowKeysGpu.DecodeSm80/*",
    "decode/mla_sm90": "Bfloat16/DecodeMla.Gpu/*",
    "forward/sm90_fp8": "BFloat/ForwardSm90Fp8.*",
    "forward/sm89_fp8": "BFloat/ForwardSm89Fp8.*",
}
# Warps with different tasks meet at mbarriers, which racecheck does not follow.
UNFOLLOWED = ("forward/sm90", "backward/sm90", "decode/sm90", "decode/mla_sm90")
EXPLAINED = {("racecheck", kernel) for kernel in UNFOLLOWED}


@dataclasses.dataclass(frozen=True)
class Run:
    tool: str
    what: str
    command: tuple[str, ...]
    bare: tuple[str, ...] = ()  # the same without the sanitizer


def runs(sanitizer: str, tools: list[str], kernels: list[str], problems: int) -> list[Run]:
    found = []
    for tool in tools:
        start = (sanitizer, "--tool", tool, "--error-exitcode", str(REPORTED), "--print-limit", "20")
        for kernel in kernels:
            own = OWN_CASES.get(kernel)
            filters = own or ":".join(f"*/{SUITES[kernel]}.*/{case}_*float*" for case in CASES)
            bare = (str(BUILD / "tests" / "kernels_gpu_test"), f"--gtest_filter={filters}", "--gtest_brief=1")
            found.append(Run(tool, kernel, (*start, *bare), bare))
        # One process, which is the one that the sanitizer watches.
        stress = ("stress", "--device", "cuda", "--problems", str(problems), "--repeats", "1", "--jobs", "1")
        if tool != "racecheck" and set(kernels) >= set(SUITES):  # those kernels are among the planner's choice
            bare = (str(BUILD / "flash-attention"), *stress)
            found.append(Run(tool, "stress", (*start, *bare), bare))
    return found


def compile_kernels(runs: list[Run], limit_s: float, jobs: int) -> None:
    """All that the runs want is in the kernel cache afterwards. What fails will fail again, and is told then."""

    def one(command: tuple[str, ...]) -> None:
        try:
            subprocess.run(command, cwd=ROOT, capture_output=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            print(f"not finished after {limit_s:.0f} s without the sanitizer: {shlex.join(command)}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, dict.fromkeys(run.bare for run in runs)))


def attempt(run: Run, limit_s: float) -> str:
    """What was wrong; empty where nothing was."""
    try:
        done = subprocess.run(run.command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"not finished after {limit_s:.0f} s"
    output = done.stdout + done.stderr
    if done.returncode == 0:
        return "" if re.search(r"^\[  PASSED  \] [1-9]|^no difference", output, re.MULTILINE) else "no test ran"
    lines = [line for line in output.splitlines() if line.startswith("=========")]
    if done.returncode == REPORTED:
        return "reported:\n" + "\n".join(lines[:60])
    return f"exit code {done.returncode}\n" + "\n".join(output.splitlines()[-30:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--kernel", action="append", choices=[*SUITES, *OWN_CASES])
    parser.add_argument("--problems", type=int, default=60, help="of the covering arrays")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--built", action="store_true", help="build nothing")
    options = parser.parse_args()
    todo = runs(options.sanitizer, options.tool or list(TOOLS), options.kernel or [*SUITES, *OWN_CASES], options.problems)
    if options.list:
        print("\n".join(shlex.join(run.command) for run in todo))
        return 0
    if shutil.which(options.sanitizer) is None:
        print(f"{options.sanitizer} is not here; the CUDA toolkit has it (--sanitizer PATH)", file=sys.stderr)
        return 2
    programs = ("flash-attention", "kernels_gpu_test")
    if not options.built and subprocess.run(["tools/build.sh", "release", *programs], cwd=ROOT).returncode != 0:
        return 2

    def one(run: Run) -> bool:
        start = time.monotonic()
        found = attempt(run, options.limit)
        explained = found.startswith("reported") and (run.tool, run.what) in EXPLAINED
        outcome = "clean" if not found else "reports that docs/emulator.md explains" if explained else found
        print(f"{run.tool} {run.what}  {time.monotonic() - start:.0f} s: {outcome}", flush=True)
        return bool(found) and not explained

    compile_kernels(todo, options.limit, options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        wrong = sum(pool.map(one, todo))
    print(f"{len(todo)} runs, {wrong} with something to look at")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
