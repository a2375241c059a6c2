"""kv_cache_sf of FlashInfer's functions: caches in nvfp4, two codes in a byte, and their scales."""

import pytest
import torch
from flash_attention import dequantize_cache, flashinfer, quantize_cache

DIM, HEADS, HEADS_KV = 64, 6, 2


def cache(*shape):
    """(codes, scales, values in float64) of random rows."""
    found = quantize_cache(torch.randn(*shape, DIM), "nvfp4")
    return found.codes, found.scale, dequantize_cache(found.codes, "nvfp4", found.scale, dtype=torch.float64)


def exact(q, k, v, scale, causal=True):
    """Attention in float64 of one sequence, the last query at the last key."""
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if causal:
        i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
        scores = scores.masked_fill(j > i + len(k) - len(q), -torch.inf)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)


def pages(layout):
    """Two sequences of 21 and 8 keys in pages of 8 that are in no order: (cache, scales, their tables, keys of each)."""
    torch.manual_seed(5)
    (k, k_sf, k_values), (v, v_sf, v_values) = (cache(6, 8, HEADS_KV) for _ in range(2))
    k_sf[1, 6:], v_sf[1, 6:] = 0x7F, 0x7F  # NaN behind the last key
    order, lengths = [[4, 0, 1], [3]], [21, 8]
    tables = [torch.tensor([0, 3, 4]), torch.tensor([4, 0, 1, 3]), torch.tensor([5, 8])]
    values = [
        [x[own].flatten(0, 1)[:length] for own, length in zip(order, lengths, strict=True)] for x in (k_values, v_values)
    ]
    whole = [torch.stack(pair, 1) for pair in ((k, v), (k_sf, v_sf))]
    if layout == "HND":
        whole = [x.transpose(-3, -2) for x in whole]
    return *whole, [x.int() for x in tables], values


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("as_pair", [False, True])
def test_decode(layout, as_pair):
    codes, scales, tables, values = pages(layout)
    q = torch.randn(2, HEADS, DIM, dtype=torch.bfloat16)
    if as_pair:
        codes, scales = codes.unbind(1), scales.view(torch.float8_e4m3fn).unbind(1)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), layout)
    wrapper.plan(*tables, HEADS, HEADS_KV, DIM, 8, kv_data_type=torch.uint8)
    out = torch.empty(2, HEADS, DIM, dtype=torch.bfloat16)
    found = wrapper.run(q, codes, kv_cache_sf=scales, k_scale=0.5, v_scale=0.25)
    for b in range(2):
        want = exact(q[b : b + 1], values[0][b], values[1][b], 0.5 * DIM**-0.5) * 0.25
        torch.testing.assert_close(found[b : b + 1].double(), want, rtol=2e-2, atol=5e-3)
    again = wrapper.run(q, codes, kv_cache_sf=scales, k_scale=0.5, out=out)  # written by the kernel
    assert again is out
    torch.testing.assert_close(again.double() * 0.25, found.double(), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("entrance", ["paged", "holistic"])
def test_prefill_over_pages(entrance):
    codes, scales, tables, values = pages("NHD")
    q, starts = torch.randn(9, HEADS, DIM, dtype=torch.float16), torch.tensor([0, 6, 9], dtype=torch.int32)
    if entrance == "paged":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "NHD")
        wrapper.plan(starts, *tables, HEADS, HEADS_KV, DIM, 8, causal=True)
        found = wrapper.run(q, codes, kv_cache_sf=scales, k_scale=2.0, v_scale=0.5)
    else:
        wrapper = flashinfer.BatchAttention("NHD", device="cpu")
        lengths = torch.tensor([21, 8], dtype=torch.int32)
        wrapper.plan(starts, tables[0], tables[1], lengths, HEADS, HEADS_KV, DIM, DIM, 8, causal=True)
        found = wrapper.run(q, codes, kv_cache_sf=scales, k_scale=2.0, v_scale=0.5)[0]
    for b, rows in enumerate((slice(0, 6), slice(6, 9))):
        want = exact(q[rows], values[0][b], values[1][b], 2 * DIM**-0.5) * 0.5
        torch.testing.assert_close(found[rows].double(), want, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_end_to_end(causal):
    torch.manual_seed(6)
    (k, k_sf, k_values), (v, v_sf, v_values) = (cache(24, HEADS_KV) for _ in range(2))
    q, starts = torch.randn(9, HEADS, DIM, dtype=torch.float16), torch.tensor([0, 6, 9], dtype=torch.int32)
    starts_kv = torch.tensor([0, 11, 24], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), "NHD")
    wrapper.plan(starts, starts_kv, HEADS, HEADS_KV, DIM, causal=causal)
    found = wrapper.run(q, k, v, kv_cache_sf=(k_sf, v_sf), v_scale=0.5)
    for rows, keys in ((slice(0, 6), slice(0, 11)), (slice(6, 9), slice(11, 24))):
        want = exact(q[rows], k_values[keys], v_values[keys], DIM**-0.5, causal) * 0.5
        torch.testing.assert_close(found[rows].double(), want, rtol=5e-3, atol=1e-3)
    single = flashinfer.single_prefill_with_kv_cache(
        q[:6], k[:11], v[:11], causal=causal, kv_cache_sf=(k_sf[:11], v_sf[:11]), v_scale=0.5
    )
    torch.testing.assert_close(single, found[:6], rtol=5e-3, atol=1e-3)


