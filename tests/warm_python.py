"""Python programs in processes of their own that need not wait for `import torch`, which takes seconds.

One process imports torch and does nothing else with it, so it has no threads. For each program it forks a child that is as
fresh as a new interpreter in all but that: the child sets the environment, loads flash_attention itself, and ends as any
program does. Programs about the import itself, or about what libraries read while they load, need a real one.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class WarmPython:
    """Called with the words after `python` (a script, -c TEXT or -m MODULE, and arguments) as subprocess.run would be."""

    spent_cpu_s = 0.0  # by programs of servers that still run: their parents have not waited for it yet

    def __init__(self) -> None:
        self._server = None
        self._spent_cpu_s = 0.0

    def __call__(self, *words: object, **environment: str) -> subprocess.CompletedProcess:
        if self._server is None:
            command = [sys.executable, __file__]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with tempfile.TemporaryDirectory() as folder:
            request = {"words": [str(word) for word in words], "folder": folder, "cwd": os.getcwd()}
            request["environment"] = {**os.environ, **environment}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code, cpu_s = self._server.stdout.readline().split()
            self._spent_cpu_s += float(cpu_s)
            WarmPython.spent_cpu_s += float(cpu_s)
            texts = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(["python", *request["words"]], int(code), *texts)

    def close(self) -> None:
        if self._server is not None:
            self._server.stdin.close()
            self._server.wait()
            WarmPython.spent_cpu_s -= self._spent_cpu_s


def run_program(words: list[str]) -> None:
    """As the interpreter does."""
    kind, *rest = words
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, "")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


def become(request: dict) -> None:
    """The child: its streams, its environment and its folder are those of the program."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(request["folder"], name), os.O_WRONLY | os.O_CREAT), stream)
    sys.path.remove(str(Path(__file__).parent))
    signal.alarm(300)  # seconds, after which a program that hangs ends


def serve() -> None:
    import torch  # noqa: F401

    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
            return run_program(request["words"])
        _, status, usage = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, flush=True)
    return None


if __name__ == "__main__":
    serve()
