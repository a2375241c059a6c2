"""The same bits, over random mixes: a sequence alone, and the same rows in every other company.

    python tests/python/invariant_mixes.py --device cuda --mixes 500

A mix is a configuration (types, head dimensions, which options there are) with random lengths, neighbours, windows, scales
and page sizes. Nothing is compared with a formula here: other tests do that.
"""

import argparse
import collections
import itertools
import random
import sys

import torch
from flash_attention import attention, attention_over_cache, attention_packed

BF16, FP16 = torch.bfloat16, torch.float16
# name: (dtype, head_dim, head_dim_v, heads_q, heads_kv, options)
CONFIGURATIONS = {
    "causal 128": (BF16, 128, 128, 8, 2, {"causal"}),
    "causal 64": (BF16, 64, 64, 4, 4, {"causal"}),
    "causal 256": (BF16, 256, 256, 4, 1, {"causal"}),
    "full 128": (FP16, 128, 128, 4, 4, set()),
    "window and sink, 64": (BF16, 64, 64, 8, 1, {"causal", "window", "sink"}),
    "softcap 128": (BF16, 128, 128, 4, 2, {"causal", "softcap"}),
    "alibi 128": (BF16, 128, 128, 6, 2, {"causal", "alibi"}),
    "bias 64": (BF16, 64, 64, 2, 2, {"causal", "bias"}),
    "mask 128": (BF16, 128, 128, 4, 2, {"mask"}),
    "softcap, window and sink, 256": (BF16, 256, 256, 4, 2, {"causal", "softcap", "window", "sink"}),
    "alibi and softcap, 64": (FP16, 64, 64, 4, 2, {"causal", "softcap", "alibi"}),
    "keys of 96, values of 64": (BF16, 96, 64, 4, 2, {"causal"}),
    "keys of 192, values of 128": (BF16, 192, 128, 4, 4, {"causal", "window"}),
    "bias and mask, 128": (BF16, 128, 128, 2, 1, {"bias", "mask"}),
    "mask and alibi, 64": (FP16, 64, 64, 5, 1, {"mask", "alibi", "causal"}),
    "window on both sides, 128": (FP16, 128, 128, 4, 2, {"window"}),
}
LONGEST = {"cuda": 3500, "cpu": 400}


