"""Second derivatives of attention(), by every way that torch has to them, compared with those of the formula in float64,
and what is refused."""

import resource
import sys

import pytest
import torch
from flash_attention import attention, attention_over_cache, attention_packed, scaled_dot_product_attention
from flash_attention.arguments.options import binding_arguments
from flash_attention.options import NUM_TENSORS
from torch.autograd import forward_ad

REFUSED = pytest.raises((RuntimeError, NotImplementedError), match="second derivatives")
THIRD = pytest.raises((RuntimeError, NotImplementedError), match="third derivatives")
QUERIES, KEYS, HEADS, HEADS_KV, DIM, DIM_V = 13, 29, 4, 2, 8, 24


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(
    q, k, v, bias=None, sink=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None, lengths=None
):
    """out and lse of [batch, seq, heads, dim], with scores as a matrix."""
    group = q.shape[2] // k.shape[2]
    k, v = (tensor.repeat_interleave(group, 2) for tensor in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    queries, keys = scores.shape[-2:]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if causal:
        hidden |= j > i
    if window[0] >= 0:
        hidden |= j < i - window[0]
    if window[1] >= 0:
        hidden |= j > i + window[1]
    if lengths is not None:
        hidden = hidden | (j >= lengths[:, None, None, None])
    scores = scores.masked_fill(hidden, -torch.inf)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    safe = lse.masked_fill(lse == -torch.inf, 0)
    return torch.einsum("bhij,bjhd->bihd", (scores - safe[..., None]).exp(), v), lse


def leaves(with_bias=False, with_sink=False, batch=2):
    shapes = [(batch, QUERIES, HEADS, DIM), (batch, KEYS, HEADS_KV, DIM), (batch, KEYS, HEADS_KV, DIM_V)]
    shapes += [(HEADS, QUERIES, KEYS)] * with_bias + [(HEADS,)] * with_sink
    return [drawn(*shape, seed=n) for n, shape in enumerate(shapes)]


def named(tensors, with_bias, with_sink):
    rest = list(tensors[3:])
    return (*tensors[:3], rest.pop(0) if with_bias else None, rest.pop(0) if with_sink else None)


OPTIONS = [
    {},
    {"causal": True},
    {"window": (5, 3), "scale": 0.4},
    {"softcap": 1.5, "causal": True},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True},
    {"key_lengths": torch.tensor([29, 7], dtype=torch.int32), "softcap": 3.0},
]
NAMES = {"alibi_slopes": "slopes", "key_lengths": "lengths"}


def ids(options):
    return "_".join(options) or "plain"


def pair(options, with_bias, with_sink):
    """The call and the formula of it, as functions of the same tensors that give (out, lse)."""
    theirs = {NAMES.get(name, name): value for name, value in options.items()}

    def call(*tensors):
        q, k, v, bias, sink = named(tensors, with_bias, with_sink)
        return attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)

    def dense(*tensors):
        q, k, v, bias, sink = named(tensors, with_bias, with_sink)
        return formula(q, k, v, bias, sink, **theirs)

    return call, dense


def close(ours, theirs, tolerance=2e-5):
    for mine, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=tolerance, atol=tolerance * max(1.0, want.abs().max().item()))


def double(tensors):
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def twice(function, tensors, cotangents, directions):
    """Gradients of the sum of gradients times directions, by tensors and cotangents."""
    tensors = [tensor.requires_grad_() for tensor in tensors]
    cotangents = [tensor.requires_grad_() for tensor in cotangents]
    first = torch.autograd.grad(function(*tensors), tensors, cotangents, create_graph=True)
    total = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    return torch.autograd.grad(total, [*tensors, *cotangents])


@pytest.mark.parametrize("with_bias, with_sink", [(False, False), (True, True)], ids=["qkv", "bias_and_sink"])
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_gradients_of_gradients(options, with_bias, with_sink):
    call, dense = pair(options, with_bias, with_sink)
    tensors = leaves(with_bias, with_sink)
    out, lse = call(*tensors)
    cotangents = [drawn(*out.shape, seed=30), drawn(*lse.shape, seed=31)]
    directions = [drawn(*x.shape, seed=40 + n) for n, x in enumerate(tensors)]
    want = twice(dense, *(double(x) for x in (tensors, cotangents, directions)))
    close(twice(call, tensors, cotangents, directions), want)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"])
