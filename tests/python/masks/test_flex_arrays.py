"""Vectors in programs, derivatives that a function takes away: against the dense formula in float64, with its gradients."""

import pytest
import torch
from flash_attention import create_block_mask, flex_attention
from flex_formula import BATCH, HEADS, KEYS, ROWS, compare, dense, tensors

generator = torch.Generator().manual_seed(5)
top = torch.randint(0, 9, (BATCH, HEADS, 6, 3), generator=generator)
places = torch.randint(0, 20, (KEYS, 2), generator=generator)
spans = torch.tensor([[[3, 20], [40, 20]], [[5, 10], [60, 30]]])
starts = torch.tensor([0, 20, 50, 90, 140])
allowed = torch.tensor([0, 1, 3])


def inside_of_spans(b, h, i, j):
    shown = i >= j
    for begin, length in spans[b]:
        shown = shown | ((i >= begin) & (i < begin + length) & (j >= begin) & (j < begin + length))
    return shown


def near(b, h, i, j):
    (x, y), (u, w) = places[i], places[j].unbind(-1)
    return ((x - u).abs() < 6) & ((y - w).abs() < 6)


MASKS = {
    "chosen blocks": lambda b, h, i, j: (top[b, h, i // 16] == (j // 16).unsqueeze(-1)).any(dim=-1),
    "spans": inside_of_spans,
    "near": near,
    "is in": lambda b, h, i, j: torch.isin((i - j) % 7, allowed),
    "bucketize": lambda b, h, i, j: torch.bucketize(i, starts) == torch.bucketize(j, starts),
    "searchsorted": lambda b, h, i, j: (
        torch.searchsorted(starts, i, right=True) == torch.searchsorted(starts, j, right=True)
    ),
    "all": lambda b, h, i, j: torch.stack([i >= j, j > 3, i != 17]).all(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    compare(None, MASKS[name])


left, right = (
    torch.randn(ROWS, 4, generator=generator).requires_grad_(),
    torch.randn(KEYS, 4, generator=generator).requires_grad_(),
)
matrix = torch.randn(4, 4, generator=generator)
table = torch.randn(HEADS, 4, KEYS, generator=generator).requires_grad_()

SCORES = {
    "a sum": (
        lambda s, b, h, i, j: s + (left[i] * right[j]).sum(-1) - 0.1 * ((left[i] - right[j]) ** 2).mean(),
        [left, right],
    ),
    "mixed": (
        lambda s, b, h, i, j: s + 0.01 * (torch.stack([i, j * 0.37]) * torch.cat([j.view(1), left[i, :1]])).sum(),
        [left],
    ),
    "a sum of another type": (
        lambda s, b, h, i, j: (
            s
            + 0.01 * torch.stack([i * 0.6, j * 0.6]).sum(dtype=torch.int64)
            + 0.01 * torch.stack([i, j]).sum(dtype=torch.float32) / 3
        ),
        [],
    ),
    "narrow": (
        lambda s, b, h, i, j: (
            s
            + 0.01 * (j * 3 - 90).to(torch.int8)
            + 0.01 * (j - 20).to(torch.uint8)
            + 1e-4 * (j * 3000).short()
            + (j > i).byte()
        ),
        [],
    ),
    "products": (lambda s, b, h, i, j: s + left[i] @ right[j] + left[i] @ matrix @ right[j], [left, right]),
    "einsum": (lambda s, b, h, i, j: s + torch.einsum("d,d->", left[i], right[j]), [left, right]),
    "a distance": (lambda s, b, h, i, j: s - (left[i] - right[j] + 0.1).norm(), [left, right]),
    "slices": (lambda s, b, h, i, j: s + table[h, :, j].sum() * 0.1 + table[h, 1:3, j][0], [table]),
    "more slices": (lambda s, b, h, i, j: s + table[h, ...][2, j] + table[:, 3, :][h, j], [table]),
    "axes in the middle": (lambda s, b, h, i, j: s + table[h, ..., j].sum() * 0.1 + table[..., j][0, 2], [table]),
    "extremes": (
        lambda s, b, h, i, j: torch.stack([s, s * 2, s - 1]).amax() + torch.cat([s.view(1), left[i]]).amin(),
        [left],
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    score_mod, parameters = SCORES[name]
    compare(score_mod, None, parameters)


factor = torch.randn(HEADS, generator=generator).requires_grad_()


def under_no_grad(s, b, h, i, j):
    with torch.no_grad():
        gate = torch.sigmoid(s) * factor[h]
    return s * gate + factor[h]


DETACHED = {
    "the score": lambda s, b, h, i, j: s + (torch.round(s) - s).detach() + factor[h],
    "what is captured": lambda s, b, h, i, j: s * factor[h].detach() + factor[h] * 0.5,
    "no_grad": under_no_grad,
    "vectors": lambda s, b, h, i, j: s + (torch.stack([s, factor[h]]).detach() * torch.stack([factor[h], s])).sum(),
}


@pytest.mark.parametrize("name", DETACHED)
def test_what_has_no_derivative(name):
    compare(DETACHED[name], None, [factor])


def test_what_is_recorded_without_grad_serves_with_it():
    """The first call is inference; the second, of the same function, wants gradients."""
    q, k, v = tensors()
    with torch.no_grad():
        flex_attention(q, k, v, under_no_grad)
    compare(under_no_grad, None, [factor])


def test_few_values_are_needed_at_once():
    """A product of vectors is recorded term by term: the CPU keeps 160 values."""
    q, k, v = (tensor.detach() for tensor in tensors())
    wide = torch.randn(KEYS, 70, generator=generator)
    got = flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.1 * (wide[i] @ wide[j]))
    expected, _ = dense(q.double(), k.double(), v.double(), lambda s, b, h, i, j: s + 0.1 * (wide[i] @ wide[j]), None)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


def test_what_a_mask_reads_has_no_gradient():
    """Learned numbers that are compared: no gradient, as torch has it, and not what memory held before."""
    q, k, v = tensors()
    learned, both = torch.randn(KEYS, requires_grad=True), torch.randn(HEADS, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: (learned[i] > learned[j]) | (both[h] > 0), None, None, ROWS, KEYS)
    found = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask).sum(), [q, learned, both], allow_unused=True)
    assert found[0] is not None and found[1] is None and found[2] is None
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + both[h], mask)
    of_mask, of_both = torch.autograd.grad(out.sum(), [learned, both])
    assert torch.equal(of_mask, torch.zeros(KEYS)) and of_both.isfinite().all()
