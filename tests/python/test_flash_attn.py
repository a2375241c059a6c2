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
    assert probs is None


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
    kept = probs.clamp(min=0) / 0.6
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(probs.abs().sum(-1), torch.ones(2, 2, 24, device=device), atol=1e-5, rtol=1e-5)


def test_dropout_mask_is_the_published_function():
    mask = dropout_mask((2, 3, 17, 40), 0.3, seed=2**40 + 17, offset=2**33 + 5)
    for b in range(2):
        assert (mask[b] == reference.keeps(2**40 + 17, 2**33 + 5, 0.3, b, 3, 17, 40)).all()


def test_flash_attention_3_keywords(device):
    q = torch.randn(1, 8, 2, 16, device=device)
    assert torch.equal(
        flash_attn.flash_attn_func(q, q, q, num_splits=4, pack_gqa=True), flash_attn.flash_attn_func(q, q, q)
    )
    with pytest.raises(NotImplementedError, match="attention_chunk"):
        flash_attn.flash_attn_func(q, q, q, attention_chunk=128)
    with pytest.raises(TypeError, match="colour"):
        flash_attn.flash_attn_func(q, q, q, colour=3)
    sink = torch.randn(2, device=device)
    with_sink = flash_attn.flash_attn_func(q, q, q, learnable_sink=sink)
    assert torch.equal(with_sink, flash_attn.flash_attn_func(q, q, q, s_aux=sink))
    assert not torch.equal(with_sink, flash_attn.flash_attn_func(q, q, q))
