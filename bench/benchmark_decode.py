"""Times decoding, a few queries over long caches, against cuDNN (torch's SDPA) and flash-attn if they are installed.

    python bench/benchmark_decode.py                                  # the shapes of `flash-attention bench decode`
    python bench/benchmark_decode.py --shapes 8x32/8x4096 --queries 4 --json decode.json
    python bench/benchmark_decode.py --preset forty --seconds 0.05    # batch, heads, lengths, widths and queries, all over
    python bench/benchmark_decode.py --device cpu --shapes 1x8/2x8192
    python bench/benchmark_decode.py --shapes 16x32/8x8192 --caches nvfp4 mxfp4 int4   # keys and values of 4 bits, in pages too

Entries of a shape alternate, with L2 emptied before each call on a GPU; medians in microseconds. Results are compared
before anything is timed. `x other` is ours over the best of the others (below 1: ours is faster). `GB/s` is K and V read
once by ours; `of read` its part of what a plain read of as many bytes reaches here.
"""

import argparse
import functools
import importlib.util
import re
import statistics
import sys

import command
import flash_attention
import timing
import torch
from flash_attention import flash_attn
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = (
    *("1x32/8x1024", "1x32/8x8192", "1x32/8x131072", "16x32/8x8192", "64x32/8x4096", "256x32/8x1024", "32x8/1x16384"),
)
# (head_dim, queries): shapes. No shape of these is to be slower than another library.
FORTY = {
    (128, 1): (
        *("1x32/8x128", "1x32/8x1024", "1x32/8x8192", "1x32/8x32768", "1x32/8x131072", "8x32/8x1024", "8x32/8x16384"),
        *("16x32/8x8192", "64x32/8x128", "64x32/8x4096", "256x32/8x1024", "1x8/1x4096", "32x8/1x16384", "256x8/1x2048"),
        *("1x32/32x2048", "8x32/32x4096", "128x32/32x2048", "1x64/4x16384", "16x64/4x8192", "128x64/4x1024"),
    ),
    (128, 4): ("1x32/8x4096", "8x32/8x1024", "8x32/8x8192", "16x8/1x1024", "1x64/4x32768", "8x64/4x1024", "4x32/32x4096"),
    (64, 1): ("1x32/8x1024", "64x32/8x128", "64x32/8x1024", "8x32/32x8192", "8x64/4x8192", "32x8/1x32768"),
    (64, 4): ("8x32/8x4096", "4x64/4x16384"),
    (256, 1): ("1x32/8x8192", "16x32/8x4096", "64x8/1x4096"),
    (256, 4): ("8x32/8x2048", "4x8/1x16384"),
}
PEERS = ("cudnn", "flash-attn", "torch")
CPU_SHAPES = ("1x8/8x8192", "1x8/2x8192", "4x8/2x4096")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parsed(text):
    """(batch, heads_q, heads_kv, keys) of "16x32/8x8192"."""
    found = re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected BATCHxHEADS/KV_HEADSxKEYS, as 16x32/8x8192")
    return tuple(map(int, found.groups()))


def in_pages(tensors, page):
    """(pages of each, table): the same rows in pages in no order."""
    batch, keys = tensors[0].shape[:2]
    each = -(-keys // page)
    order = torch.randperm(batch * each, device=tensors[0].device)
    stores = []
    for tensor in tensors:
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, each * page - keys)).unflatten(1, (each, page))
        store = torch.empty_like(padded.flatten(0, 1))
        store[order] = padded.flatten(0, 1)
        stores.append(store)
    return stores, order.view(batch, each).int()


def in_four_bits(q, k, v, cache_dtype, pages):
    """({name: call} over the same keys in 4 bits, in a piece and in pages; what they have to give: that of their values)."""
    k4, v4 = (flash_attention.quantize_cache(x, cache_dtype) for x in (k, v))
    values = [
        flash_attention.dequantize_cache(x.codes[:1], cache_dtype, x.scale[:1], None if x.zero is None else x.zero[:1])
        for x in (k4, v4)
    ]
    given = {"k": k4.codes, "v": v4.codes, "k_scale": k4.scale, "v_scale": v4.scale}
    given |= {} if k4.zero is None else {"k_zero": k4.zero, "v_zero": v4.zero}
    lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    calls = {cache_dtype: given}
    for page in pages:
        stores, table = in_pages(list(given.values()), page)
        paged = dict(zip(given, stores, strict=True))
        calls[f"{cache_dtype} page {page}"] = paged | {"page_table": table, "seqused_kv": lengths}
    call = functools.partial(flash_attention.attention_over_cache, q, cache_dtype=cache_dtype)
    return {name: functools.partial(call, **options) for name, options in calls.items()}, exact(q, *values)


