"""merge_states() against attention over all keys at once, in float64."""

import itertools

import pytest
import reference
import torch
from flash_attention import attention, merge_states


def parts_of(q, k, v, cuts, attend):
    edges = [0, *cuts, k.shape[1]]
    return [attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("cuts", [(), (5,), (0, 3, 3, 17)])
def test_equals_one_call_with_gradients(cuts):
    q, k, v = (torch.randn(2, 19, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dout, dlse = torch.randn(2, 19, 3, 8, dtype=torch.float64), torch.randn(2, 3, 19, dtype=torch.float64)
    expected = reference.attention(q, k, v)
    found = merge_states(*zip(*parts_of(q, k, v, cuts, reference.attention), strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    losses = [(out * dout).sum() + (lse * dlse).sum() for out, lse in (found, expected)]
    for one, other in zip(*(torch.autograd.grad(loss, (q, k, v)) for loss in losses), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_without_keys_and_what_empty_parts_hold():
    out = torch.randn(3, 1, 4, 2, 8)
    lse = torch.randn(3, 1, 2, 4)
    lse[1] = -torch.inf
    lse[:, 0, 1, 2] = -torch.inf
    out[1] = torch.nan
    out.requires_grad_()
    lse.requires_grad_()
    merged, total = merge_states(out, lse)
    assert torch.equal(merged[0, 2, 1], torch.zeros(8)) and total[0, 1, 2] == -torch.inf
    keep = torch.tensor([0, 2])
    plain, _ = merge_states(out.detach()[keep], lse.detach()[keep])
    assert torch.equal(merged, plain)
    (merged.sum() + total[0, 0].sum()).backward()
    assert out.grad.isfinite().all() and lse.grad.isfinite().all()


def test_half_precision_is_summed_in_float32():
    q, k, v = (torch.randn(1, 64, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    parts = parts_of(q, k, v, (16, 32, 48), lambda q, k, v: attention(q, k, v, return_lse=True))
    out, lse = merge_states(*zip(*parts, strict=True), dtype=torch.float32)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double())
    assert out.dtype == torch.float32
    assert (out - exact).abs().max() < 4e-3 and (lse - exact_lse).abs().max() < 1e-4


def test_packed_and_refusals():
    out, lse = torch.randn(2, 7, 2, 8), torch.randn(2, 2, 7)
    assert merge_states(out, lse)[0].shape == (7, 2, 8)
    with pytest.raises(ValueError, match=r"lse: got part 1 of shape \[7, 2\]; expected \[2, 7\]"):
        merge_states(list(out), [lse[0], lse[1].T])
    with pytest.raises(ValueError, match="got 2 and 1 parts"):
        merge_states(out, lse[:1])
    with pytest.raises(ValueError, match="out: got part 1"):
        merge_states([out[0], out[1, :5]], list(lse))