def test_every_device(dtype, tolerance, device):
    """Forward mode, second derivatives, and forward mode mapped over tangents."""
    call, dense = pair({"causal": True, "softcap": 1.5}, True, True)
    given = [x.to(device, dtype if n < 3 else torch.float32) for n, x in enumerate(leaves(True, True))]
    out, lse = call(*given)
    others = [[torch.randn_like(x) for x in tensors] for tensors in ((out, lse), given)]
    exact, *exact_others = ([x.detach().cpu().double() for x in tensors] for tensors in (given, *others))

    def all_of(function, tensors, cotangents, directions):
        found = list(torch.func.jvp(function, tuple(tensors), tuple(directions))[1])
        q, k, *rest = tensors
        by_keys = torch.func.vmap(lambda t: torch.func.jvp(lambda k: function(q, k, *rest)[0], (k,), (t,))[1])
        found.append(by_keys(torch.stack([directions[1], -directions[1]]))[1])
        return [*found, *twice(function, tensors, cotangents, directions)]

    want = all_of(dense, exact, *exact_others)
    close([x.detach().cpu() for x in all_of(call, given, *others)], [x.detach() for x in want], tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_of_long_sequences_on_a_gpu(dtype):
    """32768 tokens: scores would take 2 or 4 GiB."""
    q, k, v = (drawn(1, 32768, 1, 64, seed=n).to("cuda", dtype).requires_grad_() for n in range(3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    first = torch.autograd.grad(attention(q, k, v, window=(64, 64)).square().sum(), (q, k, v), create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
    torch.func.jvp(lambda q: attention(q, k.detach(), v.detach(), window=(64, 64)), (q.detach(),), (q.detach(),))
    assert torch.cuda.max_memory_allocated() - before < 300 << 20


def test_gradients_through_lse_alone():
    call, dense = pair({"causal": True}, False, False)
    tensors = leaves()

    def norm(function, tensors):
        tensors = [x.requires_grad_() for x in tensors]
        first = torch.autograd.grad(function(*tensors)[1].square().sum(), tensors[:2], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors[:2])

    close(norm(call, tensors), norm(dense, double(tensors)))


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_forward_over_reverse_and_reverse_over_forward(options):
    call, dense = pair(options, True, True)
    tensors = leaves(True, True)
    directions = tuple(drawn(*x.shape, seed=50 + n) for n, x in enumerate(tensors))

    def loss(function, *tensors):
        out, lse = function(*tensors)
        return out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()

    def products(function, tensors, directions):
        tensors, directions = tuple(tensors), tuple(directions)
        gradient = torch.func.grad(lambda *x: loss(function, *x), argnums=tuple(range(len(tensors))))
        forward_over = torch.func.jvp(gradient, tensors, directions)[1]
        along = lambda *x: torch.func.jvp(lambda *y: loss(function, *y), x, directions)[1]  # noqa: E731
        reverse_over = torch.func.grad(along, argnums=tuple(range(len(tensors))))(*tensors)
        return [*forward_over, *reverse_over]

    close(products(call, tensors, directions), products(dense, double(tensors), double(directions)), 5e-5)


def test_hessian():
    q, k, v = drawn(1, 3, 2, 8), drawn(1, 5, 2, 8, seed=1), drawn(1, 5, 2, 8, seed=2)
    weights = drawn(1, 3, 2, 8, seed=3)

    def loss(function, weights, k, v):
        return lambda q: (function(q, k, v) * weights).sum()

    got = loss(lambda *x: attention(*x, causal=True), weights, k, v)
    want = loss(lambda *x: formula(*x, causal=True)[0], *double([weights, k, v]))
    expected = torch.func.hessian(want)(q.double())
    close([torch.func.hessian(got)(q), torch.autograd.functional.hessian(got, q)], [expected, expected])
    by_keys = torch.func.hessian(lambda k: loss(lambda *x: attention(*x), weights, k, v)(q))(k)
    close([by_keys], [torch.func.hessian(lambda k: (formula(q.double(), k, v.double())[0] * weights).sum())(k.double())])
    t = drawn(*q.shape, seed=4)
    close([torch.autograd.functional.hvp(got, q, t)[1]], [torch.autograd.functional.hvp(want, q.double(), t.double())[1]])


def test_packed_and_heads_first():
    starts_q, starts_kv = (torch.tensor([0, 5, 5, 13], dtype=torch.int32), torch.tensor([0, 7, 11, 29], dtype=torch.int32))
    tensors = [drawn(QUERIES, HEADS, DIM), drawn(KEYS, HEADS_KV, DIM, seed=1), drawn(KEYS, HEADS_KV, DIM_V, seed=2)]
    weights = [drawn(*x.shape, seed=10 + n) for n, x in enumerate(tensors)]

    def dense(q, k, v):
        parts = []
        for n in range(3):
            rows, keys = slice(starts_q[n], starts_q[n + 1]), slice(starts_kv[n], starts_kv[n + 1])
            parts.append(formula(q[None, rows], k[None, keys], v[None, keys], causal=True)[0][0])
        return torch.cat(parts)

    def norm(function, tensors, weights):
        tensors = [x.requires_grad_() for x in tensors]
        first = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((g * w).sum() for g, w in zip(first, weights, strict=True)), tensors)

    packed = norm(lambda *x: attention_packed(*x, starts_q, starts_kv, causal=True), tensors, weights)
    close(packed, norm(dense, double(tensors), double(weights)))

    batched = [x.detach().unflatten(0, (1, -1)).transpose(1, 2) for x in tensors]
    turned = [x.unflatten(0, (1, -1)).transpose(1, 2) for x in weights]
    got = norm(lambda *x: attention(*x, layout="bhsd"), batched, turned)
    want = norm(lambda *x: formula(*(y.transpose(1, 2) for y in x))[0].transpose(1, 2), double(batched), double(turned))
    close(got, want)


def test_a_scale_that_learns():
    q, k, v = leaves()
    weights = drawn(*q.shape, seed=9)

    def mixed(function, q, k, v, weights, scale):
        q, scale = q.requires_grad_(), scale.requires_grad_()
        first = torch.autograd.grad(function(q, k, v, scale=scale).square().sum(), (q, scale), create_graph=True)
        return torch.autograd.grad((first[0] * weights).sum() + first[1].square(), (q, scale))

    got = mixed(attention, q, k, v, weights, torch.tensor(0.3))
    want = mixed(lambda *x, scale: formula(*x, scale=scale)[0], *double([q, k, v, weights]), torch.tensor(0.3).double())
    close(got, want)


def test_dropout():
    """With a seed the call is a function of its tensors: compared with differences of its gradients in float32."""
    tensors, t = leaves(), [drawn(*x.shape, seed=60 + n) for n, x in enumerate(leaves())]

    def gradients(*tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(attention(*tensors, dropout_p=0.4, seed=5).square().sum(), tensors)

    step = 1e-2
    ahead, behind = (gradients(*(x + sign * step * d for x, d in zip(tensors, t, strict=True))) for sign in (1, -1))
    want = [(a - b).double() / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    leaf = [x.requires_grad_() for x in tensors]
    first = torch.autograd.grad(attention(*leaf, dropout_p=0.4, seed=5).square().sum(), leaf, create_graph=True)
    close(torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, t, strict=True)), leaf), want, 5e-3)
    out_t = torch.func.jvp(lambda *x: attention(*x, dropout_p=0.4, seed=5), tuple(x.detach() for x in leaf), tuple(t))[1]
    out = [
        attention(*(x.detach() + s * step * d for x, d in zip(leaf, t, strict=True)), dropout_p=0.4, seed=5)
        for s in (1, -1)
    ]
    close([out_t], [(out[0] - out[1]).double() / (2 * step)], 5e-3)


def test_rows_and_keys_that_nobody_sees():
    """NaN behind masks reaches nothing, and rows without keys have derivatives 0."""
    q, k, v = drawn(1, 9, 2, 8), drawn(1, 5, 2, 8, seed=1), drawn(1, 5, 2, 8, seed=2)
    k[:, 3:], v[:, 3:] = torch.nan, torch.inf
    lengths = torch.tensor([3], dtype=torch.int32)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = attention(q, k, v, key_lengths=lengths, causal=True)
    first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
    assert all(g.isfinite().all() for g in second)
    assert (second[0][:, :4] == 0).all() and (second[1][:, 3:] == 0).all() and (second[2][:, 3:] == 0).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_sixteen_bits(dtype, tolerance):
    tensors = [x.to(dtype) for x in leaves()]
    out, lse = attention(*tensors, return_lse=True)
    cotangents = [drawn(*out.shape, seed=30).to(dtype), drawn(*lse.shape, seed=31)]
    directions = [drawn(*x.shape, seed=40 + n).to(dtype) for n, x in enumerate(tensors)]
    want = twice(formula, *(double(x) for x in (tensors, cotangents, directions)))
    got = twice(lambda *x: attention(*x, return_lse=True), tensors, cotangents, directions)
    close(got, want, tolerance)


def small(count=3):
    return [drawn(1, 3, 2, 8, seed=n).requires_grad_() for n in range(count)]


CHECKED = {
    "plain": lambda q, k, v: attention(q, k, v),
    "causal_lse": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
    "softcap": lambda q, k, v: attention(q, k, v, softcap=2.0),
    "window_alibi": lambda q, k, v: attention(q, k, v, window=(1, 0), alibi_slopes=torch.tensor([0.5, 0.25])),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
}


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck_and_gradgradcheck(name):
    tolerances = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
    call, inputs = CHECKED[name], small()
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, **tolerances)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, **tolerances)


