"""The same bits over caches of 8 bits and latent keys: a sequence alone, and its rows in every other company.

    python tests/python/invariant_caches.py --device cuda --mixes 60

As in invariant_mixes.py, queries are alone, in batches, in chunks, one by one and packed; keys are dense and in pages of
any size; scales are those of a tensor, of heads and of tokens.
"""

import argparse
import collections
import itertools
import random
import sys

import torch
from flash_attention import attention_over_cache

E4M3, E5M2, INT8, BF16, FP16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16
# name: (dtype of q, of the cache, head_dim, head_dim_v, heads_q, heads_kv, scales, latent, options)
CONFIGURATIONS = {
    "e4m3, scales of heads": (BF16, E4M3, 128, 128, 8, 2, "head", False, {}),
    "e4m3, scales of tokens": (BF16, E4M3, 64, 64, 4, 2, "token", False, {"window": (150, 0)}),
    "e5m2, one scale, soft cap": (FP16, E5M2, 128, 128, 4, 1, "tensor", False, {"softcap": 20.0}),
    "int8, scales of heads, 256": (BF16, INT8, 256, 256, 4, 2, "head", False, {}),
    "int8, scales of tokens, 96 and 64": (FP16, INT8, 96, 64, 4, 2, "token", False, {}),
    "latent": (BF16, BF16, 576, 512, 16, 1, None, True, {}),
    "latent, keys are values": (FP16, FP16, 128, 128, 8, 1, None, True, {"window": (200, 0)}),
    "latent, e4m3": (BF16, E4M3, 576, 512, 8, 1, "tensor", True, {}),
    "latent, int8, scales of tokens": (FP16, INT8, 192, 128, 8, 1, "token", True, {}),
    "float32, latent": (torch.float32, torch.float32, 96, 64, 4, 1, None, True, {}),
    "float32, e4m3, scales of tokens": (torch.float32, E4M3, 64, 64, 4, 2, "token", False, {}),
}
LONGEST = {"cuda": 2500, "cpu": 400}


def filled(shape, dtype, device):
    """What is nobody's: NaN where the type has it."""
    if dtype == INT8:
        return torch.full(shape, 101, dtype=dtype, device=device)
    if dtype.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


class Sequence:
    def __init__(self, name, generator, device, length):
        dtype, self.codes, dim, dim_v, heads, heads_kv, self.scales, self.latent, self.options = CONFIGURATIONS[name]
        self.device, self.length, self.heads_kv, self.dims = device, length, heads_kv, (dim, dim_v)

        def cache(columns):
            values = torch.randn(length, heads_kv, columns, generator=generator)
            return ((values * 40).round().clamp(-127, 127) if self.codes == INT8 else values * 3).to(self.codes).to(device)

        self.q = torch.randn(length, heads, dim, generator=generator).to(device, dtype)
        self.k, self.v = cache(dim - dim_v if self.latent else dim), cache(dim_v)
        kinds = {"token": (length, heads_kv), "head": (heads_kv,), "tensor": (1,), None: (1,)}
        both = torch.rand(2, *kinds[self.scales], generator=generator) * 0.03 + 0.01
        self.k_scale, self.v_scale = both.to(device)

    def __len__(self):
        return self.length


