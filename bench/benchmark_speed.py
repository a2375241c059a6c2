"""Times attention, forward and backward, against everything one would use instead.

    python bench/benchmark_speed.py --preset quick
    python bench/benchmark_speed.py --preset paper --pass forward backward --baselines ours sdpa_flash sdpa_cudnn
    python bench/benchmark_speed.py --seq 1024 4096 --head-dim 128 --heads 16 --mask causal --output build/bench/mine.json

Medians with 10th and 90th percentile; on a GPU with L2 emptied before every sample. TFLOP/s = 4 * batch * heads * L * L *
head_dim, halved for causal, 2.5 times for backward.
"""

import time

import baselines
import cases
import command
import machine
import timing
import torch

NOISY = 0.05  # half the spread between the 10th and the 90th percentile, against the median


def speed(case, entry, which, timer, device, rest):
    """The measurement of one row."""
    reason = entry.reject(case, device) or ("no backward pass" if which != "forward" and not entry.has_backward else "")
    if reason:
        return {"reason": reason}
    time.sleep(rest)
    q, k, v, grad = baselines.inputs(case, entry, device, needs_grad=which != "forward")
    if which == "forward":
        with torch.no_grad():
            found = timer(lambda: entry.run(q, k, v, case))
    elif which == "backward":
        out = entry.run(q, k, v, case)
        found = timer(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    else:
        found = timer(lambda: torch.autograd.grad(entry.run(q, k, v, case), (q, k, v), grad))
    found["tflops"] = round(case.flops(which) / found["ms"] / 1e9, 4)
    found["intensity"] = round(case.flops(which) / case.bytes(which), 2)
    found["noisy"] = (found["p90"] - found["p10"]) / 2 > NOISY * found["ms"]
    if device == "cuda":
        clocks = machine.clocks()
        found |= {"clock_mhz": clocks["sm_mhz"], "throttled": clocks["throttled"]}
    return found


def print_table(results):
    measured = results.measured()
    names = list(dict.fromkeys(row["baseline"] for row in measured))
    print(f"\nTFLOP/s (median) on {results.head['machine']['device']}")
    print(f"{'case':58}{'pass':10}" + "".join(f"{name[:14]:>16}" for name in names))
    for case, which in dict.fromkeys((label(row), row["pass"]) for row in measured):
        cells = {row["baseline"]: row for row in measured if (label(row), row["pass"]) == (case, which)}
        values = [f"{cells[n]['tflops']:.3g}" + ("~" if cells[n]["noisy"] else "") if n in cells else "-" for n in names]
        print(f"{case:58}{which:10}" + "".join(f"{value:>16}" for value in values))
    if any(row["noisy"] for row in measured):
        print("~ spread above 5 % of the median")
    for name, reason in dict.fromkeys((row["baseline"], row["reason"]) for row in results.rows if "reason" in row):
        print(f"left out: {name}: {reason}")


def label(row):
    return cases.Case(**{**row["case"], "lengths": tuple(row["case"]["lengths"])}).label()


def main():
    p = command.parser(__doc__, "build/bench/speed.json")
    p.add_argument(
        "--pass", dest="passes", nargs="+", choices=("forward", "backward", "both"), default=["forward", "backward"]
    )
    p.add_argument("--seconds", type=float, default=0.15, help="of samples per row")
    p.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each row, against power throttling")
    p.add_argument("--graph", action="store_true", help="replay the call as a CUDA graph")
    arguments = p.parse_args()
    if arguments.list:
        return command.print_list(arguments.device)
    if arguments.graph and arguments.device != "cuda":
        raise ValueError("graph: got a CPU run; allowed: --device cuda")
    chosen = command.chosen_cases(arguments, "quick")
    entries = baselines.select(arguments.baselines)
    head = machine.facts(arguments.device)
    results = command.opened(arguments.output, "speed", head, arguments.resume, arguments.force)
    if "ceilings" not in results.head:
        results.head["ceilings"] = timing.ceilings(arguments.device)
    timer = timing.Timer(arguments.device, arguments.seconds, graph=arguments.graph)
    work = [
        ({"case": case.as_json(), "baseline": entry.name, "pass": which},
         lambda c=case, e=entry, w=which: speed(c, e, w, timer, arguments.device, arguments.rest))
        for case in chosen for which in arguments.passes for entry in entries
    ]  # fmt: skip
    command.measure_all(results, arguments.output, work, arguments.quiet)
    print_table(results)
    print(f"\n{arguments.output}")
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
