"""Latent attention through FlashMLA's, FlashAttention-3's and FlashInfer's functions, against float64."""

import inspect
import math

import pytest
import torch
from flash_attention import attention_over_cache, flash_attn_3, flash_mla
from flash_attention.flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchMLAPagedAttentionWrapper

CLOSE = {torch.float32: {"atol": 2e-5, "rtol": 2e-4}, torch.bfloat16: {"atol": 1e-2, "rtol": 2e-2}}


def latent_cache(lengths, page, heads, dim, dtype, device, late=False):
    """(cache, table): keys in shuffled pages, NaN wherever no key is, and entries of the table that lead nowhere."""
    pages = [-(-length // page) for length in lengths]
    table = torch.full((len(lengths), max([*pages, 1]) + 1), 2147480000, dtype=torch.int32)
    order = torch.randperm(sum(pages) + 3)
    cache = torch.full((sum(pages) + 3, page, heads, dim), torch.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        table[b, : pages[b]] = order[sum(pages[:b]) : sum(pages[: b + 1])]
        rows = torch.randn(length, heads, dim)
        if late and length:
            rows[-1] *= 3  # the largest score comes last
        for j in range(length):
            cache[table[b, j // page], j % page] = rows[j].to(dtype)
    return cache.to(device), table.to(device)


def want_of(q, cache, table, lengths, dim_v, causal, scale=None):
    """out, lse (+inf where nothing is seen) in float64."""
    batch, tokens, heads, dim = q.shape
    out = torch.zeros(batch, tokens, heads, dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads, tokens), torch.inf, dtype=torch.float64)
    q, cache, table = q.double().cpu(), cache.double().cpu(), table.cpu()
    group = heads // cache.shape[2]
    for b, length in enumerate(lengths):
        rows = [cache[table[b, j // cache.shape[1]], j % cache.shape[1]] for j in range(length)]
        for i in range(tokens):
            seen = length - (tokens - 1 - i) if causal else length
            if seen <= 0:
                continue
            keys = torch.stack(rows[:seen])
            for h in range(heads):
                scores = keys[:, h // group] @ q[b, i, h] * (dim**-0.5 if scale is None else scale)
                lse[b, h, i] = scores.logsumexp(0)
                out[b, i, h] = scores.softmax(0) @ keys[:, h // group, :dim_v]
    return out, lse


def test_signatures():
    names = list(inspect.signature(inspect.unwrap(flash_mla.flash_mla_with_kvcache)).parameters)
    assert names[:16] == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ]
    run = list(inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters)[1:]
    assert run == [
        "q_nope",
        "q_pe",
        "ckv_cache",
        "kpe_cache",
        "out",
        "lse",
        "return_lse",
        "profiler_buffer",
        "kv_len",
        "page_table",
        "return_lse_base_on_e",
        "o_scale",
        "ckv_scale",
        "ckv_scale_arr",
        "kpe_scale",
    ]
    plan = list(inspect.signature(BatchMLAPagedAttentionWrapper.plan).parameters)[1:]
    assert plan == [
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "kv_len_arr",
        "num_heads",
        "head_dim_ckv",
        "head_dim_kpe",
        "page_size",
        "causal",
        "sm_scale",
        "q_data_type",
        "kv_data_type",
        "use_profiler",
    ]


@pytest.mark.parametrize(
    "tokens, heads, heads_k, page, dims, lengths, causal, late",
    [
        (1, 16, 1, 64, (576, 512), [131, 0, 1], False, False),
        (2, 16, 1, 64, (576, 512), [97, 1, 0, 64], True, True),
        (4, 9, 1, 16, (576, 512), [67, 3], True, False),
        (1, 128, 1, 64, (576, 512), [71], False, True),
        (2, 16, 1, 64, (512, 512), [97, 1, 0, 64], True, True),
        (3, 6, 2, 7, (96, 64), [131, 37, 2], True, True),
        (1, 8, 8, 1, (72, 8), [13, 29], False, False),
    ],
)
@pytest.mark.parametrize("dtype", CLOSE)
def test_flash_mla(tokens, heads, heads_k, page, dims, lengths, causal, late, dtype, device):
    torch.manual_seed(7)
    dim, dim_v = dims
    cache, table = latent_cache(lengths, page, heads_k, dim, dtype, device, late)
    q = torch.randn(len(lengths), tokens, heads, dim, dtype=dtype, device=device)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    metadata, splits = flash_mla.get_mla_metadata(used, heads, heads_k)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, dim_v, metadata, splits, causal=causal)
    want, want_lse = want_of(q, cache, table, lengths, dim_v, causal)
    assert out.dtype == dtype and out.shape == want.shape
    torch.testing.assert_close(out.double().cpu(), want, **CLOSE[dtype])
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-4, rtol=1e-4)


def test_cache_of_codes(device):
    torch.manual_seed(8)
    lengths, scale = [70, 5], 0.031
    cache, table = latent_cache(lengths, 16, 1, 576, torch.float32, device)
    codes = (cache / scale).to(torch.float8_e4m3fn)
    q = torch.randn(2, 2, 16, 576, dtype=torch.bfloat16, device=device)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    call = {"softmax_scale": 0.05, "causal": True, "is_fp8_kvcache": True}
    out, lse = flash_mla.flash_mla_with_kvcache(q, codes, table, used, 512, None, None, k_scale=scale, **call)
    want, want_lse = want_of(q, codes.float() * scale, table, lengths, 512, True, 0.05)
    torch.testing.assert_close(out.double().cpu(), want, atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-4, rtol=1e-4)
    again, _ = flash_mla.flash_mla_with_kvcache(
        q, codes.view(torch.uint8), table, used, 512, k_scale=torch.full((2, 1), scale, device=device), **call
    )
    assert torch.equal(out, again)


@pytest.mark.parametrize("causal", [False, True])
def test_qv_of_flash_attention_3(causal, device):
    torch.manual_seed(9)
    lengths = [45, 13]
    cache, table = latent_cache(lengths, 16, 1, 96, torch.float32, device)
    k_cache, v_cache = cache[..., 64:].contiguous(), cache[..., :64].contiguous()
    q, qv = (torch.randn(2, 3, 4, dim, device=device) for dim in (32, 64))
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, qv=qv, cache_seqlens=used, page_table=table, causal=causal, return_softmax_lse=True
    )
    want, want_lse = want_of(torch.cat([qv, q], -1), cache, table, lengths, 64, causal)
    torch.testing.assert_close(out.double().cpu(), want, **CLOSE[torch.float32])
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=1e-5, rtol=1e-5)
    padded = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, qv=qv, cache_seqlens=used, page_table=table, causal=causal,
        cache_leftpad=torch.zeros(2, dtype=torch.int32, device=device),
    )  # fmt: skip
    torch.testing.assert_close(padded, out)
    with pytest.raises(ValueError, match=r"qv: got shape \[2, 3, 4, 32\]; expected \[2, 3, 4, 64\]"):
        flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=q, cache_seqlens=used, page_table=table)


@pytest.mark.parametrize("queries", [[1, 1, 1], [2, 0, 3]])
@pytest.mark.parametrize("graph", [False, True])
def test_flashinfer(queries, graph, device):
    torch.manual_seed(10)
    lengths, page, heads, ckv, kpe = [37, 64, 5], 8, 4, 64, 32
    cache, table = latent_cache(lengths, page, 1, ckv + kpe, torch.float32, device)
    pages = [-(-length // page) for length in lengths]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    kv_starts = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.cat([table[b, :count].cpu() for b, count in enumerate(pages)])
    used = torch.tensor(lengths, dtype=torch.int32)
    buffers = {}
    if graph:
        sizes = {"qo_indptr": 4, "kv_indptr": 4, "kv_indices": len(indices) + 5, "kv_len_arr": 3}
        buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0, device=device), graph, **buffers)
    causal = queries != [1, 1, 1]
    dtypes = (torch.float32, torch.float32)
    wrapper.plan(starts, kv_starts, indices, used, heads, ckv, kpe, page, causal, 0.09, *dtypes)
    q = torch.randn(sum(queries), heads, ckv + kpe, device=device)
    pages_of_ckv, pages_of_kpe = cache[:, :, 0, :ckv], cache[:, :, 0, ckv:].contiguous()
    out, lse = wrapper.run(q[..., :ckv], q[..., ckv:], pages_of_ckv, pages_of_kpe, return_lse=True)
    _, natural = wrapper.run(
        q[..., :ckv], q[..., ckv:], pages_of_ckv, pages_of_kpe, return_lse=True, return_lse_base_on_e=True
    )
    torch.testing.assert_close(lse * math.log(2), natural)
    for b, (first, count) in enumerate(zip(starts.tolist(), queries, strict=False)):
        rows = q[first : first + count]
        want, want_lse = want_of(rows[None], cache, table[b : b + 1], lengths[b : b + 1], ckv, causal, 0.09)
        torch.testing.assert_close(out[first : first + count].double().cpu(), want[0], **CLOSE[torch.float32])
        torch.testing.assert_close(natural[first : first + count].double().cpu(), want_lse[0].T, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"q_pe: got torch.float32 \[\d+, 4, 64\].*as planned"):
        wrapper.run(q[..., :ckv], q[..., :ckv], pages_of_ckv, pages_of_kpe)


def test_traced(device):
    torch.manual_seed(11)
    cache, table = latent_cache([33], 16, 1, 96, torch.float32, device)
    q = torch.randn(1, 1, 4, 96, device=device)
    call = {"page_table": table, "seqused_kv": torch.tensor([33], dtype=torch.int32, device=device), "latent": True}
    want = attention_over_cache(q, cache[..., 64:], cache[..., :64], **call)
    op = torch.compile(lambda q: attention_over_cache(q, cache[..., 64:], cache[..., :64], **call), backend="eager")
    assert torch.equal(op(q), want)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"head_dim_v": 104}, "head_dim_v: got 104; allowed are 8 to 96"),
        ({"head_dim_v": 60}, "head_dim_v: got 60"),
        ({"block_table": None}, "block_table: got None"),
        ({"cache_seqlens": None}, "cache_seqlens: got None"),
        ({"indices": torch.zeros(1)}, "indices: got torch.float32"),
        ({"indices": torch.zeros(1, 1, 4, dtype=torch.int32), "k_scale": 1.0}, "k_scale: got a value"),
        ({"attn_sink": torch.zeros(4)}, "attn_sink: got a value; only None"),
        ({"q": torch.zeros(1, 1, 4, 64)}, "k_cache: got a head_dim of 96; expected 64, as q"),
        ({"q": torch.zeros(1, 4, 96)}, r"q: got \[1, 4, 96\]; expected \[batch, seq_q, heads_q, head_dim\]"),
        ({"is_fp8_kvcache": True}, "k_cache: got torch.float32; expected float8_e4m3fn"),
        ({"k_scale": 0.5}, "is_fp8_kvcache: got False; expected True"),
    ],
)
def test_refusals(changed, message):
    cache, table = latent_cache([5], 16, 1, 96, torch.float32, "cpu")
    lengths = torch.tensor([5], dtype=torch.int32)
    call = {
        "q": torch.zeros(1, 1, 4, 96),
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": lengths,
        "head_dim_v": 64,
    }
    with pytest.raises((ValueError, NotImplementedError), match=message):
        flash_mla.flash_mla_with_kvcache(**{**call, **changed})


