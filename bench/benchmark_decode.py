"""Times decoding, a few queries over long caches, against cuDNN (torch's SDPA) and flash-attn where they are there.

    python bench/benchmark_decode.py                                  # the shapes of `flash-attention bench decode`
    python bench/benchmark_decode.py --shapes 8x32/8x4096 --queries 4 --json decode.json
    python bench/benchmark_decode.py --device cpu --shapes 1x8/2x8192

Entries of a shape take turns, with L2 emptied before each call on a GPU; medians in microseconds. Results are compared
before anything is timed. `GB/s` is K and V read once by ours; `of read` its part of what a plain read of as many bytes
reaches here.
"""

import argparse
import importlib.util
import json
import re

import flash_attention
import timing
import torch
from flash_attention import flash_attn
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = (
    *("1x32/8x1024", "1x32/8x8192", "1x32/8x131072", "16x32/8x8192", "64x32/8x4096", "256x32/8x1024", "32x8/1x16384"),
)
CPU_SHAPES = ("1x8/8x8192", "1x8/2x8192", "4x8/2x4096")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parsed(text):
    """(batch, heads_q, heads_kv, keys) of "16x32/8x8192"."""
    found = re.fullmatch(r"(\d+)x(\d+)/(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected BATCHxHEADS/KV_HEADSxKEYS, as 16x32/8x8192")
    return tuple(map(int, found.groups()))


def in_pages(k, v, page):
    """(k pages, v pages, table): the same keys in pages that lie in no order."""
    batch, keys = k.shape[:2]
    each = -(-keys // page)
    order = torch.randperm(batch * each, device=k.device)
    stores = []
    for tensor in (k, v):
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, each * page - keys)).unflatten(1, (each, page))
        store = torch.empty_like(padded.flatten(0, 1))
        store[order] = padded.flatten(0, 1)
        stores.append(store)
    return *stores, order.view(batch, each).int()


def contestants(q, k, v, pages):
    """{name: call}; what cannot run here is left out."""
    lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
    calls = {
        "ours": lambda: flash_attention.attention(q, k, v),
        "invariant": lambda: flash_attention.attention(q, k, v, invariant=True),
    }
    for page in pages:
        k_pages, v_pages, table = in_pages(k, v, page)
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
    calls, want = contestants(q, k, v, arguments.pages), exact(q, k, v)
    for name, call in list(calls.items()):
        try:
            error = (call()[:1].double() - want).abs().max().item()
        except RuntimeError as reason:  # cuDNN has no kernel for some shapes
            print(f"  {name}: {str(reason).splitlines()[0]}")
            del calls[name]
            continue
        assert error < 0.02, f"{name}: differs from float64 by {error}"
    return dict(zip(calls, timer.in_turn([timer.warmed(call) for call in calls.values()]), strict=True))


def read_rate(bytes_read, device, timer):
    """GB/s of a plain read of so many bytes."""
    source = torch.empty(bytes_read // 4, dtype=torch.int32, device=device).fill_(1)
    return bytes_read / timer(lambda: source.sum(dtype=torch.int32))["ms"] / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", type=parsed, nargs="+", help="BATCHxHEADS/KV_HEADSxKEYS")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--pages", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    parser.add_argument("--json", help="write the results to this file, too")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; there is no GPU that torch can use here")
    timer, rows = timing.Timer(arguments.device, seconds=arguments.seconds), []
    default = SHAPES if arguments.device == "cuda" else CPU_SHAPES
    for shape in arguments.shapes or [parsed(text) for text in default]:
        batch, heads, heads_kv, keys = shape
        found = measured(shape, arguments, timer)
        bytes_read = 2 * batch * keys * heads_kv * arguments.head_dim * DTYPES[arguments.dtype].itemsize
        rate = bytes_read / found["ours"]["ms"] / 1e6
        part = rate / read_rate(bytes_read, arguments.device, timer)
        title = f"{batch} x {heads}/{heads_kv} x {keys}"
        times = "  ".join(f"{name} {row['ms'] * 1e3:.1f}" for name, row in found.items())
        print(f"{title:>20}  us: {times}  {rate:.0f} GB/s, {part:.0%} of read", flush=True)
        rows.append({"shape": [*shape, arguments.head_dim, arguments.queries], "times": found, "gbs": round(rate, 1)})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"device": arguments.device, "dtype": arguments.dtype, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
