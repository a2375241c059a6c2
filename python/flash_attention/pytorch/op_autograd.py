"""Gradients of torch.ops.flash_attention.forward itself: for graphs that hold the op, as torch.jit.trace records them."""

import torch

from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import gradients, refuse

_BIAS, _SINK = 3, 6


def _save(ctx, inputs, output):
    tensors, scalars, _ = torch_ops.split(inputs)
    ctx.save_for_backward(*tensors, *output)
    ctx.scalars = scalars
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, _):
    *tensors, out, lse, rng_state = ctx.saved_tensors
    found = [None] * len(ctx.needs_input_grad)
    if dout is not None or dlse is not None:
        needs = ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]
        *found[:3], found[_BIAS], found[_SINK] = gradients(
            tuple(tensors), ctx.scalars, out, lse, rng_state, dout, dlse, *needs
        )
    return tuple(found)


torch.library.register_autograd("flash_attention::forward", _backward, setup_context=_save, lib=torch_ops.library)
torch.library.register_autograd("flash_attention::backward", refuse, lib=torch_ops.library)
