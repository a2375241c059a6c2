"""Records everything about one GPU in one go: the JSON files of bench/results/ and the report.

    python bench/record.py --output bench/results/h200 --minutes 6

Stages run in order of importance, each in its own process; when the time is up, the stage at work is interrupted and keeps
the rows it has. A second run with the same --output goes on where the first stopped.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

BENCH = Path(__file__).resolve().parent
MAIN = ["ours", "sdpa_cudnn", "sdpa_flash", "triton"]
REST = ["standard", "sdpa_math", "sdpa_efficient", "megatron_local", "megatron_fused", "flash_attn", "flash_attn_3"]
SWEEP = ["--tokens", "16384", "--heads", "16", "--head-dim", "128", "--mask", "full", "causal"]
SPEED, MEMORY = ["benchmark_speed.py", "--seconds", "0.06"], ["benchmark_memory.py"]

# name of the stage (and of its file, up to "+"): command
STAGES = {
    "paper": [*SPEED, "--preset", "paper", "--baselines", *MAIN],
    "memory": [*MEMORY, "--preset", "seq_sweep", "--mask", "causal", "--baselines", *MAIN, *REST[:5]],
    "capacity": [*MEMORY, "--budget", "16", "--baselines", "ours", "standard", "sdpa_math", "megatron_local", "sdpa_flash"],
    "seq_sweep": [*SPEED, "--preset", "seq_sweep", "--baselines", *MAIN, *REST],
    "accuracy": ["benchmark_accuracy.py", "--baselines", *MAIN, *REST[:5]],
    "ladder": ["flash-attention", "ladder", "--sweep", "--seconds", "0.06"],
    "gqa": [*SPEED, "--preset", "gqa", "--baselines", *MAIN],
    "packed": [*SPEED, "--preset", "packed", "--baselines", "ours", "flash_attn", "sdpa_cudnn", "sdpa_flash"],
    "gpt3": [*SPEED, "--preset", "gpt3", "--baselines", *MAIN, *REST[:2]],
    "seq_sweep+flex": [*SPEED, "--seq", "4096", "16384", *SWEEP, "--baselines", "flex"],
}
# What a dry run adds to the command of a stage or a script: one case, few samples.
SHORT = {
    "benchmark_speed.py": ["--first", "1", "--seconds", "0.01"],
    "benchmark_memory.py": ["--first", "1"],
    "benchmark_accuracy.py": ["--first", "1"],
    "flash-attention": ["06"],
    "capacity": ["--budget", "0.5"],
}


def warm():
    """Compiles our kernels and the Triton kernels, one process for a head_dim and mask; the timed run finds them ready."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import torch, baselines, cases\n"
        "head_dim, causal = int(sys.argv[2]), sys.argv[3] == '1'\n"
        "for name in ('ours', 'triton'):\n"
        "    for seq in (512, 2048, 16384):\n"
        "        case = cases.Case(16384 // seq, seq, 2048 // head_dim, head_dim, causal=causal)\n"
        "        entry = baselines.all_baselines()[name]; q, k, v, g = baselines.inputs(case, entry, 'cuda', True)\n"
        "        torch.autograd.grad(entry.run(q, k, v, case), (q, k, v), g)\n"
    )
    pairs = [(head_dim, causal) for head_dim in ("64", "128", "256") for causal in "01"]
    running = [subprocess.Popen([sys.executable, "-c", program, str(BENCH), *pair]) for pair in pairs]
    return [process.wait() for process in running]


def command_of(name, output, short):
    """The words of a stage. `flash-attention` is the newest one that was built here, or that of the PATH."""
    script, *arguments = STAGES[name]
    arguments += SHORT.get(name, SHORT[script]) if short else []
    if script != "flash-attention":
        return [sys.executable, str(BENCH / script), *arguments, "--output", str(output), "--resume"]
    built = sorted(BENCH.parent.glob("build/*/flash-attention"), key=lambda path: path.stat().st_mtime)
    return [str(built[-1]) if built else shutil.which(script) or script, *arguments, "--save", str(output)]


def run_stage(name, directory, seconds, short):
    """True where the stage came to its end."""
    try:
        process = subprocess.Popen(command_of(name, directory / f"{name.partition('+')[0]}.json", short))
    except OSError as error:
        print(f"== {name}: {error}", flush=True)
        return False
    try:
        return process.wait(max(seconds, 1)) == 0
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory for the JSON files and report.html")
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything")
    parser.add_argument("--dry", action="store_true", help="one case of every stage, to see that each works")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("record.py: got a machine without an NVIDIA GPU; allowed: one with")
    end = time.monotonic() + 60 * arguments.minutes - 15  # the report needs a moment
    arguments.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if not arguments.dry:
        warm()
    print(f"== kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
    for name in arguments.stages:
        started = time.monotonic()
        if started > end:
            print(f"== {name}: no time left", flush=True)
            continue
        complete = run_stage(name, arguments.output, end - started, arguments.dry)
        print(f"== {name}: {'done' if complete else 'NOT COMPLETE'} in {time.monotonic() - started:.0f} s", flush=True)
    files = sorted(map(str, arguments.output.glob("*.json")))
    page = str(arguments.output / "report.html")
    return subprocess.call([sys.executable, str(BENCH / "visualize_results.py"), *files, "--output", page, "--force"])


if __name__ == "__main__":
    sys.exit(main())
