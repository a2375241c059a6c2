"""The backward pass as a node of torch's graph: gradients that are not computed, its own among them, are refused."""

import torch
from torch.autograd import forward_ad

from flash_attention.options import NUM_TENSORS, Tensors
from flash_attention.pytorch import ops as torch_ops


def refuse(ctx, *unused):
    """The derivative of a backward pass."""
    raise RuntimeError(
        "attention: second derivatives are not computed; torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them"
    )


class Held:
    """Options as one argument of an autograd function: torch's rules for vmap would take a named tuple apart."""

    def __init__(self, options):
        self.options = options


class Gradients(torch.autograd.Function):
    """torch_ops.backward() where a graph of the gradients is wanted: create_graph=True, or torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held, need_dbias, need_dsink, out, lse, rng_state, dout, dlse, *tensors):
        return torch_ops.backward(Tensors(*tensors), held.options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse)
    jvp = staticmethod(refuse)


class ForwardOnly(torch.autograd.Function):
    """Results that require a gradient, as torch's do, and refuse it when it is computed, in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, num_results, *results_and_sources):
        return results_and_sources[:num_results]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *unused):
        raise RuntimeError(
            f"{ctx.name}: has no gradients, and the tensors it was given require them; attention() of float32, float16 and "
            "bfloat16 has, and torch.no_grad() or detach() says that none are wanted"
        )

    @staticmethod
    def jvp(ctx, *unused):
        raise NotImplementedError(
            f"{ctx.name}: forward-mode derivatives (jvp, jacfwd, hessian, dual tensors) are not computed; attention() of "
            "float32, float16 and bfloat16 has those of grad, vjp and jacrev"
        )


def refusing_gradients(name, found, *sources):
    """`found`, a result or a tuple of them, of a call without derivatives."""
    if torch.compiler.is_compiling():
        return found
    sources = [tensor for tensor in sources if isinstance(tensor, torch.Tensor)]
    if not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        sources = [tensor for tensor in sources if tensor.requires_grad] if torch.is_grad_enabled() else []
    if not sources:
        return found
    results = found if isinstance(found, tuple) else (found,)
    results = ForwardOnly.apply(name, len(results), *results, *sources)
    return results if isinstance(found, tuple) else results[0]


# Places in an autograd function's arguments: q, k, v, options, seed, offset, *extras. The extras are the other tensors.
_BIAS, _SINK = (3 + Tensors._fields.index(name) for name in ("bias", "sink"))
_NOTHING = (None,) * NUM_TENSORS


def needed(ctx):
    """Whether bias and sink ask for gradients."""
    return ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINK]


def in_places(dq, dk, dv, dbias, dsink):
    """The gradients, each where its argument is."""
    found = [dq, dk, dv, *_NOTHING]
    found[_BIAS], found[_SINK] = dbias, dsink
    return tuple(found)


def gradients(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink):
    """(dq, dk, dv, dbias or None, dsink or None), as torch_ops.backward() gives them."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch.compile has a refusal of its own
        return Gradients.apply(Held(options), need_dbias, need_dsink, out, lse, rng_state, dout, dlse, *tensors)
    return torch_ops.backward(tensors, options, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)
