"""Gradients of torch.ops.flash_attention.forward itself: for graphs that hold the op, as torch.jit.trace records them."""

import torch

from flash_attention.options import NUM_TENSORS, Tensors, split
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import gradients, refuse

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
torch.library.register_autograd("flash_attention::backward", refuse, lib=torch_ops.library)
