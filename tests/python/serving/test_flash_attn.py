"""flash_attention.flash_attn: FlashAttention-2's signatures, layouts and meanings."""

import inspect

import pytest
import reference
import torch
from comparison import assert_close
from flash_attention import dropout_mask, flash_attn
from flash_attention.flash_attn.bert_padding import pad_input, unpad_input

COMMON = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *COMMON],
    "flash_attn_qkvpacked_func": ["qkv", *COMMON],
    "flash_attn_kvpacked_func": ["q", "kv", *COMMON],
    "flash_attn_varlen_func": ["q", "k", "v", *LENGTHS, *COMMON, "block_table"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *COMMON],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *LENGTHS, *COMMON],
    "flash_attn_with_kvcache": [
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"),
        *("cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved"),
        *("alibi_slopes", "num_splits", "return_softmax_lse"),
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name]


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (5, 2)}, {"window": (5, 2)}),
    "softcap": ({"softcap": 4.0, "softmax_scale": 0.4}, {"softcap": 4.0, "scale": 0.4}),
}


@pytest.mark.parametrize("head_dim", [32, 59])
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name, head_dim, device):
    ours, plain = OPTIONS[name]
    q = torch.randn(2, 13, 4, head_dim, device=device)
    kv = torch.randn(2, 29, 2, 2, head_dim, device=device)
    k, v = kv.unbind(2)
    slopes = torch.rand(4, device=device)
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, **ours)
    exact, lse = reference.attention(q.double(), k.double(), v.double(), alibi_slopes=slopes, **plain)
    same, _ = reference.attention(q, k, v, alibi_slopes=slopes, **plain)
    assert_close(out, exact, same, name)
    assert torch.equal(out, flash_attn.flash_attn_kvpacked_func(q, kv, alibi_slopes=slopes, **ours))
    again, softmax_lse, probs = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **ours)
    assert torch.equal(again, out)
    torch.testing.assert_close(softmax_lse.double(), lse, atol=1e-5, rtol=1e-5)
    assert probs.shape == (0,) and probs.dtype == q.dtype


def test_qkvpacked_gradient(device):
    qkv = torch.randn(2, 13, 3, 4, 32, device=device, requires_grad=True)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    (grad,) = torch.autograd.grad(out.square().sum(), qkv)
    exact_qkv = qkv.detach().double().requires_grad_()
    exact, _ = reference.attention(*exact_qkv.unbind(2), causal=True)
    (exact_grad,) = torch.autograd.grad(exact.square().sum(), exact_qkv)
    torch.testing.assert_close(grad.double(), exact_grad, atol=1e-4, rtol=1e-4)


def test_varlen_and_padding(device):
    batch, seq = 3, 20
    lengths = torch.tensor([20, 7, 13], device=device)
    mask = torch.arange(seq, device=device) < lengths[:, None]
    qkv = torch.randn(batch, seq, 3, 4, 32, device=device)
    packed, indices, cu_seqlens, longest, seqused = unpad_input(qkv, mask)
    assert packed.shape == (40, 3, 4, 32)
    assert cu_seqlens.tolist() == [0, 20, 27, 40]
    assert longest == 20
    assert seqused.tolist() == lengths.tolist()
    out = flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, causal=True)
    padded = pad_input(out, indices, batch, seq)
    for b, length in enumerate(lengths.tolist()):
        alone = flash_attn.flash_attn_qkvpacked_func(qkv[b : b + 1, :length], causal=True)
        torch.testing.assert_close(padded[b : b + 1, :length], alone, atol=1e-6, rtol=1e-5)
        assert padded[b, length:].abs().sum() == 0
    q, k, v = packed.unbind(1)
    kv = packed[:, 1:]
    same = flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    assert torch.equal(same, out)
    same = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    assert torch.equal(same, out)
    _, lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, return_attn_probs=True)
    assert lse.shape == (4, 40)


def test_paged_keys(device):
    page = 16
    lengths = [20, 37]
    k, v = (torch.randn(6, page, 2, 32, device=device) for _ in range(2))
    table = torch.tensor([[4, 1, 0], [3, 5, 2]], dtype=torch.int32, device=device)
    q = torch.randn(9, 4, 32, device=device)
    cu_q = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 20, 57], dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 37, causal=True, block_table=table)
    rows = [0]
    for b, length in enumerate(lengths):
        whole_k, whole_v = (pages[table[b].long()].flatten(0, 1)[:length] for pages in (k, v))
        part = q[cu_q[b] : cu_q[b + 1]]
        alone = flash_attn.flash_attn_func(part[None], whole_k[None], whole_v[None], causal=True)[0]
        torch.testing.assert_close(out[cu_q[b] : cu_q[b + 1]], alone, atol=1e-6, rtol=1e-5)
        rows.append(length)


