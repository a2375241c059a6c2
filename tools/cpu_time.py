"""CPU time of the programs that a test run starts, and their limits.

Other work on the machine makes a test slower by the clock, not in CPU time. So limits are in CPU seconds. A program that
does nothing for long is stopped, too.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

SPENT: dict[str, float] = {}  # seconds of user and system time, children included, by what spent them

CHECK_EVERY_S = 5
IDLE_LIMIT_S = 900  # without a second of CPU time in it: it waits for something that never happens
CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

_sessions: set[int] = set()  # of programs that run
_starting = threading.Lock()
_stopped = threading.Event()


def _processes(session: int) -> dict[int, float]:
    """CPU seconds of every process of the session, with those of the children that it has waited for."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session:
            found[int(folder.name)] = sum(map(int, fields[11:15])) * CLOCK_TICK_S
    return found


def _stop(session: int) -> None:
    """Python's faulthandler answers SIGABRT with where each thread is, so that comes first."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(session, signal.SIGABRT)
    time.sleep(1)
    for process in _processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def stop_all() -> None:
    """Ends every program that runs, and lets no other begin."""
    with _starting:
        _stopped.set()
        sessions = list(_sessions)
    for session in sessions:
        _stop(session)


class _Watch:
    """Stops a session that exceeds a limit; `reason` says which."""

    def __init__(self, session: int, limit_s: float, idle_limit_s: float):
        self.reason = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(session, limit_s, idle_limit_s), daemon=True)
        self._thread.start()

    def _watch(self, session: int, limit_s: float, idle_limit_s: float) -> None:
        busy_at, busy_spent = time.monotonic(), 0.0
        while not self._ended.wait(min(CHECK_EVERY_S, limit_s, idle_limit_s)):
            spent = sum(_processes(session).values())
            if abs(spent - busy_spent) >= 1:  # a process that ended unseen takes its time with it: less is a change, too
                busy_at, busy_spent = time.monotonic(), spent
            if spent > limit_s:
                self.reason = f"timed out: {spent:.0f} s of CPU time, the limit is {limit_s:.0f} s"
            elif time.monotonic() - busy_at > idle_limit_s:
                self.reason = f"timed out: did nothing for {idle_limit_s:.0f} s"
            if self.reason:
                return _stop(session)

    def end(self) -> str:
        self._ended.set()
        self._thread.join()
        return self.reason


def run(
    name: str,
    command: list[str],
    cwd: Path,
    environment: dict[str, str],
    limit_s: float,
    idle_limit_s: float = IDLE_LIMIT_S,
) -> tuple[str, str]:
    """Why the program failed (empty: it did not), and its output; adds the CPU time to SPENT."""
    with tempfile.TemporaryFile() as output:
        with _starting:
            if _stopped.is_set():
                return "stopped", ""
            child = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            _sessions.add(child.pid)
        watch = _Watch(child.pid, limit_s, idle_limit_s)
        _, status, usage = os.wait4(child.pid, 0)
        _sessions.discard(child.pid)
        timed_out = watch.end()
        child.returncode = os.waitstatus_to_exitcode(status)
        SPENT[name] = SPENT.get(name, 0) + usage.ru_utime + usage.ru_stime
        output.seek(0)
        text = output.read().decode(errors="replace")
    return timed_out or describe(child.returncode), text


def describe(code: int) -> str:
    """An exit code in words; empty for 0."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    return f"ended by {signal.Signals(-code).name}"


def divide(name: str, parts: dict[str, float]) -> None:
    """What `name` spent is told by its parts; the rest (imports, collection) stays under the name."""
    for part, seconds in parts.items():
        SPENT[f"{name}: {part}"] = seconds
    SPENT[name] -= sum(parts.values())


def print_slowest(count: int = 10) -> None:
    print(f"\nMost CPU time, of {sum(SPENT.values()):.0f} s:")
    for name, seconds in sorted(SPENT.items(), key=lambda item: -item[1])[:count]:
        print(f"  {seconds:7.1f} s  {name}")