def planned(wrapper, kv_indptr, indices, lengths, page=1, dtypes=(torch.float32, torch.float32)):
    to = lambda x: torch.tensor(x, dtype=torch.int32, device=wrapper.device)  # noqa: E731
    wrapper.plan(to([0, 1, 2]), to(kv_indptr), to(indices), to(lengths), 16, 64, 16, page, False, 0.07, *dtypes)
    return wrapper


def test_flashinfers_wrapper_writes_lse_where_it_is_given(device):
    ckv, kpe = torch.randn(6, 1, 64, device=device), torch.randn(6, 1, 16, device=device)
    q, pe = torch.randn(2, 16, 64, device=device), torch.randn(2, 16, 16, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1, device=device))
    planned(wrapper, [0, 2, 6, 9], [3, 0, 1, 2, 5, 4], [2, 4])  # surplus entries of kv_indptr belong to nobody
    for natural, base in ((False, 2.0), (True, math.e)):
        out, lse = torch.empty_like(q), torch.full((2, 16), 7.0, device=device)
        assert wrapper.run(q, pe, ckv, kpe, out=out, lse=lse, return_lse_base_on_e=natural) is out
        for b, pages in enumerate(([3, 0], [1, 2, 5, 4])):
            keys = torch.cat((ckv[pages, 0], kpe[pages, 0]), -1).double()
            scores = torch.cat((q[b], pe[b]), -1).double() @ keys.T * 0.07
            torch.testing.assert_close(out[b].double(), scores.softmax(-1) @ keys[:, :64], **CLOSE[torch.float32])
            torch.testing.assert_close(lse[b].double(), scores.logsumexp(-1) / math.log(base), **CLOSE[torch.float32])
    with pytest.raises(ValueError, match="kv_indptr: got 2 entries; expected 3 at least"):
        planned(wrapper, [0, 2], [3, 0], [2, 4])


