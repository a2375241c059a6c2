"""torch's own function with register(), over the parameters for which torch tests its fused kernels: the error of outputs
and gradients against fp64 is at most that of the math backend in the same type, with some room."""

import flash_attention
import grid
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

AXES = {
    "batch": (1, 5),
    "heads": ((1, 1), (3, 3), (8, 2)),
    "seq_q": (4, 64, 143, 512, 1024),
    "seq_kv": (4, 64, 129, 512, 1024),
    "head_dim": (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256),
    "causal": (False, True),
    "scale": (None, 0.1),
    "dtype": (torch.float16, torch.bfloat16),
    "views": (False, True),  # [batch, seq, heads, head_dim] seen heads first, as models have it
}


def sample(count, **held):
    found = grid.points(count, {**AXES, **held})
    return [
        {**point, "seq_kv": point["seq_q"]} if point["causal"] else point for point in found
    ]  # torch's flash wants it so


@pytest.fixture
def registered():
    flash_attention.register()
    yield
    flash_attention.unregister()


def tensors(point, device):
    """(leaves, q, k, v)"""
    (heads, heads_kv), views = point["heads"], point["views"]
    leaves = []
    for seq, count in ((point["seq_q"], heads), (point["seq_kv"], heads_kv), (point["seq_kv"], heads_kv)):
        shape = (seq, count) if views else (count, seq)
        leaf = torch.randn(point["batch"], *shape, point["head_dim"], device=device, dtype=point["dtype"])
        leaves.append(leaf.requires_grad_())
    return leaves, *(leaf.transpose(1, 2) if views else leaf for leaf in leaves)


def results(point, backend, leaves, q, k, v, dout):
    with sdpa_kernel(backend):
        options = {
            "is_causal": point["causal"],
            "scale": point["scale"],
            "enable_gqa": point["heads"][0] != point["heads"][1],
        }
        out = torch_sdpa(q, k, v, **options)
    return out, *torch.autograd.grad(out, leaves, dout)


def check(point, device):
    leaves, q, k, v = tensors(point, device)
    dout = torch.randn_like(q)
    ours = results(point, SDPBackend.FLASH_ATTENTION, leaves, q, k, v, dout)
    plain = results(point, SDPBackend.MATH, leaves, q, k, v, dout)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    heads_first = (leaf.transpose(1, 2) if point["views"] else leaf for leaf in wide)
    exact = results(point, SDPBackend.MATH, wide, *heads_first, dout.double())
    for name, mine, other, true in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        allowed = 3 * (other.double() - true).abs().max() + 1e-3 * true.abs().max() + 1e-4
        assert (mine.double() - true).abs().max() <= allowed, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("point", sample(24), ids=grid.name_of)
def test_on_cuda(point, registered):
    check(point, "cuda")


@pytest.mark.parametrize("point", sample(8, seq_q=(4, 64, 143), seq_kv=(4, 64, 129), heads=((1, 1), (3, 3)),
                                         head_dim=(8, 16, 32, 72, 128)), ids=grid.name_of)  # fmt: skip
def test_on_the_cpu(point, registered):
    check({**point, "dtype": torch.bfloat16}, "cpu")
