"""Builds and runs every test that can run on this machine; `make test` calls it.

The stages; `--only NAME` (may be repeated) takes some of them. Their jobs run three at a time, the longest first:

  includes  the table of allowed includes between rooms
  gtest     every file of GoogleTest tests in the release build: unit, compile, emulated, gpu
  pytest    tests/**/test_*.py: the Python package, the command, the install tree with the examples
  asan      unit tests under the address and undefined-behaviour sanitizers
  tsan      the tests that share memory between threads under the thread sanitizer
  torch     tests/python with the oldest and the newest torch that is supported; with --all or --only torch

The bounded fuzz run is one of the GoogleTest files, so it runs in `gtest` and again in `asan`.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import cpu_time
import torch_versions
from run_progress import Progress
from test_results import Result, failed, print_summary, read_cpu_seconds, read_junit

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "test-reports"
# Limits of CPU time, because elapsed time means little on a machine that does other work, too.
FILE_LIMIT_S = 900
LONG_TAIL_LIMIT_S = 4 * 3600
BUILD_LIMIT_S = PYTEST_LIMIT_S = 2 * 3600


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def includes() -> list[Result]:
    done = subprocess.run([sys.executable, "tools/check_includes.py"], cwd=ROOT, capture_output=True, text=True)
    return [
        Result("includes: table of allowed edges", "failed" if done.returncode else "passed", done.stdout + done.stderr)
    ]


# What builds with sanitizers take parts of from the release build (cmake/library.cmake).
WITHOUT_SANITIZERS = [f"flash_attention_{part}" for part in ("emulator", "oracle", "cold", "objects")]


def build(preset: str, targets: list[str], parallel: int | None = None) -> list[Result]:
    """Empty where the build succeeded."""
    environment = dict(os.environ)
    if preset != "release":
        environment["FLASH_ATTENTION_PLAIN_BUILD"] = str(ROOT / "build" / "release")
    if parallel is not None:
        environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(parallel)
    name = f"build {preset}"
    reason, output = cpu_time.run(name, ["tools/build.sh", preset, *targets], ROOT, environment, BUILD_LIMIT_S)
    return [failed(name, reason, output)] if reason else []


@dataclasses.dataclass(frozen=True)
class TestFile:
    """One file of GoogleTest tests, as CTest knows it."""

    name: str
    label: str
    target: str
    command: list[str]  # empty until the target is built
    environment: dict[str, str]


def test_files(preset: str) -> list[TestFile]:
    """Those of a configured build."""
    text = subprocess.run(
        ["ctest", "--test-dir", f"build/{preset}", "--show-only=json-v1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = []
    for test in json.loads(text)["tests"]:
        properties = {p["name"]: p["value"] for p in test["properties"]}
        environment = dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", []))
        label, target = sorted(properties["LABELS"], key=lambda text: text.endswith("_test"))
        found.append(TestFile(test["name"], label, target, test.get("command", []), environment))
    return found


def run_file(preset: str, test: TestFile) -> list[Result]:
    prefix = f"{test.label if preset == 'release' else preset}/{test.name}"
    report = REPORTS / preset / f"{test.name}.xml"
    report.unlink(missing_ok=True)
    command = [*test.command, f"--gtest_output=xml:{report}"]
    limit_s = LONG_TAIL_LIMIT_S if os.environ.get("FLASH_ATTENTION_TEST_ALL") else FILE_LIMIT_S
    reason, output = cpu_time.run(prefix, command, ROOT, {**os.environ, **test.environment}, limit_s)
    results = read_junit(report, prefix)
    if reason and not any(r.outcome == "failed" for r in results):
        results.append(failed(prefix, reason, output))  # the output ends with the test that was running
    if not reason and not results:
        results.append(Result(prefix, "failed", "ran, but reported no test"))
    return results


# A job has a name and gives results. Three run at a time, across all stages. If each stage waited for the one before, a
# core would wait for a seventh of the time. With one job for each of two cores they were idle for 6 to 9 % of it,
# because jobs sometimes wait: for a process, a lock, a time-out.
Job = tuple[str, Callable[[], list[Result]]]
JOBS_AT_A_TIME = 3

INSTALL = "python package"

# What takes longest comes first, so that no core waits for the last job: names of jobs begin with these. The package for
# Python is built before all of them, because pytest waits for it. CPU seconds on two cores of an EPYC (docs/lab/tests.md),
# from which the first run says how long it will take.
LONGEST = {
    INSTALL: 60,
    "asan": 105,
    "torch": 160,
    "pytest python": 160,
    "fuzz_cover_emulated": 40,
    "tsan": 80,
    "kernels_backward_": 9,
    "cpu_contract_": 9,
    "pytest": 12,
    "kernels_forward_sm90_": 9,
    "kernels_ladder_": 7,
    "jit_kernels_compile": 100,
    "kernels_": 6,
    "emulator_": 3,
    "": 0.7,
}


def rank(job: Job) -> int:
    return next(i for i, start in enumerate(LONGEST) if job[0].startswith(start))


def typical_seconds(name: str) -> float:
    return next(seconds for start, seconds in LONGEST.items() if name.startswith(start))


def side_by_side(jobs: list[Job]) -> list[Result]:
    """Results of all jobs. If the package for Python cannot be installed, or at Ctrl-C, all others stop at once."""
    progress = Progress([name for name, _ in jobs], typical_seconds, REPORTS / "seconds.json")
    results: list[Result] = []
    with ThreadPoolExecutor(max_workers=JOBS_AT_A_TIME) as pool:
        names = {pool.submit(progress.timed, *job): job[0] for job in sorted(jobs, key=rank)}
        try:
            for future in as_completed(names):
                results += future.result()
                if names[future] == INSTALL and future.result():
                    return results
        finally:
            if not all(future.done() for future in names):
                progress.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                cpu_time.stop_all()
    progress.keep()
    return results


def gtest() -> list[Job]:
    (REPORTS / "release").mkdir(parents=True, exist_ok=True)
    tests = test_files("release")
    if not Path("/dev/nvidiactl").exists():  # all tests for a GPU say that there is none: one process is enough for that
        programs = {test.target: test for test in tests if test.label == "gpu"}
        tests = [test for test in tests if test.label != "gpu"]
        tests += [dataclasses.replace(test, name=name, command=test.command[:1]) for name, test in programs.items()]
    return [(test.name, functools.partial(run_file, "release", test)) for test in tests]


INSTALLING = threading.Lock()


@functools.cache
def installed() -> list[Result]:
    reason, output = cpu_time.run(INSTALL, ["tools/install_python.sh"], ROOT, dict(os.environ), BUILD_LIMIT_S)
    return [failed(INSTALL, reason, output)] if reason else []


def install_python_package() -> list[Result]:
    """Empty where it succeeded. Whoever comes second waits."""
    with INSTALLING:
        return installed()


def pytest_groups() -> dict[str, list[str]]:
    """Files of Python tests that share a process, and with it the imports: those of a folder of tests/ and below it."""
    groups: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        groups.setdefault(path.relative_to(ROOT / "tests").parts[0], []).append(str(path.relative_to(ROOT)))
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def run_pytest(name: str, files: list[str], python: str = sys.executable) -> list[Result]:
    if install_python_package():
        return []  # that it failed is a result of its own
    prefix = f"pytest {name}"
    report = REPORTS / f"{prefix.replace(' ', '_')}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    reason, output = cpu_time.run(prefix, command, ROOT, dict(os.environ), PYTEST_LIMIT_S)
    results = read_junit(report, prefix)
    if reason in ("", "exit code 1", "exit code 5"):  # passed, a test failed, no test was chosen
        cpu_time.divide(prefix, read_cpu_seconds(report))
    else:
        results.append(failed(prefix, reason, output))
    return results


def pytest() -> list[Job]:
    REPORTS.mkdir(parents=True, exist_ok=True)
    groups = [(f"pytest {name}", functools.partial(run_pytest, name, files)) for name, files in pytest_groups().items()]
    return [(INSTALL, install_python_package), *groups]


def run_with_torch(version: str) -> list[Result]:
    if install_python_package():
        return []
    try:
        python = torch_versions.environment(version)
    except subprocess.CalledProcessError as error:
        return [failed(f"torch {version}", "its installation failed", error.stdout)]
    return run_pytest(f"torch {version}", ["tests/python"], str(python))


def with_torch_versions() -> list[Job]:
    jobs = [(f"torch {version}", functools.partial(run_with_torch, version)) for version in torch_versions.versions()]
    return [(INSTALL, install_python_package), *jobs]


def run_sanitized(preset: str) -> list[Result]:
    """The files that tests/CMakeLists.txt says are worth it, one after another: a job is for one core."""
    (REPORTS / preset).mkdir(parents=True, exist_ok=True)
    failed_build = build(preset, ["flash_attention_objects"], parallel=1)  # configures, too
    if failed_build:
        return failed_build
    targets = sorted({test.target for test in test_files(preset)})
    return build(preset, targets, parallel=1) or [r for test in test_files(preset) for r in run_file(preset, test)]


def sanitized(preset: str) -> list[Job]:
    return [(preset, functools.partial(run_sanitized, preset))]


def keep_bytecode() -> None:
    """Where Python is told to write none, as in many containers, each process would compile torch and all it imports."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / "build" / "pycache")


