"""Times attention over selected keys: lists of tokens over latent keys and over grouped heads, and lists of blocks, forward
and backward.

    python bench/benchmark_sparse.py                              # every case, on a GPU
    python bench/benchmark_sparse.py --cases prefill video --json sparse.json

Lists are random, distinct and seeded; those named "near" are of neighbours that agree, as 8 queries that name 24 blocks of
128 together. Some rows are compared with float64 before anything is timed; L2 is emptied before each call; medians in
microseconds. TFLOP/s count listed keys alone.
"""

import argparse
import math
import sys

import command
import timing
import torch
from flash_attention import attention, attention_over_cache

MLA = {  # batch, queries, keys, heads, entries
    "prefill": (1, 4096, 8192, 128, 2048),
    "prefill_64": (1, 4096, 8192, 64, 2048),
    "decode": (128, 2, 32768, 128, 2048),
    "decode_16": (128, 1, 32768, 16, 2048),
}
GROUPED = {  # batch, queries, keys, query heads, key heads, entries, page size
    "grouped": (1, 2048, 8192, 64, 4, 2048, 0),
    "grouped_decode": (64, 1, 32768, 32, 8, 2048, 64),
}
BLOCKS = {  # tokens, query heads, key heads, queries and keys of a block, entries, near, causal
    "video": (109632, 7, 7, 64, 64, 64, False, False),
    "msa": (32768, 64, 4, 1, 128, 16, False, True),
    "msa_near": (32768, 64, 4, 1, 128, 16, True, True),
}


def error_of(out, q, k, v, keys, scale):
    """Of one query [heads, dim] against float64; keys of each head."""
    worst = 0.0
    for h, named in enumerate(keys):
        g = h * k.shape[1] // q.shape[0]
        weights = torch.softmax(k[named, g].double() @ q[h].double() * scale, 0)
        worst = max(worst, (out[h].double() - weights @ v[named, g].double()).abs().max().item())
    return worst


def distinct(rows, most, entries, generator):
    """Random distinct numbers below `most`, int32 [rows, entries], in chunks of rows."""
    parts = [torch.rand(min(512, rows - r), most, device=generator.device, generator=generator).topk(entries).indices
             for r in range(0, rows, 512)]  # fmt: skip
    return torch.cat(parts).int()


def latent(name, timer):
    batch, tokens, keys, heads, entries = MLA[name]
    device = timer.device
    generator = torch.Generator(device).manual_seed(1)
    q = torch.randn(batch, tokens, heads, 576, device=device, dtype=torch.bfloat16)
    kv = torch.randn(1, keys, 1, 576, device=device, dtype=torch.bfloat16)
    lists = distinct(batch * tokens, keys, entries, generator).view(batch, tokens, 1, entries)
    k, v = (part.expand(batch, -1, -1, -1) for part in (kv[..., 512:], kv[..., :512]))
    call = lambda: attention_over_cache(q, k, v, key_indices=lists, latent=True)  # noqa: E731
    out = call()
    for b, i in ((0, 0), (batch - 1, tokens - 1)):
        named = lists[b, i, 0].long()
        error = error_of(out[b, i], q[b, i], kv[0], kv[0, ..., :512], [named] * heads, 1 / 24)
        assert error < 0.02, f"{name}: differs from float64 by {error}"
    (row,) = timer.in_turn([timer.warmed(call)])
    return {name: (row, 2 * batch * tokens * heads * entries * (576 + 512))}