class Sequence:
    """One sequence and its options. Rows are asked for in parts."""

    def __init__(self, name, generator, device, rng, length):
        self.dtype, self.dim, self.dim_v, self.heads, self.heads_kv, self.named = CONFIGURATIONS[name]
        self.device, self.length = device, length

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        self.q = (randn(length, self.heads, self.dim) * rng.choice((0.3, 1, 4))).to(self.dtype)
        growth = torch.linspace(0.1, rng.choice((0.1, 4)), length).to(device)[:, None, None]  # late maxima, or small scores
        self.k = (randn(length, self.heads_kv, self.dim) * rng.choice((1, growth))).to(self.dtype)
        self.v = randn(length, self.heads_kv, self.dim_v).to(self.dtype)
        wide = -(-length // 8) * 8  # rows of a bias begin at multiples of 16 bytes
        self.bias = randn(self.heads, length, wide)[..., :length].to(self.dtype) if "bias" in self.named else None
        self.mask = (randn(1, length, wide) < 0.8)[..., :length] if "mask" in self.named else None

    def __len__(self):
        return self.length


def shared_options(named, heads, rng, device):
    """What all calls of a mix have."""
    options = {"invariant": True, "causal": "causal" in named}
    if rng.random() < 0.3:
        options["scale"] = rng.uniform(0.02, 0.3)
    if "window" in named:
        left = rng.choice((0, 1, 63, 64, 700, 1023, 1500))
        options["window"] = (left, 0 if options["causal"] else rng.choice((0, 5, 640)))
    if "softcap" in named:
        options["softcap"] = rng.choice((5.0, 30.0))
    if "alibi" in named:
        options["alibi_slopes"] = torch.tensor([rng.uniform(0, 0.2) for _ in range(heads)], device=device)
    if "sink" in named:
        options["sink"] = torch.tensor([rng.uniform(-2, 4) for _ in range(heads)], device=device)
    return options


def alone(sequence, options, first=0, last=None):
    """out, lse of the queries [first, last). Causal rows get no key behind them."""
    last = len(sequence) if last is None else last
    keys = last if options["causal"] else len(sequence)
    assert keys == last or not {"window", "alibi"} & sequence.named or last == len(sequence)
    given = dict(options)
    for name in ("bias", "mask"):
        whole = getattr(sequence, name)
        if whole is not None:
            given[name] = whole[None, :, first:last, :keys]
    q, k, v = sequence.q[None, first:last], sequence.k[None, :keys], sequence.v[None, :keys]
    out, lse = attention(q, k, v, return_lse=True, **given)
    return out[0], lse[0]


def padded(tensors, size, axes=(0,)):
    """One tensor of several of different sizes, with NaN (True in a mask) in what is not theirs."""
    shape = list(tensors[0].shape)
    for axis in axes:
        shape[axis] = size[axis]
    first = tensors[0]
    rest = True if first.dtype == torch.bool else float("nan")
    whole = torch.full((len(tensors), *shape), rest, dtype=first.dtype, device=first.device)
    for row, tensor in zip(whole, tensors, strict=True):
        row[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return whole


def in_batch(sequences, options, queries, rng, pages=0):
    """[(out, lse)] of the last queries[b] rows of each, in tensors with room to spare; pages: keys of a page, 0 = none."""
    device = sequences[0].device
    most, capacity = max(queries), max(map(len, sequences)) + rng.randrange(200)
    capacity = -(-capacity // 8) * 8
    capacity = -(-capacity // pages) * pages if pages else capacity
    ints = {"dtype": torch.int32, "device": device}
    used = {"seqused_q": torch.tensor(queries, **ints), "seqused_kv": torch.tensor([len(s) for s in sequences], **ints)}
    q = padded([s.q[len(s) - n :] for s, n in zip(sequences, queries, strict=True)], {0: most})
    k, v = (padded([getattr(s, name) for s in sequences], {0: capacity}) for name in "kv")
    given = {**options, **used}
    for name in ("bias", "mask"):
        if getattr(sequences[0], name) is not None:
            parts = [getattr(s, name)[:, len(s) - n :] for s, n in zip(sequences, queries, strict=True)]
            given[name] = padded(parts, {1: most, 2: capacity}, (1, 2))
    if not pages:
        out, lse = attention(q, k, v, return_lse=True, **given)
    else:
        each, batch = capacity // pages, len(sequences)
        order = torch.randperm(each * batch + 3)[: each * batch].to(device)
        stores = []
        for tensor in (k, v):
            store = torch.full((each * batch + 3, pages, *tensor.shape[2:]), float("nan"), dtype=k.dtype, device=device)
            store[order] = tensor.reshape(each * batch, pages, *tensor.shape[2:])
            stores.append(store)
        table = order.view(batch, each).int()
        out, lse = attention_over_cache(q, *stores, page_table=table, return_lse=True, **given)
    return [(out[b, :n], lse[b, :, :n]) for b, n in enumerate(queries)]


def packed(sequences, options):
    """[(out, lse)] of all rows of each."""
    starts = torch.tensor([0, *itertools.accumulate(map(len, sequences))], dtype=torch.int32, device=sequences[0].device)
    q, k, v = (torch.cat([getattr(s, name) for s in sequences]) for name in "qkv")
    given = dict(options)
    most = max(map(len, sequences))
    for name in ("bias", "mask"):
        if getattr(sequences[0], name) is not None:
            wide = -(-most // 8) * 8
            parts = [getattr(s, name) for s in sequences]
            given[name] = padded(parts, {1: most, 2: wide}, (1, 2))[..., :most]
    out, lse = attention_packed(q, k, v, starts, max_seqlen_q=most, max_seqlen_kv=most, return_lse=True, **given)
    return [(out[a:b], lse[:, a:b]) for a, b in itertools.pairwise(starts.tolist())]


def gradients(tensors, call, shared):
    """[dq, dk, dv], and [dsink, dbias] of those that are `shared`, of a call that gives out and dout."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    shared = {name: tensor.detach().requires_grad_() for name, tensor in shared.items()}
    out, dout = call(*tensors, **shared)
    found = torch.autograd.grad(out, (*tensors, *shared.values()), dout)
    return list(found[:3]), list(found[3:])


def gradient_ways(sequences, which, options, douts, bias):
    """(way, gradients) of one sequence, and of what all share: a sink, and the bias [1, heads, most, most] of all."""
    one, dout = sequences[which], douts[which]
    most = max(map(len, sequences))
    options, shared = dict(options), {} if bias is None else {"bias": bias}
    if "sink" in options:
        shared = {"sink": options.pop("sink"), **shared}

    def given(own, size):
        """Every call has the same whole bias, and takes the part that its queries and keys have."""
        return {**options, **own, **({"bias": own["bias"][:, :, :size, :size]} if "bias" in own else {})}

    def whole(q, k, v, **own):
        return attention(q[None], k[None], v[None], **given(own, len(one)))[0], dout

    yield "gradients alone", gradients((one.q, one.k, one.v), whole, shared)[0]
    yield "gradients in a second run", gradients((one.q, one.k, one.v), whole, shared)[0]
    starts = torch.tensor([0, *itertools.accumulate(map(len, sequences))], dtype=torch.int32, device=one.device)
    longest = {"max_seqlen_q": most, "max_seqlen_kv": most}
    found, sums = gradients(
        [torch.cat([getattr(s, name) for s in sequences]) for name in "qkv"],
        lambda q, k, v, **own: (attention_packed(q, k, v, starts, **longest, **given(own, most)), torch.cat(douts)),
        shared,
    )
    a, b = starts[which : which + 2].tolist()
    yield "gradients packed", [tensor[a:b] for tensor in found]
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.int32, device=one.device)
    zeros = [torch.nan_to_num(padded([getattr(s, name) for s in sequences], {0: most})) for name in "qkv"]
    used = {"seqused_q": lengths, "seqused_kv": lengths}
    dout = torch.nan_to_num(padded(douts, {0: most}))
    found, others = gradients(zeros, lambda q, k, v, **own: (attention(q, k, v, **used, **given(own, most)), dout), shared)
    yield "gradients in a batch", [tensor[which, : len(one)] for tensor in found]
    if shared:
        yield "sums over sequences", sums
        yield "sums over sequences", others


def same(found, want):
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def compare(number, name, device, count=None):
    """{way: (comparisons, how many differ)} of one mix."""
    rng = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    longest = LONGEST[device]
    lengths = [rng.randint(1, rng.choice((130, longest, longest))) for _ in range(rng.randint(2, 5))]
    if "bias" in CONFIGURATIONS[name][-1]:
        lengths = [min(length, 1500) for length in lengths]
    sequences = [Sequence(name, generator, device, rng, length) for length in lengths]
    which = rng.randrange(len(sequences))
    one = sequences[which]
    options = shared_options(one.named, one.heads, rng, device)
    count = collections.Counter() if count is None else count
    want, want_lse = alone(one, options)

    def check(way, found, first, last=None):
        last = len(one) if last is None else last
        ok = same(found, (want[first:last], want_lse[:, first:last]))
        count[way, ok] += 1

    check("alone, again", alone(one, options), 0)
    if one.named <= {"mask", "bias", "softcap", "sink", "causal"} or options["causal"]:
        cuts = sorted({0, len(one), *(rng.randint(0, len(one)) for _ in range(3))})
        for a, b in itertools.pairwise(cuts):
            check("chunk", alone(one, options, a, b), a, b)
        for i in {rng.randrange(len(one)), len(one) - 1}:
            check("one query", alone(one, options, i, i + 1), i, i + 1)
    for way, most, pages in (
        ("batch", max(lengths), 0),
        ("batch of few queries", rng.choice((1, 2, 7, 16)), 0),
        ("pages, few queries", rng.choice((1, 1, 4)), rng.choice((16, 64, 128))),
        ("pages", max(lengths), rng.choice((16, 64, 128))),
    ):
        if pages and one.bias is not None:
            continue  # a cache takes no bias
        queries = [min(len(s), rng.randint(max(1, most // 2), most)) for s in sequences]
        found = in_batch(sequences, options, queries, rng, pages)[which]
        check(way, found, len(one) - queries[which])
    check("packed", packed(sequences, options)[which], 0)
    if "mask" not in one.named:
        douts = [torch.randn(len(s), s.heads, s.dim_v, generator=generator).to(device, s.dtype) for s in sequences]
        wide = -(-max(lengths) // 8) * 8
        bias = (
            None if one.bias is None else torch.randn(1, one.heads, wide, wide, generator=generator).to(device, one.dtype)
        )
        first = {}
        for way, found in gradient_ways(sequences, which, options, douts, bias):
            kind = way == "sums over sequences"
            if kind in first:
                count[way, same(found, first[kind])] += 1
            first.setdefault(kind, found)
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--mixes", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first mix")
    every = list(CONFIGURATIONS)
    parser.add_argument("--configurations", nargs="+", default=every, choices=every, metavar="NAME")
    parser.add_argument("--part", default="0/1", help="I/N: of the configurations the part I of N")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    names = arguments.configurations[part::parts]
    count, bad, failed = collections.Counter(), collections.Counter(), collections.Counter()
    share = -(-arguments.mixes * len(names) // len(arguments.configurations))
    for number in range(share):
        name, mine = names[number % len(names)], collections.Counter()
        try:
            compare(arguments.first + part * 100000 + number, name, arguments.device, mine)
        except Exception as error:
            failed[f"{name}: {type(error).__name__}: {str(error)[:200]}"] += 1
        for (way, ok), n in mine.items():
            count[way] += n
            bad[f"{name}: {way}"] += 0 if ok else n
    wrong = {way: n for way, n in bad.items() if n}
    print(f"{share} mixes, {sum(count.values())} comparisons, {sum(wrong.values())} differ; {dict(count)}")
    for text, n in [*wrong.items(), *failed.items()]:
        print(f"  {n} x {text}")
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
