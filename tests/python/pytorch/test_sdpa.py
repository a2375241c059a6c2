"""scaled_dot_product_attention with torch's signature, and register()."""

import inspect

import flash_attention
import pytest
import torch
from flash_attention import scaled_dot_product_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa


def exact(*tensors, **options):
    options = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
               for name, value in options.items()}  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH):
        return torch_sdpa(*(tensor.double() for tensor in tensors), **options)


SHAPES = {
    "four": ((2, 4, 17, 32), (2, 4, 23, 32), (2, 4, 23, 32)),
    "three": ((4, 17, 32), (4, 23, 32), (4, 23, 24)),
    "five": ((2, 3, 4, 17, 32), (2, 3, 4, 23, 32), (2, 3, 4, 23, 32)),
    "odd_head_dim": ((2, 4, 17, 30), (2, 4, 23, 30), (2, 4, 23, 13)),
    "broadcast_batch": ((2, 4, 17, 32), (1, 4, 23, 32), (1, 4, 23, 32)),
    "broadcast_query": ((1, 4, 17, 32), (2, 4, 23, 32), (2, 4, 23, 32)),
    "query_without_batch": ((4, 17, 32), (2, 4, 23, 32), (2, 4, 23, 32)),
    "one_query_head": ((2, 1, 17, 32), (2, 4, 23, 32), (2, 4, 23, 32)),
    "one_value_head": ((2, 4, 17, 32), (2, 4, 23, 32), (2, 1, 23, 32)),
    "five_each_its_own": ((2, 1, 4, 17, 32), (1, 3, 4, 23, 32), (3, 4, 23, 32)),
}


@pytest.mark.parametrize("masked", ["none", "causal", "bool", "float", "row"])
@pytest.mark.parametrize("name", SHAPES)
def test_matches_torch(name, masked, device):
    q, k, v = (torch.randn(shape, device=device) for shape in SHAPES[name])
    options = {"is_causal": masked == "causal"}
    if masked == "bool":
        options["attn_mask"] = torch.rand(17, 23, device=device) > 0.3
        options["attn_mask"][:, 0] = True
    if masked == "float":
        options["attn_mask"] = torch.randn(*q.shape[:-1], 23, device=device)
    if masked == "row":
        options["attn_mask"] = torch.randn(17, 1, device=device)
    actual = scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(actual.double(), exact(q, k, v, **options), atol=1e-5, rtol=1e-4)


def test_grouped_heads(device):
    q, k = torch.randn(2, 6, 9, 16, device=device), torch.randn(2, 2, 9, 16, device=device)
    actual = scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(actual.double(), exact(q, k, k, enable_gqa=True), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, k)


def test_keys_and_values_grouped_differently():
    q, k, v = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 3, 9, 16)
    actual = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(actual.double(), exact(q, k, v, enable_gqa=True), atol=1e-5, rtol=1e-4)


def test_scale_and_gradients(device):
    inputs = [torch.randn(2, 4, 17, 32, device=device, requires_grad=True) for _ in range(3)]
    ours = torch.autograd.grad(scaled_dot_product_attention(*inputs, scale=0.2, is_causal=True).square().sum(), inputs)
    theirs = torch.autograd.grad(exact(*inputs, scale=0.2, is_causal=True).square().sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-4, rtol=1e-4)


def test_what_we_do_not_take_goes_to_torch():
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(scaled_dot_product_attention(q, q, q), torch_sdpa(q, q, q))
    wide = torch.randn(1, 2, 5, 512)
    torch.testing.assert_close(scaled_dot_product_attention(wide, wide, wide), torch_sdpa(wide, wide, wide))
    headless = torch.randn(1, 0, 5, 16)
    assert scaled_dot_product_attention(headless, headless, headless).shape == headless.shape
    assert not scaled_dot_product_attention(*(torch.randn(1, 2, 5, 16),) * 3, dropout_p=1.0).any()


@pytest.mark.parametrize("place", range(4))
def test_names_what_is_no_tensor(place):
    arguments = [torch.randn(1, 2, 5, 16) for _ in range(3)] + [None]
    arguments[place] = [1.0]
    with pytest.raises(TypeError, match=("query", "key", "value", "attn_mask")[place]):
        scaled_dot_product_attention(*arguments)


def test_refuses_mask_with_causal(device):
    q = torch.randn(1, 2, 5, 16, device=device)
    with pytest.raises(ValueError, match="attn_mask"):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, device=device, dtype=torch.bool), is_causal=True)


def test_has_torchs_parameters():
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(inspect.signature(scaled_dot_product_attention).parameters) == [*names, "wrong"]


@pytest.fixture
def registered():
    flash_attention.register()
    yield
    flash_attention.unregister()


def counted(monkeypatch):
    """How often the binding's forward ran."""
    from flash_attention.pytorch import ops as torch_ops

    calls = []
    original = torch_ops._core.forward

    class Counting:
        backward = torch_ops._core.backward

        @staticmethod
        def forward(*arguments, **keywords):
            calls.append(1)
            return original(*arguments, **keywords)

    monkeypatch.setattr(torch_ops, "_core", Counting)
    return calls


