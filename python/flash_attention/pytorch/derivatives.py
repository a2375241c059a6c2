"""torch.ops.flash_attention.tangent and .second: forward mode and second derivatives, each a pass of the core.

    tangent: out, lse and their tangents, from those of q, k, v, bias and sink
    second: the gradients of F = sum of dq q_t + dk k_t + dv v_t + dbias bias_t + dsink sink_t, backward's results, by q, k,
        v, bias, sink, dout and dlse; the last two are the tangents of out and lse

A tangent that is None is 0. docs/numerics.md has the formulas. As with forward and backward (ops.py), eager code calls the
binding; what torch must see goes through the ops."""

import torch

from flash_attention import _core
from flash_attention.arguments.seeds import unsigned
from flash_attention.arguments.shapes import lse_shape
from flash_attention.options import NUM_TENSORS, Options, Tensors, split
from flash_attention.pytorch import ops

NUM_TANGENTS = 5  # of q, k, v, bias and sink
_TANGENTS = "Tensor? q_tangent, Tensor? k_tangent, Tensor? v_tangent, Tensor? bias_tangent, Tensor? sink_tangent"

ops.library.define(
    f"tangent({ops.TENSORS}, {ops.OPTIONS}, Tensor rng_state, {_TANGENTS}) -> "
    "(Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent)",
    tags=ops.EXACT_STRIDES,
)
ops.library.define(
    f"second({ops.TENSORS}, {ops.OPTIONS}, Tensor out, Tensor lse, Tensor rng_state, Tensor? dout, Tensor? dlse, "
    f"bool need_dbias, bool need_dsink, {_TANGENTS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink, Tensor out_tangent, Tensor lse_tangent)",
    tags=ops.EXACT_STRIDES,
)


def tangent(tensors, options, rng_state, tangents):
    """(out, lse, out's tangent, lse's tangent). `tangents`: of q, k, v, bias and sink, each or None."""
    q = tensors.q
    if ops.is_watched(q) or any(ops._is_batched(given) for given in tangents):
        rng_state = ops._no_rng_state(q) if rng_state is None else rng_state
        return torch.ops.flash_attention.tangent(*tensors[:NUM_TENSORS], *options, rng_state, *tangents)
    return _tangent(tensors, options, rng_state, tangents)


def second(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink, tangents):
    """(dq, dk, dv, dbias or None, dsink or None, out's tangent, lse's tangent)."""
    if ops.is_watched(out) or any(ops._is_batched(given) for given in (dout, dlse, *tangents)):
        rng_state = ops._no_rng_state(out) if rng_state is None else rng_state
        dq, dk, dv, dbias, dsink, *of_results = torch.ops.flash_attention.second(
            *tensors[:NUM_TENSORS], *options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink, *tangents
        )
        return dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None, *of_results
    return _second(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink, tangents)


def _chosen(options):
    """The options of these passes: a kernel that was named is one of forward or backward, and no bits are invariant."""
    changed = {"kernel": "", "standard": False, "invariant": False}
    return Options(*(changed.get(name, value) for name, value in zip(Options._fields, options, strict=True)))


def _overlaps(tensor):
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _paired(tensors, tangents):
    """Both so that each tangent has the strides of its tensor."""
    names = "q", "k", "v", "bias", "sink"
    found = []
    for name, given in zip(names, tangents, strict=True):
        tensor = getattr(tensors, name)
        if given is not None and _overlaps(tensor):
            tensor = tensor.contiguous()
            tensors = tensors._replace(**{name: tensor})
        found.append(None if given is None else _laid_out_as(tensor, given))
    return tensors, found


def _laid_out_as(tensor, given):
    if given.stride() == tensor.stride() and given.dtype == tensor.dtype:
        return given
    return _empty_as(tensor).copy_(given)


def _empty_as(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _seed(options, rng_state):
    return tuple(map(unsigned, rng_state.tolist())) if options.dropout_p else (0, 0)


def _tangent(tensors, options, rng_state, tangents):
    out, lse = ops.empty_results(tensors, options, True)
    out_t, lse_t = _empty_as(out), torch.empty_like(lse)
    tensors, tangents = _paired(tensors, tangents)
    seed = _seed(options, rng_state)
    (*tensors_and, out_t, lse_t), stream = _bare((*tensors, *tangents, out_t, lse_t))
    tensors, tangents = Tensors(*tensors_and[: len(tensors)]), tensors_and[len(tensors) :]
    _core.tangent(
        tensors, _chosen(options), out, lse, (*tangents, out_t, lse_t), *seed, stream, lambda size: ops.workspace(out, size)
    )
    return out, lse, out_t, lse_t


def _bare(tensors):
    return (tensors, 0) if ops.HAS_EXCHANGE else ops.detached(tensors)


def _second(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink, tangents):
    out = out.contiguous() if _overlaps(out) else out
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    gradients = ops._empty_gradients(tensors, need_dbias, need_dsink)
    out_t, lse_t = _empty_as(out), torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    tensors, tangents = _paired(tensors, tangents)
    seed = _seed(options, rng_state)
    count = len(tensors)
    bare, stream = _bare((*tensors, *tangents, out, lse.contiguous(), dout, dlse))
    tangents, (out_, lse_, dout, dlse) = bare[count : count + NUM_TANGENTS], bare[count + NUM_TANGENTS :]
    _core.second(
        Tensors(*bare[:count]), _chosen(options), (out_, lse_), (dout, dlse, *gradients), (*tangents, out_t, lse_t), *seed,
        stream, lambda size: ops.workspace(out, size),
    )  # fmt: skip
    return *gradients, out_t, lse_t


def _tangent_op(*arguments):
    tensors, options, (rng_state, *tangents) = split(arguments)
    return _tangent(tensors, options, rng_state, tangents)


def _tangent_fake(*arguments):
    tensors, options, _ = split(arguments)
    out, lse = ops.empty_results(tensors, options, True)
    return out, lse, _empty_as(out), torch.empty_like(lse)


def _second_op(*arguments):
    tensors, options, rest = split(arguments)
    *found, out_t, lse_t = _second(tensors, options, *rest[:-NUM_TANGENTS], rest[-NUM_TANGENTS:])
    return *ops._stand_ins(tensors.q, found), out_t, lse_t


def _second_fake(*arguments):
    tensors, options, (out, _, _, _, _, need_dbias, need_dsink, *_) = split(arguments)
    lse = tensors.q.new_empty(lse_shape(tensors, options), dtype=torch.float32)
    return *ops._stand_ins(tensors.q, ops._empty_gradients(tensors, need_dbias, need_dsink)), _empty_as(out), lse


for _key in ("CPU", "CUDA"):
    ops.library.impl("tangent", _tangent_op, _key)
    ops.library.impl("second", _second_op, _key)
torch.library.register_fake("flash_attention::tangent", _tangent_fake, lib=ops.library)
torch.library.register_fake("flash_attention::second", _second_fake, lib=ops.library)
