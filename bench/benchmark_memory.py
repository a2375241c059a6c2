"""Peak memory of attention against length, and what fits into a budget.

    python bench/benchmark_memory.py                                     # forward + backward, L 512 to 16384
    python bench/benchmark_memory.py --budget 16                         # largest batch and longest sequence in 16 GB
    python bench/benchmark_memory.py --budget 16 --first 5               # the first five searches: 1024 x 8 heads of 64

`extra` is what a pass needs beyond its inputs, outputs and gradients. The budget is enforced by the allocator and every
answer of the search was run, forward and backward; so was the next larger one, which did not fit.
"""

import ctypes
import gc
from dataclasses import replace

import cases
import command
import machine
import torch
from peers import baselines

SEARCH_LIMIT = {"batch": 4096, "seq": 1 << 19}


def run_once(case, entry, device, which):
    q, k, v, grad = baselines.inputs(case, entry, device, needs_grad=which != "forward")
    with torch.set_grad_enabled(which != "forward"):
        out = entry.run(q, k, v, case)
    if which != "forward":
        torch.autograd.grad(out, (q, k, v), grad)
    if device == "cuda":
        torch.cuda.synchronize()


def peak_of(call, device):
    """Bytes in use at the highest point of call(), beyond those in use before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    before = status_bytes("VmRSS")
    call()
    return max(0, status_bytes("VmHWM") - before)


def status_bytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def memory(case, entry, which, device):
    reason = entry.reject(case, device) or entry.lacks(which)
    if reason:
        return {"reason": reason}
    small = replace(case, batch=1, seq=128, lengths=(128,) if case.lengths else ())
    run_once(small, entry, device, which)  # what a first call compiles or keeps is not the problem's memory
    peak = peak_of(lambda: run_once(case, entry, device, which), device)
    ends = case.bytes("forward" if which == "forward" else "backward")
    return {"peak_bytes": peak, "extra_bytes": max(0, peak - ends)}


def fits(case, entry):
    """Runs it, forward and backward; False where memory ran out."""
    command.release()
    try:
        run_once(case, entry, "cuda", "both")
        return True
    except torch.OutOfMemoryError:
        return False


def largest(case, axis, entry, budget_gb, granule):
    """The largest multiple of granule of `axis` that fits into the budget, by doubling and bisection."""
    reason = entry.reject(case, "cuda") or entry.lacks("both")
    if reason:
        return {"reason": reason}
    torch.cuda.set_per_process_memory_fraction(budget_gb * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    try:
        limit = SEARCH_LIMIT[axis] // granule
        found = bisect(lambda n: fits(replace(case, **{axis: n * granule}), entry), limit)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"largest": found * granule, "at_limit": found == limit}


def bisect(good, limit):
    """The largest n up to limit with good(n), where good is true up to some point; 0 where good(1) is false. The limit is
    tried first: where it is good, the largest runs, which take longest, are made once."""
    if good(limit):
        return limit
    low, high = 0, 1
    while high < limit and good(high):
        low, high = high, high * 2
    high = min(high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def print_table(results):
    print(f"\npeak GB (extra GB) on {results.head['machine']['device']}")
    for row in results.measured():
        case = row["case"]
        print(f"  {row['baseline']:16} {row['pass']:9} L {case['seq']:6} {'causal' if case['causal'] else 'full':7}"
              f" {row['peak_bytes'] / 1e9:9.3f} ({row['extra_bytes'] / 1e9:.3f})")  # fmt: skip


def main():
    p = command.parser(__doc__, "build/bench/memory.json")
    p.add_argument("--pass", dest="passes", nargs="+", choices=("forward", "both"), default=["both"])
    p.add_argument("--budget", type=float, help="GB: search for the largest batch and the longest sequence instead")
    arguments = p.parse_args()
    if arguments.list:
        return command.print_list(arguments.device)
    entries = baselines.select(arguments.baselines)
    head = machine.facts(arguments.device)
    if arguments.budget is not None:
        return capacity(arguments, entries, head)
    chosen = command.chosen_cases(arguments, "seq_sweep" if arguments.device == "cuda" else "cpu")
    results = command.opened(arguments.output, "memory", head, arguments.resume, arguments.force)
    work = [
        ({"case": case.as_json(), "baseline": entry.name, "pass": which},
         lambda c=case, e=entry, w=which: memory(c, e, w, arguments.device))
        for case in chosen for which in arguments.passes for entry in entries
    ]  # fmt: skip
    command.measure_all(results, arguments.output, work, arguments.quiet)
    print_table(results)
    print(f"\n{arguments.output}")
    return 0


def capacity(arguments, entries, head):
    if arguments.device != "cuda":
        raise ValueError("budget: got a search on the CPU; allowed: --device cuda, whose allocator can enforce it")
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    if not 0 < arguments.budget <= total:
        raise ValueError(f"budget: got {arguments.budget} GB; allowed: above 0, up to the {total:.0f} GB of the GPU")
    results = command.opened(arguments.output, "capacity", head, arguments.resume, arguments.force)
    batch_case = cases.Case(1, 4096, 16, 64, causal=True)
    seq_case = cases.Case(1, 1024, 16, 64, causal=True)
    small_case = cases.Case(1, 1024, 8, 64, causal=True)
    searches = (("batch", small_case, 1), ("batch", batch_case, 1), ("seq", seq_case, 1024))  # from the quickest
    work = [
        ({"search": {"axis": axis, "budget_gb": arguments.budget, "case": case.as_json()}, "baseline": entry.name},
         lambda a=axis, c=case, g=granule, e=entry: largest(c, a, e, arguments.budget, g))
        for axis, case, granule in searches for entry in entries
    ]  # fmt: skip
    command.measure_all(results, arguments.output, command.share_of(arguments, work), arguments.quiet)
    for row in results.measured():
        more = " or more" if row["at_limit"] else ""
        print(f"  largest {row['search']['axis']:6} in {arguments.budget} GB: {row['baseline']:16} {row['largest']}{more}")
    print(f"\n{arguments.output}")
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
