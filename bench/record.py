"""Records everything about one GPU in one go: the JSON files of bench/results/ and the report.

    python bench/record.py --output bench/results/h200
    python bench/record.py --output bench/results/h200 --seconds 60 --stages gqa packed

Stages run in order of importance, each in its own process; when the time is up, the stage at work is interrupted and
keeps the rows it has. A second run with the same --output goes on where the first stopped; a file of another commit is left
alone, and its stage skipped, unless --force is given.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import benchmark_accuracy
import benchmark_decode
import benchmark_masks
import benchmark_memory
import benchmark_mla
import benchmark_prefill
import benchmark_programs
import benchmark_speed
import machine
import torch
from peers import baselines
from report import load

BENCH = Path(__file__).resolve().parent
MAIN = ["ours", "sdpa_cudnn", "sdpa_flash", "triton"]
REST = ["standard", "sdpa_math", "sdpa_efficient", "megatron_local", "megatron_fused", "megatron_core"]
REST += ["flash_attn", "flash_attn_3", "flash_attn_4", "flashinfer"]
SPEED = ["benchmark_speed.py", "--seconds", "0.03", "--warmup", "0.01"]
MEMORY = ["benchmark_memory.py"]
COMPILED = ("ours", "ours_ieee", "ours_tf32", "ours_fp8", "triton", "flex", "megatron_fused")  # at their first use
PARTS = {
    "benchmark_speed.py": 12,
    "benchmark_decode.py": 6,
    "benchmark_mla.py": 4,
    "benchmark_masks.py": 8,
    "benchmark_prefill.py": 3,
    "benchmark_programs.py": 10,
}
INTERRUPTED = 130  # the exit status of what SIGINT has stopped
REPORT_SECONDS = 5
TIMED = ["--seconds", "0.03"]
SCRIPTS = {Path(module.__file__).name: module for module in (benchmark_speed, benchmark_memory, benchmark_accuracy)}
# Those that write rows with the times of all entries, after each problem: they take --json and do not resume.
LISTS = (benchmark_decode, benchmark_mla, benchmark_masks, benchmark_prefill, benchmark_programs)
OTHERS = {Path(module.__file__).name: module for module in LISTS}

# name of the stage and of its file: command
STAGES = {
    "paper": [*SPEED, "--preset", "paper", "--baselines", *MAIN],
    "options": [*SPEED, "--preset", "options", "--baselines", "ours", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"],
    "small": [*SPEED, "--preset", "small", "--graph", "--baselines", *MAIN[:3]],
    "gqa": [*SPEED, "--preset", "gqa", "--baselines", *MAIN],
    "cross": [*SPEED, "--preset", "cross", "--baselines", *MAIN[:3]],
    "wide": [*SPEED, "--preset", "wide", "--baselines", *MAIN[:3], "sdpa_efficient", "flex"],
    "fp8": [
        *(*SPEED, "--preset", "fp8", "--pass", "forward"),
        *("--baselines", "ours", "ours_fp8", "sdpa_cudnn", "flash_attn_3_fp8"),
    ],
    "mla": ["benchmark_mla.py", *TIMED, "--fp8"],
    "masks": ["benchmark_masks.py", *TIMED],
    "programs": ["benchmark_programs.py", *TIMED, "--heads", "16", "--batch", "1"],
    "masks_16k": ["benchmark_masks.py", *TIMED, "--lengths", "16384"],
    "programs_16k": ["benchmark_programs.py", *TIMED, "--heads", "16", "--batch", "1", "--lengths", "16384"],
    "decode": ["benchmark_decode.py", "--preset", "forty", *TIMED],
    "prefill": ["benchmark_prefill.py", *TIMED],
    "fp32": [*SPEED, "--preset", "fp32", "--baselines", "ours", "ours_tf32", "ours_ieee", "sdpa_efficient", "sdpa_math"],
    "options_flex": [*SPEED, "--preset", "options", "--baselines", "flex"],
    "seq_sweep": [*SPEED, "--preset", "seq_sweep", "--baselines", *MAIN, *REST],
    "packed": [*SPEED, "--preset", "packed", "--baselines", "ours", "flash_attn", "flashinfer", "sdpa_cudnn", "sdpa_flash"],
    "gpt3": [*SPEED, "--preset", "gpt3", "--baselines", *MAIN, *REST[:2]],
    "memory": [*MEMORY, "--preset", "seq_sweep", "--mask", "causal", "--baselines", *MAIN, *REST[:5]],
    "capacity": [*MEMORY, "--budget", "16", "--baselines", "ours", "standard", "sdpa_math", "megatron_local", "sdpa_flash"],
    "accuracy": ["benchmark_accuracy.py", "--baselines", *MAIN, *REST[:5]],
    "flex": [*SPEED, "--seq", "4096", "16384", "--tokens", "16384", "--heads", "16", "--head-dim", "128",
             "--mask", "full", "causal", "--baselines", "flex"],
    "ladder": ["flash-attention", "ladder", "--sweep", "--seconds", "0.06"],
}  # fmt: skip
# What a dry run adds to the command of a stage or a script: one case, few samples.
SHORT = {
    "benchmark_speed.py": ["--first", "1", "--seconds", "0.01"],
    "benchmark_memory.py": ["--first", "1"],
    "benchmark_accuracy.py": ["--first", "1"],
    "benchmark_decode.py": ["--first", "1"],
    "benchmark_mla.py": ["--first", "1"],
    "benchmark_masks.py": ["--first", "1"],
    "benchmark_prefill.py": ["--first", "1"],
    "benchmark_programs.py": ["--first", "1"],
    "flash-attention": ["06"],
    "capacity": ["--budget", "0.5"],
    "options": ["--first", "10", "--seconds", "0.01"],  # one of each
}


def warm(stages, seconds):
    """Side by side, so that the timed stages find everything ready: workers, one for each core, run the stages in parts
    with the fewest samples and throw the results away."""
    parts, taken = compiling(stages), multiprocessing.get_context("fork").Value("i", 0)
    workers = [started(compile_parts, parts, taken) for _ in range(min(os.cpu_count(), len(parts)))]
    return finished(workers, seconds)


def compiling(stages):
    """The words of all parts that have something to compile. A part holds neighbours, which often share their kernels."""
    found = []
    for name in stages:
        script, *arguments = STAGES[name]
        if script == "benchmark_speed.py":
            place = arguments.index("--baselines") + 1
            arguments[place:] = [entry for entry in arguments[place:] if entry in COMPILED]
            arguments += ["--warmup", "0"]
        if script == "benchmark_speed.py" or script in OTHERS:
            arguments += ["--seconds", "0"]
            found += [[script, *arguments, "--part", f"{i}/{PARTS[script]}"] for i in range(PARTS[script])]
    return sorted(found, key=lambda words: words[0] == "benchmark_speed.py" and "flex" not in words)  # the longest first


def compile_parts(parts, taken):
    """Until none is left; what fails here says so in its stage."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    with tempfile.TemporaryDirectory() as directory:
        while (index := next_of(taken)) < len(parts):
            script, *arguments = parts[index]
            output = str(Path(directory) / "thrown_away.json")
            place = ["--output", output, "--force"] if script in SCRIPTS else ["--json", output]
            sys.argv = [str(BENCH / script), *arguments, *place]
            try:
                (SCRIPTS | OTHERS)[script].main()
            except SystemExit as stop:
                if stop.code == INTERRUPTED:
                    raise
            except Exception:
                continue
            finally:  # the others need the memory
                baselines.operands.forget()
                benchmark_speed.command.release()


