"""Programs that are windows or options, and those that look like them: attention() against the dense formula in float64."""

import math

import pytest
import torch
from flash_attention import attention, attention_packed
from flex_formula import IndexByTensors

HEADS, DIM = 2, 16
generator = torch.Generator().manual_seed(4)
slopes = torch.tensor([0.25, 0.0625])
flags = torch.zeros(260, dtype=torch.bool)
flags[77] = True
all_but_one = ~flags


def inputs(seq_q, seq_kv, batch=2):
    return [torch.randn(batch, seq, HEADS, DIM, generator=generator).requires_grad_() for seq in (seq_q, seq_kv, seq_kv)]


def dense(q, k, v, score_mod=None, mask_mod=None, before=None, visible=None):
    """out [batch, seq, heads, dim]. before(scores): what comes before the program; visible: of other masks. Indices have 32
    bits, as in a program."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(DIM)
    scores = scores if before is None else before(scores)
    sizes = [torch.arange(size, dtype=torch.int32) for size in scores.shape]
    if score_mod is not None:
        over = torch.vmap(torch.vmap(torch.vmap(torch.vmap(score_mod, (0, None, None, None, 0)), (0, None, None, 0, None)),
                                     (0, None, 0, None, None)), (0, 0, None, None, None))  # fmt: skip
        with IndexByTensors():
            scores = over(scores, *sizes)
    seen = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible
    if mask_mod is not None:
        shape = [size.view([-1 if n == axis else 1 for n in range(4)]) for axis, size in enumerate(sizes)]
        seen = seen & mask_mod(*shape)
    scores = scores.masked_fill(~seen, -math.inf)
    some = (scores > -math.inf).any(-1, keepdim=True)
    weights = torch.softmax(torch.where(some, scores, 0.0), -1) * some
    return (weights @ v).transpose(1, 2)


def compare(seq_q, seq_kv, call, formula, queries=slice(None)):
    given = inputs(seq_q, seq_kv)
    exact = [x.detach().double().requires_grad_() for x in given]
    out, wanted = call(*given)[:, queries], formula(*exact)[:, queries]
    grad = torch.randn(wanted.shape, generator=generator)
    found = [out, *torch.autograd.grad((out * grad).sum(), given)]
    expected = [wanted, *torch.autograd.grad((wanted * grad).sum(), exact)]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 3e-5 * max(1.0, other.abs().max().item())


WINDOWS = {
    "a constant that goes round": lambda b, h, i, j: i + (2**31 - 1) >= j,
    "a constant that nothing reaches": lambda b, h, i, j: i - (2**31 - 1) <= j,
    "constants that go round together": lambda b, h, i, j: (i + 2**30) + 2**30 >= j,
    "a bound below the diagonal": lambda b, h, i, j: i - 3 >= j,
    "a distance": lambda b, h, i, j: (i - j).abs() <= 5,
    "two bounds": lambda b, h, i, j: (i - j <= 9) & (j - i < 4),
    "no bound of a difference": lambda b, h, i, j: (i + j <= 9) | (j == 0),
    "one flag": lambda b, h, i, j: flags[j] | (i == j),
    "one flag alone": lambda b, h, i, j: flags[j],
    "all flags but one": lambda b, h, i, j: all_but_one[j] & (i >= j),
    "flags of rows": lambda b, h, i, j: flags[i] | (j < 3),
}


@pytest.mark.parametrize("sizes", [(40, 40), (25, 40), (140, 250)])
@pytest.mark.parametrize("name", WINDOWS)
def test_masks(name, sizes):
    mask = WINDOWS[name]
    compare(*sizes, lambda q, k, v: attention(q, k, v, mask_mod=mask), lambda q, k, v: dense(q, k, v, mask_mod=mask))


def visible(seq_q, seq_kv, mask):
    return mask(torch.arange(seq_q)[:, None] + seq_kv - seq_q, torch.arange(seq_kv)[None])


def test_a_mask_beside_a_window_of_the_other_diagonal():
    """The window is bottom-right, the program counts from the first query."""
    mask = lambda b, h, i, j: i + 12 >= j  # noqa: E731
    shown = visible(25, 40, lambda i, j: (i - j <= 9) & (j - i <= 3))
    compare(
        25, 40,
        lambda q, k, v: attention(q, k, v, mask_mod=mask, window=(9, 3)),
        lambda q, k, v: dense(q, k, v, mask_mod=mask, visible=shown),
    )  # fmt: skip


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_a_causal_mask_of_packed_sequences(alignment):
    """Lengths of queries and keys differ, their largest do not: the program's diagonal is the first query's."""
    starts_q, starts_kv = [0, 12, 30], [0, 18, 36]
    q = torch.randn(30, HEADS, DIM, generator=generator)
    k, v = (torch.randn(36, HEADS, DIM, generator=generator) for _ in range(2))
    packed = [torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_kv)]
    out = attention_packed(q, k, v, *packed, mask_mod=lambda b, h, i, j: i >= j, alignment=alignment)
    for n in range(2):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_kv[n : n + 2])
        wanted = dense(*(x[None].double() for x in (q[rows], k[keys], v[keys])), mask_mod=lambda b, h, i, j: i >= j)
        assert (out[rows] - wanted[0]).abs().max() <= 3e-5


def alibi(offset, distance):
    return lambda s, b, h, i, j: s - slopes[h] * distance((i + offset - j).float())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("distance", [torch.abs, lambda d: d], ids=["absolute", "signed"])
@pytest.mark.parametrize("offset", [0, 15])
def test_alibi(causal, distance, offset):
    """A signed distance is ALiBi's under a causal mask of as many queries as keys alone."""
    for seq_q, seq_kv in ((40, 40), (25, 40)):
        shown = visible(seq_q, seq_kv, lambda i, j: i >= j) if causal else None
        compare(
            seq_q, seq_kv,
            lambda q, k, v: attention(q, k, v, score_mod=alibi(offset, distance), causal=causal),
            lambda q, k, v, shown=shown: dense(q, k, v, alibi(offset, distance), visible=shown),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv"])
def test_alibi_beside_lengths(name):
    """The option's distance follows the used lengths, the program's does not."""
    lengths = torch.tensor([30, 30], dtype=torch.int32)
    rows = slice(0, 30) if name == "seqused_q" else slice(None)
    shown = torch.arange(40)[None] < (30 if name == "seqused_kv" else 40)
    compare(
        40, 40,
        lambda q, k, v: attention(q, k, v, score_mod=alibi(0, torch.abs), **{name: lengths}),
        lambda q, k, v: dense(q, k, v, alibi(0, torch.abs), visible=shown),
        rows,
    )  # fmt: skip


def capped(s, b, h, i, j):
    return 1.5 * torch.tanh(s / 1.5)


def test_a_soft_cap_behind_other_options():
    """A soft cap after a bias, after ALiBi and after another soft cap; the option would be applied before all of them."""
    bias = torch.randn(1, HEADS, 40, 40, generator=generator) * 3
    there = slopes * 4
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    for options, before in (
        ({"bias": bias}, lambda s: s + bias),
        ({"alibi_slopes": there}, lambda s: s - there[:, None, None] * (i - j).abs()),
        ({"softcap": 0.5}, lambda s: 0.5 * torch.tanh(s / 0.5)),
        ({}, None),
    ):
        compare(
            40, 40,
            lambda q, k, v, options=options: attention(q, k, v, score_mod=capped, **options),
            lambda q, k, v, before=before: dense(q, k, v, capped, before=before),
        )  # fmt: skip


@pytest.mark.parametrize("outer, inner", [(20.0, 20.0), (20.0, 2.0), (-20.0, 20.0)])
def test_a_soft_cap_of_captured_numbers(outer, inner):
    """It is the option where both numbers are the same."""

    def bent(s, b, h, i, j):
        return outer * torch.tanh(s / inner)

    compare(40, 40, lambda q, k, v: attention(q, k, v, score_mod=bent), lambda q, k, v: dense(q, k, v, bent))


def test_slopes_with_gradients_stay_a_program():
    learned = slopes.clone().requires_grad_()
    q, k, v = inputs(20, 20)
    out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s - learned[h] * (i - j).abs())
    distance = visible(20, 20, lambda i, j: (i - j).abs())
    wanted = dense(*(x.double() for x in (q, k, v)), before=lambda s: s - learned[:, None, None] * distance)
    (got,), (want,) = (torch.autograd.grad(x.square().sum(), learned) for x in (out, wanted))
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_alibi_of_packed_sequences():
    """The option's distance ends at the last key of each sequence, the program's begins at the first."""
    starts_q, starts_kv = [0, 12, 30], [0, 18, 36]
    q = torch.randn(30, HEADS, DIM, generator=generator)
    k, v = (torch.randn(36, HEADS, DIM, generator=generator) for _ in range(2))
    packed = [torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_kv)]
    out = attention_packed(q, k, v, *packed, score_mod=alibi(0, torch.abs))
    for n in range(2):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_kv[n : n + 2])
        wanted = dense(*(x[None].double() for x in (q[rows], k[keys], v[keys])), alibi(0, torch.abs))
        assert (out[rows] - wanted[0]).abs().max() <= 3e-5


