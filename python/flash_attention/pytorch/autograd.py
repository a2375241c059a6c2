"""attention() of torch tensors: which derivatives a call has, and the autograd functions of eager code."""

import torch
from torch._guards import _TLS

from flash_attention import _core, routes, tracing
from flash_attention.arguments.seeds import signed
from flash_attention.options import NUM_TENSORS, Options, Tensors, has_statistics, made_deterministic
from flash_attention.pytorch import flops, op_autograd, statistics  # noqa: F401 (what ops have)
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.canonical import canonical, is_any_autocast_enabled, is_plain
from flash_attention.pytorch.gradients import Held, gradients, in_places, needed
from flash_attention.pytorch.transforms import TransformedAttention, forward_mode, is_transformed


def run(tensors, options, seed, offset, return_lse):
    q = tensors.q
    if not isinstance(q, torch.Tensor) and torch.overrides.has_torch_function((q,)):  # a proxy of torch.fx
        arguments = tuple(tensors), tuple(options), seed, offset, return_lse
        return torch.overrides.handle_torch_function(_run_of_graph, (q,), *arguments)
    seed = None if seed is None else signed(seed)
    offset = signed(offset)
    tensors = canonical(tensors, options)
    if has_statistics(options):
        if is_transformed():
            raise NotImplementedError(
                "return_max_logit, return_key_mass, return_entropy: transforms of torch.func and forward-mode derivatives "
                "take none of them"
            )
        return statistics.run(tensors, options, seed, offset, return_lse)
    q, k, v, *extras = tensors[:NUM_TENSORS]
    if is_transformed():
        found = forward_mode(tensors, options, seed, offset)
        out, lse = found or TransformedAttention.apply(q, k, v, Held(options), seed, offset, *extras)[:2]
    elif not _wants_gradient(tensors):
        out, lse, _ = torch_ops.forward(tensors, options, seed, offset, return_lse)
    else:
        if torch.are_deterministic_algorithms_enabled():
            options = made_deterministic(options)
        if torch_ops.is_watched(q):  # it sees the op, which has gradients of its own
            out, lse, _ = torch_ops.forward(tensors, options, seed, offset, True)
        else:
            out, lse = _apply_attention(q, k, v, options, seed, offset, *(() if is_plain(tensors) else extras))
    return (out, lse) if return_lse else out


def _wants_gradient(tensors):
    if not torch.is_grad_enabled():
        return False
    given = tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sink
    return any([tensor is not None and tensor.requires_grad for tensor in given])


def _run_of_graph(tensors, options, seed, offset, return_lse):
    """run() as a node of torch.fx, which would make named tuples by nodes of their own."""
    return run(Tensors(*tensors), Options(*options), seed, offset, return_lse)


class Attention(torch.autograd.Function):
    """(out, lse) of a call, with gradients for q, k, v, bias and sink.

    `extras` are the tensors after q, k, v, in the order of the binding. If there are none, nothing is passed: torch looks
    at every argument in every call.
    """

    @staticmethod
    def forward(ctx, q, k, v, options, seed, offset, *extras):
        out, lse, rng_state = torch_ops.forward(Tensors(q, k, v, *extras), options, seed, offset, True)
        ctx.save_for_backward(q, k, v, out, lse, rng_state, *extras)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, rng_state, *extras = ctx.saved_tensors
        unused = (None,) * (3 + len(extras))
        if dout is None and dlse is None:
            return None, None, None, *unused
        needs = needed(ctx) if extras else (False, False)
        found = gradients(Tensors(q, k, v, *extras), ctx.options, out, lse, rng_state, dout, dlse, *needs)
        return in_places(*found) if extras else (*found[:3], *unused)


class PlainAttention(torch.autograd.Function):
    """out of a call in the kernels' form, from C to C: _core.attention() applies it.

    It is separate from Attention because torch looks at each argument and each result of a Function. Such a call takes
    6.4 us of the host; through general() and Attention it would take 27 (AMD EPYC, 8 tokens, one head of 16).
    """

    forward = staticmethod(_core.differentiable_forward)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        traced = tracing.is_tracing() or torch.is_grad_enabled()
        return *(_plain_gradients if traced else _core.attention_backward)(q, k, v, out, lse, dout, ctx.options), None


def _plain_gradients(q, k, v, out, lse, dout, options):
    return gradients(Tensors(q, k, v), options, out, lse, None, dout, None, False, False)[:3]


def _apply_in_eager(function):
    """Function.apply without its Python part, which serves torch.func and takes a third of the time."""
    return super(torch.autograd.Function, function).apply


_apply_attention = _apply_in_eager(Attention)


def connect():
    """Tells the binding and tracing.py what torch is: from then on eager calls are C functions."""
    tracing.state_of_torch = _TLS
    _core.set_eager(
        tensor=torch.Tensor if torch_ops.HAS_EXCHANGE else torch._C.TensorBase,  # the C functions take no tensor
        empty_like=torch.empty_like,
        empty_strided=torch.empty_strided,
        float32=torch.float32,
        uint8=torch.uint8,
        grad_enabled=torch.is_grad_enabled,
        deterministic=torch._C._get_deterministic_algorithms,
        matmul_precision=torch.get_float32_matmul_precision,
        differentiate=_apply_in_eager(PlainAttention),
        general_backward=_plain_gradients,
        autocast=is_any_autocast_enabled,
        autocast_of_cuda=torch.is_autocast_enabled,
        autocast_type=torch.get_autocast_dtype,
        dispatch_modes=torch._C._len_torch_dispatch_stack,
        interceptors=(
            torch._C._are_functorch_transforms_active,
            torch._C._is_tracing,
        ),
        forward_ad=vars(torch.autograd.forward_ad),
        profiler=vars(torch.autograd.profiler),
        options=Options,
    )
    routes.eager_type = torch.Tensor if torch_ops.HAS_EXCHANGE else None
