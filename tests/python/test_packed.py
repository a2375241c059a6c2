"""attention_packed() against the reference, sequence by sequence."""

import flash_attention
import pytest
import reference
import torch
from comparison import assert_close, exact_and_plain, gradients

LENGTHS_Q = [5, 0, 33, 1, 20]
LENGTHS_KV = [9, 4, 33, 0, 61]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (6, 2)},
    "softcap": {"softcap": 3.0, "scale": 0.5},
    "dropout": {"dropout_p": 0.25, "seed": 99, "causal": True},
}


def starts(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bound", [0, 1000, None], ids=["max_seqlen", "beyond_total", "unknown"])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name, bound, dtype, device):
    options = OPTIONS[name]
    cu_q, cu_kv = starts(LENGTHS_Q, device), starts(LENGTHS_KV, device)
    q = torch.randn(sum(LENGTHS_Q), 4, 32, device=device).to(dtype)
    k = torch.randn(sum(LENGTHS_KV), 2, 32, device=device).to(dtype)
    v = torch.randn(sum(LENGTHS_KV), 2, 24, device=device).to(dtype)
    bounds = {}
    if bound is not None:
        bounds = {"max_seqlen_q": max(LENGTHS_Q) + bound, "max_seqlen_kv": max(LENGTHS_KV) + bound}
    dout = torch.randn(sum(LENGTHS_Q), 4, 24, device=device, dtype=torch.float64)

    def plain(q, k, v):
        return reference.attention_packed(q, k, v, cu_q, cu_kv, **options)

    def ours(q, k, v):
        return flash_attention.attention_packed(q, k, v, cu_q, cu_kv, return_lse=True, **bounds, **options)

    names, actual = ("out", "lse", "dq", "dk", "dv"), gradients(ours, (q, k, v), dout)
    for what, *three in zip(names, actual, *exact_and_plain(plain, (q, k, v), dout), strict=True):
        assert_close(*three, f"{name} {what}")


def test_same_lengths_for_keys_by_default(device):
    cu = starts([3, 8], device)
    q = torch.randn(11, 2, 16, device=device)
    a = flash_attention.attention_packed(q, q, q, cu, causal=True)
    b = flash_attention.attention_packed(q, q, q, cu, cu, causal=True)
    assert torch.equal(a, b)


def test_bias_up_to_a_bound(device):
    """A bias as large as the bounds, which are beyond the tensors; its gradient has its shape."""
    lengths = [5, 11]
    cu = starts(lengths, device)
    q, k, v = (torch.randn(16, 2, 16, device=device) for _ in range(3))
    bias = torch.randn(2, 2, 20, 20, device=device, requires_grad=True)
    out = flash_attention.attention_packed(q, k, v, cu, max_seqlen_q=20, max_seqlen_kv=20, bias=bias)
    dout = torch.randn_like(out)
    (ours,) = torch.autograd.grad(out, bias, dout)
    expected = torch.zeros_like(bias)
    for b, length in enumerate(lengths):
        part = slice(sum(lengths[:b]), sum(lengths[: b + 1]))
        one = bias[b : b + 1, :, :length, :length].detach().requires_grad_()
        exact, _ = reference.attention(*(tensor[None, part] for tensor in (q, k, v)), bias=one)
        torch.testing.assert_close(out[part], exact[0], atol=1e-5, rtol=1e-4)
        expected[b, :, :length, :length] = torch.autograd.grad(exact[0], one, dout[part])[0][0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


BOUNDS = {"both": (7, 12), "queries": (7, None), "keys": (None, 12), "none": (None, None)}


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("shape", ["whole", "one_key", "one_query", "scalar_row"])
@pytest.mark.parametrize("name", BOUNDS)
def test_width_of_scores_follows_the_bounds(name, shape, library):
    """The last axes of a bias have the sizes max_seqlen_q and max_seqlen_kv; a bound that is not given is the total."""
    lengths_q, lengths_kv = [3, 7], [12, 2]
    cu_q, cu_kv = starts(lengths_q, "cpu"), starts(lengths_kv, "cpu")
    q, k, v = (torch.randn(total, 2, 16) for total in (10, 14, 14))
    max_q, max_kv = BOUNDS[name]
    rows, keys = max_q or 10, max_kv or 14
    sizes = {"whole": (rows, keys), "one_key": (rows, 1), "one_query": (1, keys), "scalar_row": (1, 1)}[shape]
    bias = torch.randn(2, 2, *sizes)
    full = bias.expand(2, 2, rows, keys)
    exact, _ = reference.attention_packed(q.double(), k.double(), v.double(), cu_q, cu_kv, bias=full)
    call = dict(max_seqlen_q=max_q, max_seqlen_kv=max_kv)
    arguments = (q, k, v, cu_q, cu_kv, bias)
    if library == "numpy":
        arguments = tuple(tensor.numpy() for tensor in arguments)
    out = flash_attention.attention_packed(*arguments[:5], bias=arguments[5], **call)
    torch.testing.assert_close(torch.as_tensor(out), exact.float(), atol=1e-5, rtol=1e-4)
    if name == "both" and shape == "whole":
        with pytest.raises(ValueError, match=r"bias.*\[2, 2, 7, 12\]"):
            flash_attention.attention_packed(q, k, v, cu_q, cu_kv, bias=bias.mT.contiguous(), **call)


def test_one_bound_serves_both_where_the_keys_lie_as_the_queries():
    cu = starts([3, 7], "cpu")
    q = torch.randn(10, 2, 16)
    bias = torch.randn(2, 2, 8, 8)
    exact, _ = reference.attention_packed(*(q.double(),) * 3, cu, cu, bias=bias)
    out = flash_attention.attention_packed(q, q, q, cu, max_seqlen_q=8, bias=bias)
    torch.testing.assert_close(out, exact.float(), atol=1e-5, rtol=1e-4)
