"""torch tensors: autocast, gradients, and the forms that the kernels take."""

import torch
from torch.autograd.function import once_differentiable

from flash_attention import torch_ops
from flash_attention.shapes import check_tensors, score_width


def run(tensors, scalars, seed, offset, return_lse):
    q = tensors[0]
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        dtype = torch.get_autocast_dtype(q.device.type)
        tensors = (*(_autocast(tensor, dtype) for tensor in tensors[:3]), *tensors[3:])
    try:
        q, k, v, bias, mask, slopes, sink = tensors[:7]
        if bias is not None or mask is not None or slopes is not None or sink is not None:
            tensors = _plain_extras(tensors, score_width(tensors, scalars))
            bias, sink = tensors[3], tensors[6]
        wants_gradient = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink is not None and sink.requires_grad)
        )
    except (AttributeError, IndexError):
        check_tensors(tensors)
        raise
    if wants_gradient:
        if torch.are_deterministic_algorithms_enabled():
            scalars = (*scalars[:9], True, *scalars[10:])
        out, lse = Attention.apply(*tensors, scalars, seed, offset)
    else:
        out, lse, _ = torch_ops.forward(tensors, scalars, seed, offset, return_lse)
    return (out, lse) if return_lse else out


class Attention(torch.autograd.Function):
    """(out, lse) of a call, with gradients for q, k, v, bias and sink."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, scalars, seed, offset = arguments
        out, lse, rng_state = torch_ops.forward(tuple(tensors), scalars, seed, offset, True)
        ctx.save_for_backward(*tensors, out, lse, rng_state)
        ctx.scalars = scalars
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 15
        *tensors, out, lse, rng_state = ctx.saved_tensors
        dq, dk, dv, dbias, dsink = torch_ops.backward(
            tuple(tensors), ctx.scalars, out, lse, rng_state, dout, dlse, ctx.needs_input_grad[3], ctx.needs_input_grad[6]
        )
        return dq, dk, dv, dbias, None, None, dsink, *(None,) * 8


def _autocast(tensor, dtype):
    return tensor.to(dtype) if getattr(tensor, "dtype", None) == torch.float32 else tensor


def _plain_extras(tensors, width):
    q, k, v, bias, mask, slopes, sink, *lengths = tensors
    bias = None if bias is None else _scores(bias, width)
    mask = None if mask is None else _scores(mask, width)
    return (q, k, v, bias, mask, _single(slopes), _single(sink), *lengths)


def _single(values):
    return None if values is None else values.float().contiguous()


def _scores(scores, width):
    """A bias or mask as the kernels take it: last axis whole and of stride 1, size 1 where it broadcasts.

    An expanded axis is narrowed, so that its gradient is summed by the kernel and torch's expand adds nothing to it.
    """
    if scores.dim() == 0:
        return scores
    if scores.shape[-1] == 1 and width != 1:
        scores = scores.expand(*scores.shape[:-1], width)
    for axis in range(scores.dim() - 1):
        if scores.stride(axis) == 0 and scores.shape[axis] > 1:
            scores = scores.narrow(axis, 0, 1)
    return scores if scores.stride(-1) == 1 else scores.contiguous()