def test_gradgradcheck_of_bias_and_sink():
    bias, sink = drawn(2, 3, 3, seed=8).requires_grad_(), drawn(2, seed=9).requires_grad_()
    call = lambda q, k, v, bias, sink: attention(q, k, v, bias=bias, sink=sink)  # noqa: E731
    tolerances = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
    assert torch.autograd.gradcheck(call, (*small(), bias, sink), check_forward_ad=True, **tolerances)
    assert torch.autograd.gradgradcheck(call, (*small(), bias, sink), check_fwd_over_rev=True, **tolerances)


def test_same_bits():
    def run():
        tensors = [x.requires_grad_() for x in leaves()]
        first = torch.autograd.grad(attention(*tensors, deterministic=True).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_third_derivatives_are_refused():
    q, k, v = small()
    (first,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with THIRD:
        second.sum().backward()
    q = q.detach()
    with THIRD:
        torch.func.jacfwd(torch.func.jacfwd(lambda q: attention(q, k, v).sum()))(q)


def test_what_has_no_second_derivatives():
    q, k, v = small()

    def penalty(call):
        (gradient,) = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
        gradient.square().sum().backward()

    lists = torch.zeros(1, 3, 1, 1, dtype=torch.int32)
    for call in (
        lambda q: attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2),
        lambda q: attention(q, k, v, return_entropy=True)[1],
        lambda q: attention(q, k, v, key_indices=lists),
    ):
        with REFUSED:
            penalty(call)
    with pytest.raises((RuntimeError, NotImplementedError), match="attention_over_cache"):
        cache = drawn(1, 8, 2, 8)
        attention_over_cache(q[:, :1], cache, cache, seqused_kv=torch.tensor([8], dtype=torch.int32)).sum().backward()


def by_op(w, k):
    options = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": None, "alignment": "bottom_right"}
    options |= {"dropout_p": 0.0, "deterministic": False, "kernel": None}
    slots, options = binding_arguments({"q": w, "k": k, "v": k, **options})
    return torch.ops.flash_attention.forward(*slots[:NUM_TENSORS], *options, None, 0)[0]


CALLS = {
    "plain": lambda w, k: attention(w, k, k),
    "lse": lambda w, k: attention(w, k, k, return_lse=True)[1],
    "bias": lambda w, k: attention(w, k, k, bias=torch.zeros(8, 8, device=w.device)),
    "sdpa": lambda w, k: scaled_dot_product_attention(w, k, k, is_causal=True),
    "op": by_op,
}


@pytest.mark.parametrize("name", CALLS)
def test_penalty_on_a_gradient(name, device):
    """On every device the gradient with a graph is that without, and its derivative is right."""
    w = drawn(1, 8, 2, 16).to(device).requires_grad_()
    k = drawn(1, 8, 2, 16, seed=1).to(device)

    def penalty(w, k):
        (gradient,) = torch.autograd.grad(CALLS[name](w, k).square().sum(), w, create_graph=True)
        (w.sum() + gradient.square().sum()).backward()
        return gradient

    (plain,) = torch.autograd.grad(CALLS[name](w, k).square().sum(), w)
    torch.testing.assert_close(penalty(w, k).detach(), plain)
    x, keys = w.detach().cpu().double().requires_grad_(), k.cpu().double()
    turned = [t.transpose(1, 2) if name == "sdpa" else t for t in (x, keys, keys)]
    dense = formula(*turned, causal=name == "sdpa")
    (gradient,) = torch.autograd.grad(dense[name == "lse"].square().sum(), x, create_graph=True)
    (x.sum() + gradient.square().sum()).backward()
    close([w.grad.cpu()], [x.grad])


def test_compiled():
    w, k = drawn(1, 8, 2, 16).requires_grad_(), drawn(1, 8, 2, 16, seed=1)
    torch._dynamo.reset()
    step = torch.compile(lambda w: attention(w, k, k).sum(), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(step(w), w, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_of_long_sequences():
    """32768 tokens: scores would take 4 GiB; forward mode and second derivatives take less than a tenth of that."""
    q, k, v = (drawn(1, 32768, 1, 8, seed=n).requires_grad_() for n in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = torch.autograd.grad(attention(q, k, v, window=(64, 64)).square().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
    with forward_ad.dual_level():
        out = attention(forward_ad.make_dual(q.detach(), k.detach()), k.detach(), v.detach(), window=(64, 64))
        tangent = forward_ad.unpack_dual(out).tangent
    assert tangent.isfinite().all() and all(g.isfinite().all() for g in second)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
