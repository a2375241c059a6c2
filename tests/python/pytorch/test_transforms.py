"""torch.func, torch.fx and torch.jit.trace: whatever takes a call apart or looks at it from outside."""

import pytest
import reference
import torch
from flash_attention import attention, scaled_dot_product_attention
from torch.autograd import forward_ad

V, BATCH, HEADS, QUERIES, KEYS, DIM = 3, 2, 2, 5, 7, 8


def tensors(device, *shapes):
    return [torch.randn(shape, device=device) for shape in shapes]


def qkv(device, *leading):
    shape = (*leading, BATCH)
    return tensors(device, (*shape, QUERIES, HEADS, DIM), (*shape, KEYS, HEADS, DIM), (*shape, KEYS, HEADS, DIM))


def exact(q, k, v, **options):
    options = {name: value.double() if value.is_floating_point() else value for name, value in options.items()}
    return reference.attention(q.double(), k.double(), v.double(), **options)[0].to(q.dtype)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_grad(device):
    q, k, v = qkv(device)
    for argument in range(3):
        ours = torch.func.grad(lambda *args: attention(*args).square().sum(), argument)(q, k, v)
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        assert_close(ours, torch.autograd.grad(exact(*leaves).square().sum(), leaves[argument])[0])


def test_jacobian(device):
    q, k, v = (tensor[:1, :3] for tensor in qkv(device))
    ours = torch.func.jacrev(attention)(q, k, v)
    assert_close(ours, torch.autograd.functional.jacobian(lambda q: exact(q, k, v), q))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (3, 1, 0)])
def test_vmap(in_dims, device):
    slices = [qkv(device) for _ in range(V)]
    stacked = [
        column[0] if dim is None else torch.stack(column, dim)
        for column, dim in zip(zip(*slices, strict=True), in_dims, strict=True)
    ]
    actual = torch.vmap(lambda q, k, v: attention(q, k, v), in_dims)(*stacked)
    for i in range(V):
        own = [slices[0][j] if dim is None else slices[i][j] for j, dim in enumerate(in_dims)]
        assert_close(actual[i], exact(*own))


EXTRAS = {
    "bias": ("bias", (BATCH, HEADS, QUERIES, KEYS)),
    "bias_without_batch": ("bias", (HEADS, QUERIES, KEYS)),
    "bias_of_keys": ("bias", (1, 1, 1, KEYS)),
    "mask": ("mask", (BATCH, 1, QUERIES, KEYS)),
    "slopes": ("alibi_slopes", (HEADS,)),
    "slopes_of_batch": ("alibi_slopes", (BATCH, HEADS)),
    "sink": ("sink", (HEADS,)),
    "key_lengths": ("key_lengths", (BATCH,)),
}


def extra(name, shape, device):
    if name == "key_lengths":
        return torch.randint(1, KEYS, shape, device=device, dtype=torch.int32)
    values = torch.rand(shape, device=device)
    return values > 0.3 if name == "mask" else values


