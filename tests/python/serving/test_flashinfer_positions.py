"""FlashInfer's pos_encoding_mode against its formulas in float64."""

import pytest
import torch
from flash_attention import flashinfer
from flash_attention.flashinfer.positions import alibi_slopes

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 8


def rotated(x, places, scale=1.0, theta=1e4):
    """x [rows, heads, dim], each half a half of the pairs: as complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = places.double()[:, None] / scale * theta ** (-torch.arange(half).double() / half)
    found = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((found.real, found.imag), -1)


def exact(q, k, v, mode, causal=True, **rope):
    """One sequence in float64, the last query at the last key."""
    places, of_q = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))
    q, k, v = q.double(), k.double(), v.double()
    if mode == "ROPE_LLAMA":
        q, k = rotated(q, of_q, **rope), rotated(k, places, **rope)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
    distance = of_q[:, None] - places
    if mode == "ALIBI":
        scores = scores - alibi_slopes(HEADS).double()[:, None, None] * distance
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def close(got, want):
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


def draw(queries, keys):
    torch.manual_seed(queries + keys)
    return torch.randn(queries, HEADS, DIM), torch.randn(keys, KV_HEADS, DIM), torch.randn(keys, KV_HEADS, DIM)


def paged(sequences):
    """(cache, indptr, indices, last_page_len) of the keys and values of sequences, pages in no order, NaN elsewhere."""
    counts = [-(-len(k) // PAGE) for _, k, _ in sequences]
    order = torch.randperm(sum(counts) + 2)
    cache = torch.full((len(order), 2, PAGE, KV_HEADS, DIM), torch.nan)
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    for (_, k, v), first in zip(sequences, indptr, strict=False):
        for j in range(len(k)):
            page = order[first + j // PAGE]
            cache[page, 0, j % PAGE], cache[page, 1, j % PAGE] = k[j], v[j]
    last = torch.tensor([(len(k) - 1) % PAGE + 1 for _, k, _ in sequences]).int()
    return cache, indptr, order[: sum(counts)].int(), last


@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_single(mode):
    q, k, v = draw(1, 37)
    close(flashinfer.single_decode_with_kv_cache(q[0], k, v, pos_encoding_mode=mode), exact(q, k, v, mode)[0])
    q, k, v = draw(11, 29)
    close(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, pos_encoding_mode=mode), exact(q, k, v, mode))


def test_rope_has_a_scale_and_a_base():
    q, k, v = draw(5, 21)
    rope = {"rope_scale": 4.0, "rope_theta": 5e5}
    got = flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA", **rope)
    close(got, exact(q, k, v, "ROPE_LLAMA", causal=False, scale=4.0, theta=5e5))


@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decoding_over_pages(mode, tokens):
    sequences = [draw(tokens, keys) for keys in (37, 8, 19)]
    cache, *tables = paged(sequences)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8, dtype=torch.uint8))
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, pos_encoding_mode=mode, q_len_per_req=tokens)
    got = wrapper.run(torch.cat([q for q, _, _ in sequences]), cache)
    close(got, torch.cat([exact(*sequence, mode) for sequence in sequences]))


@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_prompts_over_pages(mode):
    sequences = [draw(queries, keys) for queries, keys in ((5, 37), (8, 8), (1, 19))]
    cache, *tables = paged(sequences)
    starts = torch.tensor([0, 5, 13, 14], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8, dtype=torch.uint8))
    wrapper.plan(starts, *tables, HEADS, KV_HEADS, DIM, PAGE, causal=True, pos_encoding_mode=mode)
    got = wrapper.run(torch.cat([q for q, _, _ in sequences]), cache)
    close(got, torch.cat([exact(*sequence, mode) for sequence in sequences]))


def test_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_refused():
    q, k, v = draw(4, 9)
    with pytest.raises(NotImplementedError, match="'ALIBI' without causal"):
        flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI")
    with pytest.raises(ValueError, match="allowed are 'NONE', 'ROPE_LLAMA', 'ALIBI'"):
        flashinfer.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="XPOS")
