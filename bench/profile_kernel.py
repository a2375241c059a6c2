"""The handful of Nsight Compute counters that matter for one kernel, compared with what the formulas predict.

    python bench/profile_kernel.py ladder/06_mma --seq 4096 --heads 16 --head-dim 128 --mask causal
    python bench/profile_kernel.py ours --pass backward

The kernel is an entry of the baselines (--list). Nsight Compute (`ncu`) must be installed; it replays every launch of one
warm call, so times here are not those of a benchmark.
"""

import csv
import io
import shutil
import subprocess
import sys

import command
import torch
from peers import baselines

# counter: (name in the table, scale, unit)
COUNTERS = {
    "gpu__time_duration.sum": ("time", 1e-3, "us"),
    "dram__bytes_read.sum": ("DRAM read", 1e-6, "MB"),
    "dram__bytes_write.sum": ("DRAM written", 1e-6, "MB"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor pipe", 1, "%"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("bank conflicts", 1, ""),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy", 1, "%"),
    "launch__registers_per_thread": ("registers", 1, ""),
}
STALL_COUNTER = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle", "wait", "gmma")
UNITS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "second": 1e9,
         "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # fmt: skip


def parse(text):
    """[{"kernel": name, counter: value}] from ncu's raw CSV page: a header, a line of units, one line per launch."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3:
        raise ValueError("ncu: reported no launch; its output was:\n" + text[-2000:])
    header, units, *launches = rows
    found = []
    for launch in launches:
        row = {"kernel": launch[header.index("Kernel Name")]}
        for name, unit, value in zip(header, units, launch, strict=True):
            if name in COUNTERS or name in stall_names():
                row[name] = float(value.replace(",", "")) * UNITS.get(unit, 1) if value not in ("", "n/a") else None
        found.append(row)
    return found


def stall_names():
    return [STALL_COUNTER.format(stall) for stall in STALLS]


def lines_of(launches, case, which):
    """The table: one block per launch, then the whole call against the formulas."""
    for launch in launches:
        yield launch["kernel"]
        for counter, (name, scale, unit) in COUNTERS.items():
            value = launch.get(counter)
            yield f"  {name:16}" + (f"{value * scale:12.4g} {unit}" if value is not None else f"{'-':>12}")
        stalls = [(launch.get(STALL_COUNTER.format(s)) or 0.0, s.replace("_", " ")) for s in STALLS]
        worst = ", ".join(f"{name} {value:.2f}" for value, name in sorted(stalls, reverse=True)[:3])
        yield f"  {'stalled on':16} {worst} (warps per issue)"
    total = {counter: sum(launch.get(counter) or 0.0 for launch in launches) for counter in COUNTERS}
    moved = total["dram__bytes_read.sum"] + total["dram__bytes_write.sum"]
    seconds = total["gpu__time_duration.sum"] * 1e-9
    yield f"the call: {seconds * 1e6:.4g} us, {case.flops(which) / seconds / 1e12:.4g} TFLOP/s"
    yield f"  DRAM traffic    {moved / 1e6:12.4g} MB; every tensor once would be {case.bytes(which) / 1e6:.4g} MB"
    scores = case.heads * case.pairs() * case.element_bytes
    yield f"  the scores, stored once, would be {scores / 1e6:.4g} MB"


def run_target(entry, case, which):
    """In the process under ncu: a warm-up, then one call between profiler start and stop."""
    q, k, v, grad = baselines.inputs(case, entry, "cuda", needs_grad=which != "forward")
    for watched in (False, True):
        out = entry.run(q, k, v, case) if which == "backward" else None
        torch.cuda.synchronize()
        if watched:
            torch.cuda.profiler.start()
        torch.autograd.grad(out, (q, k, v), grad) if which == "backward" else entry.run(q, k, v, case)
        torch.cuda.synchronize()
        if watched:
            torch.cuda.profiler.stop()


def main():
    p = command.parser(__doc__, "build/bench/profile.csv")
    p.add_argument("kernel", nargs="?", default="ours", help="an entry of the baselines")
    p.add_argument("--pass", dest="which", choices=("forward", "backward"), default="forward")
    p.add_argument("--target", action="store_true", help="(used by this script) the process that ncu watches")
    arguments = p.parse_args()
    if arguments.list:
        return command.print_list(arguments.device)
    (entry,) = baselines.select([arguments.kernel])
    if not arguments.preset:
        arguments.seq, arguments.heads = arguments.seq or [4096], arguments.heads or [16]
        arguments.head_dim, arguments.dtype = arguments.head_dim or [128], arguments.dtype or ["bfloat16"]
    case = command.chosen_cases(arguments, "quick")[0]
    reason = entry.reject(case, "cuda")
    if reason:
        raise ValueError(f"kernel: {arguments.kernel} cannot run this: {reason}")
    if arguments.target:
        return run_target(entry, case, arguments.which)
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ValueError("ncu: not found; allowed: Nsight Compute on the PATH (it comes with the CUDA toolkit)")
    counters = ",".join([*COUNTERS, *stall_names()])
    words = [ncu, "--csv", "--page", "raw", "--profile-from-start", "off", "--metrics", counters, sys.executable, *sys.argv]
    done = subprocess.run([*words, "--target"], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ncu: failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{arguments.kernel}, {arguments.which}, {case.label()}")
    print("\n".join(lines_of(parse(done.stdout), case, arguments.which)))
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
