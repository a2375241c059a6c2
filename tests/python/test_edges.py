"""Sizes of zero, seeds of 64 bits, and what a call without dropout leaves alone."""

import flash_attention
import numpy
import pytest
import reference
import torch
from flash_attention import attention, attention_packed, flash_attn

SIZES = {"queries": (2, 0, 5), "keys": (2, 3, 0), "batch": (0, 3, 5), "all": (0, 0, 0)}


@pytest.mark.parametrize("name", SIZES)
def test_sum_over_empty_tensors(name, device):
    batch, seq_q, seq_kv = SIZES[name]
    q, k, v = (torch.randn(batch, seq, 4, 16, device=device, requires_grad=True) for seq in (seq_q, seq_kv, seq_kv))
    for return_lse in (False, True):
        out = attention(q, k, v, return_lse=return_lse)
        out = out[0] if return_lse else out
        assert out.shape == q.shape and not out.any()
        for gradient, leaf in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
            assert gradient.shape == leaf.shape and not gradient.any()


def test_sum_over_empty_packed_tensors(device):
    q, k, v = (torch.randn(0, 4, 16, device=device, requires_grad=True) for _ in range(3))
    attention_packed(q, k, v, torch.zeros(3, dtype=torch.int32, device=device)).sum().backward()
    assert q.grad.shape == k.grad.shape == v.grad.shape == q.shape


@pytest.mark.parametrize("totals", [(0, 0), (0, 9), (9, 0)], ids=["both", "queries", "keys"])
def test_bias_of_empty_packed_tensors(totals, device):
    """The bias is as large as the bounds; where there is no score its gradient is 0."""
    q, k, v = (torch.randn(total, 2, 16, device=device, requires_grad=True) for total in (totals[0], totals[1], totals[1]))
    starts = [torch.tensor([0, min(4, total), total], dtype=torch.int32, device=device) for total in totals]
    bias = torch.randn(2, 2, 5, 7, device=device, requires_grad=True)
    out = attention_packed(q, k, v, *starts, max_seqlen_q=5, max_seqlen_kv=7, bias=bias)
    assert out.shape == q.shape and not out.any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v, bias)):
        assert not gradient.any()


def test_empty_numpy_arrays():
    q, k = numpy.zeros((2, 0, 4, 16), "float32"), numpy.zeros((2, 5, 4, 16), "float32")
    assert attention(q, k, k).shape == q.shape
    assert not attention(k, q, q).any()


@pytest.mark.parametrize("seed, offset", [(2**64 - 1, 0), (2**63, 2**64 - 1), (7, 2**63)])
def test_seeds_of_64_bits(seed, offset, device):
    """The mask is that of the published function, in both passes, also where torch holds the seed as a signed number."""
    q, k, v = (torch.randn(1, 24, 2, 16, device=device, requires_grad=True) for _ in range(3))
    options = {"dropout_p": 0.4, "seed": seed, "offset": offset}
    exact = reference.attention(q.double(), k.double(), v.double(), **options)[0]
    dout = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, (q, k, v), dout)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options), fullgraph=True, backend="aot_eager")
    for call in (lambda q, k, v: attention(q, k, v, **options), compiled):
        out = call(q, k, v)
        torch.testing.assert_close(out, exact.float(), atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(torch.autograd.grad(out, (q, k, v), dout.float()), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    keeps = flash_attention.dropout_mask((1, 2, 24, 24), 0.4, seed, offset)
    assert (keeps[0] == reference.keeps(seed, offset, 0.4, 0, 2, 24, 24)).all()


def _calls(q):
    cu = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device)
    layer = flash_attention.MultiheadAttention(16, 2, batch_first=True, device=q.device)
    return {
        "attention": lambda: attention(q, q, q),
        "with_lse": lambda: attention(q, q, q, return_lse=True),
        "with_mask": lambda: attention(q, q, q, mask=mask),
        "packed": lambda: attention_packed(q[0], q[0], q[0], cu),
        "sdpa": lambda: flash_attention.scaled_dot_product_attention(q, q, q, mask[: q.shape[2], : q.shape[2]]),
        "flash_attn": lambda: flash_attn.flash_attn_func(q, q, q, return_attn_probs=True),
        "varlen": lambda: flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, return_attn_probs=True),
        "vmap": lambda: torch.vmap(lambda q: attention(q, q, q))(q[None]),
        "layer": lambda: layer(q[..., 0, :], q[..., 0, :], q[..., 0, :], need_weights=False),
    }


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_no_seed_is_drawn_without_dropout(grad, device):
    q = torch.randn(1, 12, 2, 16, device=device, requires_grad=grad)
    calls = _calls(q)
    for name, call in calls.items():
        before = torch.get_rng_state()
        result = call()
        if grad:
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        assert torch.equal(torch.get_rng_state(), before), name
    before = torch.get_rng_state()
    attention(q, q, q, dropout_p=0.1)
    assert not torch.equal(torch.get_rng_state(), before)
