"""JAX: attention() on jax arrays, through custom calls of XLA, with jit, grad and vmap.

from flash_attention.jax import attention
out = jax.jit(lambda q, k, v: attention(q, k, v, causal=True))(q, k, v)
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy
from jax.custom_batching import custom_vmap

from flash_attention import _core, functional
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.seeds import signed
from flash_attention.arguments.shapes import check_tensors, lse_shape, score_width
from flash_attention.options import Options, Tensors, has_statistics

_TYPES = {
    "integer": numpy.int64, "number": numpy.float32, "optional_number": numpy.float32, "flag": numpy.bool_,
    "optional_flag": numpy.bool_, "text": str,
}  # fmt: skip
_BIAS, _SINK = (Tensors._fields.index(name) for name in ("bias", "sink"))


def attention(q, k, v, **options):
    """flash_attention.attention() for anything that jax.numpy.asarray accepts. Dropout needs a static seed."""
    return functional.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), **options)


def attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_kv=None, **options):
    """flash_attention.attention_packed() for anything that jax.numpy.asarray accepts."""
    return functional.attention_packed(
        jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), cu_seqlens_q, cu_seqlens_kv, **options
    )


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
    **wrong,
):
    """jax.nn.dot_product_attention: same arguments, same result. `implementation` is accepted and has no effect.

    Args:
        query: [batch, seq_q, heads, head_dim], or without batch.
        key, value: [batch, seq_kv, heads_kv, head_dim], or without batch.
        bias, mask: broadcastable to [batch, heads, seq_q, seq_kv]; True = visible.
        is_causal, local_window_size: around the diagonal j = i (top-left); the window is an int or (left, right).
        query_seq_lengths, key_value_seq_lengths: int [batch]; later rows are 0, later keys are hidden.
        return_residual: also return the logarithm of the sum of exponentials, [batch, seq_q, heads], in the dtype of query
            and without a gradient, as jax.nn does. attention(return_lse=True) returns it in float32, differentiable.

    A row that sees no key is 0 here; jax.nn gives the mean of all values.
    """
    if wrong:
        refuse_keywords(dot_product_attention, wrong)
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    whole = query.ndim == 4
    if not whole:
        query, key, value = query[None], key[None], value[None]
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    left, right = _window(local_window_size)
    out, lse = functional.attention(
        *(_whole_vectors(array) for array in (query, key, value)),
        bias=None if bias is None else jnp.asarray(bias),
        mask=None if mask is None else jnp.asarray(mask),
        scale=head_dim**-0.5 if scale is None else scale,
        causal=is_causal,
        window=(left, right),
        alignment="top_left",
        seqused_q=None if query_seq_lengths is None else jnp.asarray(query_seq_lengths, jnp.int32),
        key_lengths=None if key_value_seq_lengths is None else jnp.asarray(key_value_seq_lengths, jnp.int32),
        return_lse=True,
    )
    out, lse = out[..., :head_dim_v], jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(query.dtype))
    out, lse = (out, lse) if whole else (out[0], lse[0])
    return (out, lse) if return_residual else out


def _window(size):
    if size is None:
        return -1, -1
    return (size, size) if isinstance(size, int) else tuple(size)


def _whole_vectors(array):
    """Zeros up to a multiple of 8 change no score."""
    missing = -array.shape[-1] % 8
    return jnp.pad(array, ((0, 0),) * 3 + ((0, missing),)) if missing else array


def run(tensors, options, seed, offset, return_lse):
    _register()
    check_tensors(tensors)
    if has_statistics(options):
        raise NotImplementedError("return_max_logit, return_key_mass, return_entropy: JAX's arrays have none of them")
    for name, tensor in zip(Tensors._fields, tensors, strict=True):
        if tensor is not None and not isinstance(tensor, (jax.Array, numpy.ndarray)):
            raise TypeError(f"{name}: expected an array of JAX, as q is, got {type(tensor).__name__}")
    _check_dtypes(tensors)
    if options.dropout_p and seed is None:
        raise ValueError("seed: got None; dropout in JAX needs a seed, a Python int")
    width = score_width(tensors, options)
    tensors = tensors._replace(
        bias=_scores(tensors.bias, width),
        mask=_scores(tensors.mask, width),
        alibi_slopes=None if tensors.alibi_slopes is None else _constant(_single(tensors.alibi_slopes)),
        sink=_single(tensors.sink),
    )
    if _has_lists(tensors) and tensors.bias is not None:
        tensors = tensors._replace(bias=_bias_of_lists(tensors.bias))
    tensors = _varying(tensors, _axes(tensors))
    if options.scale is None:
        options = options._replace(scale=tensors[0].shape[-1] ** -0.5)
    if options.invariant is None:
        options = options._replace(invariant=_core.invariant_by_default())
    static = tuple((name, _static(name, _TYPES[kind], getattr(options, name))) for name, kind, _ in _core.options)
    out, lse = _attention(
        (*static, ("seed", numpy.int64(signed(seed or 0))), ("offset", numpy.int64(signed(offset)))), *tensors
    )
    return (out, lse) if return_lse else out


def _check_dtypes(tensors):
    """Called before anything is traced: XLA would report an internal error when the program runs."""
    q = tensors.q
    if str(q.dtype) not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"q: got {q.dtype}{list(q.shape)}; allowed dtypes are float32, float16 and bfloat16")
    for name in ("k", "v"):
        tensor = getattr(tensors, name)
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: got {tensor.dtype}{list(tensor.shape)}; expected the dtype of q, {q.dtype}")


def _static(name, kind, value):
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name}: expected a value that is known before anything is traced, got {value.aval}")
    return kind(value)


@jax.custom_jvp
def _constant(slopes):
    return slopes


@_constant.defjvp
def _refuse_gradient(primals, tangents):
    """Called only if slopes are differentiated: their gradient is not computed, and 0 would be wrong."""
    raise NotImplementedError(
        "alibi_slopes: a gradient is wanted, which is not computed; jax.lax.stop_gradient() says that none is"
    )


@jax.custom_jvp
def _bias_of_lists(bias):
    return bias


@_bias_of_lists.defjvp
def _refuse_gradient_of_bias(primals, tangents):
    raise NotImplementedError(
        "bias: a gradient is wanted, which is not computed where keys are listed; jax.lax.stop_gradient() says that none is"
    )


def _has_lists(tensors):
    return tensors.key_indices is not None or tensors.key_blocks is not None


def _axes(arrays):
    """The axes of a shard_map along which any of the arrays differs."""
    if not hasattr(jax, "typeof"):
        return frozenset()
    kinds = [jax.typeof(array) for array in arrays if array is not None]
    return frozenset().union(*(_axes_of_kind(kind) for kind in kinds))


def _axes_of_kind(kind):
    """Older versions of JAX call them vma, newer ones the varying axes of a manual_axis_type."""
    axes = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "vma", frozenset()) if axes is None else axes.varying


def _varying(arrays, axes):
    """The arrays marked as different along `axes`. JAX sums the gradients of arrays that were not."""

    def vary(array):
        missing = () if array is None else tuple(axes - _axes([array]))
        if not missing:
            return array
        return jax.lax.pcast(array, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, missing)

    return tuple(vary(array) for array in arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static, *tensors):
    return _forward(static, *tensors, backward_follows=False)[0]


def _forward(static, *tensors, backward_follows=True):
    tensors = Tensors(*tensors)
    q, v = tensors.q, tensors.v
    results = (
        jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(
            lse_shape(tensors, Options(*(value for _, value in static[: len(Options._fields)]))), jnp.float32
        ),
    )
    out, lse = _call(results, tensors, (), static, backward=False, backward_follows=backward_follows)
    return (out, lse), (tensors, out, lse)


def _backward(static, residuals, cotangents):
    tensors, out, lse = residuals
    wanted = [0, 1, 2] + [slot for slot in (_BIAS, _SINK) if tensors[slot] is not None]
    if _has_lists(tensors):
        wanted = [slot for slot in wanted if slot != _BIAS]
    if tensors[0].size == 0 or (tensors[1].size == 0 and tensors[_SINK] is None):  # no score: no dbias would be written
        return tuple(jnp.zeros_like(tensor) if slot in wanted else None for slot, tensor in enumerate(tensors))
    results = tuple(jax.ShapeDtypeStruct(tensors[slot].shape, tensors[slot].dtype) for slot in wanted)
    gradients = dict(zip(wanted, _call(results, tensors, (out, lse, *cotangents), static, backward=True), strict=True))
    return tuple(gradients.get(slot) for slot in range(len(tensors)))


_attention.defvjp(_forward, _backward)


def _call(results, tensors, more, static, backward, backward_follows=False):
    present = sum(1 << slot for slot, tensor in enumerate(tensors) if tensor is not None)
    operands = [tensor for tensor in tensors if tensor is not None]
    flags = {"backward": numpy.bool_(backward), "backward_follows": numpy.bool_(backward_follows)}
    attributes = {**dict(static), "present": numpy.int64(present), **flags}

    def call(results, *operands):
        return jax.ffi.ffi_call("flash_attention", results, vmap_method="sequential")(*operands, **attributes)

    if present != 0b111:
        return _varying(call(results, *operands, *more), _axes(operands))
    # q, k and v alone: the mapped axis joins the batch, and one call serves all of it.
    alone = custom_vmap(partial(call, results))
    alone.def_vmap(partial(_join_batch, call, results))
    return _varying(alone(*operands, *more), _axes(operands))


def _join_batch(call, results, size, mapped, *operands):
    whole = [
        operand if is_mapped else jnp.broadcast_to(operand, (size, *operand.shape))
        for operand, is_mapped in zip(operands, mapped, strict=True)
    ]
    joined = tuple(jax.ShapeDtypeStruct((size * result.shape[0], *result.shape[1:]), result.dtype) for result in results)
    out = call(joined, *(operand.reshape(size * operand.shape[1], *operand.shape[2:]) for operand in whole))
    return tuple(part.reshape(size, part.shape[0] // size, *part.shape[1:]) for part in out), (True,) * len(results)


def _scores(scores, width):
    if scores is None or scores.ndim == 0 or scores.shape[-1] == width:
        return scores
    return jnp.broadcast_to(scores, (*scores.shape[:-1], width))


def _single(values):
    return None if values is None else jnp.asarray(values, jnp.float32)


def _register(done=[]):  # noqa: B006 - once per process
    if done:
        return
    if not hasattr(_core, "jax_targets"):
        raise ImportError(
            "flash_attention was built without the headers of XLA, which jaxlib has; build it again with `pip install .`, "
            "or with jaxlib installed if the build is not isolated"
        )
    for platform, target in _core.jax_targets.items():
        try:
            jax.ffi.register_ffi_target("flash_attention", target, platform=platform)
        except jax.errors.JaxRuntimeError as error:
            raise ImportError(
                f"jaxlib {jax.lib.__version__} does not take calls of flash_attention, which was built with the headers of "
                "a newer jaxlib; upgrade jax, or build flash_attention again with `pip install .`"
            ) from error
    done.append(True)
