"""The backward pass as a node of torch's graph, so that its own derivative is refused, not dropped."""

import torch

from flash_attention.pytorch import ops as torch_ops


def refuse(ctx, *unused):
    """The derivative of a backward pass."""
    raise RuntimeError(
        "attention: second derivatives are not computed; torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them"
    )


class Gradients(torch.autograd.Function):
    """torch_ops.backward() where a graph of the gradients is wanted: create_graph=True, or torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scalars, need_dbias, need_dsink, out, lse, rng_state, dout, dlse, *tensors):
        return torch_ops.backward(tensors, scalars, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse)


def gradients(tensors, scalars, out, lse, rng_state, dout, dlse, need_dbias, need_dsink):
    """(dq, dk, dv, dbias or None, dsink or None), as torch_ops.backward() gives them."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch.compile has a refusal of its own
        return Gradients.apply(scalars, need_dbias, need_dsink, out, lse, rng_state, dout, dlse, *tensors)
    return torch_ops.backward(tensors, scalars, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)
