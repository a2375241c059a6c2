"""What functions of scores and indices may do: operations that torch has and programs do not, indices of every sign, and
shapes that torch's own tests and attention-gym's mods have. Against the dense formula in float64."""

import pytest
import torch
from flash_attention import flex_attention
from flex_formula import BATCH, DIM, HEADS, KEYS, ROWS, compare, dense
from torch.nn import functional

generator = torch.Generator().manual_seed(3)
by_head = torch.randn(HEADS, generator=generator)
signed = torch.randint(-9, 9, (KEYS,), generator=generator)
table = torch.randn(ROWS, KEYS, generator=generator)
deep = torch.randn(4, BATCH, HEADS, KEYS, generator=generator)
shown = torch.rand(BATCH, ROWS, KEYS, generator=generator) > 0.3
which = torch.tensor(2)
wide = torch.zeros(8, 129)
bytes_ = torch.randint(0, 255, (KEYS,), dtype=torch.uint8, generator=generator)
shorts = torch.randint(-9, 9, (KEYS,), dtype=torch.int16, generator=generator)
doubles = by_head.double()


def in_place(s, b, h, i, j):
    s += by_head[h] * 0.5
    s *= 2
    distance = i - j
    distance -= 3
    near = distance >= 0
    near &= j > 2
    near |= i == j
    return torch.where(near, s, s - 1).clamp(-3, 3)


