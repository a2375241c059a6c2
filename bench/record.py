"""Records everything about one GPU in one go: the JSON files of bench/results/ and the report.

    python bench/record.py --output bench/results/h200 --seconds 300
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
import time
from pathlib import Path

import benchmark_accuracy
import benchmark_decode
import benchmark_memory
import benchmark_speed
import cases
import machine
import torch
from peers import baselines
from report import load

BENCH = Path(__file__).resolve().parent
MAIN = ["ours", "sdpa_cudnn", "sdpa_flash", "triton"]
REST = ["standard", "sdpa_math", "sdpa_efficient", "megatron_local", "megatron_fused", "megatron_core"]
REST += ["flash_attn", "flash_attn_3"]
SPEED = ["benchmark_speed.py", "--seconds", "0.03", "--warmup", "0.01"]
MEMORY = ["benchmark_memory.py"]
REPORT_SECONDS = 5
WARM_LENGTHS = (512, 2048, 16384)  # a short, a longer and a long one, where choices change
FLEX_LENGTHS = (4096, 16384)  # each takes seconds to compile
SCRIPTS = {Path(module.__file__).name: module for module in (benchmark_speed, benchmark_memory, benchmark_accuracy)}

# Those that write a file of another form: it goes to profile/, next to the files of the report.
OTHERS = {Path(module.__file__).name: module for module in (benchmark_decode,)}

# name of the stage and of its file: command
STAGES = {
    "paper": [*SPEED, "--preset", "paper", "--baselines", *MAIN],
    "seq_sweep": [*SPEED, "--preset", "seq_sweep", "--baselines", *MAIN, *REST],
    "gqa": [*SPEED, "--preset", "gqa", "--baselines", *MAIN],
    "packed": [*SPEED, "--preset", "packed", "--baselines", "ours", "flash_attn", "sdpa_cudnn", "sdpa_flash"],
    "decode": ["benchmark_decode.py", "--preset", "forty", "--seconds", "0.05"],
    "gpt3": [*SPEED, "--preset", "gpt3", "--baselines", *MAIN, *REST[:2]],
    "memory": [*MEMORY, "--preset", "seq_sweep", "--mask", "causal", "--baselines", *MAIN, *REST[:5]],
    "capacity": [*MEMORY, "--budget", "16", "--baselines", "ours", "standard", "sdpa_math", "megatron_local", "sdpa_flash"],
    "accuracy": ["benchmark_accuracy.py", "--baselines", *MAIN, *REST[:5]],
    "flex": [*SPEED, "--seq", *map(str, FLEX_LENGTHS), "--tokens", "16384", "--heads", "16", "--head-dim", "128",
             "--mask", "full", "causal", "--baselines", "flex"],
    "ladder": ["flash-attention", "ladder", "--sweep", "--seconds", "0.06"],
}  # fmt: skip
# What a dry run adds to the command of a stage or a script: one case, few samples.
SHORT = {
    "benchmark_speed.py": ["--first", "1", "--seconds", "0.01"],
    "benchmark_memory.py": ["--first", "1"],
    "benchmark_accuracy.py": ["--first", "1"],
    "benchmark_decode.py": ["--first", "1"],
    "flash-attention": ["06"],
    "capacity": ["--budget", "0.5"],
}


def compile_kernels(name, problems):
    """Calls an entry forward and backward, so that what it compiles is in the caches of the disk."""
    entry = baselines.all_baselines()[name]
    for case in problems:
        q, k, v, grad = baselines.inputs(case, entry, "cuda", True)
        torch.autograd.grad(entry.run(q, k, v, case), (q, k, v), grad)
    torch.cuda.synchronize()


def warm(stages, seconds):
    """Side by side, so that the timed stages find everything ready. Ours and Triton's kernels change with head_dim, mask,
    groups of heads and whether a sequence is long; FlexAttention's with every shape."""
    work = []
    if set(stages) & {"paper", "seq_sweep", "gqa", "packed", "gpt3"}:
        kinds = {(case.head_dim, case.causal) for case in cases.paper()}
        sets = [[c for c in cases.paper() if (c.head_dim, c.causal) == kind and c.seq in WARM_LENGTHS] for kind in kinds]
        sets += [[case] for case in cases.gqa() if case.kv != case.heads and case.seq in WARM_LENGTHS]
        work += [(name, problems) for name in ("triton", "ours") for problems in sets]
        work += [("ours", [case for case in cases.packed() if case.causal == causal]) for causal in cases.MASKS]
    if "flex" in stages:
        work += [("flex", [case]) for case in cases.seq_sweep() if case.seq in FLEX_LENGTHS]
    forks = [started(compile_kernels, *arguments) for arguments in work]
    end = time.monotonic() + seconds
    return all([finished(fork, end - time.monotonic()) for fork in forks])


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
        os._exit(130)


def finished(fork, seconds):
    """True where it came to its end in time; else it is interrupted, and killed where that does not help."""
    fork.join(max(seconds, 1))
    for last_word in (signal.SIGINT, signal.SIGKILL):
        if fork.is_alive():
            os.kill(fork.pid, last_word)
            fork.join(8)
    return fork.exitcode == 0


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


def run_stage(name, directory, seconds, short, force):
    """What became of it, in words."""
    path = directory / ("profile" if STAGES[name][0] in OTHERS else "") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if foreign(path) and not force:
        return f"left alone: {path} is of commit {foreign(path)}"
    fork = started(run_words, command_of(name, path, short, force or "ladder" in name))
    return "done" if finished(fork, seconds) else "NOT COMPLETE"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory for the JSON files and report.html")
    parser.add_argument("--seconds", type=float, default=360.0, help="for everything")
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
    page = str(arguments.output / "report.html")
    return subprocess.call([sys.executable, str(BENCH / "visualize_results.py"), *files, "--output", page, "--force"])


if __name__ == "__main__":
    sys.exit(main())