def test_probabilities_carry_the_dropout_mask(device):
    q, k, v = (torch.randn(2, 24, 2, 16, device=device) for _ in range(3))
    torch.manual_seed(11)
    out, _, probs = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4, causal=True, return_attn_probs=True)
    weights = probs / probs.abs().sum(-1, keepdim=True)
    kept = weights.clamp(min=0) / 0.6
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(probs.abs().amax(-1), torch.ones(2, 2, 24, device=device))
    starts = torch.tensor([0, 24, 48], dtype=torch.int32, device=device)
    torch.manual_seed(11)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    _, _, packed = flash_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, 24, 24, dropout_p=0.4, causal=True, return_attn_probs=True
    )
    torch.testing.assert_close(packed, probs)


def test_dropout_mask_is_the_published_function():
    mask = dropout_mask((2, 3, 17, 40), 0.3, seed=2**40 + 17, offset=2**33 + 5)
    for b in range(2):
        assert (mask[b] == reference.keeps(2**40 + 17, 2**33 + 5, 0.3, b, 3, 17, 40)).all()


def test_flash_attention_3_keywords(device):
    q = torch.randn(1, 8, 2, 16, device=device)
    assert torch.equal(
        flash_attn.flash_attn_func(q, q, q, num_splits=4, pack_gqa=True), flash_attn.flash_attn_func(q, q, q)
    )
    whole = flash_attn.flash_attn_func(q, q, q, causal=True)
    chunked = flash_attn.flash_attn_func(q, q, q, causal=True, attention_chunk=4)
    torch.testing.assert_close(chunked[:, :4], whole[:, :4])
    torch.testing.assert_close(chunked[:, 4:], flash_attn.flash_attn_func(*[q[:, 4:]] * 3, causal=True))
    with pytest.raises(TypeError, match="colour"):
        flash_attn.flash_attn_func(q, q, q, colour=3)
    sink = torch.randn(2, device=device)
    with_sink = flash_attn.flash_attn_func(q, q, q, learnable_sink=sink)
    assert torch.equal(with_sink, flash_attn.flash_attn_func(q, q, q, s_aux=sink))
    assert not torch.equal(with_sink, flash_attn.flash_attn_func(q, q, q))


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_cache_grows_and_is_attended_to(paged, rotary, causal, device):
    batch, page, dim = 2, 16, 32
    held = torch.tensor([5, 21], dtype=torch.int32, device=device)
    q = torch.randn(batch, 3, 4, dim, device=device)
    k_new, v_new = (torch.randn(batch, 3, 2, dim, device=device) for _ in range(2))
    k_rows, v_rows = (torch.randn(batch, 48, 2, dim, device=device) for _ in range(2))
    angles = torch.rand(48, dim // 4, device=device) * 6
    options = {"causal": causal, "cache_seqlens": held}
    if rotary is not None:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary}
    k_cache, v_cache = k_rows.clone(), v_rows.clone()
    if paged:
        order = torch.tensor([[4, 0, 3], [1, 5, 2]], device=device)
        pages = [torch.empty(6, page, 2, dim, device=device) for _ in range(2)]
        for store, rows in zip(pages, (k_rows, v_rows), strict=True):
            store[order] = rows.unflatten(1, (3, page))
        k_cache, v_cache = pages
        options["block_table"] = order.int()
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k_new, v_new, return_softmax_lse=True, **options)
    for b in range(batch):
        start = int(held[b])
        rotated = (lambda x, at: x) if rotary is None else (lambda x, at: rotate(x, angles[at], rotary))
        keys = torch.cat([k_rows[b, :start], rotated(k_new[b], start + torch.arange(3, device=device))])
        values = torch.cat([v_rows[b, :start], v_new[b]])
        at = start + torch.arange(3, device=device) * int(causal)
        exact, exact_lse = reference.attention(rotated(q[b], at)[None], keys[None], values[None], causal=causal)
        torch.testing.assert_close(out[b : b + 1], exact, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse[b : b + 1], exact_lse, atol=1e-5, rtol=1e-4)
        if not paged:
            torch.testing.assert_close(k_cache[b, start : start + 3], keys[start:])
            torch.testing.assert_close(v_cache[b, : start + 3], values)


def rotate(x, angles, interleaved):
    """Complex multiplication of the pairs of the first dimensions of x [seq, heads, dim] by exp(i angle)."""
    if not len(x):
        return x
    width = 2 * angles.shape[-1]
    head, rest = x[..., :width], x[..., width:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles)[:, None])
    rotated = rotated.flatten(-2) if interleaved else rotated.transpose(-1, -2).flatten(-2)
    return torch.cat([rotated, rest], dim=-1)


def test_cache_rows_and_left_padding(device):
    cache = torch.randn(4, 32, 2, 16, device=device)
    q = torch.randn(2, 1, 4, 16, device=device)
    rows = torch.tensor([3, 1], device=device)
    pad = torch.tensor([2, 7], dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 9], dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=pad, causal=True
    )
    for b in range(2):
        keys = cache[rows[b], pad[b] : lengths[b]][None]
        torch.testing.assert_close(out[b : b + 1], reference.attention(q[b : b + 1], keys, keys)[0], atol=1e-5, rtol=1e-4)


