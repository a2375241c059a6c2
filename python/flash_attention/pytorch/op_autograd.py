"""Gradients of torch.ops.flash_attention.forward itself: for graphs that hold the op, as torch.jit.trace records them."""

import torch

from flash_attention.options import NUM_OPTIONS, NUM_TENSORS, Tensors, split
from flash_attention.pytorch import derivatives  # noqa: F401 (its ops)
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import computes, gradients, refuse, refuse_third, second

_BIAS, _SINK = (Tensors._fields.index(name) for name in ("bias", "sink"))


def _save(ctx, inputs, output):
    tensors, options, _ = split(inputs)
    ctx.save_for_backward(*tensors[:NUM_TENSORS], *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, _):
    *tensors, out, lse, rng_state = ctx.saved_tensors
    found = [None] * len(ctx.needs_input_grad)
    if dout is not None or dlse is not None:
        needs = ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]
        *found[:3], found[_BIAS], found[_SINK] = gradients(
            Tensors(*tensors), ctx.options, out, lse, rng_state, dout, dlse, *needs
        )
    return tuple(found)


torch.library.register_autograd("flash_attention::forward", _backward, setup_context=_save, lib=torch_ops.library)


def _save_backward(ctx, inputs, output):
    tensors, options, (*results, ctx.need_dbias, ctx.need_dsink) = split(inputs)
    ctx.save_for_backward(*tensors[:NUM_TENSORS], *results)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _twice(ctx, dq, dk, dv, dbias, dsink):
    *tensors, out, lse, rng_state, dout, dlse = ctx.saved_tensors
    tensors = Tensors(*tensors)
    if not computes(tensors):
        refuse(ctx)
    tangents = dq, dk, dv, dbias if ctx.need_dbias else None, dsink if ctx.need_dsink else None
    found = [None] * len(ctx.needs_input_grad)
    of = second(ctx.options, ctx.need_dbias, ctx.need_dsink, (out, lse, rng_state), (dout, dlse), tangents, tensors)
    *found[:3], found[_BIAS], found[_SINK] = of[:5]
    first = NUM_TENSORS + NUM_OPTIONS + 3
    found[first], found[first + 1] = None if dout is None else of[5], None if dlse is None else of[6]
    return tuple(found)


torch.library.register_autograd("flash_attention::backward", _twice, setup_context=_save_backward, lib=torch_ops.library)
for _op in ("tangent", "second"):
    torch.library.register_autograd(f"flash_attention::{_op}", refuse_third, lib=torch_ops.library)