@pytest.mark.parametrize("batched", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("case", EXTRAS)
def test_vmap_with_extras(case, batched, device):
    name, shape = EXTRAS[case]
    q, k, v = qkv(device, V)
    given = extra(name, (V, *shape) if batched else shape, device)
    call = torch.vmap(lambda q, k, v, x: attention(q, k, v, **{name: x}), (0, 0, 0, 0 if batched else None))
    actual = call(q, k, v, given)
    for i in range(V):
        assert_close(actual[i], exact(q[i], k[i], v[i], **{name: given[i] if batched else given}))


@pytest.mark.parametrize("option", ["plain", "bias", "sink"])
def test_gradient_of_each_sample(option, device):
    q, k, v = qkv(device, V)
    shape = {"plain": (1,), "bias": (HEADS, QUERIES, KEYS), "sink": (HEADS,)}[option]
    given = torch.rand(V, *shape, device=device)

    def loss(call, q, k, v, x):
        return call(q, k, v, **({} if option == "plain" else {option: x})).square().sum()

    ours = torch.vmap(torch.func.grad(lambda *args: loss(attention, *args), (0, 1, 2, 3)))(q, k, v, given)
    for i in range(V):
        leaves = [tensor[i].clone().requires_grad_() for tensor in (q, k, v, given)]
        expected = torch.autograd.grad(loss(exact, *leaves), leaves, allow_unused=True)
        for a, b in zip(ours, expected, strict=True):
            assert_close(a[i], torch.zeros_like(a[i]) if b is None else b)


def test_vmap_of_an_empty_batch(device):
    q, k, v = (tensor[:, :0] for tensor in qkv(device, V))
    assert torch.vmap(attention)(q, k, v).shape == q.shape


def test_randomness_of_vmap(device):
    q, k, v = (tensor.expand(V, *tensor.shape) for tensor in qkv(device))
    call = lambda q, k, v: attention(q, k, v, dropout_p=0.5)  # noqa: E731
    same = torch.vmap(call, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(call, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q, k, v)


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_fx_keeps_the_call_whole(function):
    _, k, v = qkv("cpu")
    graph = torch.fx.symbolic_trace(lambda q, k, v: function(q, k, v) * 2)
    assert_close(graph(k, k, v), function(k, k, v) * 2)
    assert sum(node.op == "call_function" for node in graph.graph.nodes) == 2


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_jit_trace(function, device):
    _, k, v = qkv(device)
    traced = torch.jit.trace(lambda q, k, v: function(q, k, v), (k, k, v))
    _, k, v = qkv(device)
    assert_close(traced(v, k, v), function(v, k, v))


def test_jit_trace_of_a_module_with_parameters(device):
    """torch.jit.trace compares a trace with gradients and one without; the graph that it leaves has gradients."""

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return attention(*super().forward(x).unflatten(-1, (3, 2, 8)).unbind(2), causal=True)

    layer = Layer(16, 48, device=device)
    x = torch.randn(3, 9, 16, device=device)
    traced = torch.jit.trace(layer, torch.randn(2, 5, 16, device=device))
    assert_close(traced(x), layer(x))
    ours, theirs = (torch.autograd.grad(call(x).square().sum(), layer.weight) for call in (traced, layer))
    assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_meta_tensors_have_shapes_alone(function):
    q = torch.empty(2, 4, 4, 8, device="meta", requires_grad=True)
    out = function(q, q, q)
    assert out.is_meta and out.shape == q.shape
    out.sum().backward()
    assert q.grad.is_meta and q.grad.shape == q.shape


def test_compiled_gradient_is_refused_rather_than_lost():
    q, k, v = qkv("cpu")
    gradient = torch.func.grad(lambda q: attention(q, k, v).square().sum())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(gradient, backend="eager", fullgraph=True)(q)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"bias": torch.zeros(1, HEADS, QUERIES, KEYS)}], ids=str)
def test_many_gradients_at_once(options):
    """torch.autograd.grad(is_grads_batched=True), by which jacobian(vectorize=True) works."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv("cpu"))
    result = attention(q, k, v, **options)
    out = result[0] if "return_lse" in options else result
    directions = torch.randn(3, *out.shape)
    many = torch.autograd.grad(out, (q, k, v), directions, is_grads_batched=True, retain_graph=True)
    for n, direction in enumerate(directions):
        for one, other in zip(torch.autograd.grad(out, (q, k, v), direction, retain_graph=True), many, strict=True):
            assert_close(other[n], one)


def test_refusals_say_what_is_not_computed():
    q, k, v = qkv("cpu")
    slopes = torch.ones(q.shape[2])
    with pytest.raises(NotImplementedError, match="attention: forward-mode derivatives"):
        torch.func.jvp(lambda slopes: attention(q, k, v, alibi_slopes=slopes), (slopes,), (slopes,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="attention: forward-mode derivatives"):
        attention(q, k, v, alibi_slopes=forward_ad.make_dual(slopes, slopes))
    for transform in (torch.func.vmap, lambda function: torch.func.grad(lambda q: function(q).sum())):
        with pytest.raises(NotImplementedError, match="score_mod, mask_mod: transforms"):
            transform(lambda q: attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2))(q[None].expand(2, *q.shape))