def paged(batch=2, pages=6, page=16, table=3):
    """A cache of pages, and a table of which the second sequence uses two entries."""
    cache = torch.randn(pages, page, 2, 16)
    block_table = torch.tensor([[4, 0, 3], [1, 5, 2]], dtype=torch.int32)[:batch, :table]
    return torch.randn(batch, 1, 2, 16), cache, block_table, torch.tensor([40, 20], dtype=torch.int32)[:batch]


@pytest.mark.parametrize("wrong", [6, -1, 2**31 - 1])
def test_pages_that_do_not_exist_are_refused(wrong):
    q, cache, table, lengths = paged()
    table[1, 1] = wrong
    with pytest.raises(RuntimeError, match=rf"block_table: entry \[1, 1\] is {wrong}"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table)
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=lengths, block_table=table)
    starts = torch.tensor([0, 40, 60], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn.flash_attn_varlen_func(
            q[:, 0], cache, cache, torch.arange(3, dtype=torch.int32), starts, 1, 40, block_table=table
        )


def test_entries_behind_the_last_page_may_be_anything(device):
    q, cache, table, lengths = (tensor.to(device) for tensor in paged())
    call = {"cache_seqlens": lengths, "causal": True}
    expected = flash_attn.flash_attn_with_kvcache(q, cache, cache, block_table=table, **call)
    for garbage in (-1, 6, 2**31 - 1):
        table[1, 2] = garbage
        assert torch.equal(flash_attn.flash_attn_with_kvcache(q, cache, cache, block_table=table, **call), expected)
    call["cache_seqlens"] = torch.tensor([40, 32], dtype=torch.int32, device=device)  # whole pages
    out = flash_attn.flash_attn_with_kvcache(q, cache, cache, block_table=table, cache_leftpad=0 * lengths, **call)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, cache, cache, block_table=table, **call), out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_table_on_a_gpu_never_harms_the_process():
    q, cache, table, lengths = (tensor.cuda() for tensor in paged())
    table[1, 1] = 2**31 - 1
    caches = cache, cache.clone()
    flash_attn.flash_attn_with_kvcache(q, *caches, q, q, cache_seqlens=lengths, block_table=table)
    flash_attn.flash_attn_with_kvcache(q, *caches, q, q, cache_seqlens=lengths + 30, block_table=table)  # cut off
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="block_table"):  # the first call of a table looks at the lengths
        flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths + 30, block_table=table.clone())
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn.flash_attn_with_kvcache(q, *caches, q, q, cache_seqlens=48, block_table=table)


def test_cache_without_room_is_refused():
    cache = torch.zeros(1, 16, 2, 16)
    new = torch.zeros(1, 1, 2, 16)
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(new, cache, cache, new, new, cache_seqlens=16)
    with pytest.raises(RuntimeError, match="block_table"):  # as flash-attn has it
        flash_attn.flash_attn_with_kvcache(new, cache, cache, cache_seqlens=17)


def test_the_extension_by_its_functions():
    """FlashAttention-2's extension module: the same bits as the functions above it, and no generator."""
    from flash_attention.flash_attn.flash_attn_interface import flash_attn_gpu as raw

    torch.manual_seed(6)
    q, k, v, grad = (torch.randn(2, 9, 2, 16) for _ in range(4))
    scalars = (0.0, 0.25, True, -1, -1, 0.0)
    out, lse, _, rng_state = raw.fwd(q, k, v, None, None, *scalars, False, None)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    want = flash_attn.flash_attn_func(*leaves, softmax_scale=0.25, causal=True)
    assert torch.equal(out, want)
    gradients = raw.bwd(grad, q, k, v, out, lse, None, None, None, None, *scalars, False, None, rng_state)
    for got, one in zip(gradients, torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(got, one)
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    place = torch.empty_like(flat[0])
    packed = raw.varlen_fwd(*flat, place, starts, starts, None, None, None, None, 9, 9, 0.0, 0.25, False, True, -1, -1, 0.0,
                            False, None)  # fmt: skip
    assert packed[0] is place and torch.allclose(place.view_as(out), out, atol=1e-6)
    gradients_packed = raw.varlen_bwd(
        grad.flatten(0, 1), *flat, place, packed[1], None, None, None, starts, starts, None, 9, 9, 0.0, 0.25, False, True,
        -1, -1, 0.0, False, None, packed[3],
    )  # fmt: skip
    for got, one in zip(gradients_packed, gradients, strict=True):
        torch.testing.assert_close(got.view_as(one), one)
    with pytest.raises(RuntimeError, match="generator` argument is no longer supported"):
        raw.fwd(q, k, v, None, None, *scalars, False, torch.empty(1))