SCORES = {
    "in place": in_place,
    "tan": lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(b),
    "sinh, cosh": lambda s, b, h, i, j: torch.sinh(s) - torch.cosh(s * 0.5),
    "fmod": lambda s, b, h, i, j: s + torch.fmod(i - j, 5) * 0.1 + torch.fmod(s, 0.75),
    "round": lambda s, b, h, i, j: s + torch.round((i - j) / 2) * 0.1 + torch.round(i) * 0.01,
    "softplus": lambda s, b, h, i, j: functional.softplus(s) + functional.softplus(s * 30, 2.0, 5.0) * 0.05,
    "logsigmoid": lambda s, b, h, i, j: functional.logsigmoid(s * 3),
    "gelu": lambda s, b, h, i, j: functional.gelu(s, approximate="tanh"),
    "gelu by erf": lambda s, b, h, i, j: functional.gelu(s * 2) + torch.erf(s) + torch.erfc(s * 3),
    "elu": lambda s, b, h, i, j: functional.elu(s) + functional.leaky_relu(s, 0.2),
    "shrunk": lambda s, b, h, i, j: (
        functional.mish(s)
        + functional.softsign(s)
        + functional.relu6(s)
        + functional.hardsigmoid(s)
        + functional.hardswish(s)
        + functional.selu(s)
        + functional.celu(s, 2.0)
        + functional.tanhshrink(s)
        + functional.softshrink(s)
        + functional.hardshrink(s)
        + functional.threshold(s, 0.1, 0.0)
    ),
    "logarithms": lambda s, b, h, i, j: (
        torch.expm1(s * 0.1)
        + torch.expm1(s)
        + torch.log10((i - j).abs() + 1.0)
        + torch.logaddexp(s, s * 0.5)
        + torch.special.xlogy(s.abs(), 2.0)
        + torch.logit(torch.sigmoid(s) * 0.9 + 0.05)
    ),
    "angles": lambda s, b, h, i, j: (
        torch.atan(s)
        + torch.atan(s * 9)
        + torch.atan2((i - j).float(), s)
        + torch.asin(torch.tanh(s) * 0.9)
        + torch.acos(torch.tanh(s) * 0.5)
        + torch.asinh(s)
        + torch.acosh(s * s + 1.5)
        + torch.atanh(torch.tanh(s) * 0.7)
        + torch.sinc(s)
    ),
    "of two": lambda s, b, h, i, j: (
        torch.hypot(s, (i - j) * 0.1)
        + torch.copysign(s, (i - j).float())
        + torch.fmax(s, s * 0)
        + torch.fmin(s, s * 2)
        + torch.addcmul(s, s, s, value=0.3)
        + torch.addcdiv(s, s, s.abs() + 1)
        + torch.frac(s)
    ),
    "powers": lambda s, b, h, i, j: s * (-1.0) ** h + 0.05 * (s + 9) ** -2 + (s * 0.5) ** 17 + (s.abs() + 0.1) ** 1.5,
    "powers of captured": lambda s, b, h, i, j: (
        (s.abs() + 0.2) ** by_head[h] + 2.0 ** (-(i - j).abs()) + (s + 0.3) ** (h + 1)
    ),
    "numbers on the device of a symbol": lambda s, b, h, i, j: (
        torch.maximum(s, torch.tensor(-0.5, device=s.device))
        + torch.zeros((), device=h.device, dtype=torch.int32)
        + torch.full((), 0.5, device=s.device) * torch.ones((), device=s.device)
        + s.new_tensor(0.25)
        + by_head.to(s.device)[h]
        + by_head.to(s)[h]
        + by_head.to(device=h.device, dtype=torch.float32)[h]
    ),
    "narrow and wide": lambda s, b, h, i, j: s + bytes_[i] * 0.1 + shorts[j] * 0.05 + doubles[h].to(s.dtype),
    "hardtanh": lambda s, b, h, i, j: functional.hardtanh(s) + 0.1 * s,
    "lerp": lambda s, b, h, i, j: torch.lerp(s, s * s, 0.3),
    "not a number": lambda s, b, h, i, j: torch.where(torch.isnan(s) | torch.isinf(s), 0.0, s * torch.isfinite(s)),
    "shifts": lambda s, b, h, i, j: s + ((i - j) >> 3) * 0.05 + (j << 1) * 0.01 + ((i ^ j) & 5) * 0.02,
    "quotients": lambda s, b, h, i, j: (
        s + ((i - j) // 5) * 0.1 + ((j - i) % 7) * 0.2 + ((i - j) % -6 + (i - j) // -4) * 0.05
    ),
    "captured ints": lambda s, b, h, i, j: s + (signed[i] // 4) * 0.3 + (signed[i] % signed[j].clamp(min=1)) * 0.2,
    "from the end": lambda s, b, h, i, j: s + table[-1 - i, j] + by_head[(j - i) // 7 % HEADS],
    "one after the other": lambda s, b, h, i, j: s + deep[0][b, h][i] + deep[which, b][h, j],
    "bools as numbers": lambda s, b, h, i, j: s * (i >= j) + shown[b, i, j] - (i == j).int(),
    "nested": lambda s, b, h, i, j: torch.where(
        i > j, torch.where((i + j) % 3 == 0, s * 2, s), torch.where(s > 0, s, s * 0.1)
    ),
    "zeros of a shape": lambda s, b, h, i, j: s + by_head[h.new_zeros(h.shape)],
}


def encoded(x, y):
    """The bits of two numbers of four bits in turn."""

    def spread(n):
        n = (n | (n << 2)) & 0x33
        return (n | (n << 1)) & 0x55

    return (spread(y) << 1) | spread(x)


def decoded(n):
    def gathered(n):
        n = n & 0x55
        n = (n | (n >> 1)) & 0x33
        return (n | (n >> 2)) & 0x0F

    return gathered(n), gathered(n >> 1)


def morton(b, h, i, j):
    """A neighbourhood of pixels that are numbered along a curve."""
    (x, y), (u, w) = decoded(i), decoded(j)
    return ((x - u).abs() <= 2) & ((y - w).abs() <= 3) & (encoded(x, y) == i)


MASKS = {
    "morton": morton,
    "remainders of negatives": lambda b, h, i, j: ((i - j) % 5 < 2) | ((i - j) % -5 < -3),
    "quotients of negatives": lambda b, h, i, j: ((i - j) // 16 == -1) | ((i - 50) // 10 == (j - 50) // 10),
    "where of where": lambda b, h, i, j: torch.where(i < 40, torch.where(j % 2 == 0, j < 30, j > 100), (h == 1) ^ (i >= j)),
    "empty rows": lambda b, h, i, j: (i % 5 != 0) & (j < 20),
    "by sequence": lambda b, h, i, j: shown[b, i, j],
    "powers of heads": lambda b, h, i, j: (i - j) % (2**h) == 0,
    "everything": lambda b, h, i, j: b.new_ones((), dtype=torch.bool),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    compare(SCORES[name], None)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads_kv", [1, 4])
def test_masks(name, heads_kv):
    compare(SCORES["nested"] if heads_kv == 1 else None, MASKS[name], heads_kv=heads_kv, dim_v=16)


def test_product_of_captured_vectors():
    """Of latent attention: the rotated part of queries and keys as a change of scores."""
    q_rope, k_rope = (torch.randn(BATCH, heads, KEYS, 64, generator=generator) for heads in (HEADS, 1))
    compare(lambda s, b, h, i, j: s + 0.3 * torch.dot(q_rope[b, h, i], k_rope[b, h // HEADS, j]), None, heads_kv=1)


def test_gradient_of_a_product_of_captured_vectors():
    keys = torch.randn(KEYS, 3, generator=generator)
    weight = torch.randn(HEADS, 3, generator=generator).requires_grad_()
    compare(lambda s, b, h, i, j: s + torch.dot(weight[h], keys[j]), None, [weight])


def test_keys_that_all_sequences_share():
    q, k, v = (torch.randn(batch, 2, 40, DIM, requires_grad=True) for batch in (3, 1, 1))
    change = lambda s, b, h, i, j: s * (b + 1)  # noqa: E731
    out = flex_attention(q, k, v, change)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected, _ = dense(exact[0], *(tensor.expand(3, -1, -1, -1) for tensor in exact[1:]), change, None)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for got, other in zip((out, *gradients), (expected, *wanted), strict=True):
        assert got.shape == other.shape
        assert (got.double() - other).abs().max() <= 3e-5 * max(1.0, other.abs().max().item())


@pytest.mark.parametrize(
    ("score_mod", "named"),
    [
        (lambda s, b, h, i, j: s + (i >> j), "allowed are ints from 0 to 30"),
        (lambda s, b, h, i, j: s + (i << 31), "allowed are ints from 0 to 30"),
        (lambda s, b, h, i, j: torch.stack([s, s]).norm(3.0), "allowed are 1 and 2"),
        (lambda s, b, h, i, j: torch.round(s, decimals=2), "whole numbers"),
        (lambda s, b, h, i, j: s + torch.dot(wide[i], wide[j]), "at most 128"),
    ],
)
def test_refusals(score_mod, named):
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match=named):
        flex_attention(q, q, q, score_mod)


def test_long_functions_have_gradients():
    """A derivative is computed beside its value: a CPU keeps 160 values at once, and this needed more."""
    weight = torch.randn(HEADS, generator=generator).requires_grad_()

    def score_mod(s, b, h, i, j):
        for _ in range(3):
            s = functional.gelu(s) + torch.atan(s * weight[h]) + functional.mish(s)
        return s

    compare(score_mod, None, [weight])
