"""Times attention, forward and backward, against everything one would use instead.

    python bench/benchmark_speed.py --preset quick
    python bench/benchmark_speed.py --preset paper --pass forward backward --baselines ours sdpa_flash sdpa_cudnn
    python bench/benchmark_speed.py --seq 1024 4096 --head-dim 128 --heads 16 --mask causal --output build/bench/mine.json

Medians with 10th and 90th percentile; on a GPU with L2 emptied before every sample, on a CPU with all baselines of a case
taking turns. TFLOP/s = 4 * batch * heads * L * L * head_dim, halved for causal, 2.5 times for backward.
"""

import statistics
import time

import baselines
import cases
import command
import machine
import timing
import torch

NOISY = 0.05  # half the spread between the 10th and the 90th percentile, against the median


def prepared(case, entry, which, device):
    """(the call to time, why there is none)"""
    reason = entry.reject(case, device) or entry.lacks(which)
    if reason:
        return None, reason
    q, k, v, grad = baselines.inputs(case, entry, device, needs_grad=which != "forward")
    if which == "forward":
        return torch.no_grad()(lambda: entry.run(q, k, v, case)), ""
    if which == "backward":
        out = entry.run(q, k, v, case)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), ""
    return lambda: torch.autograd.grad(entry.run(q, k, v, case), (q, k, v), grad), ""


def completed(case, which, found, device):
    """The timing with what follows from it."""
    found["tflops"] = round(case.flops(which) / found["ms"] / 1e9, 4)
    found["intensity"] = round(case.flops(which) / case.bytes(which), 2)
    found["noisy"] = (found["p90"] - found["p10"]) / 2 > NOISY * found["ms"]
    if device == "cuda":
        clocks = machine.clocks()
        found |= {"clock_mhz": clocks["sm_mhz"], "throttled": clocks["throttled"]}
    return found


def speed(case, entry, which, timer, device, rest):
    """The measurement of one row."""
    call, reason = prepared(case, entry, which, device)
    if reason:
        return {"reason": reason}
    time.sleep(rest)
    return completed(case, which, timer(call), device)


class InTurn:
    """The measurements of all entries for one case and pass on a CPU, made together when the first is asked for."""

    def __init__(self, case, entries, which, timer):
        self.case, self.entries, self.which, self.timer, self.found = case, entries, which, timer, None

    def row(self, entry):
        if self.found is None:
            self.found, calls = {}, {}
            for each in self.entries:
                try:
                    calls[each.name], reason = prepared(self.case, each, self.which, "cpu")
                    calls[each.name] and calls[each.name]()
                except Exception as error:  # any failure of a baseline is a result
                    reason = command.reason_of(error)
                if reason:
                    calls.pop(each.name, None)
                    self.found[each.name] = {"reason": reason}
            for name, found in zip(calls, self.timer.take_turns(list(calls.values())), strict=True):
                self.found[name] = completed(self.case, self.which, found, "cpu")
        return self.found[entry.name]


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


def print_ratios(results):
    """How many times as fast ours is as each of the others: geometric mean, smallest and largest, by type and pass."""
    times = {(label(row), row["pass"], row["baseline"]): row for row in results.measured()}
    groups = {}
    for (case, which, name), row in times.items():
        ours = times.get((case, which, "ours"))
        if name != "ours" and ours:
            groups.setdefault((name, row["case"]["dtype"], which), []).append(row["ms"] / ours["ms"])
    for (name, dtype, which), ratios in groups.items():
        mean = statistics.geometric_mean(ratios)
        print(
            f"ours against {name}, {dtype} {which}: {mean:.2f} times as fast (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


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
    work = []
    for case in chosen:
        for which in arguments.passes:
            turns = InTurn(case, entries, which, timer)
            for entry in entries:
                identity = {"case": case.as_json(), "baseline": entry.name, "pass": which}
                if arguments.device == "cpu":
                    work.append((identity, lambda t=turns, e=entry: t.row(e)))
                else:
                    work.append((identity, lambda c=case, e=entry, w=which: speed(c, e, w, timer, "cuda", arguments.rest)))
    command.measure_all(results, arguments.output, work, arguments.quiet)
    print_table(results)
    print_ratios(results)
    print(f"\n{arguments.output}")
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
