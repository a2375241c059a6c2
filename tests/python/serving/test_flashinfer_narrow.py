"""FlashInfer's queries, keys and values of 8 bits, with a scale for each head: against float64 of the same codes."""

import pytest

torch = pytest.importorskip("torch")

from flash_attention import flashinfer  # noqa: E402

CODES = [torch.float8_e4m3fn, torch.float8_e5m2]


def rows(length, heads, dim, code, seed):
    """Codes, and scales that differ by head: dropping or swapping one is seen."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, heads, dim, generator=generator) * 2
    return values.to(code), torch.linspace(0.2, 1.5, heads).roll(seed)


def exact(q, k, v, scales, causal=False, mask=None, sm_scale=None):
    q, k, v = (
        codes.double() * scale.double().expand(codes.shape[1])[:, None]
        for codes, scale in zip((q, k, v), scales, strict=True)
    )
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool) if mask is None else mask
    if causal:
        seen = seen.tril(k.shape[0] - q.shape[0])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / torch.log(torch.tensor(2.0).double())


def assert_near(out, lse, want, device_error=0.06):
    error = (out.double() - want[0]).norm() / want[0].norm()
    assert error < device_error
    torch.testing.assert_close(lse.double(), want[1], atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(3, 3), (6, 2)])
def test_single_prefill(code, heads_q, heads_kv):
    q, k, v = (rows(n, h, 32, code, seed) for n, h, seed in ((13, heads_q, 1), (29, heads_kv, 3), (29, heads_kv, 4)))
    codes, scales = zip(q, k, v, strict=True)
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(*codes, *scales, o_dtype=torch.float16, causal=True)
    assert out.dtype == torch.float16
    assert_near(out, lse, exact(*codes, scales, causal=True))
    one = torch.tensor([0.7])
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(*codes, one, one, one)
    assert_near(out, lse, exact(*codes, (one, one, one)))


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_ragged(heads_q, heads_kv, masked):
    code = CODES[0]
    q, k, v = (rows(n, h, 64, code, seed) for n, h, seed in ((12, heads_q, 1), (26, heads_kv, 3), (26, heads_kv, 4)))
    codes, scales = zip(q, k, v, strict=True)
    starts_q, starts_kv = torch.tensor([0, 5, 12]).int(), torch.tensor([0, 9, 26]).int()
    masks = [torch.rand(5, 9) < 0.6, torch.rand(7, 17) < 0.6]
    for mask in masks:
        mask[:, 0] = True
    packed = torch.cat([torch.from_numpy(bits(mask)) for mask in masks])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1), "NHD")
    given = {"packed_custom_mask": packed} if masked else {"causal": True}
    wrapper.plan(starts_q, starts_kv, heads_q, heads_kv, 64, q_data_type=code, o_data_type="float16", **given)
    out, lse = wrapper.run(*codes, *scales, return_lse=True)
    assert out.dtype == torch.float16
    want = []
    for b in range(2):
        own = (codes[0][starts_q[b] : starts_q[b + 1]], *(x[starts_kv[b] : starts_kv[b + 1]] for x in codes[1:]))
        want.append(exact(*own, scales, causal=not masked, mask=masks[b] if masked else None))
    assert_near(out, lse, [torch.cat(parts) for parts in zip(*want, strict=True)])


def bits(mask):
    import numpy

    return numpy.packbits(mask.flatten().numpy(), bitorder="little")


def test_paged():
    code, pages = CODES[0], torch.tensor([3, 0, 2, 1, 4]).int()
    q, k, v = (rows(n, h, 64, code, seed) for n, h, seed in ((9, 4, 1), (5 * 8, 2, 3), (5 * 8, 2, 4)))
    codes, scales = zip(q, k, v, strict=True)
    cache = tuple(x.view(5, 8, 2, 64) for x in codes[1:])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "NHD")
    tables = [torch.tensor(x).int() for x in ([0, 4, 9], [0, 2, 5], [3, 0, 2, 1, 4], [5, 3])]
    wrapper.plan(*tables, 4, 2, 64, 8, causal=True, q_data_type=code, kv_data_type=code, o_data_type=torch.bfloat16)
    out, lse = wrapper.run(codes[0], cache, *scales, return_lse=True)
    assert out.dtype == torch.bfloat16
    want = []
    for b, length in enumerate((13, 19)):
        own = [x[pages[tables[1][b] : tables[1][b + 1]].long()].flatten(0, 1)[:length] for x in cache]
        want.append(exact(codes[0][tables[0][b] : tables[0][b + 1]], *own, scales, causal=True))
    assert_near(out, lse, [torch.cat(parts) for parts in zip(*want, strict=True)], 0.01)


def test_blocks():
    code = CODES[1]
    q, k, v = (rows(n, h, 64, code, seed) for n, h, seed in ((16, 4, 1), (24, 2, 3), (24, 2, 4)))
    codes, scales = zip(q, k, v, strict=True)
    wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(torch.tensor([0, 2, 3]).int(), torch.tensor([0, 2, 1]).int(), 16, 24, 8, 8, 4, 2, 64)
    out, lse = wrapper.run(*codes, *scales, return_lse=True)
    mask = torch.zeros(16, 24, dtype=torch.bool)
    mask[:8, :8] = mask[:8, 16:] = mask[8:, 8:16] = True
    assert_near(out, lse, exact(*codes, scales, mask=mask), 0.01)


def test_scales_are_checked():
    q, k = torch.zeros(3, 2, 32), torch.zeros(3, 2, 32).to(CODES[0])
    with pytest.raises(ValueError, match=r"scale_q: got shape \[3\]; expected \[2\]"):
        flashinfer.single_prefill_with_kv_cache(k, k, k, torch.ones(3))
    with pytest.raises(ValueError, match=r"scale_q: got a tensor for torch\.float32"):
        flashinfer.single_prefill_with_kv_cache(q, k, k, torch.ones(2))
    with pytest.raises(TypeError, match="scale_v: expected a tensor, got float"):
        flashinfer.single_prefill_with_kv_cache(k, k, k, None, None, 1.0)
