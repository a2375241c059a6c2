"""attention() on torch tensors: every option, out, lse and all gradients, against the reference."""

import flash_attention
import pytest
import torch
from attention_cases import CASES, NAMES, Case, check


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_float32(case, device):
    check(case, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_half(case, dtype, device):
    check(case, dtype, device)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_heads_first(case, device):
    check(case, torch.float32, device, layout="bhsd")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_standard(case, device):
    check(case, torch.float32, device, kernel="standard")


def test_strided_inputs(device):
    """Slices of one projection, [batch, seq, 3, heads, dim], need no copy and give the same bits as contiguous tensors."""
    qkv = torch.randn(2, 20, 3, 4, 32, device=device)
    q, k, v = qkv.unbind(2)
    strided = flash_attention.attention(q, k, v, causal=True)
    dense = flash_attention.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(strided, dense)


def test_result_keeps_the_layout(device):
    q = torch.randn(2, 20, 4, 32, device=device).transpose(1, 2)
    out = flash_attention.attention(q, q, q, layout="bhsd")
    assert out.stride() == q.stride()


def test_expanded_bias_gradient(device):
    """A bias expanded by the caller gets the gradient of the one it came from."""
    q = torch.randn(2, 16, 2, 16, device=device)
    small = torch.randn(1, 2, 16, 16, device=device, requires_grad=True)
    flash_attention.attention(q, q, q, bias=small).square().sum().backward()
    expanded = small.detach().clone().requires_grad_()
    flash_attention.attention(q, q, q, bias=expanded.expand(2, 2, 16, 16)).square().sum().backward()
    torch.testing.assert_close(expanded.grad, small.grad)


def test_bias_and_mask_over_keys_alone(device):
    q = torch.randn(2, 16, 2, 16, device=device)
    column = torch.randn(2, 1, 16, 1, device=device, requires_grad=True)
    out = flash_attention.attention(q, q, q, bias=column, mask=torch.ones(1, device=device, dtype=torch.bool))
    torch.testing.assert_close(out, flash_attention.attention(q, q, q))
    out.sum().backward()
    assert column.grad.shape == column.shape


def test_nan_behind_the_mask_stays_there(device):
    q, k, v, _ = Case("nan").make(torch.float32, device)
    lengths = torch.tensor([30, 10], dtype=torch.int32, device=device)
    clean = flash_attention.attention(q, k, v, key_lengths=lengths)
    for b, length in enumerate((30, 10)):
        k[b, length:] = torch.nan
        v[b, length:] = torch.inf
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = flash_attention.attention(q, k, v, key_lengths=lengths)
    assert torch.equal(out, clean)
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


def test_seed_from_torch(device):
    """Without a seed, torch.manual_seed decides; with one, nothing else does."""
    q = torch.randn(1, 32, 2, 16, device=device)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(flash_attention.attention(q, q, q, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_forward_is_reproducible(device):
    q, k, v, _ = Case("again", seq_q=200, seq_kv=300, batch=3).make(torch.float32, device)
    first = flash_attention.attention(q, k, v, causal=True)
    assert all(torch.equal(first, flash_attention.attention(q, k, v, causal=True)) for _ in range(3))


def test_deterministic_backward(device):
    q, k, v, _ = Case("again", seq_q=200, seq_kv=300, batch=3).make(torch.float32, device)
    grads = []
    for _ in range(2):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        flash_attention.attention(*inputs, causal=True, deterministic=True).square().sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads", "heads_kv", "head_dim"), [(32, 32, 64), (16, 16, 128), (32, 1, 128), (16, 4, 64)])
def test_deterministic_backward_of_many_blocks(heads, heads_kv, head_dim, causal):
    """Blocks on all SMs add to the same sums: the same bits each time, and next to the sums of any order."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    shape = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 4099, heads, head_dim, **shape, requires_grad=True)
    k, v = (torch.randn(2, 4099, heads_kv, head_dim, **shape, requires_grad=True) for _ in range(2))
    grad = torch.randn_like(q)

    def grads(**options):
        return torch.autograd.grad(flash_attention.attention(q, k, v, causal=causal, **options), (q, k, v), grad)

    first, *others = (grads(deterministic=True) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for a, b in zip(first, grads(), strict=True):
        assert torch.linalg.vector_norm((a - b).float()) < 3e-3 * torch.linalg.vector_norm(b.float())