def test_register_reaches_torchs_function(registered, monkeypatch):
    calls = counted(monkeypatch)
    inputs = [torch.randn(2, 4, 33, 32, requires_grad=True) for _ in range(3)]
    mask = torch.randn(33, 33)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        ours = torch_sdpa(*inputs, **options)
        theirs = exact(*inputs, **options)
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)
        for a, b in zip(
            torch.autograd.grad(ours.square().sum(), inputs),
            torch.autograd.grad(theirs.square().sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(a, b.to(a.dtype), atol=1e-4, rtol=1e-4)
    assert len(calls) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_register_on_cuda(causal, compiled, registered, monkeypatch):
    """Where torch would run its flash kernels; heads-first views, as models have them."""
    torch._dynamo.reset()
    calls = counted(monkeypatch)
    function = torch.compile(torch_sdpa, fullgraph=True, backend="aot_eager") if compiled else torch_sdpa
    leaves = [torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    inputs = [leaf.transpose(1, 2) for leaf in leaves]
    dout = torch.randn_like(inputs[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = function(*inputs, is_causal=causal)
        ours = [out, *torch.autograd.grad(out, leaves, dout)]
    assert len(calls) == 1
    theirs = exact(*inputs, is_causal=causal)
    theirs = [theirs, *torch.autograd.grad(theirs, leaves, dout.double())]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_register_comes_before_cudnn(monkeypatch):
    """Without sdpa_kernel, as programs call it; a mask, which torch's flash refuses, keeps torch's choice."""
    calls = counted(monkeypatch)
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch_sdpa(q, k, v)
    order = torch._C._get_sdp_priority_order()
    flash_attention.register()
    out = torch_sdpa(q, k, v, is_causal=True)
    assert len(calls) == 1
    torch.testing.assert_close(out.double(), exact(q, k, v, is_causal=True), atol=2e-2, rtol=2e-2)
    masked = torch_sdpa(q, k, v, attn_mask=torch.rand(200, 200, device="cuda") < 0.9)
    assert len(calls) == 1 and masked.isfinite().all()
    flash_attention.unregister()
    torch_sdpa(q, k, v)
    assert len(calls) == 1
    assert torch._C._get_sdp_priority_order() == order


@pytest.mark.skipif(not hasattr(torch._C, "_set_sdp_priority_order"), reason="torch is older than 2.6")
def test_flash_takes_the_place_of_cudnn_alone():
    from flash_attention.torch_registry import flash_first

    math, flash, efficient, cudnn, other = 0, 1, 2, 3, 4
    assert flash_first([cudnn, flash, efficient, math, other]) == [flash, cudnn, efficient, math, other]
    assert flash_first([efficient, cudnn, math, flash]) == [efficient, flash, cudnn, math]
    for order in ([flash, efficient, math, cudnn, other], [efficient, flash, cudnn], [cudnn, math], []):
        assert flash_first(order) == order


@pytest.mark.skipif(not hasattr(torch._C, "_set_sdp_priority_order"), reason="torch is older than 2.6")
def test_the_order_waits_for_cuda_and_is_given_back(monkeypatch):
    """On a torch that prefers cuDNN at its first choice, as on Hopper."""
    from flash_attention import torch_registry

    waiting, orders = [], {"now": [1, 2, 0, 3, 4]}

    def choose(*_):
        orders["now"] = [3, 1, 2, 0, 4]

    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: list(orders["now"]))
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: orders.update(now=order))
    preference = torch_registry._FlashFirst()
    assert orders["now"] == [1, 2, 0, 3, 4]
    waiting.pop()()
    assert orders["now"] == [1, 3, 2, 0, 4]
    preference.remove()
    assert orders["now"] == [3, 1, 2, 0, 4]
    torch_registry._FlashFirst().remove()
    waiting.pop()()  # CUDA starts after unregister()
    assert orders["now"] == [3, 1, 2, 0, 4]
    preference = torch_registry._FlashFirst()
    waiting.pop()()
    orders["now"] = [0, 1, 2, 3, 4]  # the program has chosen another since
    preference.remove()
    assert orders["now"] == [0, 1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_register_on_cuda_drops_what_its_backward_drops(registered):
    """out is linear in v, so its gradient is P^T dout with the P that was used, dropout included."""
    q, k = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    v = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch_sdpa(q, k, v, dropout_p=0.4)
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, dout)
    pairing = (out.double() * dout).sum(), (v.double() * dv).sum()
    torch.testing.assert_close(*pairing, atol=0.5, rtol=5e-3)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 16), (torch.float32, 30)], ids=["float64", "odd_head_dim"])
def test_register_leaves_the_rest_to_torch(dtype, head_dim, registered, monkeypatch):
    calls = counted(monkeypatch)
    inputs = [torch.randn(1, 2, 9, head_dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    ours, theirs = torch_sdpa(*inputs, is_causal=True), exact(*inputs, is_causal=True)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-4, rtol=1e-4)
    assert not calls


def test_row_hidden_by_minus_infinity(device):
    """A float mask of -inf over a whole row hides it: the result is 0, as in torch, and gradients are finite."""
    q, k, v = (torch.randn(1, 2, 6, 16, device=device, requires_grad=True) for _ in range(3))
    mask = torch.zeros(6, 6, device=device)
    mask[2] = -torch.inf
    mask[4, 3:] = -torch.inf
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out.double(), exact(q, k, v, attn_mask=mask).nan_to_num(0.0), atol=1e-5, rtol=1e-4)
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


def test_unregister(monkeypatch):
    calls = counted(monkeypatch)
    flash_attention.register()
    flash_attention.unregister()
    q = torch.randn(1, 2, 9, 16)
    torch_sdpa(q, q, q)
    assert not calls