def test_refusals():
    codes, scales, tables, _ = pages("NHD")
    q = torch.randn(2, HEADS, DIM, dtype=torch.bfloat16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), "NHD")
    wrapper.plan(*tables, HEADS, HEADS_KV, DIM, 8)
    with pytest.raises(ValueError, match="kv_cache_sf: got None; keys of 4 bits"):
        wrapper.run(q, codes)
    with pytest.raises(ValueError, match=r"kv_cache_sf: got scales for keys of torch\.bfloat16"):
        wrapper.run(q, torch.zeros(6, 2, 8, HEADS_KV, DIM, dtype=torch.bfloat16), kv_cache_sf=scales)
    with pytest.raises(ValueError, match="kv_cache_sf: got shape"):
        wrapper.run(q, codes, kv_cache_sf=scales[:, 0])
    with pytest.raises(ValueError, match="paged_kv_cache: got pages"):
        wrapper.run(q, codes[..., :16], kv_cache_sf=scales)
    wrapper.plan(*tables, HEADS, HEADS_KV, DIM, 8, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NotImplementedError, match=r"ROPE_LLAMA.*4 bits"):
        wrapper.run(q, codes, kv_cache_sf=scales)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("by_slots", [False, True])
def test_append(layout, by_slots):
    """Tokens in places of three pages, one of them nowhere; what was there before stays."""
    torch.manual_seed(6)
    k, v = (torch.randn(5, HEADS_KV, DIM).bfloat16() for _ in range(2))
    shape = (4, 2, 8, HEADS_KV) if layout == "NHD" else (4, 2, HEADS_KV, 8)
    codes = torch.full((*shape, DIM // 2), 0x11, dtype=torch.uint8)
    scales = torch.full((*shape, DIM // 16), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    sizes = 0.5, torch.tensor([2.0])
    if by_slots:
        slots = torch.tensor([2 * 8 + 1, -1, 32, 7, 3 * 8 + 5])
        padded = (torch.cat((x, torch.full_like(x[:2], torch.nan))) for x in (k, v))
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*padded, slots, codes, scales, *sizes, layout)
        places = {0: (2, 1), 3: (0, 7), 4: (3, 5)}
    else:
        tables = [torch.tensor(x) for x in ([2, 0, 3], [0, 2, 3], [3, 6])]  # int64 is taken, too
        sequences, positions = torch.tensor([0, 0, -1, 0, 1]), torch.tensor([1, 8, 4, 2, 5])
        given = (k, v, sequences, positions, codes, scales, *tables, *sizes, layout)
        flashinfer.nvfp4_quantize_append_paged_kv_cache(*given)
        places = {0: (2, 1), 1: (0, 0), 3: (2, 2), 4: (3, 5)}
    if layout == "HND":
        codes, scales = codes.transpose(-3, -2), scales.transpose(-3, -2)
    untouched = torch.ones(4, 8, dtype=torch.bool)
    for token, (page, entry) in places.items():
        untouched[page, entry] = False
        for part, rows, size in ((0, k, 0.5), (1, v, 2.0)):
            row = codes[page, part, entry], scales[page, part, entry]
            found = dequantize_cache(row[0][None], "nvfp4", row[1][None], global_scale=size, dtype=torch.float64)[0]
            largest = rows[token].double().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
            error = (found - rows[token].double()).unflatten(-1, (-1, 16)).abs()
            assert (error <= 0.18 * largest).all()  # half of the step from 4 to 6, and the rounding of a scale
    assert (codes.transpose(1, 2)[untouched] == 0x11).all()
    assert (scales.view(torch.uint8).transpose(1, 2)[untouched] == 0x38).all()


def test_append_refuses():
    k, slots = torch.zeros(3, HEADS_KV, DIM).bfloat16(), torch.zeros(3, dtype=torch.int32)
    codes, scales = torch.zeros(1, 2, 8, HEADS_KV, DIM // 2).byte(), torch.zeros(1, 2, 8, HEADS_KV, DIM // 16).byte()
    append = flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    for bad in (0.0, -1.0, float("nan"), float("inf"), torch.tensor(-1.0)):
        with pytest.raises(ValueError, match=r"v_scale: got .*positive finite global decode scale"):
            append(k, k, slots, codes, scales, 1.0, bad)
    with pytest.raises(ValueError, match="append_key: got 2 rows; expected at least 3"):
        append(k[:2], k, slots, codes, scales, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"append_key: got \[3, 2, 32\]"):
        append(k[..., :32], k, slots, codes, scales, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"paged_kv_cache: got torch\.bfloat16"):
        append(k, k, slots, codes.bfloat16(), scales, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"slot_mapping: got torch\.float32"):
        append(k, k, slots.float(), codes, scales, 1.0, 1.0)
