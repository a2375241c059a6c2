"""What a kernel of the ladder asks of the machine, thread by thread: recorder.cpp, compiled with the rung and its plan."""

import functools
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM = 128


@dataclass(frozen=True)
class Recorder:
    """A rung that is ready to be run thread by thread."""

    program: Path
    shared_bytes: int
    threads: int
    sequence: int
    heads: int

    def steps(self, *threads: int, block: int = 0, grid: int = 1) -> dict[int, list[tuple]]:
        """[(name, number...)] of each thread, in its own order."""
        words = [self.shared_bytes, self.threads, grid, self.sequence, self.heads, block, *threads]
        done = subprocess.run([self.program, *map(str, words)], check=True, capture_output=True, text=True)
        result = {thread: [] for thread in threads}
        for line in done.stdout.splitlines():
            thread, name, *numbers = line.split()
            result[int(thread)].append((name, *map(int, numbers)))
        return result


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="lessons_")


def compile_host(source: Path, program: Path, *flags: str) -> None:
    """A program that includes kernels, for this machine's CPU."""
    compiler = os.environ.get("CXX", "c++")
    includes = ["-I", ROOT / "src/emulator/runtime", "-I", ROOT / "kernels"]
    words = [compiler, "-std=c++20", "-w", "-O0", *includes, *flags, "-o", program, source]
    subprocess.run(words, check=True)


@functools.cache
def record(command: str, rung: str, sequence: int, heads: int = 1, causal: bool = False) -> Recorder:
    """The rung as `flash-attention plan` would launch it."""
    words = ["--device", "emulator", "--arch", "sm_90", "--kernel", f"ladder/{rung}", "--dtype", "bf16", "--json"]
    words += ["--seq-q", str(sequence), "--heads", str(heads), "--head-dim", str(HEAD_DIM), *["--causal"] * causal]
    planned = subprocess.run([command, "plan", *words], check=True, capture_output=True, text=True)
    launch = json.loads(planned.stdout)["plan"]["launches"][0]
    program = Path(folder().name) / f"{rung}_{causal}"
    flags = [f'-DRUNG="{launch["unit"]}.cu"', f"-DCONFIG={launch['config']}"]
    compile_host(Path(__file__).with_name("recorder.cpp"), program, *flags)
    return Recorder(program, launch["shared_bytes"], launch["block"], sequence, heads)