def next_of(taken):
    with taken.get_lock():
        taken.value += 1
        return taken.value - 1


def started(function, *arguments):
    """In its own process, which need not import torch again: nothing here has touched the GPU before."""
    fork = multiprocessing.get_context("fork").Process(target=until_interrupted, args=(function, *arguments))
    fork.start()
    return fork


def until_interrupted(function, *arguments):
    torch.set_num_threads(1)  # the threads that the parent may have started are not here
    try:
        function(*arguments)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


def finished(forks, seconds):
    """True where all came to their end in time; else they are interrupted, and killed where that does not help."""
    for last_word, more in ((signal.SIGINT, max(seconds, 1)), (signal.SIGKILL, 8), (None, 8)):
        end = time.monotonic() + more
        for fork in forks:
            fork.join(max(end - time.monotonic(), 0.01))
        for fork in forks:
            if fork.is_alive() and last_word:
                os.kill(fork.pid, last_word)
    return all(fork.exitcode == 0 for fork in forks)


def command_of(name, output, short, force):
    """The words of a stage. `flash-attention` is the newest one that was built here, or that of the PATH."""
    script, *arguments = STAGES[name]
    arguments += SHORT.get(name, SHORT[script]) if short else []
    if script in SCRIPTS:
        return [str(BENCH / script), *arguments, "--output", str(output), "--force" if force else "--resume"]
    if script in OTHERS:
        return [str(BENCH / script), *arguments, "--json", str(output)]
    built = sorted(BENCH.parent.glob("build/*/flash-attention"), key=lambda path: path.stat().st_mtime)
    return [str(built[-1]) if built else shutil.which(script) or script, *arguments, "--save", str(output)]


