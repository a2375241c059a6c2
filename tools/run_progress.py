"""What a test run says while it runs: how many of its jobs are done, and how long the rest takes."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

SAY_EVERY_S = 30  # without a terminal; at one, each job that ends is a line


class Progress:
    """Counts jobs and their seconds. `expected` gives the seconds of a job that no earlier run left in `record`."""

    def __init__(self, names: list[str], expected: Callable[[str], float], record: Path):
        self._record = record
        try:
            self._earlier = json.loads(record.read_text())
        except (OSError, ValueError):
            self._earlier = {}
        self._expected = {name: max(float(self._earlier.get(name, expected(name))), 0.01) for name in names}
        self._spent: dict[str, float] = {}
        self._running: dict[str, float] = {}
        self._failed = 0
        self._stopped = False
        self._start = self._said = time.monotonic()
        self._lock = threading.Lock()

    def timed(self, name: str, job: Callable[[], list]) -> list:
        """Runs the job and says that it is done."""
        start = time.monotonic()
        with self._lock:
            self._running[name] = start
        results = job()
        with self._lock:
            del self._running[name]
            self._spent[name] = time.monotonic() - start
            bad = sum(result.outcome == "failed" for result in results)
            self._failed += bad
            self._say(f"{name}: {len(results)} tests" + (f", {bad} FAILED" if bad else ""), bool(bad))
        return results

    def left_s(self) -> float:
        """Seconds to the end, if what is left is as much slower or faster than expected as what is done."""
        now = time.monotonic()
        done = sum(self._expected[name] for name in self._spent)
        done += sum(min(now - start, self._expected[name]) for name, start in self._running.items())
        return (now - self._start) * (sum(self._expected.values()) - done) / done

    def _say(self, job: str, urgent: bool) -> None:
        now = time.monotonic()
        if self._stopped or not (urgent or sys.stderr.isatty() or now - self._said >= SAY_EVERY_S):
            return
        self._said = now
        done, total = len(self._spent), len(self._expected)
        line = f"{done} of {total} jobs, {self._failed} tests failed, {about(self.left_s())} left"
        if urgent or sys.stderr.isatty():
            line += f"; {job}"
        print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Says nothing more: jobs that are stopped do not count as failed."""
        self._stopped = True

    def keep(self) -> None:
        """For the next run."""
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(self._earlier | self._spent))


def about(seconds: float) -> str:
    """A time for people: whole minutes from two minutes on."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(seconds, 1):.0f} s"
