"""One line on a terminal with bar, case and time left; otherwise a plain line now and then. Standard error only."""

import sys
import time


class Progress:
    """with Progress(total) as progress: progress.step("what was done")"""

    def __init__(self, total, quiet=False, stream=None, clock=time.monotonic):
        self.total, self.quiet, self.stream, self.clock = total, quiet, stream or sys.stderr, clock
        self.done, self.started, self.last_line = 0, clock(), float("-inf")
        self.bar = None if quiet or not self.stream.isatty() else rich_bar(total)

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exception):
        if self.bar:
            self.bar.stop()
        elif not self.quiet and self.stream.isatty():
            self.stream.write("\n")

    def step(self, text):
        self.done += 1
        if self.quiet:
            return
        if self.bar:
            self.bar.update(self.bar.task_ids[0], advance=1, description=text)
            return
        line = f"[{self.done}/{self.total}] {self.eta()} left  {text}"
        if self.stream.isatty():
            self.stream.write(f"\r\x1b[K{line[:120]}")
        elif self.clock() - self.last_line >= 2 or self.done == self.total:
            self.last_line = self.clock()
            self.stream.write(line + "\n")
        self.stream.flush()

    def eta(self):
        seconds = (self.clock() - self.started) / max(self.done, 1) * (self.total - self.done)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def rich_bar(total):
    """A bar of rich where that is installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    bar = Bar(*columns, console=Console(stderr=True))
    bar.add_task("", total=total)
    return bar