def test_alibi_beside_the_option():
    there = slopes * 4
    distance = visible(40, 40, lambda i, j: (i - j).abs())
    compare(
        40, 40,
        lambda q, k, v: attention(q, k, v, score_mod=alibi(0, torch.abs), alibi_slopes=there),
        lambda q, k, v: dense(q, k, v, alibi(0, torch.abs), before=lambda s: s - there[:, None, None] * distance),
    )  # fmt: skip


def test_alibi_of_queries_before_the_first_key():
    """Top-left and causal, fewer keys than queries: the distance to the option's diagonal is negative for some pairs."""
    given = inputs(40, 25)
    mod = lambda s, b, h, i, j: s - slopes[h] * (i - 15 - j).float()  # noqa: E731
    out = attention(*given, score_mod=mod, causal=True, alignment="top_left")
    shown = torch.arange(40)[:, None] >= torch.arange(25)[None]
    wanted = dense(*(x.double() for x in given), mod, visible=shown)
    assert (out - wanted).abs().max() <= 3e-5


def test_slopes_of_each_sequence():
    table = torch.tensor([[0.5, 0.125], [0.0625, 2.0]])
    mod = lambda s, b, h, i, j: s - table[b, h] * (i - j).abs()  # noqa: E731
    compare(40, 40, lambda q, k, v: attention(q, k, v, score_mod=mod), lambda q, k, v: dense(q, k, v, mod))


