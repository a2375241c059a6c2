"""return_max_logit, return_key_mass and return_entropy: compared with the formula in float64, gradients included."""

import flash_attention
import numpy
import pytest
import torch
from flash_attention import attention, attention_packed

ALL = {"return_max_logit": True, "return_key_mass": True, "return_entropy": True}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(q, k, v, visible=None, sink=None, scale=None):
    """out, lse, largest score, key mass and entropy of [seq, heads, head_dim] in double precision; visible [i, j]."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    logits = scores if sink is None else torch.cat([scores, sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
    lse = logits.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1).log(), 0).sum(-1)
    return torch.einsum("hij,jhd->ihd", p, v), lse, scores.amax((-1, -2)), p.sum(-2), entropy


def gradients(results, leaves, seed=9):
    """Of all results but the largest score, each with weights of its own."""
    total = 0
    for n, result in enumerate(results):
        if n != 2:
            total = total + (result * drawn(*result.shape, seed=seed + n)).sum()
    return torch.autograd.grad(total, leaves)


def check(got, want, tolerance=2e-5):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def batched(results):
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(causal):
    q, k, v, sink = drawn(2, 37, 4, 16), drawn(2, 53, 2, 16, seed=1), drawn(2, 53, 2, 8, seed=2), drawn(4, seed=3)
    visible = torch.ones(37, 53, dtype=torch.bool).tril(53 - 37) if causal else None
    ours = [tensor.clone().requires_grad_() for tensor in (q, k, v, sink)]
    theirs = [tensor.clone().requires_grad_() for tensor in (q, k, v, sink)]
    got = attention(*ours[:3], sink=ours[3], causal=causal, return_lse=True, **ALL)
    want = batched(formula(*parts, visible, theirs[3]) for parts in zip(*theirs[:3], strict=True))
    check(got, want)
    assert [tensor.requires_grad for tensor in got] == [True, True, False, True, True]
    check(gradients(got, ours), gradients(want, theirs), 1e-4)


def test_packed():
    starts = torch.tensor([0, 5, 5, 31], dtype=torch.int32)
    q, k, v = drawn(34, 4, 16), drawn(34, 2, 16, seed=1), drawn(34, 2, 16, seed=2)  # 3 rows are of no sequence
    out, lse, largest, mass, entropy = attention_packed(q, k, v, starts, causal=True, return_lse=True, **ALL)
    assert (largest.shape, mass.shape, entropy.shape) == ((3, 4), (4, 34), (4, 34))
    for b, (first, last) in enumerate([(0, 5), (5, 5), (5, 31)]):
        if first == last:
            assert (largest[b] == -torch.inf).all()
            continue
        rows = slice(first, last)
        want = formula(q[rows], k[rows], v[rows], torch.ones(last - first, last - first, dtype=torch.bool).tril())
        check((out[rows], lse[:, rows], largest[b], mass[:, rows], entropy[:, rows]), want)
    assert (mass[:, 31:] == 0).all() and (entropy[:, 31:] == 0).all()


def test_order_and_parts():
    q = k = v = drawn(1, 9, 2, 8)
    out, largest, mass, entropy = attention(q, k, v, **ALL)
    assert (largest.shape, mass.shape, entropy.shape) == ((1, 2), (1, 2, 9), (1, 2, 9))
    for name, whole in zip(ALL, (largest, mass, entropy), strict=True):
        for with_lse in (False, True):
            *first, values = attention(q, k, v, **{name: True}, return_lse=with_lse)
            assert len(first) == 1 + with_lse and torch.equal(first[0], out) and torch.equal(values, whole)


def test_heads_first():
    q, k, v = drawn(2, 3, 11, 8), drawn(2, 3, 7, 8, seed=1), drawn(2, 3, 7, 8, seed=2)
    got = attention(q, k, v, layout="bhsd", **ALL)
    want = attention(*(tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)), **ALL)
    for one, other in zip(got[1:], want[1:], strict=True):
        assert torch.equal(one, other)


def test_dropout_changes_none_of_them():
    q, k, v = drawn(1, 33, 2, 16), drawn(1, 41, 2, 16, seed=1), drawn(1, 41, 2, 16, seed=2)
    for one, other in zip(attention(q, k, v, dropout_p=0.5, seed=1, **ALL)[1:], attention(q, k, v, **ALL)[1:], strict=True):
        assert torch.equal(one, other)


def test_without_keys():
    q, k = drawn(1, 3, 2, 8), drawn(1, 0, 2, 8)
    _, largest, mass, entropy = attention(q, k, k, **ALL)
    assert (largest == -torch.inf).all() and mass.shape == (1, 2, 0) and (entropy == 0).all()


def test_a_gradient_through_one_alone():
    q, k, v = drawn(1, 5, 2, 8), drawn(1, 6, 2, 8, seed=1), drawn(1, 6, 2, 8, seed=2)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    _, mass = attention(q, k, v, return_key_mass=True)
    # A row's probabilities sum to 1: the sum of all masses is a constant.
    for gradient in torch.autograd.grad(mass.sum(), (q, k, v)):
        assert gradient.abs().max() < 1e-6
    _, largest, entropy = attention(q, k, v, return_max_logit=True, return_entropy=True)
    assert torch.autograd.grad(entropy.sum(), q)[0].abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(largest.sum(), q)


def test_compiled():
    q, k, v = drawn(1, 19, 2, 16), drawn(1, 23, 2, 16, seed=1), drawn(1, 23, 2, 16, seed=2)

    def step(q, k, v):
        out, largest, mass, entropy = attention(q, k, v, causal=True, **ALL)
        return out.sum() + entropy.sum() + mass.square().sum(), largest

    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    others = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    total, largest = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    expected, known = step(*others)
    torch.testing.assert_close(total, expected)
    assert torch.equal(largest, known)
    check(torch.autograd.grad(total, leaves), torch.autograd.grad(expected, others))


def test_numpy():
    q, k, v = (tensor.numpy() for tensor in (drawn(1, 9, 2, 8), drawn(1, 7, 2, 8, seed=1), drawn(1, 7, 2, 8, seed=2)))
    got = attention(q, k, v, return_lse=True, **ALL)
    want = attention(*(torch.from_numpy(array) for array in (q, k, v)), return_lse=True, **ALL)
    for one, other in zip(got, want, strict=True):
        numpy.testing.assert_array_equal(one, other.numpy())


def test_what_is_not_computed_is_refused():
    q = k = v = drawn(1, 9, 2, 8)
    with pytest.raises(NotImplementedError, match=r"return_entropy: .*score_mod"):
        attention(q, k, v, return_entropy=True, score_mod=lambda score, b, h, i, j: score * 2)
    with pytest.raises(NotImplementedError, match=r"return_key_mass: .*standard"):
        attention(q, k, v, return_key_mass=True, kernel="standard")
    with pytest.raises(NotImplementedError, match=r"return_max_logit.*torch.func"):
        torch.func.grad(lambda q: attention(q, k, v, return_max_logit=True)[0].sum())(q)
    x = drawn(1, 9, 2, 8).requires_grad_()
    entropy = attention(x, k, v, return_entropy=True)[1]
    (gradient,) = torch.autograd.grad(entropy.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(gradient.sum(), x)
    with pytest.raises(TypeError, match="return_entropy: expected a bool"):
        attention(q, k, v, return_entropy="yes")
    with pytest.raises(TypeError):
        flash_attention.attention_over_cache(q, k, v, return_entropy=True)