def grouped(name, timer):
    """Keys of 128 columns, in pages or not, on the planner's kernel and on that of CUDA cores."""
    batch, tokens, keys, heads, heads_kv, entries, page = GROUPED[name]
    device, dim = timer.device, 128
    generator = torch.Generator(device).manual_seed(1)
    q = torch.randn(batch, tokens, heads, dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, keys, heads_kv, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    lists = distinct(batch * tokens, keys, entries, generator).view(batch, tokens, 1, entries)
    options = {"key_indices": lists}
    if page:
        table = torch.randperm(batch * keys // page, device=device, generator=generator).view(batch, -1)
        options |= {"page_table": table.int(), "seqused_kv": torch.full((batch,), keys, device=device, dtype=torch.int32)}
        pages = [torch.empty(table.numel(), page, heads_kv, dim, device=device, dtype=torch.bfloat16) for _ in range(2)]
        for whole, part in zip((k, v), pages, strict=True):
            part[table.flatten()] = whole.view(-1, page, heads_kv, dim)
    cache = pages if page else (k, v)
    calls = {name: lambda: attention_over_cache(q, *cache, **options)}
    calls[f"{name}, CUDA cores"] = lambda: attention_over_cache(q, *cache, **options, kernel="forward/listed")
    for call in calls.values():
        out = call()
        for b, i in ((0, 0), (batch - 1, tokens - 1)):
            error = error_of(out[b, i], q[b, i], k[b], v[b], [lists[b, i, 0].long()] * heads, dim**-0.5)
            assert error < 0.02, f"{name}: differs from float64 by {error}"
    found = timer.in_turn([timer.warmed(call) for call in calls.values()])
    return {key: (row, 4 * batch * tokens * heads * entries * dim) for key, row in zip(calls, found, strict=True)}


def in_blocks(name, timer):
    tokens, heads, heads_kv, of_q, of_kv, entries, near, causal = BLOCKS[name]
    device, dim = timer.device, 128
    generator = torch.Generator(device).manual_seed(1)
    rows, units = tokens // of_q, tokens // of_kv
    lists = heads if heads == heads_kv else heads_kv
    if near:  # eight neighbours choose among 24 blocks
        pool = distinct(rows // 8 * lists, units, 24, generator).view(rows // 8, 1, lists, 24)
        picked = distinct(rows * lists, 24, entries, generator).view(rows // 8, 8, lists, entries).long()
        blocks = pool.expand(-1, 8, -1, -1).gather(3, picked).view(1, rows, lists, entries)
    else:
        blocks = distinct(rows * lists, units, entries, generator).view(1, rows, lists, entries)
    if causal:  # a query names blocks up to its own, and that one
        own = (torch.arange(rows, device=device) * of_q // of_kv).view(1, rows, 1, 1)
        blocks = torch.cat((blocks[..., 1:] % (own + 1), own.expand(1, rows, lists, 1)), 3)
    blocks = blocks.int().contiguous()
    make = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.randn(1, tokens, heads, dim, **make)
    k, v = (torch.randn(1, tokens, heads_kv, dim, **make) for _ in range(2))
    options = {"key_blocks": blocks, "key_block_size": (of_q, of_kv), "causal": causal}
    with torch.no_grad():
        out = attention(q, k, v, **options)
        for i in (0, tokens // 2 + 3, tokens - 1):
            keys = []
            for h in range(heads):
                starts = blocks[0, i // of_q, h * lists // heads].unique().long() * of_kv
                named = (starts[:, None] + torch.arange(of_kv, device=device)).flatten()
                keys.append(named[named <= i] if causal else named)
            error = error_of(out[0, i], q[0, i], k[0], v[0], keys, dim**-0.5)
            assert error < 0.02, f"{name}: differs from float64 by {error}"
        named = torch.zeros(1, rows, lists, units, device=device, dtype=torch.bool).scatter_(3, blocks.long(), True)
        pairs = named.sum().item() * of_q * of_kv * heads / lists
    dout = torch.randn_like(out)

    def forward():
        with torch.no_grad():
            return attention(q, k, v, **options)

    def both():
        return torch.autograd.grad(attention(q, k, v, **options), (q, k, v), dout)

    def dense():
        with torch.no_grad():
            return attention(q, k, v, causal=causal)

    def dense_both():
        return torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), dout)

    calls = {name: forward, f"{name} + backward": both}
    if tokens <= 32768:
        calls |= {f"{name}, dense": dense, f"{name} + backward, dense": dense_both}
    found = timer.in_turn([timer.warmed(call) for call in calls.values()])
    flops = 4 * pairs * dim
    counts = [flops * (3.5 if "backward" in key else 1) if "dense" not in key else math.nan for key in calls]
    return {key: (row, count) for key, row, count in zip(calls, found, counts, strict=True)}


CASES = [*MLA, *GROUPED, *BLOCKS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_device(parser)
    parser.add_argument("--cases", nargs="+", default=CASES, help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_json(parser)
    arguments = parser.parse_args()
    timer = timing.Timer(arguments.device, seconds=arguments.seconds)
    kept = command.Times(arguments.json, arguments.device)
    for case in arguments.cases:
        with kept.problem(case):
            found = (latent if case in MLA else grouped if case in GROUPED else in_blocks)(case, timer)
            rows = {name: row for name, (row, _) in found.items()}
            for name, (row, flops) in found.items():
                row["tflops"] = None if math.isnan(flops) else round(flops / row["ms"] / 1e9, 1)
                print(f"{name:>24}: {row['ms'] * 1e3:.1f} us, {row['tflops']} TFLOP/s", flush=True)
            kept.add(case, "forward", rows, ())
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