def contestants(q, k, v, pages):
    """{name: call}; what cannot run here is left out."""
    lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    calls = {
        "ours": lambda: flash_attention.attention(q, k, v),
        "invariant": lambda: flash_attention.attention(q, k, v, invariant=True),
    }
    for page in pages:
        (k_pages, v_pages), table = in_pages([k, v], page)
        calls[f"page {page}"] = lambda k=k_pages, v=v_pages, table=table: flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table
        )
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]

    def sdpa(backend):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)

    if q.is_cuda and q.dtype != torch.float32 and torch.backends.cudnn.is_available():
        calls["cudnn"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
    elif not q.is_cuda:
        calls["torch"] = lambda: sdpa([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    if q.is_cuda and q.dtype != torch.float32 and importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_with_kvcache

        calls["flash-attn"] = lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    return calls


def exact(q, k, v):
    """The first sequence, in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor[:1].double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(group, dim=2) for tensor in (k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def measured(shape, arguments, timer):
    """{name: {"ms", ...}} of one shape."""
    batch, heads, heads_kv, keys = shape
    make = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
    q = torch.randn(batch, arguments.queries, heads, arguments.head_dim, **make)
    k, v = (torch.randn(batch, keys, heads_kv, arguments.head_dim, **make) for _ in range(2))
    calls, want, wants = contestants(q, k, v, arguments.pages), exact(q, k, v), {}
    for name in arguments.caches:
        more, of_values = in_four_bits(q, k, v, name, arguments.pages)
        calls, wants = calls | more, wants | dict.fromkeys(more, of_values)
    for name, call in list(calls.items()):
        try:
            error = (call()[:1].double() - wants.get(name, want)).abs().max().item()
        except RuntimeError as reason:  # cuDNN has no kernel for some shapes
            print(f"  {name}: {str(reason).splitlines()[0]}")
            del calls[name]
            continue
        assert error < 0.02, f"{name}: differs from float64 by {error}"
    return dict(zip(calls, timer.in_turn([timer.warmed(call) for call in calls.values()]), strict=True))


def over_others(found):
    """Ours by the fastest of the others, None where there is none."""
    others = [found[name]["ms"] for name in PEERS if name in found]
    return found["ours"]["ms"] / min(others) if others else None


def read_rate(bytes_read, device, timer):
    """GB/s of a plain read of so many bytes."""
    source = torch.empty(bytes_read // 4, dtype=torch.int32, device=device).fill_(1)
    return bytes_read / timer(lambda: source.sum(dtype=torch.int32))["ms"] / 1e6


def report(label, shape, arguments, timer, kept):
    """Measures a shape, keeps it and prints a line."""
    batch, heads, heads_kv, keys = shape
    found = measured(shape, arguments, timer)
    bytes_read = 2 * batch * keys * heads_kv * arguments.head_dim * DTYPES[arguments.dtype].itemsize
    rate = bytes_read / found["ours"]["ms"] / 1e6
    part = rate / read_rate(bytes_read, arguments.device, timer)
    title = label if arguments.preset else f"{batch} x {heads}/{heads_kv} x {keys}"
    ratio = over_others(found)
    times = "  ".join(f"{name} {row['ms'] * 1e3:.1f}" for name, row in found.items())
    against = "" if ratio is None else f"  {ratio:.3f} x other"
    print(f"{title:>20}  us: {times}{against}  {rate:.0f} GB/s, {part:.0%} of read", flush=True)
    what = {"shape": [*shape, arguments.head_dim, arguments.queries], "dtype": arguments.dtype, "gbs": round(rate, 1)}
    kept.add(label, "forward", found, PEERS, over_others=ratio and round(ratio, 4), **what)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", type=parsed, nargs="+", help="BATCHxHEADS/KV_HEADSxKEYS")
    parser.add_argument("--preset", choices=("forty",), help="forty shapes, each with its head dimension and queries")
    command.add_share(parser, "shapes")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--pages", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--caches", nargs="*", default=[], choices=("nvfp4", "mxfp4", "int4"), help="keys of 4 bits, too")
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_json(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; there is no GPU that torch can use here")
    timer = timing.Timer(arguments.device, seconds=arguments.seconds)
    kept = command.Times(arguments.json, arguments.device)
    default = SHAPES if arguments.device == "cuda" else CPU_SHAPES
    shapes = arguments.shapes or [parsed(text) for text in default]
    work = [(arguments.head_dim, arguments.queries, shape) for shape in shapes]
    if arguments.preset:
        work = [(*kind, parsed(text)) for kind, texts in FORTY.items() for text in texts]
    for head_dim, queries, shape in command.share_of(arguments, work):
        arguments.head_dim, arguments.queries = head_dim, queries
        batch, heads, heads_kv, keys = shape
        label = f"{batch} x {heads}/{heads_kv} x {keys}, D{head_dim}, queries {queries}"
        with kept.problem(label):
            report(label, shape, arguments, timer, kept)
    ratios = [row["over_others"] for row in kept.results.measured() if row["over_others"]]
    if len(ratios) > 1:
        mean, slower = statistics.geometric_mean(ratios), sum(ratio > 1 for ratio in ratios)
        spread = f"{mean:.3f} in the mean, at most {max(ratios):.3f}"
        print(f"ours over the best other: {spread}; slower: {slower} of {len(ratios)}")
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
