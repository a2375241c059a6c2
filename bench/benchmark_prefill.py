"""Times prompts whose keys and values are in pages against the same in one piece.

    python bench/benchmark_prefill.py                                   # causal prompts of 2k to 16k
    python bench/benchmark_prefill.py --shapes 1x32/8x512x16384 --pages 16 256 --kernels decode/sm80 forward/sm90
    python bench/benchmark_prefill.py --device cpu --shapes 1x4/1x256x1024

A shape is BATCHxHEADS/KV_HEADSxQUERIESxKEYS; with fewer queries than keys it is a chunk of a prompt, the last one. Entries
of a shape alternate; medians. Results are compared before anything is timed. `of one piece` is the part of the rate
without pages.
"""

import argparse
import re
import sys

import command
import package  # noqa: F401 (makes flash_attention importable)
import timing
import torch
from benchmark_decode import DTYPES, in_pages
from flash_attention.torch_cache import attention_over_cache

SHAPES = (
    *("8x32/8x2048x2048", "4x32/8x4096x4096", "2x32/8x8192x8192", "1x32/8x16384x16384"),
    *("1x32/8x512x16384", "8x32/8x512x8192", "1x32/8x128x16384", "1x32/8x64x16384", "8x32/8x32x8192"),
)
CPU_SHAPES = ("1x4/1x512x512", "1x4/1x128x1024")


def parsed(text):
    """(batch, heads_q, heads_kv, queries, keys) of "8x32/8x2048x2048"."""
    found = re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected BATCHxHEADS/KV_HEADSxQUERIESxKEYS, as 8x32/8x2048x2048")
    return tuple(map(int, found.groups()))


def contestants(q, k, v, arguments):
    """{name: call}; the planner's choice, and each kernel by name on the first page size."""
    lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)

    def call(keys, values, table=None, kernel=None):
        return lambda: attention_over_cache(
            q, keys, values, seqused_kv=lengths, page_table=table, causal=not arguments.full, kernel=kernel
        )

    calls = {"one piece": call(k, v)}
    for page in arguments.pages:
        stores, table = in_pages([k, v], page)
        paged = (*stores, table)
        calls[f"page {page}"] = call(*paged)
        if page == arguments.pages[0]:
            calls |= {kernel: call(*paged, kernel) for kernel in arguments.kernels}
    return calls


def products(shape, full):
    """Multiplications and additions of a shape's visible scores, by the width of a head."""
    batch, heads, _, queries, keys = shape
    visible = queries * keys if full else queries * (keys - queries) + queries * (queries + 1) // 2
    return 4 * batch * heads * visible


def measured(shape, arguments, timer):
    batch, heads, heads_kv, queries, keys = shape
    make = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
    q = torch.randn(batch, queries, heads, arguments.head_dim, **make)
    k, v = (torch.randn(batch, keys, heads_kv, arguments.head_dim, **make) for _ in range(2))
    calls = contestants(q, k, v, arguments)
    want = calls["one piece"]()
    for name, call in calls.items():
        error = (call() - want).abs().max().item()
        assert error < 0.03, f"{name}: differs from one piece by {error}"
    return dict(zip(calls, timer.in_turn([timer.warmed(call) for call in calls.values()]), strict=True))


def report(label, shape, arguments, timer, kept):
    """Measures a shape, keeps it and prints its lines."""
    found = measured(shape, arguments, timer)
    work, whole = products(shape, arguments.full) * arguments.head_dim, found["one piece"]["ms"]
    print(label)
    for name, row in found.items():
        row["tflops"] = round(work / row["ms"] / 1e9, 4)
        part = whole / row["ms"]
        print(f"  {name:>12}  {row['ms'] * 1e3:9.1f} us  {row['tflops']:6.0f} TFLOP/s  {part:.3f} of one piece", flush=True)
    what = {"shape": [*shape, arguments.head_dim], "causal": not arguments.full, "dtype": arguments.dtype}
    kept.add(label, "forward", found, (), **what)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_device(parser)
    parser.add_argument("--shapes", type=parsed, nargs="+", help="BATCHxHEADS/KV_HEADSxQUERIESxKEYS")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--kernels", nargs="*", default=[], help="kernels by name, on the first page size")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_share(parser, "shapes")
    command.add_json(parser)
    arguments = parser.parse_args()
    timer = timing.Timer(arguments.device, seconds=arguments.seconds)
    kept = command.Times(arguments.json, arguments.device)
    shapes = arguments.shapes or [parsed(text) for text in (SHAPES if arguments.device == "cuda" else CPU_SHAPES)]
    for shape in command.share_of(arguments, shapes):
        batch, heads, heads_kv, queries, keys = shape
        label = f"{batch} x {heads}/{heads_kv} x {queries} of {keys}, D{arguments.head_dim}"
        with kept.problem(label):
            report(label, shape, arguments, timer, kept)
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
