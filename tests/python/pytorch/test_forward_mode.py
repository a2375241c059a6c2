"""Forward-mode derivatives of attention(): compared with those of the formula in float64, which torch differentiates."""

import resource
import sys
from pathlib import Path

import pytest
import torch
from flash_attention import attention, attention_packed
from torch.autograd import forward_ad

BATCH, QUERIES, KEYS, HEADS, HEADS_KV, DIM, DIM_V = 2, 19, 29, 4, 2, 16, 24


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs():
    shapes = (BATCH, QUERIES, HEADS, DIM), (BATCH, KEYS, HEADS_KV, DIM), (BATCH, KEYS, HEADS_KV, DIM_V), (HEADS,)
    return [drawn(*shape, seed=n) for n, shape in enumerate(shapes)], [
        drawn(*shape, seed=10 + n) for n, shape in enumerate(shapes)
    ]


def visible(options):
    """[queries, keys] of causal, window and alignment."""
    i, j = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    place = i + (0 if options.get("alignment") == "top_left" else KEYS - QUERIES)
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if options.get("causal"):
        seen &= j <= place
    left, right = options.get("window", (-1, -1))
    if left >= 0:
        seen &= j >= place - left
    if right >= 0:
        seen &= j <= place + right
    return seen


def formula(q, k, v, sink=None, **options):
    """out and lse of [batch, seq, heads, dim]."""
    k, v = (tensor.repeat_interleave(HEADS // HEADS_KV, 2) for tensor in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (options.get("scale") or DIM**-0.5)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "bias" in options:
        scores = scores + options["bias"].double()
    if "alibi_slopes" in options:
        distance = (torch.arange(QUERIES)[:, None] + KEYS - QUERIES - torch.arange(KEYS)).abs()
        scores = scores - options["alibi_slopes"].double()[:, None, None] * distance
    hidden = ~visible(options)
    if "key_lengths" in options:
        hidden = hidden | (torch.arange(KEYS) >= options["key_lengths"][:, None, None, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    logits = scores if sink is None else torch.cat([scores, sink[None, :, None, None].expand(BATCH, -1, QUERIES, 1)], -1)
    lse = logits.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (scores - lse[..., None]).exp(), v), lse


CASES = [
    {},
    {"causal": True},
    {"window": (5, 3), "scale": 0.4},
    {"softcap": 1.5, "causal": True},
    {"bias": drawn(HEADS, QUERIES, KEYS, seed=20)},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True},
    {"key_lengths": torch.tensor([29, 7], dtype=torch.int32)},
]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("options", CASES, ids=lambda options: "_".join(options) or "plain")
def test_tangents(options, with_sink):
    primals, tangents = inputs()
    primals, tangents = primals[: 3 + with_sink], tangents[: 3 + with_sink]
    got = torch.func.jvp(
        lambda q, k, v, *sink: attention(q, k, v, sink=sink[0] if sink else None, return_lse=True, **options),
        tuple(primals),
        tuple(tangents),
    )
    double = [tuple(tensor.double() for tensor in tensors) for tensors in (primals, tangents)]
    want = torch.func.jvp(lambda *tensors: formula(*tensors, **options), *double)
    for ours, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", range(4))
def test_one_tangent_alone(which):
    """By dual tensors, whose other inputs have none."""
    primals, tangents = inputs()
    with forward_ad.dual_level():
        given = [
            forward_ad.make_dual(x, t) if n == which else x for n, (x, t) in enumerate(zip(primals, tangents, strict=True))
        ]
        out, lse = attention(*given[:3], sink=given[3], return_lse=True)
        got = forward_ad.unpack_dual(out).tangent, forward_ad.unpack_dual(lse).tangent
    double = [tensor.double() for tensor in primals]

    def alone(x):
        return formula(*(x if n == which else other for n, other in enumerate(double)))

    want = torch.func.jvp(alone, (double[which],), (tangents[which].double(),))[1]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_layout_and_packed():
    primals, tangents = inputs()
    want = torch.func.jvp(lambda q, k, v: attention(q, k, v, causal=True), tuple(primals[:3]), tuple(tangents[:3]))[1]
    first = [tuple(tensor.transpose(1, 2) for tensor in tensors[:3]) for tensors in (primals, tangents)]
    got = torch.func.jvp(lambda q, k, v: attention(q, k, v, causal=True, layout="bhsd"), *first)[1]
    torch.testing.assert_close(got.transpose(1, 2), want)
    starts_q, starts_kv = (torch.arange(BATCH + 1, dtype=torch.int32) * length for length in (QUERIES, KEYS))
    flat = [tuple(tensor.flatten(0, 1) for tensor in tensors[:3]) for tensors in (primals, tangents)]
    got = torch.func.jvp(lambda q, k, v: attention_packed(q, k, v, starts_q, starts_kv, causal=True), *flat)[1]
    torch.testing.assert_close(got, want.flatten(0, 1))


def test_rows_without_keys():
    """Their tangents are 0, whatever their queries are."""
    q, k, v = drawn(1, 9, 2, 8), drawn(1, 5, 2, 8, seed=1), drawn(1, 5, 2, 8, seed=2)
    q[:, 0] = torch.nan
    tangents = torch.func.jvp(lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), (q, k, v), (q, k, v))[1]
    assert (tangents[0][:, :4] == 0).all() and (tangents[1][..., :4] == 0).all()
    assert tangents[0][:, 4:].isfinite().all() and tangents[1][..., 4:].isfinite().all()


def test_finite_differences():
    (q, k, v, _), (q_t, k_t, v_t, _) = inputs()
    step = 1e-4

    def at(sign):
        return formula(*(x.double() + sign * step * t.double() for x, t in ((q, q_t), (k, k_t), (v, v_t))))[0]

    want = (at(1) - at(-1)) / (2 * step)
    got = torch.func.jvp(lambda *tensors: attention(*tensors), (q, k, v), (q_t, k_t, v_t))[1]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_gradcheck_in_both_modes():
    small = [drawn(1, 3, 2, 8, seed=n).requires_grad_() for n in range(3)]
    assert torch.autograd.gradcheck(attention, small, eps=1e-2, atol=1e-2, rtol=1e-2, check_forward_ad=True)


def test_many_tangents():
    (q, k, v, _), (q_t, _, _, _) = inputs()
    along = torch.func.vmap(lambda t: torch.func.jvp(lambda q: attention(q, k, v), (q,), (t,))[1])
    both = along(torch.stack([q_t, -2 * q_t]))
    torch.testing.assert_close(both[1], -2 * both[0])
    each = torch.func.vmap(lambda q, t: torch.func.jvp(lambda q: attention(q, k, v), (q,), (t,))[1])
    torch.testing.assert_close(each(torch.stack([q, q]), torch.stack([q_t, -2 * q_t])), both)
    jacobian = torch.func.jacfwd(lambda q: attention(q, k[:, :3], v[:, :3]).sum((1, 2)))(q[:, :2])
    backwards = torch.func.jacrev(lambda q: attention(q, k[:, :3], v[:, :3]).sum((1, 2)))(q[:, :2])
    torch.testing.assert_close(jacobian, backwards, rtol=1e-4, atol=1e-5)


def test_what_is_not_computed_is_refused():
    (q, k, v, _), (q_t, _, _, _) = inputs()

    def refused(match, call, x=q, t=q_t):
        with pytest.raises((NotImplementedError, RuntimeError), match=match):
            torch.func.jvp(call, (x,), (t,))

    lists = torch.zeros(BATCH, QUERIES, 1, 1, dtype=torch.int32)
    refused("with dropout_p", lambda q: attention(q, k, v, dropout_p=0.5, seed=1, key_indices=lists))
    slopes = torch.rand(HEADS)
    refused("with respect to alibi_slopes", lambda slopes: attention(q, k, v, alibi_slopes=slopes), slopes, slopes)
    refused("score_mod", lambda q: attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2))
    refused("return_entropy", lambda q: attention(q, k, v, return_entropy=True))