def run_words(words):
    """In the process of the stage: the script as if it had been started with these words, or the program."""
    script = Path(words[0]).name
    if script not in SCRIPTS | OTHERS:
        status = subprocess.call(words)
        if status == 0:
            sign(words[-1])
        sys.exit(status)
    sys.argv = words
    benchmark_speed.command.exit_on_bad_input((SCRIPTS | OTHERS)[script].main)


def sign(path):
    """Writes the commit into a file of the command, which does not know it."""
    results = load(path)
    results.head["commit"] = machine.commit()
    results.save(path)


def foreign(path):
    """The commit of a file that another commit wrote; empty where this one may add to it."""
    if not path.exists():
        return ""
    commit = json.loads(path.read_text()).get("commit") or "unknown"
    return "" if commit == machine.commit() else commit


def can_go_on(status, path):
    """Whether another process may go on behind the row at which this one lost the GPU or was killed by a call."""
    if status < 0 and benchmark_speed.command.at_work_of(path).exists():
        benchmark_speed.command.blame(path, -status)
        return True
    return status == benchmark_speed.command.LOST


def run_stage(name, directory, seconds, short, force):
    """What became of it, in words."""
    path = directory / f"{name}.json"
    if foreign(path) and not force:
        return f"left alone: {path} is of commit {foreign(path)}"
    end = time.monotonic() + seconds
    fork = started(run_words, command_of(name, path, short, force or "ladder" in name))
    done, restarts = finished([fork], seconds), 0
    while STAGES[name][0] in SCRIPTS and time.monotonic() < end and can_go_on(fork.exitcode, path):
        fork = started(run_words, command_of(name, path, short, force=False))
        done, restarts = finished([fork], end - time.monotonic()), restarts + 1
    benchmark_speed.command.at_work_of(path).unlink(missing_ok=True)
    return ("done" if done else "NOT COMPLETE") + (f", the GPU lost {restarts} times" if restarts else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="directory for the JSON files; the page is DIRECTORY.html"
    )
    parser.add_argument("--seconds", type=float, default=720.0, help="for everything")
    parser.add_argument("--dry", action="store_true", help="one case of every stage, to see that each works")
    parser.add_argument("--force", action="store_true", help="measure anew what has been measured")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    if not torch.cuda.device_count():  # asks the driver's manager, not the GPU, which no process could use after a fork
        sys.exit("record.py: got a machine without an NVIDIA GPU; allowed: one with")
    began = time.monotonic()
    end = began + arguments.seconds - REPORT_SECONDS
    arguments.output.mkdir(parents=True, exist_ok=True)
    if not arguments.dry:
        ready = warm(arguments.stages, arguments.seconds / 3)
        print(f"== kernels compiled{'' if ready else ', NOT ALL,'} in {time.monotonic() - began:.0f} s", flush=True)
    for name in arguments.stages:
        started_at = time.monotonic()
        found = "no time left" if started_at > end else ""
        found = found or run_stage(name, arguments.output, end - started_at, arguments.dry, arguments.force)
        print(f"== {name}: {found}, {time.monotonic() - started_at:.0f} s", flush=True)
    print(f"== all: {time.monotonic() - began:.0f} s", flush=True)
    files = sorted(map(str, arguments.output.glob("*.json")))
    page = f"{arguments.output}.html"
    return subprocess.call([sys.executable, str(BENCH / "visualize_results.py"), *files, "--output", page, "--force"])


if __name__ == "__main__":
    sys.exit(main())
