"""Gradients of scale, softcap and alibi_slopes, compared with the formula of docs/numerics.md in float64."""

import itertools
import math

import flash_attention
import pytest
import torch
from flash_attention import attention, attention_packed

NUMBERS = ("scale", "softcap", "alibi_slopes")
LEARNED = [names for n in (1, 2, 3) for names in itertools.combinations(NUMBERS, n)]
SIZES = {"batch": 2, "seq_q": 37, "seq_kv": 53, "heads": 6, "heads_kv": 2, "dim": 24, "dim_v": 40}


def dense(q, k, v, scale, softcap=None, slopes=None, bias=None, causal=False, lengths=None):
    """[batch, seq, heads, dim] in float64; `lengths`: (queries, keys) of each sequence. A learned number may be given for
    each score, [batch, heads, seq_q, seq_kv]. Returns out and lse, 0 and -inf where nothing is seen."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    score = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    outs, lses = [], []
    for b in range(q.shape[0]):
        used_q, used_kv = (q.shape[1], k.shape[1]) if lengths is None else lengths[b]
        diagonal = i + used_kv - used_q
        s = score[b]
        if slopes is not None:
            of_heads = slopes if slopes.dim() == 1 else slopes[b]
            s = s - (of_heads if slopes.dim() == 4 else of_heads[:, None, None]) * (diagonal - j).abs()
        visible = (j < used_kv) & (i < used_q) & ((j <= diagonal) if causal else True)
        s = s.masked_fill(~visible, -math.inf)
        seen = visible.any(-1)[None, :, None]
        p = torch.where(seen, s.masked_fill(~seen, 0.0).softmax(-1), 0.0)
        outs.append(torch.einsum("hij,jhd->ihd", p, v[b]))
        lses.append(torch.where(seen[..., 0], s.masked_fill(~seen, 0.0).logsumexp(-1), -math.inf))
    return torch.stack(outs), torch.stack(lses)


def drawn(dtype=torch.float32, seed=0, **sizes):
    n = {**SIZES, **sizes}
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(n["batch"], n["seq_q"], n["heads"], n["dim"], generator=make)
    k = torch.randn(n["batch"], n["seq_kv"], n["heads_kv"], n["dim"], generator=make)
    v = torch.randn(n["batch"], n["seq_kv"], n["heads_kv"], n["dim_v"], generator=make)
    learned = {
        "scale": torch.tensor(0.31),
        "softcap": torch.tensor([2.5]),
        "alibi_slopes": torch.rand(n["heads"], generator=make) * 0.3 + 0.05,
        "bias": torch.randn(n["heads"], n["seq_q"], n["seq_kv"], generator=make),
    }
    return [tensor.to(dtype) for tensor in (q, k, v)], learned


def compare(got, want, tolerance, names, terms=()):
    """`terms`: {name: norm of what its gradient is the sum of}. Terms cancel, and their rounding errors do not."""
    for name, a, b in zip(names, got, want, strict=True):
        error, allowed = (a.double() - b).norm(), tolerance * (b.norm() + dict(terms).get(name, 0.0))
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("learns", LEARNED)
@pytest.mark.parametrize("others", [(), ("bias",), ("softcap", "alibi_slopes", "bias")])
def test_gradients_are_those_of_the_formula(learns, others, dtype, tolerance):
    (q, k, v), values = drawn(dtype)
    wanted = [tensor.requires_grad_() for tensor in (q, k, v)]
    options = {"causal": True}
    for name in (*learns, *(other for other in others if other not in learns)):
        value = values[name].clone()
        if name in learns or name == "bias":
            wanted.append(value.requires_grad_())
        elif name == "softcap":
            value = value.item()
        options[name] = value
    out, lse = attention(q, k, v, return_lse=True, **options)
    make = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(tensor.shape, generator=make) for tensor in (out, lse))
    dlse = torch.where(lse.isfinite(), dlse, 0.0)
    got = torch.autograd.grad((out, lse), wanted, (dout.to(dtype), dlse))

    exact, summed = {"scale": q.shape[-1] ** -0.5}, {}
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    for name, value in options.items():
        if name in learns:  # a number for each score, so that the terms of its gradient are seen
            one = value.detach().double().reshape(-1, 1, 1)  # of heads, or of all
            exact[name] = summed[name] = one.expand(scores).clone().requires_grad_()
        elif isinstance(value, torch.Tensor):
            exact[name] = value.detach().double().requires_grad_(name == "bias")
        elif name != "causal":
            exact[name] = value
    exact["slopes"] = exact.pop("alibi_slopes", None)
    want_out, want_lse = dense(*leaves, causal=True, **exact)
    loss = (want_out * dout.to(dtype).double()).sum() + (want_lse * dlse)[want_lse.isfinite()].sum()
    leaves += [exact["bias"]] if "bias" in others else []
    want = torch.autograd.grad(loss, [*leaves, *summed.values()])
    found = dict(zip(("q", "k", "v", *(n for n in options if n in learns or n == "bias")), got, strict=True))
    wanted = dict(zip(("q", "k", "v", *(["bias"] if "bias" in others else []), *summed), want, strict=True))
    terms = {name: wanted[name].norm() for name in summed}
    for name in summed:
        by_head = wanted[name].sum((0, 2, 3))
        wanted[name] = by_head if found[name].numel() > 1 else by_head.sum().view(found[name].shape)
    compare([out], [want_out], tolerance, ["out"])
    compare([found[name] for name in wanted], wanted.values(), tolerance, wanted, terms)


def test_lengths_move_the_diagonal():
    (q, k, v), values = drawn()
    slopes = (values["alibi_slopes"] * torch.tensor([[1.0], [2.0]])).requires_grad_()
    used_q, used_kv = torch.tensor([30, 0], dtype=torch.int32), torch.tensor([20, 53], dtype=torch.int32)
    out = attention(q, k, v, alibi_slopes=slopes, seqused_q=used_q, seqused_kv=used_kv, causal=True)
    exact = slopes.detach().double().requires_grad_()
    want, _ = dense(q.double(), k.double(), v.double(), 24**-0.5, slopes=exact, causal=True, lengths=[(30, 20), (0, 53)])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    got, wanted = (torch.autograd.grad(x, s, dout.to(x.dtype)) for x, s in ((out, slopes), (want, exact)))
    compare((out, *got), (want, *wanted), 2e-6, ("out", "slopes"))


def test_packed():
    (q, k, v), values = drawn(batch=1, seq_q=50, seq_kv=61)
    starts_q, starts_kv = torch.tensor([0, 13, 13, 50], dtype=torch.int32), torch.tensor([0, 20, 30, 61], dtype=torch.int32)
    learned = {name: values[name].requires_grad_() for name in ("scale", "softcap", "alibi_slopes")}
    out = attention_packed(q[0], k[0], v[0], starts_q, starts_kv, causal=True, **learned)
    exact = {name: value.detach().double().requires_grad_() for name, value in learned.items()}
    parts = [
        dense(
            *(t.double()[:, a:b] for t, (a, b) in ((q, rows), (k, keys), (v, keys))), exact["scale"], exact["softcap"],
            exact["alibi_slopes"], causal=True,
        )[0][0]
        for rows, keys in (((0, 13), (0, 20)), ((13, 50), (30, 61)))
    ]  # fmt: skip
    want = torch.cat(parts)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad(out, learned.values(), dout)
    wanted = torch.autograd.grad(want, exact.values(), dout.double())
    compare([out], [want], 2e-6, ["out"])
    compare(got, wanted, 2e-4, learned)  # sums whose terms cancel


def test_a_program_comes_after_them():
    (q, k, v), values = drawn()
    scale = values["scale"].requires_grad_()
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    out = attention(*heads_first, scale=scale, softcap=3.0, layout="bhsd", score_mod=lambda s, b, h, i, j: s * s - 0.1 * j)
    exact = scale.detach().double().requires_grad_()
    group = q.shape[2] // k.shape[2]
    score = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(group, 2)) * exact
    score = (3 * torch.tanh(score / 3)) ** 2 - 0.1 * torch.arange(k.shape[1])
    want = torch.einsum("bhij,bjhd->bhid", score.softmax(-1), v.double().repeat_interleave(group, 2))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    got, wanted = (torch.autograd.grad(x, s, dout.to(x.dtype)) for x, s in ((out, scale), (want, exact)))
    compare((out, *got), (want, *wanted), 2e-6, ("out", "scale"))


def test_a_scale_of_zero_has_a_gradient():
    (q, k, v), _ = drawn()
    scale = torch.zeros(1, requires_grad=True)
    exact = torch.zeros((), dtype=torch.float64, requires_grad=True)
    dout = torch.randn(*q.shape[:3], v.shape[-1], generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad(attention(q, k, v, scale=scale), scale, dout)
    want = torch.autograd.grad(dense(q.double(), k.double(), v.double(), exact)[0], exact, dout.double())
    compare(got, want, 2e-6, ("scale",))


def test_the_same_bits_in_every_run_and_compiled():
    (q, k, v), values = drawn()
    slopes = values["alibi_slopes"].requires_grad_()

    def gradient():
        out = attention(q, k, v, alibi_slopes=slopes, deterministic=True)
        return torch.autograd.grad(out.square().sum(), slopes)[0]

    first = gradient()
    assert torch.equal(first, gradient())
    compiled = torch.compile(lambda slopes: attention(q, k, v, alibi_slopes=slopes))
    got = torch.autograd.grad(compiled(slopes).square().sum(), slopes)[0]
    torch.testing.assert_close(got, first)


def test_without_gradients_the_options_are_options():
    (q, k, v), values = drawn()
    values = {name: value.requires_grad_() for name, value in values.items() if name in ("scale", "alibi_slopes")}
    with torch.no_grad():
        got = attention(q, k, v, **values)
    plain = attention(q, k, v, scale=values["scale"].item(), alibi_slopes=values["alibi_slopes"].detach())
    assert torch.equal(got, plain)


def test_a_layer_learns_its_slopes():
    torch.manual_seed(0)
    (q, k, v), _ = drawn(seq_q=32, seq_kv=32)
    target = attention(q, k, v, alibi_slopes=torch.full((6,), 0.4))
    slopes = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.Adam([slopes], lr=0.05)
    losses = []
    for _ in range(60):
        loss = (attention(q, k, v, alibi_slopes=slopes) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50 and (slopes.detach() - 0.4).abs().max() < 0.05


def test_what_cannot_learn_is_refused_by_name():
    (q, k, v), values = drawn()
    with pytest.raises(ValueError, match=r"^scale: got torch.float32 \[2\]; expected a number or a tensor of one float"):
        attention(q, k, v, scale=torch.ones(2, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: a gradient is computed for q of torch in float32"):
        attention(q.numpy(), k.numpy(), v.numpy(), alibi_slopes=values["alibi_slopes"].requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^scale: "):
        flash_attention.attention_over_cache(q[:, :1], k, v, scale=values["scale"].requires_grad_())