def test_fewer_slopes_than_heads():
    """As of a program: of an option too few slopes would be read past their end."""
    few = torch.tensor([0.25, 8.0])[:1]
    with pytest.raises(ValueError, match="index 0 of t0 runs from 0 to 1"):
        attention(*inputs(40, 40), score_mod=lambda s, b, h, i, j: s - few[h] * (i - j).abs())


@pytest.mark.parametrize("name", ["seqused_q", "seqused_kv"])
def test_a_causal_mask_beside_lengths(name):
    """The diagonal of the option follows the used lengths, the program's does not."""
    lengths = torch.tensor([30, 30], dtype=torch.int32)
    mask = lambda b, h, i, j: i >= j  # noqa: E731
    shown = torch.arange(40)[None] < (30 if name == "seqused_kv" else 40)
    compare(
        40, 40,
        lambda q, k, v: attention(q, k, v, mask_mod=mask, **{name: lengths}),
        lambda q, k, v: dense(q, k, v, mask_mod=mask, visible=shown),
        slice(0, 30) if name == "seqused_q" else slice(None),
    )  # fmt: skip


@pytest.mark.parametrize("window", [(3, -1), (-1, 2), (20, 20)])
def test_a_mask_beside_a_window_is_the_narrower_of_both(window):
    mask = lambda b, h, i, j: (i - j <= 9) & (j - i <= 7)  # noqa: E731
    left, right = (40 if bound < 0 else bound for bound in window)
    shown = visible(40, 40, lambda i, j: (i - j <= left) & (j - i <= right))
    compare(
        40, 40,
        lambda q, k, v: attention(q, k, v, mask_mod=mask, window=window),
        lambda q, k, v: dense(q, k, v, mask_mod=mask, visible=shown),
    )  # fmt: skip


def test_a_mask_beside_chunks_of_the_other_diagonal():
    """Chunks end with the last key, the program counts from the first query."""
    mask = lambda b, h, i, j: i + 12 >= j  # noqa: E731
    shown = visible(25, 40, lambda i, j: i // 8 == j // 8)
    compare(
        25, 40,
        lambda q, k, v: attention(q, k, v, mask_mod=mask, attention_chunk=8),
        lambda q, k, v: dense(q, k, v, mask_mod=mask, visible=shown),
    )  # fmt: skip


@pytest.mark.parametrize(
    "seq_q, seq_kv, alignment", [(40, 25, "top_left"), (25, 40, "bottom_right"), (40, 25, "bottom_right")]
)
def test_a_chunk_of_all_keys_or_all_queries_alone(seq_q, seq_kv, alignment):
    given = inputs(seq_q, seq_kv)
    out = attention(*given, attention_chunk=30, alignment=alignment)
    i = torch.arange(seq_q)[:, None] + (seq_kv - seq_q if alignment == "bottom_right" else 0)
    shown = i.div(30, rounding_mode="floor") == torch.arange(seq_kv)[None] // 30
    assert (out - dense(*(x.double() for x in given), visible=shown)).abs().max() <= 3e-5


def test_a_chunk_of_more_queries_than_used_keys():
    """There are as many keys as queries, of which a sequence uses ten: its first thirty queries are before them."""
    given = inputs(40, 40)
    out = attention(*given, attention_chunk=64, seqused_kv=torch.tensor([10, 40], dtype=torch.int32))
    assert out[0, :30].eq(0).all()
    shown = (torch.arange(40)[None] < torch.tensor([10, 40])[:, None])[:, None, None]
    wanted = dense(*(x.double() for x in given), visible=shown)
    assert (out[0, 30:] - wanted[0, 30:]).abs().max() <= 3e-5
    assert (out[1] - wanted[1]).abs().max() <= 3e-5


def test_a_chunk_of_more_queries_than_keys():
    """Queries before the first key are in a chunk without keys, however long it is."""
    q, k, v = inputs(40, 25)
    out = attention(q, k, v, attention_chunk=64)
    assert out[:, :15].eq(0).all()
    wanted = dense(*(x.double() for x in (q[:, 15:], k, v)))
    assert (out[:, 15:] - wanted).abs().max() <= 3e-5
