"""What `make test` says of a job that does not end, that fails, or without which no other can run."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cpu_time  # noqa: E402
import run_tests  # noqa: E402
from run_progress import Progress, about  # noqa: E402
from test_results import Result, failed  # noqa: E402

BUSY = "while True: pass"
BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{BUSY}'])"


@pytest.fixture(autouse=True)
def fresh_limits(monkeypatch):
    monkeypatch.setattr(cpu_time, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(cpu_time, "_stopped", threading.Event())


def run(program: str, limit_s: float, idle_limit_s: float = 60) -> tuple[str, str]:
    return cpu_time.run("test", [sys.executable, "-c", program], ROOT, {}, limit_s, idle_limit_s)


@pytest.mark.parametrize("program", [BUSY, BUSY_CHILD], ids=["itself", "a child"])
def test_a_program_that_computes_for_too_long_is_stopped(program):
    reason, _ = run(program, 0.5)
    assert reason.startswith("timed out: ") and reason.endswith("s of CPU time, the limit is 0 s")


def test_a_program_that_waits_for_ever_is_stopped():
    reason, _ = run("import time; time.sleep(1000)", 100, idle_limit_s=0.5)
    assert reason == "timed out: did nothing for 0 s"


def test_python_says_where_it_was():
    _, output = run(
        "import faulthandler; faulthandler.enable()\ndef here(): time.sleep(1000)\nimport time; here()", 100, 0.5
    )
    assert "in here" in output


def test_waiting_is_not_computing():
    """Other work on the machine makes a program wait."""
    assert run("import time; time.sleep(1.5); print('done')", 1) == ("", "done\n")


@pytest.mark.parametrize(
    ("program", "reason"),
    [("raise SystemExit(3)", "exit code 3"), ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV")],
)
def test_a_failure_says_why(program, reason):
    assert run(program, 100)[0] == reason
    result = failed("name", reason, "\n".join(map(str, range(1000))))
    lines = result.detail.splitlines()
    assert lines[0] == reason and lines[-1] == "999" and len(lines) <= 25  # print_summary shows all of them


def test_a_failed_installation_stops_all_other_jobs(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    began = threading.Event()

    def install():
        began.wait()
        return [Result(run_tests.INSTALL, "failed", "the last line of the log")]

    def long_job():
        began.set()
        reason, output = run("import time; time.sleep(1000)", 100)
        return [failed("long", reason, output)]

    start = time.monotonic()
    jobs = [
        ("later", lambda: [Result("later", "passed")]),
        ("asan", long_job),
        (run_tests.INSTALL, install),
        ("tsan", long_job),
    ]
    results = run_tests.side_by_side(jobs)
    assert time.monotonic() - start < 30
    assert run_tests.INSTALL in [result.name for result in results] and "long" not in [result.name for result in results]
    assert "of 4 jobs, 1 tests failed" in capfd.readouterr().err


def test_every_job_is_counted_and_the_next_run_knows_its_time(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("run_progress.SAY_EVERY_S", 0)
    record = tmp_path / "seconds.json"
    progress = Progress(["short", "long"], lambda name: 1, record)
    progress.timed("short", lambda: [Result("a", "passed"), Result("b", "failed")])
    progress.timed("long", lambda: time.sleep(0.3) or [Result("c", "passed")])
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("1 of 2 jobs, 1 tests failed, ") and first.endswith("; short: 2 tests, 1 FAILED")
    assert second.startswith("2 of 2 jobs, 1 tests failed, ")
    progress.keep()
    again = Progress(["short", "long"], lambda name: 1, record)
    again.timed("short", lambda: time.sleep(0.01) or [])
    assert again.left_s() > 0.1  # `long` takes 0.3 s, and the clock has barely started


def test_times_are_told_in_words():
    assert [about(seconds) for seconds in (0.1, 45, 119, 121, 600)] == ["1 s", "45 s", "119 s", "2 min", "10 min"]


@pytest.mark.parametrize("failing", ["build.sh", "setup.sh"])
def test_the_build_and_the_installation_stop_each_other(tmp_path, failing):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "prepare.sh").write_bytes((ROOT / "tools" / "prepare.sh").read_bytes())
    for name in ("build.sh", "setup.sh"):
        does = "echo the reason; exit 1" if name == failing else "sleep 1000"
        (tools / name).write_text(f'#!/bin/bash\n[ "$1" != system ] || exit 0\n{does}\n')
    for script in tools.iterdir():
        script.chmod(0o755)
    start = time.monotonic()
    done = subprocess.run([tools / "prepare.sh", "run", "--", "target"], capture_output=True, text=True)
    assert done.returncode != 0 and "the reason" in done.stdout and time.monotonic() - start < 30
