"""The yardstick itself: a backward pass in tiles that rounds only its output is within it, one with a mistake is not."""

import pytest
import reference
import torch
from comparison import assert_close, exact_and_plain

FAULTS = {
    "delta left out": {"delta_factor": 0.0},
    "delta without the last eighth of head_dim": {"short": True},
    "dq 16 steps of the dtype too large": {"steps": 16},
    "scale forgotten": {"scale_factor": 80**0.5},
}


def in_tiles(q, k, v, dout, dtype, delta_factor=1.0, scale_factor=1.0, steps=0, short=False):
    """[out, lse, dq, dk, dv] by the flash formulas in float64, out and the gradients rounded to dtype."""
    q, k, v, dout = (tensor.double() for tensor in (q, k, v, dout))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    out = torch.einsum("bhij,bjhd->bihd", probs, v).to(dtype)
    width = q.shape[-1] * 7 // 8 if short else None
    delta = delta_factor * (dout * out)[..., :width].sum(-1).transpose(1, 2)[..., None]
    ds = probs * (torch.einsum("bihd,bjhd->bhij", dout, v) - delta) * scale_factor / q.shape[-1] ** 0.5
    dq = (1 + steps * torch.finfo(dtype).eps) * torch.einsum("bhij,bjhd->bihd", ds, k)
    dk = torch.einsum("bhij,bihd->bjhd", ds, q)
    dv = torch.einsum("bhij,bihd->bjhd", probs, dout)
    return [out, lse, *(gradient.to(dtype) for gradient in (dq, dk, dv))]


def check(dtype, seq_kv, fault=()):
    q, k, v = (torch.randn(2, seq, 2, 80).to(dtype) for seq in (60, seq_kv, seq_kv))
    dout = torch.randn_like(q)
    actual = in_tiles(q, k, v, dout, dtype, **dict(fault))
    expected = exact_and_plain(reference.attention, (q, k, v), dout)
    for name, *three in zip(("out", "lse", "dq", "dk", "dv"), actual, *expected, strict=True):
        assert_close(*three, what=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq_kv", [1, 2, 40])
def test_rounding_of_the_output_is_allowed(seq_kv, dtype):
    check(dtype, seq_kv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_found(fault, dtype):
    with pytest.raises(AssertionError, match=r"d[qk]: error"):
        check(dtype, 1 if "delta" in fault else 40, FAULTS[fault])
