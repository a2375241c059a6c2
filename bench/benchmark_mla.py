"""Times latent attention (MLA) for few queries: one cache in pages of 64, of 576 columns of which 512 are the values.

    python bench/benchmark_mla.py                                 # batch 128, 4096 keys, 16 and 128 heads, 1 and 2 tokens
    python bench/benchmark_mla.py --shapes 128x16x4096 1x128x65536 --tokens 1 --fp8 --json mla.json
    python bench/benchmark_mla.py --dims 512x512                  # other widths of a key and its value

A shape is BATCHxHEADSxKEYS. Results are compared with float64 before anything is timed; L2 is emptied before each call;
medians in microseconds. `GB/s` counts the cache once, TFLOP/s 2 * (576 + 512) a score. FlashMLA is timed, too, where it is
installed.
"""

import argparse
import importlib.util
import sys

import command
import timing
import torch
from flash_attention import flash_mla

DIMS, PAGE = "576x512", 64
SHAPES = ("128x16x4096", "128x128x4096")


def exact(q, cache, table, keys, dim_v):
    """The first sequence, in float64."""
    rows = cache[table[0].long()].flatten(0, 1)[:keys, 0].double()
    tokens = q.shape[1]
    scores = torch.einsum("qhd,kd->hqk", q[0].double(), rows) * q.shape[-1] ** -0.5
    hidden = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu(keys - tokens + 1)
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), rows[:, :dim_v])


def measured(shape, tokens, dims, fp8, timer):
    device = timer.device
    batch, heads, keys = map(int, shape.split("x"))
    dim, dim_v = map(int, dims.split("x"))
    pages = -(-keys // PAGE)
    make = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(batch, tokens, heads, dim, **make)
    cache = torch.randn(batch * pages, PAGE, 1, dim, **make)
    table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    options = {"causal": True}
    want = exact(q, cache, table, keys, dim_v)
    codes = cache.to(torch.float8_e4m3fn) if fp8 else None
    calls = {"ours": lambda: flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, dim_v, **options)[0]}
    if fp8:
        calls["ours, fp8"] = lambda: flash_mla.flash_mla_with_kvcache(
            q, codes, table, lengths, dim_v, is_fp8_kvcache=True, k_scale=1.0, **options
        )[0]
    if device == "cuda" and importlib.util.find_spec("flash_mla") is not None:
        import flash_mla as theirs

        metadata = theirs.get_mla_metadata()
        calls["FlashMLA"] = lambda: theirs.flash_mla_with_kvcache(q, cache, table, lengths, dim_v, *metadata, **options)[0]
    for name, call in calls.items():
        error = (call()[0].double() - want).abs().max().item()
        assert error < (0.2 if "fp8" in name else 0.02), f"{name}: differs from float64 by {error}"
    found = dict(zip(calls, timer.in_turn([timer.warmed(call) for call in calls.values()]), strict=True))
    for name, row in found.items():
        element = 1 if "fp8" in name else 2
        row["gbs"] = round(batch * keys * dim * element / row["ms"] / 1e6, 1)
        row["tflops"] = round(2 * (dim + dim_v) * batch * tokens * heads * keys / row["ms"] / 1e9, 1)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_device(parser)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="BATCHxHEADSxKEYS")
    command.add_share(parser, "shapes and tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dims", default=DIMS, help="columns of a key, and of them those of its value")
    parser.add_argument("--fp8", action="store_true", help="a cache of e4m3, too")
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_json(parser)
    arguments = parser.parse_args()
    timer = timing.Timer(arguments.device, seconds=arguments.seconds)
    kept = command.Times(arguments.json, arguments.device)
    work = [(shape, tokens) for shape in arguments.shapes for tokens in arguments.tokens]
    for shape, tokens in command.share_of(arguments, work):
        label = f"{shape}, tokens {tokens}" + ("" if arguments.dims == DIMS else f", {arguments.dims}")
        with kept.problem(label):
            found = measured(shape, tokens, arguments.dims, arguments.fp8, timer)
            kept.add(label, "forward", found, ("FlashMLA",), shape=shape, tokens=tokens)
            for name, row in found.items():
                print(
                    f"{shape:>16} tokens {tokens}  {name}: {row['ms'] * 1e3:.1f} us, {row['gbs']:.0f} GB/s, "
                    f"{row['tflops']:.0f} TFLOP/s",
                    flush=True,
                )
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
