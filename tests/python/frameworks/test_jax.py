"""flash_attention.jax: the same results as the reference, with jit, grad and vmap."""

import os
import subprocess
import sys
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
from flash_attention.jax import attention, attention_packed, dot_product_attention  # noqa: E402


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


DOT_PRODUCT = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (4, 2)},
    "one_window": {"local_window_size": 3, "is_causal": True},
    "scale": {"scale": 0.3},
    "lengths": {"query_seq_lengths": numpy.array([13, 7]), "key_value_seq_lengths": numpy.array([5, 21])},
}


SINGLE, HALF = (20, "float32", 1e-5), (32, "bfloat16", 2e-2)
DOT_PRODUCT_CASES = [pytest.param(name, *SINGLE, id=f"{name}-float32") for name in DOT_PRODUCT]
DOT_PRODUCT_CASES += [
    pytest.param(name, *HALF, id=f"{name}-bfloat16", marks=[] if name in ("plain", "lengths") else pytest.mark.long_tail)
    for name in DOT_PRODUCT
]


@pytest.mark.parametrize("name, head_dim, dtype, tolerance", DOT_PRODUCT_CASES)
def test_dot_product_attention(name, head_dim, dtype, tolerance):
    """jax.nn's own, in float32 of the same numbers, is the judge: values, residual and gradients."""
    shapes = (2, 13, 4, head_dim), (2, 21, 2, head_dim), (2, 21, 2, head_dim), (1, 4, 13, 21), (2, 1, 13, 21)
    q, k, v, bias, visible = (jnp.asarray(array) for array in arrays(*shapes))
    q, k, v = (array.astype(dtype) for array in (q, k, v))
    visible = (visible > -1).at[..., 0].set(True)
    options = {"bias": bias, "mask": visible, **DOT_PRODUCT[name]}

    def loss(call, q, k, v):
        return (call(q, k, v, **options).astype("float32") ** 2).sum()

    single = [array.astype("float32") for array in (q, k, v)]
    out, residual = jax.jit(lambda *t: dot_product_attention(*t, return_residual=True, **options))(q, k, v)
    expected = jax.nn.dot_product_attention(*single, **options)
    rows = jnp.arange(13) < jnp.asarray(options.get("query_seq_lengths", [13, 13]))[:, None]
    theirs = jax.nn.dot_product_attention(q, k, v, return_residual=True, **options)[1]
    assert out.dtype == q.dtype and residual.dtype == theirs.dtype == q.dtype
    exact = jax.nn.dot_product_attention(*single, return_residual=True, **options)[1]
    numpy.testing.assert_allclose(residual.astype("float32")[rows], exact[rows], atol=4 * tolerance, rtol=10 * tolerance)
    of_residual = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True, **options)[1].sum())
    assert not of_residual(q).any()  # as jax.nn's
    numpy.testing.assert_allclose(out.astype("float32")[rows], expected[rows], atol=tolerance, rtol=10 * tolerance)
    assert not out[~rows].any()
    ours = jax.grad(lambda *t: loss(dot_product_attention, *t), (0, 1, 2))(q, k, v)
    theirs = jax.grad(lambda *t: loss(jax.nn.dot_product_attention, *t), (0, 1, 2))(*single)
    for a, b in zip(ours, theirs, strict=True):
        numpy.testing.assert_allclose(a.astype("float32"), b, atol=10 * tolerance * float(jnp.abs(b).max()))


def test_dot_product_attention_without_batch_and_mapped():
    q, k, v = (jnp.asarray(array) for array in arrays((3, 13, 4, 32), (3, 21, 2, 32), (3, 21, 2, 32)))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    alone, residual = dot_product_attention(q[0], k[0], v[0], is_causal=True, return_residual=True)
    numpy.testing.assert_allclose(alone, expected[0], atol=1e-5, rtol=1e-4)
    assert residual.shape == (13, 4)
    mapped = jax.vmap(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))(q, k, v)
    numpy.testing.assert_allclose(mapped, expected, atol=1e-5, rtol=1e-4)


def test_shards_of_one_host():
    """shard_map over two devices, the batch on one axis: values and gradients as on one device."""
    program = """
import jax, numpy
from jax.sharding import Mesh, PartitionSpec as P
from flash_attention.jax import attention
q, k, v = (jax.random.normal(jax.random.key(n), (4, 16, 2, 32)) for n in range(3))
def loss(q, k, v):
    return (attention(q, k, v, causal=True) ** 2).sum(axis=(1, 2, 3))
mesh = Mesh(numpy.array(jax.devices()), ("batch",))
parts = jax.shard_map(loss, mesh=mesh, in_specs=(P("batch"),) * 3, out_specs=P("batch"))
assert len(jax.devices()) == 2
numpy.testing.assert_allclose(jax.jit(parts)(q, k, v), loss(q, k, v), rtol=1e-5)
ours = jax.jit(jax.grad(lambda *t: parts(*t).sum(), (0, 1, 2)))(q, k, v)
for a, b in zip(ours, jax.grad(lambda *t: loss(*t).sum(), (0, 1, 2))(q, k, v)):
    numpy.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
keys = k[0:1].repeat(2, 0)  # the same on both devices: their gradients are summed
parts = jax.shard_map(loss, mesh=mesh, in_specs=(P("batch"), P(), P()), out_specs=P("batch"))
ours = jax.jit(jax.grad(lambda q, k: parts(q, k, k).sum(), (0, 1)))(q, keys)
def whole(q, k):
    k = jax.numpy.tile(k, (2, 1, 1, 1))
    return loss(q, k, k).sum()
theirs = jax.grad(whole, (0, 1))(q, keys)
for a, b in zip(ours, theirs):
    numpy.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


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


def test_what_is_not_differentiated_or_traced_is_refused():
    q, slopes = jax.numpy.ones((1, 8, 2, 16)), jax.numpy.ones(2)
    with pytest.raises(NotImplementedError, match="alibi_slopes: a gradient is wanted"):
        jax.grad(lambda slopes: attention(q, q, q, alibi_slopes=slopes).sum())(slopes)
    for step in (jax.grad, lambda loss: jax.jit(jax.grad(loss))):
        assert step(lambda q: attention(q, q, q, alibi_slopes=slopes).sum())(q).shape == q.shape
    with pytest.raises(TypeError, match="scale: expected a value that is known before anything is traced"):
        jax.jit(lambda scale: attention(q, q, q, scale=scale))(0.5)
    with pytest.raises(TypeError, match=r"k: got bfloat16.*expected the dtype of q, float32"):
        jax.jit(lambda k: attention(q, k, q))(q.astype("bfloat16"))
    with pytest.raises(TypeError, match=r"q: got int32.*allowed dtypes are"):
        attention(*(q.astype("int32"),) * 3)
    with pytest.raises(TypeError, match="window_left: expected a value that is known"):
        jax.jit(lambda left: attention(q, q, q, window=(left, 0)))(3)


THREADS = """
import os
import jax
from flash_attention.jax import attention