def rows_of(parts, rng, packed=False, page=0, room=0):
    """[(out, lse)] of parts: (sequence, keys that exist, queries, which are the last of them)."""
    first, device = parts[0][0], parts[0][0].device
    ints = {"dtype": torch.int32, "device": device}
    keys, queries = ([part[i] for part in parts] for i in (1, 2))
    own = [s.q[n - count : n] for s, n, count in parts]
    given = {"causal": True, "invariant": True, "return_lse": True, **first.options}
    if packed:
        q = torch.cat(own)
        starts = [0, *itertools.accumulate(queries)]
        given |= {"cu_seqlens_q": torch.tensor(starts, **ints), "max_seqlen_q": max(queries)}
    else:
        q = filled((len(parts), max(queries), *first.q.shape[1:]), first.q.dtype, device)
        for row, tensor in zip(q, own, strict=True):
            row[: len(tensor)] = tensor
        given["seqused_q"] = torch.tensor(queries, **ints)
    capacity = max(keys) + room
    page_count, size = (-(-capacity // page), page) if page else (1, capacity)
    order = torch.randperm(
        page_count * len(parts) + (3 if page else 0), generator=torch.Generator().manual_seed(rng.randrange(99))
    )
    order = order[: page_count * len(parts)] if page else torch.arange(len(parts))

    def stored(name):
        tensors = [getattr(s, name)[:n] for s, n, _ in parts]
        rest = tensors[0].shape[1:]
        whole = filled((len(parts), page_count * size, *rest), tensors[0].dtype, device)
        for row, tensor in zip(whole, tensors, strict=True):
            row[: len(tensor)] = tensor
        if not page:
            return whole
        store = filled((page_count * len(parts) + 3, size, *rest), tensors[0].dtype, device)
        bytes_of = (lambda x: x.view(torch.uint8)) if store.dtype.itemsize == 1 else (lambda x: x)
        bytes_of(store)[order.to(device)] = bytes_of(whole.reshape(page_count * len(parts), size, *rest))
        return store

    if page or packed:
        if page:
            given["page_table"] = order.view(len(parts), page_count).int().to(device)
        else:
            given["page_table"] = torch.arange(len(parts), **ints)[:, None]
    given["seqused_kv"] = torch.tensor(keys, **ints)
    if first.scales == "token":
        given |= {name: torch.nan_to_num(stored(name), 7.0) for name in ("k_scale", "v_scale")}
    elif first.scales == "head":
        given |= {name: torch.stack([getattr(s, name) for s, _, _ in parts]) for name in ("k_scale", "v_scale")}
    elif first.scales == "tensor":
        given |= {name: getattr(first, name) for name in ("k_scale", "v_scale")}
    if first.latent:
        given["latent"] = True
    out, lse = attention_over_cache(q, stored("k"), stored("v"), **given)
    if packed:
        return [(out[a:b], lse[:, a:b]) for a, b in itertools.pairwise(starts)]
    return [(out[b, :n], lse[b, :, :n]) for b, n in enumerate(queries)]


def compare(number, name, device, count=None):
    """{(way, equal): comparisons} of one mix."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    longest = LONGEST[device]
    one, *others = (
        Sequence(name, generator, device, rng.randint(1, rng.choice((90, longest)))) for _ in range(rng.randint(3, 5))
    )
    if one.scales == "tensor":
        for other in others:
            other.k_scale, other.v_scale = one.k_scale, one.v_scale
    count = collections.Counter() if count is None else count
    [(want, want_lse)] = rows_of([(one, len(one), len(one))], rng)

    def check(way, keys, queries, beside=(), place=0, **layout):
        parts = list(beside)
        parts.insert(place, (one, keys, queries))
        out, lse = rows_of(parts, rng, **layout)[place]
        first = keys - queries
        count[way, torch.equal(out, want[first:keys]) and torch.equal(lse, want_lse[:, first:keys])] += 1

    def beside(most):
        return [(s, n := rng.randint(1, len(s)), rng.randint(0, min(n, most))) for s in others]

    check("alone, again", len(one), len(one))
    for n in {len(one), rng.randint(1, len(one))}:
        check("one query", n, 1)
    cuts = sorted({0, len(one), *(rng.randint(0, len(one)) for _ in range(3))})
    for a, b in itertools.pairwise(cuts):
        check("chunk", b, b - a)
        check("chunk in pages", b, b - a, page=rng.choice((1, 7, 16, 64, 128)))
    for way, most, layout in (
        ("batch", longest, {"room": rng.randrange(300)}),
        ("batch of few queries", rng.choice((1, 2, 9)), {"room": rng.randrange(300)}),
        ("pages", longest, {"page": rng.choice((16, 64, 128, 24))}),
        ("pages, few queries", rng.choice((1, 4)), {"page": rng.choice((16, 64, 128, 5)), "room": 200}),
        ("packed over pages", 40, {"page": rng.choice((16, 64)), "packed": True}),
        ("packed over rows", 40, {"packed": True}),
    ):
        queries = min(len(one), rng.randint(max(1, most // 2), most))
        check(way, len(one), queries, beside(most), rng.randint(0, len(others)), **layout)
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--mixes", type=int, default=33)
    parser.add_argument("--part", default="0/1", help="I/N: of the configurations the part I of N")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    names = list(CONFIGURATIONS)[part::parts]
    wrong, count = collections.Counter(), collections.Counter()
    for number in range(-(-arguments.mixes * len(names) // len(CONFIGURATIONS))):
        name, mine = names[number % len(names)], collections.Counter()
        try:
            compare(1000 * part + number, name, arguments.device, mine)
        except Exception as error:
            wrong[f"{name}: {type(error).__name__}: {str(error)[:300]}"] += 1
        for (way, equal), n in mine.items():
            count[equal] += n
            if not equal:
                wrong[f"{name}: {way}"] += n
    print(f"caches: {count[True]} comparisons equal, {count[False]} differ")
    for text, n in wrong.items():
        print(f"  {n} x {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
