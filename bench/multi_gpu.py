"""Times attention on many GPUs, data-parallel and context-parallel: TFLOP/s of a GPU, and how that scales.

    torchrun --nproc-per-node 8 bench/multi_gpu.py --seq 65536 131072 --heads 32 --heads-kv 8 --head-dim 128 --mask causal
    python bench/multi_gpu.py --seq 16384 --heads 16 --head-dim 128 --mask causal          # one GPU: what the wrapper costs
    python bench/multi_gpu.py --seq 16384 --heads 16 --head-dim 128 --mask causal --steps 4

A context-parallel case has the whole sequence on all ranks together; a data-parallel one on every rank. A sample is the
time of the slowest rank. `scaling` is a rank's TFLOP/s against those of one rank that attends the same sequence alone.
--steps N, on one GPU: the blocks that N ranks would attend in their turns, one after the other, and their TFLOP/s against
one call. The JSON file is that of the other benchmarks: bench/visualize_results.py reads it.
"""

import os
import time

import command
import machine
import timing
import torch
import torch.distributed as dist
from flash_attention.parallel import split
from peers import baselines, parallel_calls

SAMPLES = (3, 50)


def start(device):
    """This process's rank and world; a plain `python` is a group of one."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
        dist.init_process_group("nccl", device_id=place, **alone)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **alone)
    return dist.get_rank(), dist.get_world_size()


def slowest(value, device):
    """The largest of all ranks' values."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def sample(call, device):
    """Milliseconds of the slowest rank; all begin together."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return slowest((time.perf_counter() - begin) * 1e3, device)


def measured(call, device, seconds):
    """{"ms", "p10", "p90", "samples"}; every rank takes as many samples as the others."""
    for _ in range(2):
        each = sample(call, device)
    count = int(min(SAMPLES[1], max(SAMPLES[0], seconds * 1e3 / max(each, 1e-3))))
    return timing.summary([sample(call, device) for _ in range(count)])


def tensors_of(case, device, world, rank, whole):
    """q, k, v, dout of this rank: all rows, or its part of them."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(case.batch, case.seq, heads, case.head_dim) for heads in (case.heads, case.kv, case.kv, case.heads)]
    found = [torch.randn(*s, generator=generator, device=device, dtype=baselines.DTYPES[case.dtype]) for s in sizes]
    return found if whole or world == 1 else [split(tensor, world, rank) for tensor in found]


def call_of(run, tensors, which):
    q, k, v, dout = tensors
    if which == "forward":
        return torch.no_grad()(lambda: run(q, k, v))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    if which == "both":
        return lambda: torch.autograd.grad(run(q, k, v), (q, k, v), dout)
    out = run(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def row_of(case, name, which, device, world, rank, seconds):
    reason = parallel_calls.rejects(name, case, world, device)
    if reason:
        return {"reason": reason}
    whole = name == "data_parallel"
    run = parallel_calls.ENTRIES[name](case, world, rank)
    found = measured(call_of(run, tensors_of(case, device, world, rank, whole), which), device, seconds)
    work = case.flops(which) * (world if whole else 1)
    return completed(found, work / world, world)


def completed(found, work, world):
    """work: FLOPs of one GPU."""
    found["tflops"] = round(work / found["ms"] / 1e9, 4)
    found["world"] = world
    found["noisy"] = (found["p90"] - found["p10"]) / 2 > 0.05 * found["ms"]
    return found


def alone(case, which, device, rank, seconds):
    """TFLOP/s of one rank that attends the whole sequence while the others wait; 0 where it does not fit."""
    call, fits = (lambda: None), 1.0
    if rank == 0:
        try:
            call = call_of(parallel_calls.data_parallel(case, 1, 0), tensors_of(case, device, 1, 0, True), which)
            call()
        except (MemoryError, torch.OutOfMemoryError):
            command.release()
            fits = 0.0
    if slowest(fits if rank == 0 else 0.0, device) == 0.0:
        return 0.0
    return case.flops(which) / measured(call, device, seconds)["ms"] / 1e9


def steps_rows(case, steps, device, seconds):
    """{(entry, pass): row} of one call and of the same work in the blocks of `steps` ranks."""
    tensors = tensors_of(case, device, 1, 0, True)
    calls = dict(zip(("forward", "backward"), parallel_calls.simulated_steps(case, steps, tensors), strict=True))
    timer, rows = timing.Timer(device, seconds, 0.05), {}
    for which, call in calls.items():
        whole = call_of(parallel_calls.data_parallel(case, 1, 0), tensors_of(case, device, 1, 0, True), which)
        one, many = timer.in_turn([timer.warmed(whole), timer.warmed(call)])
        rows["ours", which] = completed(one, case.flops(which), 1)
        rows[f"steps_{steps}", which] = completed(many, case.flops(which), 1)
        rows[f"steps_{steps}", which]["scaling"] = round(one["ms"] / many["ms"], 4)
    return rows


def print_rows(rows, world):
    print(f"\nTFLOP/s of a GPU, {world} of them")
    for row in rows:
        label = f"L{row['case']['seq']} H{row['case']['heads']}/{row['case']['heads_kv']} {row['baseline']} {row['pass']}"
        scaling = f"   {row['scaling']:.3f} of one GPU" if "scaling" in row else ""
        print(f"{label:56}" + (row["reason"] if "reason" in row else f"{row['tflops']:10.4g}{scaling}"))


def main():
    p = command.parser(__doc__, "build/bench/multi_gpu.json")
    p.add_argument("--pass", dest="passes", nargs="+", choices=("forward", "backward", "both"), default=["forward", "both"])
    p.add_argument("--seconds", type=float, default=0.5, help="of samples per row")
    p.add_argument("--steps", type=int, metavar="N", help="the blocks of N ranks on one GPU, instead of everything else")
    arguments = p.parse_args()
    names = arguments.baselines or list(parallel_calls.ENTRIES)
    unknown = [name for name in names if name not in parallel_calls.ENTRIES]
    if unknown:
        raise ValueError(f"baselines: got '{unknown[0]}'; allowed: {', '.join(parallel_calls.ENTRIES)}")
    chosen = command.chosen_cases(arguments, "quick")
    rank, world = start(arguments.device)
    if arguments.steps and world > 1:
        raise ValueError(f"steps: got {arguments.steps} with {world} processes; allowed: one process")
    results = None
    if rank == 0:
        results = command.opened(arguments.output, "speed", machine.facts(arguments.device), False, arguments.force)
        results.head["world"] = world
    rows = []
    for case in chosen:
        if arguments.steps:
            found = steps_rows(case, arguments.steps, arguments.device, arguments.seconds)
            rows += [{"case": case.as_json(), "baseline": n, "pass": w, **row} for (n, w), row in found.items()]
            continue
        for which in arguments.passes:
            single = alone(case, which, arguments.device, rank, arguments.seconds)
            for name in names:
                try:
                    row = row_of(case, name, which, arguments.device, world, rank, arguments.seconds)
                except Exception as error:  # any failure of a baseline is a result; it is the same one on every rank
                    row = {"reason": command.reason_of(error)}
                if single and "tflops" in row:
                    row["scaling"] = round(row["tflops"] / single, 4)
                rows.append({"case": case.as_json(), "baseline": name, "pass": which, **row})
    if rank == 0:
        results.rows = rows
        results.save(arguments.output)
        print_rows(rows, world)
        print(f"\n{arguments.output}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