names = lambda: len(os.listdir("/proc/self/task"))
q, k, v = (jax.random.normal(jax.random.key(i), (2, 512, 8, 64)) for i in range(3))
step = jax.jit(lambda q, k, v: attention(q @ (q[0, 0].T @ q[0, 0] / 64), k, v, causal=True))
(q @ q.swapaxes(-1, -2)).block_until_ready()
before = names()
for _ in range(3):
    step(q, k, v).block_until_ready()
print(names() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_calls_run_on_the_threads_of_xla():
    def started(**settings):
        settings = {"JAX_PLATFORMS": "cpu", "FLASH_ATTENTION_THREADS": "", **settings}
        done = subprocess.run(
            [sys.executable, "-c", THREADS], capture_output=True, text=True, env={**os.environ, **settings}, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    xla = started()
    own = started(FLASH_ATTENTION_THREAD_SOURCE="own", FLASH_ATTENTION_THREADS="3")
    assert own == xla + 2


@pytest.mark.parametrize("packed", [False, True])
def test_lists_of_keys(packed):
    """Traced lists, with gradients, against torch in float64."""
    from key_list_formula import attend, times_of

    q, k, v, sink = arrays((1, 13, 4, 32), (1, 21, 2, 32), (1, 21, 2, 16), (4,))
    lists = torch.randint(-2, 24, (1, 13, 2, 9), generator=torch.Generator().manual_seed(3)).int()
    counts, weights = torch.randint(0, 10, (1, 13, 2)).int(), torch.randn(13, 4, 16).numpy()
    starts = [jnp.array([0, n], jnp.int32) for n in (13, 21)]

    def loss(q, k, v, sink, lists, counts):
        options = {"causal": True, "sink": sink, "return_lse": True}
        if packed:
            given = {"key_indices": lists[0], "key_counts": counts[0]}
            out, lse = attention_packed(q[0], k[0], v[0], *starts, **given, **options)
        else:
            out, lse = attention(q, k, v, key_indices=lists, key_counts=counts, **options)
        return (out.reshape(13, 4, 16) * weights).sum() + lse.sum()

    value, ours = jax.jit(jax.value_and_grad(loss, argnums=range(4)))(q, k, v, sink, lists.numpy(), counts.numpy())
    inputs = [torch.from_numpy(array).double().requires_grad_() for array in (q, k, v, sink)]
    times = times_of(lists[0], counts[0], 13, 21, 4, 2)
    out, lse = attend(*(x[0] for x in inputs[:3]), times, causal=True, sink=inputs[3])
    total = (out * torch.from_numpy(weights)).sum() + lse.sum()
    total.backward()
    numpy.testing.assert_allclose(value, float(total.detach()), rtol=1e-5)
    for gradient, tensor in zip(ours, inputs, strict=True):
        numpy.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-4, rtol=1e-3)


def test_lists_of_blocks_with_a_bias():
    """A bias has no gradient where keys are listed: refused if it is wanted, and no hindrance to the others."""
    from key_list_formula import attend, times_of

    q, k, v, bias = arrays((1, 13, 4, 32), (1, 21, 2, 32), (1, 21, 2, 32), (1, 4, 13, 21))
    blocks = torch.tensor([[[[0, 3, 3], [1, -1, 2]], [[2, 9, 0], [3, 1, 1]]]], dtype=torch.int32)

    def loss(q, bias):
        out = attention(q, k, v, bias=bias, key_blocks=blocks.numpy(), key_block_size=(8, 5))
        return (out**2).sum()

    exact = torch.from_numpy(q).double().requires_grad_()
    times = times_of(blocks[0], None, 13, 21, 4, 2, (8, 5))
    (
        attend(exact[0], *(torch.from_numpy(x[0]) for x in (k, v)), times, bias=torch.from_numpy(bias[0]))[0] ** 2
    ).sum().backward()
    numpy.testing.assert_allclose(jax.grad(loss)(q, bias), exact.grad.numpy(), atol=1e-4, rtol=1e-3)
    with pytest.raises(NotImplementedError, match=r"^bias: "):
        jax.grad(loss, argnums=1)(q, bias)


def test_a_jaxlib_older_than_the_headers_is_named(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the handler's API version (0.5) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.raises(ImportError, match=rf"jaxlib {jax.lib.__version__} does not take calls .* upgrade jax"):
        flash_attention.jax._register(done=[])
