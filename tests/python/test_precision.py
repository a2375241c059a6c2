"""precision: every value is taken everywhere; they differ for float32 on a GPU alone."""

import pytest
import torch
from flash_attention import attention, attention_packed, explain


def dense(q, k, v):
    """[batch, seq, heads, dim] in float64."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def tensors(device, dtype=torch.float32, seq=200, dim=64):
    torch.manual_seed(1)
    return [torch.randn(2, seq, 3, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def error(got, want):
    return (got.double() - want).square().mean().sqrt().item()


@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["ordinary", "large"])
def test_fast_is_as_exact_as_ieee(device, scale):
    """Logits up to 5 and up to 80. With large ones the errors of a row are those of its largest scores, a few."""
    q, k, v = (tensor.detach().mul(scale).requires_grad_() for tensor in tensors(device))
    gradient = torch.randn_like(q)
    want = [dense(q, k, v)]
    want += torch.autograd.grad(want[0], (q, k, v), gradient.double())
    errors = {}
    for precision in ("ieee", "fast"):
        out = attention(q, k, v, precision=precision)
        got = [out, *torch.autograd.grad(out, (q, k, v), gradient)]
        errors[precision] = [error(*pair) for pair in zip(got, want, strict=True)]
    for ieee, fast in zip(errors["ieee"], errors["fast"], strict=True):
        assert fast <= 1.5 * ieee


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_other_types_are_the_same(device, dtype):
    q, k, v = tensors(device, dtype)
    assert torch.equal(attention(q, k, v, precision="fast"), attention(q, k, v))


def test_a_cpu_is_the_same():
    q, k, v = tensors("cpu")
    assert torch.equal(attention(q, k, v, precision="fast"), attention(q, k, v))
    starts = torch.tensor([0, 90, 200], dtype=torch.int32)
    packed = [tensor[0] for tensor in (q, k, v)]
    assert torch.equal(attention_packed(*packed, starts, precision="fast"), attention_packed(*packed, starts))


def test_compiled_and_under_the_checks_of_the_op(device):
    q, k, v = tensors(device, seq=40, dim=16)
    compiled = torch.compile(lambda *qkv: attention(*qkv, precision="fast"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attention(q, k, v, precision="fast"))


@pytest.mark.parametrize("precision", ["fp32", "", None, 1, [1]])
def test_other_values_are_refused_by_name(precision):
    q, k, v = tensors("cpu", seq=8, dim=8)
    with pytest.raises(ValueError, match=r"precision: got .*; allowed are 'auto' and 'ieee' and 'fast' and 'tf32'"):
        attention(q, k, v, precision=precision)


@pytest.mark.parametrize("precision", ["auto", "fast", "tf32", "ieee"])
def test_a_plan_names_the_kernel(device, precision):
    q, k, v = tensors(device)
    text = str(explain(q, k, v, precision=precision))
    cores = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0) and precision != "ieee"
    assert ("kernel     forward/tf32" in text) == cores
    assert (f"precision {precision}" in text) == (precision != "auto")


@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_auto_follows_torch(device, word):
    """torch's word of matrix products is asked for at each call; what the caller says counts more."""
    before = torch.get_float32_matmul_precision()
    q, k, v = tensors(device, seq=40, dim=16)
    try:
        torch.set_float32_matmul_precision(word)
        assert ("precision tf32" in str(explain(q, k, v))) == (word != "highest")
        assert "precision fast" in str(explain(q, k, v, precision="fast"))
        assert "precision" not in str(explain(*(tensor.half() for tensor in (q, k, v))))
        named = attention(q, k, v, precision="fast" if word == "highest" else "tf32")
        assert torch.equal(attention(q, k, v), named)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["auto", "fast", "tf32"])
def test_jax_takes_it(precision):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from flash_attention.jax import attention as of_jax

    q, k, v = (jax.numpy.asarray(tensor.detach().numpy()) for tensor in tensors("cpu", seq=40, dim=16))
    found, ieee = (jax.jit(lambda *qkv, p=p: of_jax(*qkv, precision=p))(q, k, v) for p in (precision, "ieee"))
    assert (found == ieee).all() == (jax.default_backend() == "cpu")
