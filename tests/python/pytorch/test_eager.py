"""The eager route in C: the same bits as the general form in Python, which gets each call that C does not take."""

import time
import weakref

import flash_attention
import pytest
import torch
from flash_attention import _core, routes
from flash_attention.arguments.names import renamed
from flash_attention.flash_attn import flash_attn_func
from flash_attention.pytorch import ops as torch_ops

PLAIN = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "alignment": "top_left"},
    "window": {"window": (5, None)},
    "scores": {"scale": 0.3, "softcap": 4.0},
    "heads_first": {"layout": "bhsd"},
}


@pytest.fixture
def in_python():
    """The calls that _core.attention left to Python."""
    calls = []

    def counting(*arguments, **options):
        calls.append(options)
        return routes.general(*arguments, **options)

    _core.set_python(general=counting, renamed=renamed)
    yield calls
    _core.set_python(general=routes.general, renamed=renamed)


def tensors(device, dtype=torch.float32):
    return [torch.randn(2, size, 4, 32, device=device, dtype=dtype) for size in (17, 23, 23)]


def tensors_for(name, device):
    if "layout" in PLAIN[name]:
        return [tensor.transpose(1, 2) for tensor in tensors(device)]
    return tensors(device)


def both_ways(name, q, k, v, in_python):
    """The result by C, and the same bits by Python."""
    flash_attention.attention(q, q, q)  # the first call loads what is needed
    in_python.clear()
    short = flash_attention.attention(q, k, v, **PLAIN[name])
    assert not in_python
    long = routes.general(q, k, v, **PLAIN[name])
    assert torch.equal(short, long)
    return short, long


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("name", PLAIN)
def test_same_bits_as_the_long_way(name, device, in_python):
    q, k, v = tensors_for(name, device)
    short, long = both_ways(name, q, k, v, in_python)
    assert short.stride() == long.stride()


LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "one row": lambda x: x[:, :1],
    "one of a batch": lambda x: x[1:, 3:9],
    "gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "of three": lambda x: torch.stack((x, x, x), dim=2)[:, :, 1],
}


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_lie_as_empty_like_puts_them_and_are_freed(name, device, in_python):
    q = LAYOUTS[name](tensors(device)[0]).detach()
    leaves = [q.detach().requires_grad_() for _ in range(3)]
    results = [flash_attention.attention(q, q, q)]
    assert not in_python and results[0].grad_fn is None
    assert torch.equal(results[0], routes.general(q, q, q))
    results += torch.autograd.grad(flash_attention.attention(*leaves), leaves, results[0])
    assert [result.stride() for result in results] == [torch.empty_like(q).stride()] * 4
    watched = [weakref.ref(result) for result in results]
    del results
    patience = time.monotonic() + 5  # torch's thread of a GPU may still hold a gradient that it has handed over
    while any(reference() is not None for reference in watched) and time.monotonic() < patience:
        time.sleep(0.001)
    assert [reference() for reference in watched] == [None] * 4


def score_tensors(name, device):
    """A bias and a mask in the shapes that attention() takes."""
    found = {
        "bias": {"bias": torch.randn(17, 23, device=device)},
        "mask": {"mask": torch.rand(2, 1, 17, 23, device=device) < 0.7},
        "both": {"bias": torch.randn(1, 4, 1, 23, device=device), "mask": torch.rand(17, 23, device=device) < 0.7},
    }
    return found[name]


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("name", ["bias", "mask", "both"])
def test_bias_and_mask_go_the_short_way(name, device, in_python):
    q, k, v = tensors(device)
    flash_attention.attention(q, q, q)
    in_python.clear()
    options = score_tensors(name, device)
    short = flash_attention.attention(q, k, v, **options)
    assert not in_python
    assert torch.equal(short, routes.general(q, k, v, **options))


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("wanted", ["q", "bias"])
@pytest.mark.parametrize("name", ["bias", "both"])
def test_bias_and_mask_with_gradients(name, wanted, device, in_python):
    q, k, v = tensors(device)
    options = score_tensors(name, device)
    flash_attention.attention(q, q, q)
    in_python.clear()
    short = flash_attention.attention(q, k, v, **options)
    assert not in_python
    (q if wanted == "q" else options["bias"]).requires_grad_()
    long = flash_attention.attention(q, k, v, **options)
    assert len(in_python) == 1
    assert short.grad_fn is None and long.grad_fn is not None
    assert torch.equal(short, long)


