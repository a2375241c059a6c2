"""Times invariant=True against the same calls without it: prefill, decoding, backward.

    python bench/benchmark_invariant.py                                 # everything, on a GPU
    python bench/benchmark_invariant.py --parts prefill options --json invariant.json
    python bench/benchmark_invariant.py --parts decode --first 3 --device cpu

Prefill and backward: the cells of the preset "paper" (backward against deterministic=True), and some with options; decode:
32 query heads over 8 key heads of 128 columns, dense and in pages of 64. The two calls of a cell alternate, with L2 emptied
before each; medians in microseconds, and how many times as long the invariant call takes.
"""

import argparse
import statistics
import sys

import benchmark_decode
import command
import presets
import timing
import torch
from flash_attention import attention, attention_over_cache

LENGTHS, BATCHES = (128, 1024, 8192, 32768, 131072), (1, 8, 16)
OPTIONS = {  # 2 x 8192, causal
    "softcap": {"softcap": 30.0},
    "window": {"window": (1024, 0)},
    "alibi": {"alibi_slopes": None},
    "sink": {"sink": None},
}


def tensors(shape, device, learn=False):
    batch, seq, heads, dim = shape
    make = {"device": device, "dtype": torch.bfloat16, "requires_grad": learn}
    return [torch.randn(batch, seq, heads, dim, **make) for _ in range(3)]


def prefill(case, device):
    q, k, v = tensors((case.batch, case.seq, case.heads, case.head_dim), device)
    return [lambda flag=flag: attention(q, k, v, causal=case.causal, invariant=flag) for flag in (False, True)]


def option(name, device, dim=128):
    q, k, v = tensors((2, 8192, 2048 // dim, dim), device)
    heads = torch.rand(2048 // dim, device=device)
    given = {key: heads if value is None else value for key, value in OPTIONS[name].items()}
    return [lambda flag=flag: attention(q, k, v, causal=True, invariant=flag, **given) for flag in (False, True)]


def backward(case, device):
    q, k, v = tensors((case.batch, case.seq, case.heads, case.head_dim), device, learn=True)
    dout = torch.randn_like(q)
    calls = []
    for flags in ({"deterministic": True}, {"invariant": True}):
        out = attention(q, k, v, causal=case.causal, **flags)
        calls.append(lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    return calls


def decode(shape, device):
    batch, keys, pages = shape
    make = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(batch, 1, 32, 128, **make)
    k, v = (torch.randn(batch, keys, 8, 128, **make) for _ in range(2))
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    given = {}
    if pages:
        (k, v), table = benchmark_decode.in_pages([k, v], pages)
        given = {"page_table": table, "seqused_kv": lengths}
    run = attention_over_cache if pages else attention
    return [lambda flag=flag: run(q, k, v, invariant=flag, **given) for flag in (False, True)]


def paper(pass_):
    sizes = lambda c: f"{c.batch} x {c.seq} x {c.heads} x {c.head_dim}, {'causal' if c.causal else 'full'}"  # noqa: E731
    return [(f"{pass_} {sizes(case)}", case) for case in presets.paper()]


WORK = {
    "prefill": (prefill, lambda: paper("prefill")),
    "options": (option, lambda: [(f"prefill 2 x 8192 x 16 x 128, causal, {name}", name) for name in OPTIONS]),
    "decode": (
        decode,
        lambda: [
            (f"decode {b} x 32/8 x {n}, {f'pages of {p}' if p else 'dense'}", (b, n, p))
            for n in LENGTHS for b in BATCHES for p in (0, 64)
        ],
    ),
    "backward": (backward, lambda: paper("backward")),
}  # fmt: skip


def report(label, calls, timer, kept, part):
    plain, invariant = timer.in_turn([timer.warmed(call) for call in calls])
    times = round(invariant["ms"] / plain["ms"], 4)
    print(f"{label:>44}: {plain['ms'] * 1e3:9.1f} {invariant['ms'] * 1e3:9.1f} us  x {times:.3f}", flush=True)
    which = "backward" if part == "backward" else "forward"
    kept.add(label, which, {"plain": plain, "invariant": invariant}, (), times_plain=times)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_device(parser)
    parser.add_argument("--parts", nargs="+", default=list(WORK), choices=list(WORK))
    command.add_share(parser, "cells of each part")
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_json(parser)
    arguments = parser.parse_args()
    timer = timing.Timer(arguments.device, arguments.seconds, warmup_seconds=arguments.seconds / 2)
    kept = command.Times(arguments.json, arguments.device)
    for part in arguments.parts:
        make, cells = WORK[part]
        found = []
        for label, what in command.share_of(arguments, cells()):
            with kept.problem(label):
                found.append(report(label, make(what, arguments.device), timer, kept, part))
        if found:
            print(f"{part}: {statistics.geometric_mean(found):.3f} in the mean, at most {max(found):.3f}", flush=True)
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