def test_a_tangent_of_values_has_a_gradient():
    """P v. is attention of the tangent."""
    (q, k, v, _), (_, _, v_t, _) = inputs()
    got = torch.func.grad(lambda q: torch.func.jvp(lambda v: attention(q, k, v), (v,), (v_t,))[1].square().sum())(q)
    want = torch.func.grad(lambda q: attention(q, k, v_t).square().sum())(q)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_tangents_of_bias():
    (q, k, v, _), (q_t, _, _, _) = inputs()
    bias, bias_t = drawn(HEADS, QUERIES, KEYS, seed=21), drawn(HEADS, QUERIES, KEYS, seed=22)
    got = torch.func.jvp(lambda q, bias: attention(q, k, v, bias=bias, return_lse=True), (q, bias), (q_t, bias_t))[1]
    double = [tensor.double() for tensor in (q, k, v, bias, q_t, bias_t)]
    want = torch.func.jvp(
        lambda q, bias: formula(q, double[1], double[2], bias=bias), (double[0], double[3]), (double[4], double[5])
    )[1]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_lists_of_keys():
    """By a backward pass: all keys listed are no list."""
    (q, k, v, _), tangents = inputs()
    lists = torch.arange(KEYS, dtype=torch.int32).expand(BATCH, QUERIES, 1, KEYS).contiguous()
    got = torch.func.jvp(lambda *x: attention(*x, key_indices=lists), (q, k, v), tuple(tangents[:3]))[1]
    want = torch.func.jvp(lambda *x: attention(*x), (q, k, v), tuple(tangents[:3]))[1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_consistency_model_learns(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "examples")
    import consistency

    before, after = consistency.train(50, report=lambda line: None)
    assert after < 0.9 * before, (before, after)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_of_long_sequences():
    """32768 tokens: scores would take 4 GiB; a call and its tangent take less than a tenth of that."""
    q, k, v, t = (drawn(1, 32768, 1, 8, seed=n) for n in range(4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out_t = torch.func.jvp(lambda q: attention(q, k, v, window=(64, 64)), (q,), (t,))[1]
    assert out_t.isfinite().all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
