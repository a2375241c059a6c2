"""Attention over caches of 8 bits, against float64 on what their codes and scales are worth."""

import pytest
import torch
from flash_attention.append import append_kv
from flash_attention.torch_cache import attention_over_cache

CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


def attention64(q, k, v, lengths):
    """Of q [batch, seq, heads, dim] over the first keys of each sequence, causal at the end."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[b, :length].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[b].double(), keys) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - q.shape[1] + 1)
        out[b] = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("kind", ["number", "head", "row"])
@pytest.mark.parametrize("queries", [1, 40])
def test_append_then_attend(dtype, kind, queries):
    torch.manual_seed(queries)
    batch, capacity, heads, dim = 2, 96, 2, 64
    lengths = torch.tensor([17, 50], dtype=torch.int32)
    k_cache, v_cache = (torch.zeros(batch, capacity, heads, dim, dtype=dtype) for _ in range(2))
    scale = {"number": 0.04, "head": torch.rand(batch, heads) * 0.05 + 0.02, "row": torch.ones(batch, capacity, heads)}[
        kind
    ]
    scales = {"k_scale": scale, "v_scale": scale.clone() if kind == "row" else scale}
    start = torch.zeros(batch, dtype=torch.int32)
    k, v = (torch.randn(batch, 96, heads, dim).bfloat16() for _ in range(2))
    new = int(lengths.max()) + queries
    append_kv(k_cache, v_cache, k[:, :new], v[:, :new], lengths=start, **scales)
    worth = []
    for cache, which in ((k_cache, scales["k_scale"]), (v_cache, scales["v_scale"])):
        factor = which if kind == "number" else which[:, None, :, None] if kind == "head" else which[..., None]
        worth.append(cache.float().double() * factor)
    q = torch.randn(batch, queries, 6, dim).bfloat16()
    used = lengths + queries
    out = attention_over_cache(q, k_cache, v_cache, seqused_kv=used, causal=True, **scales)
    want = attention64(q, *worth, used)
    assert (out.double() - want).abs().max() < 0.02
    raw = attention_over_cache(
        q,
        k_cache.view(torch.uint8),
        v_cache.view(torch.uint8),
        seqused_kv=used,
        causal=True,
        cache_dtype=CODES[dtype],
        **scales,
    )
    assert torch.equal(out, raw)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96])  # whole vectors of codes, and a part of one
def test_every_code_is_worth_what_torch_says(dtype, queries, dim):
    """With one key a row of out is its value; a query of one 1 has the key's column as its score, which lse returns."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = (torch.arange(256 * dim) * 7).to(torch.uint8).view(256, 1, 1, dim).view(dtype)
    keys = torch.zeros(256, 1, 1, dim, dtype=torch.uint8)
    keys[..., dim - 5] = codes.view(torch.uint8)[:, None, None]
    q = torch.zeros(256, 1, 1, dim, dtype=queries)
    q[..., dim - 5] = 1
    used = torch.ones(256, dtype=torch.int32)
    out, lse = attention_over_cache(
        q, keys.view(dtype), values, seqused_kv=used, scale=1.0, return_lse=True, k_scale=1.0, v_scale=1.0
    )
    worth = codes.float()
    usable = worth.isfinite()  # a NaN score makes a row of NaN
    want = values.float().to(queries)
    same = (out == want) | (out.isnan() & want.isnan())
    assert same[usable].all()
    assert (lse.flatten()[usable] - worth[usable]).abs().max() <= 1e-5 * worth[usable].abs().max()


def test_pages_and_a_compiled_call():
    torch.manual_seed(1)
    pages, table = torch.randn(6, 16, 2, 32), torch.tensor([[4, 0, -1], [2, 5, 1]], dtype=torch.int32)
    k_cache, v_cache = ((pages * factor).to(torch.float8_e4m3fn) for factor in (1, 2))
    lengths, q = torch.tensor([20, 48], dtype=torch.int32), torch.randn(2, 1, 4, 32).half()
    gathered = [
        torch.stack([cache[t.clamp(min=0).long()].flatten(0, 1) for t in table])
        for cache in (k_cache.float(), v_cache.float())  # torch 2.9 does not index float8
    ]
    scales = {"k_scale": 0.5, "v_scale": 2.0}

    def step(x):
        return attention_over_cache(x, k_cache, v_cache, page_table=table, seqused_kv=lengths, **scales)

    want = attention64(q, gathered[0] * 0.5, gathered[1] * 2, lengths)
    assert (step(q).double() - want).abs().max() < 0.02
    assert torch.equal(torch.compile(step, backend="aot_eager")(q), step(q))


def test_wrong_arguments_are_named():
    q, cache = torch.randn(2, 1, 4, 32).half(), torch.zeros(2, 8, 2, 32, dtype=torch.float8_e4m3fn)
    one = torch.ones(1)
    for message, change in {
        r"k_scale: got 0.000000; allowed are positive finite numbers": {"k_scale": 0 * one, "v_scale": one},
        r"v_scale\[1\]\[1\]: got inf": {"k_scale": torch.ones(2, 2), "v_scale": torch.tensor([[1, 1], [1, torch.inf]])},
        r"k_scale: got float32\[3\]; expected one number, \[2, 2\] or": {"k_scale": torch.ones(3), "v_scale": one},
        r"k_scale: got float64\[1\]; expected dtype float32": {"k_scale": one.double(), "v_scale": one},
        r"v_scale: got float32\[2, 2\]; expected scales like those": {"k_scale": one, "v_scale": torch.ones(2, 2)},
        r"k_scale and v_scale go together": {"k_scale": one},
        r"cache_dtype: got 'int3'": {"k": cache.view(torch.uint8), "v": cache.view(torch.uint8), "cache_dtype": "int3"},
        r"kv_scales: got tensor; they belong": {"k": cache.half(), "v": cache.half(), "k_scale": one, "v_scale": one},
        r"v: got torch.float16; expected the dtype of k": {"v": cache.half()},
    }.items():  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            attention_over_cache(**{"q": q, "k": cache, "v": cache, **change})