def test_flashinfers_wrapper_over_caches_of_two_scales(device):
    ckv, kpe = (torch.randn(6, 1, dim, device=device).to(torch.float8_e4m3fn) for dim in (64, 16))
    q, pe = (torch.randn(2, 16, dim, dtype=torch.bfloat16, device=device) for dim in (64, 16))
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1, device=device))
    planned(wrapper, [0, 2, 6], [3, 0, 1, 2, 5, 4], [2, 4], dtypes=(torch.bfloat16, torch.float8_e4m3fn))
    out = wrapper.run(q, pe, ckv, kpe, ckv_scale=0.25, kpe_scale=2.0)
    for b, pages in enumerate(([3, 0], [1, 2, 5, 4])):
        keys = torch.cat((ckv.double()[pages, 0] * 0.25, kpe.double()[pages, 0] * 2.0), -1)
        scores = torch.cat((q[b], pe[b]), -1).double() @ keys.T * 0.07
        torch.testing.assert_close(out[b].double(), scores.softmax(-1) @ keys[:, :64], **CLOSE[torch.bfloat16])


@pytest.mark.parametrize("graph", [False, True])
def test_flashinfers_wrapper_over_a_cache_without_pages(graph, device):
    sizes = {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": 64, "kv_len_arr": 2}
    buffers = {name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1, device=device), use_cuda_graph=graph, **buffers)
    planned(wrapper, [0, 0, 0], [], [0, 0])
    q, pe = torch.randn(2, 16, 64, device=device), torch.randn(2, 16, 16, device=device)
    empty = torch.empty(0, 1, 64, device=device), torch.empty(0, 1, 16, device=device)
    out, lse = wrapper.run(q, pe, *empty, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    tables = list(buffers.values())[1:]
    decode = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=device), "NHD", graph, False, *tables)
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    decode.plan(zeros, zeros[:0], zeros[:2], 16, 1, 64, 1)
    assert not decode.run(q, torch.empty(0, 2, 1, 1, 64, device=device)).any()
