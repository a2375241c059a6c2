"""flash_attention.jax: the same results as the reference, with jit, grad and vmap."""

import os
from importlib.util import find_spec

import numpy
import pytest
import reference
import torch

# A GPU, where there is one, is for the tests that ask for it: the first platform is the one that arrays lie on by default.
HAS_GPU = torch.cuda.is_available() and any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if HAS_GPU else "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax")
jnp = jax.numpy

import flash_attention  # noqa: E402
from flash_attention import _core  # noqa: E402

if not hasattr(_core, "jax_targets"):
    pytest.skip("built without JAX's headers", allow_module_level=True)
from flash_attention.jax import attention, attention_packed  # noqa: E402


def arrays(*shapes):
    return [torch.randn(shape).numpy() for shape in shapes]


def exact(q, k, v, **options):
    options = {
        name: torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value for name, value in options.items()
    }
    out, lse = reference.attention(*(torch.from_numpy(array).double() for array in (q, k, v)), **options)
    return out.numpy(), lse.numpy()


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (4, 1), "softcap": 5.0},
    "dropout": {"dropout_p": 0.3, "seed": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_forward(name):
    q, k, v = arrays((2, 13, 4, 32), (2, 21, 2, 32), (2, 21, 2, 16))
    options = OPTIONS[name]
    out, lse = jax.jit(lambda *t: attention(*t, return_lse=True, **options))(q, k, v)
    expected, expected_lse = exact(q, k, v, **options)
    numpy.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-4)
    numpy.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-4)


def test_gradients_of_everything():
    q, k, v, bias, sink = arrays((2, 13, 4, 32), (2, 21, 2, 32), (2, 21, 2, 32), (1, 4, 1, 21), (4,))
    weights = torch.randn(2, 13, 4, 32).numpy()

    def loss(q, k, v, bias, sink):
        out, lse = attention(q, k, v, bias=bias, sink=sink, causal=True, return_lse=True)
        return (out * weights).sum() + lse.sum()

    ours = jax.jit(jax.grad(loss, argnums=range(5)))(q, k, v, bias, sink)
    inputs = [torch.from_numpy(array).double().requires_grad_() for array in (q, k, v, bias, sink)]
    out, lse = reference.attention(*inputs[:3], bias=inputs[3], sink=inputs[4], causal=True)
    ((out * torch.from_numpy(weights)).sum() + lse.sum()).backward()
    for gradient, tensor in zip(ours, inputs, strict=True):
        numpy.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-4, rtol=1e-3)


def test_vmap():
    q, k, v = arrays((3, 2, 13, 4, 32), (3, 2, 21, 2, 32), (3, 2, 21, 2, 32))
    out = jax.vmap(lambda *t: attention(*t, causal=True))(q, k, v)
    for n in range(3):
        numpy.testing.assert_allclose(out[n], attention(q[n], k[n], v[n], causal=True), atol=1e-6)
    shared = jax.vmap(lambda q: attention(q, k[0], v[0], causal=True))(q)
    numpy.testing.assert_allclose(shared[2], attention(q[2], k[0], v[0], causal=True), atol=1e-6)


def test_vmap_of_gradients_and_with_bias():
    q, k, v, bias = arrays((3, 2, 13, 4, 32), (3, 2, 21, 2, 32), (3, 2, 21, 2, 32), (3, 4, 13, 21))

    def gradient(q, k, v, bias=None):
        return jax.grad(lambda q: (attention(q, k, v, bias=bias) ** 2).sum())(q)

    for inputs in ((q, k, v), (q, k, v, bias)):
        mapped = jax.jit(jax.vmap(gradient))(*inputs)
        for n in range(3):
            numpy.testing.assert_allclose(mapped[n], gradient(*(array[n] for array in inputs)), atol=1e-5)


def test_packed():
    q = arrays((30, 2, 16))[0]
    starts = jnp.array([0, 10, 30], jnp.int32)
    out = attention_packed(q, q, q, starts, causal=True)
    for begin, end in ((0, 10), (10, 30)):
        alone = attention(q[None, begin:end], q[None, begin:end], q[None, begin:end], causal=True)[0]
        numpy.testing.assert_allclose(out[begin:end], alone, atol=1e-6)


def test_bfloat16():
    q = jnp.asarray(arrays((1, 16, 2, 32))[0], jnp.bfloat16)
    out = attention(q, q, q)
    assert out.dtype == jnp.bfloat16
    expected, _ = exact(*(numpy.array(q.astype(jnp.float32)),) * 3)
    numpy.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)


def test_dropout_needs_a_seed():
    q = jnp.ones((1, 8, 2, 16))
    with pytest.raises(ValueError, match="seed"):
        attention(q, q, q, dropout_p=0.5)


def test_seeds_are_numbers_that_are_known():
    q = jnp.asarray(arrays((1, 8, 2, 16))[0])
    with pytest.raises(TypeError, match="seed: expected an int"):
        jax.jit(lambda seed: attention(q, q, q, dropout_p=0.5, seed=seed))(3)
    with pytest.raises(ValueError, match="seed: got -1"):
        attention(q, q, q, dropout_p=0.5, seed=-1)
    options = {"dropout_p": 0.5, "seed": 2**64 - 1, "offset": 2**63}
    expected, _ = exact(*(numpy.array(q),) * 3, **options)
    numpy.testing.assert_allclose(attention(q, q, q, **options), expected, atol=1e-5, rtol=1e-4)


def test_second_derivatives_are_refused():
    q = jnp.asarray(arrays((1, 8, 2, 16))[0])
    inner = jax.grad(lambda q: attention(q, q, q).sum())
    with pytest.raises(ValueError, match="differentiated"):
        jax.grad(lambda q: inner(q).sum())(q)


def test_errors_name_the_argument():
    q = jnp.ones((1, 8, 2, 16))
    with pytest.raises(ValueError, match="k: "):
        attention(q, q[0], q)
    with pytest.raises(TypeError, match="k: expected an array of JAX"):
        flash_attention.attention(q, torch.ones(1, 8, 2, 16), q)
    with pytest.raises(Exception, match="v: got"):
        jax.block_until_ready(attention(q, q, q[:, :4]))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no NVIDIA GPU, or JAX without CUDA")
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_on_cuda(dtype, tolerance):
    """jit, grad and vmap of a causal call with grouped heads."""
    q, k, v = arrays((2, 3, 40, 4, 32), (2, 3, 40, 2, 32), (2, 3, 40, 2, 32))
    on_gpu = [jax.device_put(array, jax.devices("cuda")[0]).astype(dtype) for array in (q, k, v)]
    rounded = [numpy.array(array.astype("float32")) for array in on_gpu]

    def loss(q, k, v):
        return (jax.vmap(lambda q, k, v: attention(q, k, v, causal=True))(q, k, v).astype("float32") ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*on_gpu)
    leaves = [torch.from_numpy(array).double().flatten(0, 1).requires_grad_() for array in rounded]
    out, _ = reference.attention(*leaves, causal=True)
    expected = torch.autograd.grad(out.square().sum(), leaves)
    for found, true in zip(gradients, expected, strict=True):
        true = true.numpy().reshape(found.shape)
        numpy.testing.assert_allclose(found.astype("float32"), true, atol=10 * tolerance * numpy.abs(true).max())
        assert found.devices() == {jax.devices("cuda")[0]}
