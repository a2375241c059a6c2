"""A second derivative is refused in every way that it can be asked for; a first one with a graph of its own is not."""

import pytest
import torch
from flash_attention import attention, scaled_dot_product_attention
from flash_attention.arguments.options import binding_arguments
from flash_attention.options import NUM_TENSORS

REFUSED = pytest.raises(RuntimeError, match="second derivatives")


def by_op(w, k):
    options = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": None, "alignment": "bottom_right"}
    options |= {"dropout_p": 0.0, "deterministic": False, "kernel": None}
    slots, options = binding_arguments({"q": w, "k": k, "v": k, **options})
    return torch.ops.flash_attention.forward(*slots[:NUM_TENSORS], *options, None, 0)[0]


CALLS = {
    "plain": lambda w, k: attention(w, k, k),
    "lse": lambda w, k: attention(w, k, k, return_lse=True)[1],
    "bias": lambda w, k: attention(w, k, k, bias=torch.zeros(8, 8)),
    "sdpa": lambda w, k: scaled_dot_product_attention(w, k, k, is_causal=True),
    "op": by_op,
}


@pytest.fixture
def leaves(device):
    return torch.randn(1, 8, 2, 16, device=device, requires_grad=True), torch.randn(1, 8, 2, 16, device=device)


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("name", CALLS)
def test_penalty_on_a_gradient(name, loss, leaves):
    w, k = leaves
    if name == "bias" and w.is_cuda:
        pytest.skip("the bias is on the host")
    (plain,) = torch.autograd.grad(loss(CALLS[name](w, k)), w)
    (gradient,) = torch.autograd.grad(loss(CALLS[name](w, k)), w, create_graph=True)
    torch.testing.assert_close(gradient, plain)
    assert gradient.requires_grad
    with REFUSED:
        (w.sum() + gradient.square().sum()).backward()


def test_derivative_by_the_other_inputs(leaves):
    w, k = leaves
    k.requires_grad_()
    (gradient,) = torch.autograd.grad(attention(w, k, k).sum(), w, create_graph=True)
    with REFUSED:
        torch.autograd.grad(gradient.sum(), k)


def test_derivative_by_the_incoming_gradient(leaves):
    w, k = leaves
    dout = torch.randn_like(w, requires_grad=True)
    (gradient,) = torch.autograd.grad(attention(w, k, k), w, dout, create_graph=True)
    with REFUSED:
        torch.autograd.grad(gradient.sum(), dout)


def test_hessian(leaves):
    w, k = leaves
    with REFUSED:
        torch.autograd.functional.hessian(lambda w: attention(w, k, k).sum(), w.detach())


def test_gradient_of_a_gradient(leaves):
    w, k = leaves
    inner = torch.func.grad(lambda w: attention(w, k, k).sum())
    with REFUSED:
        torch.func.grad(lambda w: inner(w).square().sum())(w.detach())
    with REFUSED:
        torch.func.jacrev(inner)(w.detach())


def test_compiled(leaves):
    w, k = leaves
    torch._dynamo.reset()
    step = torch.compile(lambda w: attention(w, k, k).sum(), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(step(w), w, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
