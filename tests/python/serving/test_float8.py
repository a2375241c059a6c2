"""q, k and v in float8, against float64 on what their codes and descales are worth, and on what they were made from."""

import pytest
import torch
from flash_attention import attention, attention_packed, flash_attn_3, quantize, rotate

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def attention64(q, k, v, causal=False, window=(-1, -1), softcap=0.0, scale=None):
    """(out, lse) of [batch, seq, heads, dim], bottom-right."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    left, right = window[0], 0 if causal else window[1]
    hidden = (distance > right) & (right >= 0) | (-distance > left) & (left >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def worth(codes, descale, heads):
    return codes.double() * descale.double().repeat_interleave(heads // descale.shape[1], 1)[:, None, :, None]


def made(batch=2, seq_q=70, seq_kv=100, heads=4, heads_kv=2, dim=64, dtype=torch.float8_e4m3fn):
    torch.manual_seed(dim)
    tensors = [torch.randn(batch, n, h, dim) * (1 + i) for i, (n, h) in
               enumerate(((seq_q, heads), (seq_kv, heads_kv), (seq_kv, heads_kv)))]  # fmt: skip
    pairs = [quantize(x, dtype, heads_kv=heads_kv) for x in tensors]
    return tensors, [codes for codes, _ in pairs], [scale for _, scale in pairs]


OPTIONS = [{}, {"causal": True}, {"window": (20, 3)}, {"softcap": 5.0, "causal": True}, {"scale": 0.3}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_right_of_the_codes(dtype, options):
    _, (q, k, v), (a, b, c) = made(dtype=dtype)
    out, lse = attention(q, k, v, q_descale=a, k_descale=b, v_descale=c, return_lse=True, **options)
    want, want_lse = attention64(worth(q, a, 4), worth(k, b, 2), worth(v, c, 2), **options)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out.double() - want).abs().max() < 0.01 * want.abs().max() + 2**-8 * want.abs().max()
    assert (lse.double() - want_lse).abs().max() < 1e-4 * want_lse.abs().max()
    half = attention(q, k, v, q_descale=a, k_descale=b, v_descale=c, out_dtype=torch.float16, **options)
    assert half.dtype == torch.float16
    wide = attention(q, k, v, q_descale=a, k_descale=b, v_descale=c, out_dtype=torch.float32, **options)
    assert (wide.double() - want).abs().max() < 1e-5 * want.abs().max()


def test_heads_first_numbers_and_no_scales():
    _, (q, k, v), _ = made()
    plain = attention(q, k, v, causal=True, out_dtype=torch.float32)
    ones = attention(q, k, v, causal=True, q_descale=1.0, k_descale=torch.ones(1), v_descale=torch.ones(2, 2),
                     out_dtype=torch.float32)  # fmt: skip
    assert torch.equal(plain, ones)
    first = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", causal=True, out_dtype=torch.float32)
    assert torch.equal(first.transpose(1, 2), plain)


def errors_of(q, k, v, hadamard):
    """Of attention, and of exact products of the codes, against float64 on what the codes were made from: rms."""
    want, _ = attention64(q, k, v, causal=True)
    (a, da), (b, db) = (quantize(x, hadamard=hadamard) for x in (q, k))
    c, dc = quantize(v)
    out = attention(a, b, c, causal=True, q_descale=da, k_descale=db, v_descale=dc, out_dtype=torch.float32)
    exact, _ = attention64(worth(a, da, 2), worth(b, db, 2), worth(c, dc, 2), causal=True)
    return tuple((x.double() - want).square().mean().sqrt().item() for x in (out, exact))


def test_outliers_in_k():
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 128, 2, 128) for _ in range(3))
    k[..., 5] *= 30
    for hadamard in (False, True):
        error, exact_error = errors_of(q, k, v, hadamard)
        assert error < 1.3 * exact_error


def test_rotation_against_scattered_outliers():
    torch.manual_seed(1)
    q, k = (torch.randn(1, 256, 2, 128) + 10 * torch.randn(1, 256, 2, 128) * (torch.rand(1, 256, 2, 128) < 0.001)
            for _ in range(2))  # fmt: skip
    v = torch.randn(1, 256, 2, 128).sign()  # no error of its own
    assert errors_of(q, k, v, True)[0] < 0.9 * errors_of(q, k, v, False)[0]


def test_packed_as_in_a_batch():
    _, (q, k, v), scales = made(seq_q=60, seq_kv=60)
    lengths = [60, 33]
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (q, k, v)]
    starts = torch.tensor([0, 60, 93], dtype=torch.int32)
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out = attention_packed(*packed, starts, causal=True, out_dtype=torch.float32, **descales)
    for b, n in enumerate(lengths):
        alone = {name: scale[b : b + 1] for name, scale in descales.items()}
        one = attention(*(x[b : b + 1, :n] for x in (q, k, v)), causal=True, out_dtype=torch.float32, **alone)
        assert (out[starts[b] : starts[b + 1]] - one[0]).abs().max() < 1e-5
    three = flash_attn_3.flash_attn_varlen_func(*packed, starts, starts, 60, 60, causal=True, **descales)
    assert torch.equal(three, out.bfloat16())


def test_flash_attn_3():
    _, (q, k, v), (a, b, c) = made(seq_q=100)
    out, lse = flash_attn_3.flash_attn_func(q, k, v, None, True, None, a, b, c, return_attn_probs=True)
    want, want_lse = attention64(worth(q, a, 4), worth(k, b, 2), worth(v, c, 2), causal=True)
    assert out.dtype == torch.bfloat16 and (out.double() - want).abs().max() < 2**-7 * want.abs().max()
    assert (lse - want_lse).abs().max() < 1e-4 * want_lse.abs().max()
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_3.flash_attn_func(q, k, v, qv=q)


def test_quantize():
    torch.manual_seed(0)
    x = torch.randn(2, 50, 6, 32) * torch.logspace(-3, 2, 6)[:, None]
    codes, descale = quantize(x, heads_kv=3)
    assert descale.shape == (2, 3) and codes.dtype == torch.float8_e4m3fn
    assert (codes.float().abs().amax((1, 3)).unflatten(1, (3, 2)).amax(2) == 448).all()
    groups = x.abs().amax((1, 3)).unflatten(1, (3, 2)).amax(2).repeat_interleave(2, 1)[:, None, :, None]
    error = (worth(codes, descale, 6) - x).abs()
    assert (error <= (x.abs() * 2**-4).clamp(min=groups * 2**-18)).all()
    flat, of_sequences = quantize(x.flatten(0, 1), heads_kv=3, cu_seqlens=torch.tensor([0, 50, 100], dtype=torch.int32))
    assert torch.equal(of_sequences, descale) and torch.equal(flat.unflatten(0, (2, 50)).float(), codes.float())
    one, single = quantize(x, "e5m2", "tensor")
    assert single.shape == (1,) and one.dtype == torch.float8_e5m2 and one.float().abs().max() == 57344
    zero, ones = quantize(torch.zeros(1, 3, 2, 8))
    assert (zero.float() == 0).all() and (ones == 1).all()


def test_rotation_keeps_products():
    torch.manual_seed(0)
    for dim in (64, 96, 128):
        q, k = torch.randn(3, dim, dtype=torch.float64), torch.randn(5, dim, dtype=torch.float64)
        assert torch.allclose((rotate(q) @ rotate(k).T).double(), q @ k.T, atol=1e-4)
    spread = rotate(torch.eye(64)[3])
    assert torch.allclose(spread.abs(), torch.full((64,), 0.125))


def test_dropout_and_what_is_added_to_scores():
    """The same mask as of any other call with that seed and offset; biases and sinks as attention() takes them."""
    _, (q, k, v), _ = made()
    options = {"dropout_p": 0.4, "seed": 2**63 + 5, "offset": 3}
    more = {"bias": torch.randn(4, 70, 1), "sink": torch.randn(4).bfloat16(), "alibi_slopes": torch.rand(4).half()}
    wide = [tensor.float() for tensor in (q, k, v)]
    for given in (options, more, options | more):
        expected = attention(*wide, causal=True, **given)
        got = attention(q, k, v, causal=True, out_dtype=torch.float32, **given)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    torch.manual_seed(4)
    first, second = (attention(q, k, v, dropout_p=0.4) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(attention(q, k, v, dropout_p=0.4), first) and not torch.equal(first, second)


def test_backward_is_refused():
    x = torch.randn(1, 9, 2, 16, requires_grad=True)
    q = x.to(torch.float8_e4m3fn)  # which torch differentiates
    with pytest.raises(RuntimeError, match="attention of float8 tensors: has no gradients"):
        attention(q, q, q).float().sum().backward()
    with torch.no_grad():
        assert not attention(q, q, q).requires_grad


def test_a_compiled_call():
    _, (q, k, v), (a, b, c) = made(seq_q=16, seq_kv=16)
    call = lambda *x: attention(*x, causal=True, q_descale=a, k_descale=b, v_descale=c)  # noqa: E731
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(q, k, v), call(q, k, v))


def test_refusals():
    (wide, *_), (q, k, v), (a, *_) = made(seq_q=16, seq_kv=16)
    one, bad = torch.ones(1), torch.ones(2, 2)
    bad[1, 0] = torch.nan
    for match, tensors, options in [
        (r"q_descale: got \[0.0\]; allowed are positive", (q, k, v), {"q_descale": 0 * one}),
        (r"k_descale: got \[-1.0\]; allowed are positive", (q, k, v), {"k_descale": -1.0}),
        (r"v_descale: got .*nan.*; allowed are positive", (q, k, v), {"v_descale": bad}),
        (r"k_descale: got shape \[3\]; expected one number or \[2, 2\]", (q, k, v), {"k_descale": torch.ones(3)}),
        (r"q_descale: got shape \[2, 4\]; expected one number or \[2, 2\]", (q, k, v), {"q_descale": torch.ones(2, 4)}),
        (r"q_descale: got torch.float64; expected a number", (q, k, v), {"q_descale": one.double()}),
        (r"v: got torch.float8_e5m2; expected the dtype of q", (q, k, v.to(torch.float8_e5m2)), {}),
        (r"k: got torch.bfloat16; expected the dtype of q", (q, k.bfloat16(), v), {}),
        (r"q: got torch.float32; descales and out_dtype go with", (wide, wide, wide), {"q_descale": a}),
        (r"out_dtype: got torch.float64; allowed", (q, k, v), {"out_dtype": torch.float64}),
        (r"kernel: the textbook algorithm", (q, k, v), {"kernel": "standard"}),
        (r"score_mod, mask_mod: 8-bit", (q, k, v), {"mask_mod": lambda b, h, i, j: i >= j}),
    ]:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=match):
            attention(*tensors, **options)
    for match, x, options in [
        ("dtype: got torch.float16", wide, {"dtype": torch.float16}),
        ("scales: got 'row'", wide, {"scales": "row"}),
        ("heads_kv: got 3; expected a divisor of 4", wide, {"heads_kv": 3}),
        (r"x: got torch.float32 \[16, 4, 64\]", wide[0], {}),
    ]:
        with pytest.raises(ValueError, match=match):
            quantize(x, **options)
