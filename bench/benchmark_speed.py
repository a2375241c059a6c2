"""Times attention, forward and backward, against everything one would use instead.

    python bench/benchmark_speed.py --preset quick
    python bench/benchmark_speed.py --preset paper --pass forward backward --baselines ours sdpa_flash sdpa_cudnn
    python bench/benchmark_speed.py --seq 1024 4096 --head-dim 128 --heads 16 --mask causal --output build/bench/mine.json

Medians with 10th and 90th percentile; the baselines of a case alternate. On a GPU L2 is emptied before each sample. On a
CPU each call is timed alone, with pauses, and again as in a model, between matrix products of torch (`interleaved_ms`).
TFLOP/s = 4 * batch * heads * L * L * head_dim, halved for causal, 2.5 times for backward.
"""

import statistics
import time

import cases
import command
import machine
import presets
import timing
import torch
from peers import baselines

NOISY = 0.05  # half the spread between the 10th and the 90th percentile, against the median


def call_of(case, entry, which, tensors):
    """What is timed."""
    q, k, v, grad = tensors
    if which == "forward":
        return torch.no_grad()(lambda: entry.run(q, k, v, case))
    wanted = baselines.wanted(case, q, k, v)
    if which == "backward":
        out = entry.run(q, k, v, case)
        return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)
    return lambda: torch.autograd.grad(entry.run(q, k, v, case), wanted, grad)


def completed(case, which, found, device):
    """The timing with what follows from it."""
    found["tflops"] = round(case.flops(which) / found["ms"] / 1e9, 4)
    found["intensity"] = round(case.flops(which) / case.bytes(which), 2)
    found["noisy"] = (found["p90"] - found["p10"]) / 2 > NOISY * found["ms"]
    if device == "cuda":
        clocks = machine.clocks()
        found |= {"clock_mhz": clocks["sm_mhz"], "throttled": clocks["throttled"]}
    return found


class InTurn:
    """The measurements of the entries for one case and pass, made together when the first is needed.

    On a GPU an entry that stores the scores is timed by itself after the others, which it would leave no memory.
    """

    def __init__(self, case, entries, which, timer, rest=0.0, alone=False, pauses=True):
        self.case, self.which, self.timer, self.rest, self.pauses, self.found = case, which, timer, rest, pauses, {}
        single = [e for e in entries if alone or (e.stores_scores and timer.device == "cuda")]
        self.groups = [[e for e in entries if e not in single], *([e] for e in single)]

    def row(self, entry):
        if entry.name not in self.found:
            with self.timer.stream():
                self.measure(next(group for group in self.groups if entry in group))
        return self.found[entry.name]

    def measure(self, group):
        time.sleep(self.rest)
        device, calls, tensors = self.timer.device, {}, {}  # tensors: the same for all that take the same form
        for entry in group:
            reason = entry.reject(self.case, device) or entry.lacks(self.which)
            if not reason:
                try:
                    if entry.form not in tensors:
                        tensors[entry.form] = baselines.inputs(self.case, entry, device, self.which != "forward")
                    call = call_of(self.case, entry, self.which, tensors[entry.form])
                    calls[entry.name] = self.timer.warmed(call)
                except Exception as error:  # any failure of a baseline is a result
                    reason = command.reason_of(error)
                    if command.is_lost():
                        raise command.LostGpu(reason, entry.name) from error
            if reason:
                self.found[entry.name] = {"reason": reason}
        warmed = list(calls.values())
        alone = self.timer.in_turn(warmed) if self.pauses else []
        between = self.timer.between_matmuls(warmed) if device == "cpu" and calls else [{} for _ in calls]
        if not self.pauses:
            names = "ms", "p10", "p90", "samples"
            alone = [{name: found[f"interleaved_{name}"] for name in names} for found in between]
        for name, found, more in zip(calls, alone, between, strict=True):
            self.found[name] = completed(self.case, self.which, found, device) | more


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
    """Our speed over that of each other baseline: geometric mean, smallest and largest, by type and pass. On CPUs alone and
    between matrix products, and also the product after our call against the product after the other."""
    times = {(label(row), row["pass"], row["baseline"]): row for row in results.measured()}
    for field, where in (("ms", ""), ("interleaved_ms", " between matmuls"), ("matmul_ms", ", the matmul after it")):
        groups = {}
        for (case, which, name), row in times.items():
            ours = times.get((case, which, "ours"))
            if name != "ours" and cases.job(name) == "" and ours and field in ours and field in row:
                groups.setdefault((name, row["case"]["dtype"], which), []).append(row[field] / ours[field])
        for (name, dtype, which), ratios in groups.items():
            mean = statistics.geometric_mean(ratios)
            spread = f"from {min(ratios):.2f} to {max(ratios):.2f}"
            print(f"ours against {name}, {dtype} {which}{where}: {mean:.2f} times as fast ({spread})")


def label(row):
    return cases.Case.from_json(row["case"]).label()


def main():
    p = command.parser(__doc__, "build/bench/speed.json")
    p.add_argument(
        "--pass", dest="passes", nargs="+", choices=("forward", "backward", "both"), default=["forward", "backward"]
    )
    p.add_argument("--seconds", type=float, default=0.15, help="of samples per row")
    p.add_argument("--warmup", type=float, default=0.05, help="seconds of warm-up per row")
    p.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each case, against power throttling")
    p.add_argument("--alone", action="store_true", help="time one baseline after another instead of in turn")
    p.add_argument("--graph", action="store_true", help="replay the call as a CUDA graph")
    p.add_argument("--interleaved", action="store_true", help="on a CPU: between matrix products alone, without any pause")
    arguments = p.parse_args()
    if arguments.list:
        return command.print_list(arguments.device)
    if arguments.graph and arguments.device != "cuda":
        raise ValueError("graph: got a CPU run; allowed: --device cuda")
    if arguments.interleaved and arguments.device != "cpu":
        raise ValueError("interleaved: got a GPU run; allowed: --device cpu")
    chosen = command.chosen_cases(arguments, "quick")
    entries = baselines.select(arguments.baselines)
    head = machine.facts(arguments.device)
    results = command.opened(arguments.output, "speed", head, arguments.resume, arguments.force)
    if "ceilings" not in results.head and not arguments.part:
        results.head["ceilings"] = timing.ceilings(arguments.device)
    if presets.PRESETS.get(arguments.preset) in presets.LISTS:
        results.head["listed"] = True
    timer = timing.Timer(arguments.device, arguments.seconds, arguments.warmup, arguments.graph)
    work, known = [], results.keys()
    for case in chosen:
        for which in arguments.passes:
            rows = [({"case": case.as_json(), "baseline": e.name, "pass": which}, e) for e in entries]
            rows = [(identity, entry) for identity, entry in rows if results.key(identity) not in known]
            order = {"alone": arguments.alone, "pauses": not arguments.interleaved}
            turns = InTurn(case, [entry for _, entry in rows], which, timer, arguments.rest, **order)
            work += [(identity, lambda t=turns, e=entry: t.row(e)) for identity, entry in rows]
    command.measure_all(results, arguments.output, work, arguments.quiet)
    print_table(results)
    print_ratios(results)
    print(f"\n{arguments.output}")
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