@pytest.mark.parametrize("change", ["autocast", "narrow_v", "odd", "strided", "slopes", "dropout", "parameter"])
def test_goes_on_in_python_with_what_is_not_plain(change, device, in_python):
    q, k, v = tensors(device)
    options = {}
    if change == "narrow_v":
        v = v[..., :16]
    if change == "odd":
        q, k, v = (tensor[..., :30] for tensor in (q, k, v))
    if change == "strided":
        q = torch.randn(2, 17, 32, 4, device=device).transpose(2, 3)
    if change == "slopes":
        options["alibi_slopes"] = torch.rand(4, device=device)
    if change == "dropout":
        options["dropout_p"] = 0.5
    if change == "parameter":
        k = torch.nn.Parameter(k, requires_grad=False)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=change == "autocast"):
        call = flash_attn_func if change in ("odd", "strided") else flash_attention.attention
        out = call(q, k, v, **options)
    assert out.shape == (2, 17, 4, v.shape[-1])
    assert len(in_python) == 1
    assert out.grad_fn is None
    assert out.dtype == (torch.bfloat16 if change == "autocast" else torch.float32)


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("entrance", ["attention", "sdpa"])
def test_tensors_in_autocast_s_type_go_the_short_way(entrance, device, in_python):
    """As behind linear layers in a training step: forward in autocast, backward after it."""
    leaves = [tensor.bfloat16().requires_grad_() for tensor in tensors(device)]
    call = flash_attention.attention
    if entrance == "sdpa":
        call, leaves = (
            flash_attention.scaled_dot_product_attention,
            [leaf.detach()[:, :4].requires_grad_() for leaf in leaves],
        )
    call(*leaves)
    in_python.clear()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = call(*leaves)
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    with torch.autocast(device, dtype=torch.bfloat16):
        out_inside = call(*leaves)
        found_inside = torch.autograd.grad(out_inside, leaves, torch.ones_like(out))
    assert not in_python
    expected = call(*leaves)
    assert torch.equal(out, expected) and torch.equal(out_inside, expected)
    expected = torch.autograd.grad(expected, leaves, torch.ones_like(out))
    for one, inside, other in zip(found, found_inside, expected, strict=True):
        assert torch.equal(one, other) and torch.equal(inside, other)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_tensor_of_another_type_is_cast(which, dtype, device, in_python):
    given = [tensor.bfloat16() for tensor in tensors(device)]
    expected = flash_attention.attention(*given)
    in_python.clear()
    given[which] = given[which].to(dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attention.attention(*given)
    assert len(in_python) == 1
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("name", PLAIN)
def test_lse_by_both_ways(name, device, in_python):
    q, k, v = tensors_for(name, device)
    flash_attention.attention(q, q, q)
    in_python.clear()
    short = flash_attention.attention(q, k, v, return_lse=True, **PLAIN[name])
    assert not in_python
    for ours, others in zip(short, routes.general(q, k, v, return_lse=True, **PLAIN[name]), strict=True):
        assert torch.equal(ours, others)


@pytest.mark.skipif(not torch_ops.HAS_EXCHANGE, reason="torch is older than 2.11")
@pytest.mark.parametrize("wanted", ["q", "v", "all"])
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_are_those_of_the_long_way(name, wanted, device, in_python):
    q, k, v = tensors_for(name, device)
    leaves = [tensor.requires_grad_() for letter, tensor in zip("qkv", (q, k, v), strict=True) if wanted in (letter, "all")]
    short, long = both_ways(name, q, k, v, in_python)
    dout = torch.randn_like(short)
    for ours, others in zip(torch.autograd.grad(short, leaves, dout), torch.autograd.grad(long, leaves, dout), strict=True):
        torch.testing.assert_close(ours, others, atol=1e-6, rtol=1e-5)


def test_gradients_with_what_torch_saves(device):
    q, k, v = (tensor.requires_grad_() for tensor in tensors(device))
    flash_attention.attention(q, k, v)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        flash_attention.attention(q, k, v)
    assert len(packed) == 5  # q, k, v, out, lse
    out = flash_attention.attention(2 * q, k, v)
    out.mul_(2)  # the backward pass reads it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_gradient_where_none_is_enabled(device, in_python):
    q, k, v = (tensor.requires_grad_() for tensor in tensors(device))
    with torch.no_grad():
        out = flash_attention.attention(q, k, v)
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(flash_attention.attention(q, k, v), out)


def test_mistakes_are_the_same(device):
    q, k, v = tensors(device)
    with pytest.raises(ValueError, match="softcap"):
        flash_attention.attention(q, k, v, softcap=-1.0)
    with pytest.raises(ValueError, match="v: got"):
        flash_attention.attention(q, k[:, :5], v)
    with pytest.raises(TypeError, match="k: got"):
        flash_attention.attention(q, k.half(), v)
