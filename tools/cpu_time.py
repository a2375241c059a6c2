"""CPU time of what a test run starts: the machine may be shared, so seconds on the wall say little about a test."""

import os
import subprocess
import tempfile
import threading
from pathlib import Path

SPENT: dict[str, float] = {}  # seconds of user and system time, children included, by what spent them


def run(name: str, command: list[str], cwd: Path, environment: dict[str, str], limit_s: float) -> tuple[int, str]:
    """Exit code and output; adds what the command spent to SPENT. One that is still running after the limit is killed."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        stopped = not timer.is_alive()
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        SPENT[name] = SPENT.get(name, 0) + usage.ru_utime + usage.ru_stime
        output.seek(0)
        text = output.read().decode(errors="replace")
    return child.returncode, f"{text}\nstill running after {limit_s:.0f} s" if stopped else text


def divide(name: str, parts: dict[str, float]) -> None:
    """What `name` spent is told by its parts; the rest (imports, collection) stays under the name."""
    for part, seconds in parts.items():
        SPENT[f"{name}: {part}"] = seconds
    SPENT[name] -= sum(parts.values())


def print_slowest(count: int = 10) -> None:
    print(f"\nMost CPU time, of {sum(SPENT.values()):.0f} s:")
    for name, seconds in sorted(SPENT.items(), key=lambda item: -item[1])[:count]:
        print(f"  {seconds:7.1f} s  {name}")