STAGES: dict[str, Callable[[], list[Job]]] = {
    "includes": lambda: [("includes", includes)],
    "gtest": gtest,
    "pytest": pytest,
    "asan": lambda: sanitized("asan"),
    "tsan": lambda: sanitized("tsan"),
    "torch": with_torch_versions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=STAGES, help="run this stage; may be repeated")
    parser.add_argument("--all", action="store_true", help="the long tail, too: more seeds, every compile configuration")
    arguments = parser.parse_args()
    chosen = arguments.only or [name for name in STAGES if name != "torch" or arguments.all]
    if arguments.all:
        os.environ["FLASH_ATTENTION_TEST_ALL"] = "1"  # read by tests/support/long_tail.h and tests/conftest.py
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    keep_bytecode()
    start = time.monotonic()
    everything, some = {"gtest", "pytest"} & set(chosen), {"asan", "tsan"} & set(chosen)
    if everything or some:
        say("building what has changed, and the tests")
    results = build("release", [] if everything else WITHOUT_SANITIZERS) if everything or some else []
    if not results:
        jobs = dict(job for name in chosen for job in STAGES[name]())  # two stages install the package
        results = side_by_side(list(jobs.items()))
    say(f"took {time.monotonic() - start:.0f} s")
    cpu_time.print_slowest()
    return print_summary(results)


if __name__ == "__main__":
    raise SystemExit(main())
