"""torch tensors: autocast, gradients, and the forms that the kernels take."""

import torch
from torch._guards import _TLS

from flash_attention import _core, functional
from flash_attention.arguments.seeds import signed
from flash_attention.arguments.shapes import NAMES, check_tensors, score_width
from flash_attention.pytorch import flops, op_autograd  # noqa: F401 (what ops have)
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import gradients
from flash_attention.pytorch.transforms import TransformedAttention, is_transformed

_NO_EXTRAS = (None,) * 11
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def run(tensors, scalars, seed, offset, return_lse):
    q, k, v, bias, mask, slopes, sink, starts_q, _, used_q, used_kv, key_lengths, hidden_rows, block_mask = tensors
    if not isinstance(q, torch.Tensor) and torch.overrides.has_torch_function((q,)):  # a proxy of torch.fx
        return torch.overrides.handle_torch_function(run, (q,), tensors, scalars, seed, offset, return_lse)
    _check(tensors)
    seed = None if seed is None else signed(seed)
    offset = signed(offset)
    extras = ()
    try:
        if _is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
            q, k, v = (_autocast(tensor, torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
        others = starts_q is used_q is used_kv is key_lengths is hidden_rows is block_mask is None
        if not (others and bias is mask is slopes is sink is None):
            extras = _plain_extras(tensors[3:], score_width(tensors, scalars))
            bias, sink = extras[0], extras[3]
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
    if is_transformed():
        out, lse, _ = TransformedAttention.apply(q, k, v, scalars, seed, offset, *(extras or _NO_EXTRAS))
    elif wants_gradient and (functional.is_tracing() or not torch._C._is_tracing()):
        if torch.are_deterministic_algorithms_enabled():
            scalars = (*scalars[:9], True, *scalars[10:])
        eager = not functional.is_tracing() and type(q) is functional.eager_type
        if not eager:  # torch.compile wants each tensor once
            k = k.view_as(k) if k is q else k
            v = v.view_as(v) if v is q or v is tensors[1] else v
        out, lse = (_apply_attention if eager else Attention.apply)(q, k, v, scalars, seed, offset, *extras)
    else:  # or torch.jit.trace is at work: it records the op, which has gradients of its own
        out, lse, _ = torch_ops.forward((q, k, v, *(extras or _NO_EXTRAS)), scalars, seed, offset, return_lse)
    return (out, lse) if return_lse else out


class Attention(torch.autograd.Function):
    """(out, lse) of a call, with gradients for q, k, v, bias and sink.

    `extras` are the tensors behind q, k, v in the order of the binding, or nothing where there are none: torch looks at
    every argument in every call.
    """

    @staticmethod
    def forward(ctx, q, k, v, scalars, seed, offset, *extras):
        tensors = (q, k, v, *(extras or _NO_EXTRAS))
        out, lse, rng_state = torch_ops.forward(tensors, scalars, seed, offset, True)
        ctx.save_for_backward(q, k, v, out, lse, rng_state, *extras)
        ctx.scalars = scalars
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, rng_state, *extras = ctx.saved_tensors
        unused = (None,) * (3 + len(extras))
        if dout is None and dlse is None:
            return None, None, None, *unused
        need_dbias, need_dsink = (ctx.needs_input_grad[6], ctx.needs_input_grad[9]) if extras else (False, False)
        tensors = (q, k, v, *(extras or _NO_EXTRAS))
        dq, dk, dv, dbias, dsink = gradients(tensors, ctx.scalars, out, lse, rng_state, dout, dlse, need_dbias, need_dsink)
        if not extras:
            return dq, dk, dv, *unused
        return dq, dk, dv, None, None, None, dbias, None, None, dsink, *(None,) * 7


class PlainAttention(torch.autograd.Function):
    """out of a plain call, from C to C: _core.attend() applies it."""

    forward = staticmethod(_core.differentiable_forward)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        found = None
        if not functional.is_tracing() and not torch.is_grad_enabled():
            found = _core.attend_backward(q, k, v, out, lse, dout, ctx.scalars)
        if found is None:
            found = gradients((q, k, v, *_NO_EXTRAS), ctx.scalars, out, lse, None, dout, None, False, False)
        return *found[:3], None


def _apply_in_eager(function):
    """Function.apply without its Python part, which serves torch.func and takes a third of the time."""
    return super(torch.autograd.Function, function).apply


_apply_attention = _apply_in_eager(Attention)


def _enable_fast_path():
    _core.set_eager(
        tensor=torch.Tensor,
        empty_like=torch.empty_like,
        empty_strided=torch.empty_strided,
        float32=torch.float32,
        uint8=torch.uint8,
        grad_enabled=torch.is_grad_enabled,
        deterministic=torch._C._get_deterministic_algorithms,
        differentiate=_apply_in_eager(PlainAttention),
        autocast=_is_any_autocast_enabled,
        autocast_of_cuda=torch.is_autocast_enabled,
        interceptors=(
            torch._C._len_torch_dispatch_stack,
            torch._C._are_functorch_transforms_active,
            torch._C._is_tracing,
        ),
        forward_ad=vars(torch.autograd.forward_ad),
        profiler=vars(torch.autograd.profiler),
    )
    functional.eager_type = torch.Tensor


functional.state_of_torch = _TLS
if torch_ops.HAS_EXCHANGE:
    _enable_fast_path()


def _check(tensors):
    """Refuses what is no strided tensor of torch, and a mix of memory and of shapes alone."""
    q = tensors[0]
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is None:
            if name in ("q", "k", "v"):
                raise TypeError(f"{name}: expected a tensor, got None")
        elif not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor of torch, as q is, got {type(tensor).__name__}")
        elif tensor.is_nested:
            raise TypeError(f"{name}: got a nested tensor; attention_packed takes sequences end to end with cu_seqlens")
        elif tensor.layout is not torch.strided:
            raise TypeError(f"{name}: got layout {tensor.layout}; only torch.strided is allowed")
        elif tensor.is_meta is not q.is_meta:
            raise ValueError(f"{name}: is on {tensor.device}; q is on {q.device}, and all must be on one device")


def _autocast(tensor, dtype):
    return tensor.to(dtype) if getattr(tensor, "dtype", None) in _AUTOCAST_FROM else tensor


def _plain_extras(extras, width):
    bias, mask, slopes, sink, *lengths = extras
    bias = None if bias is None else _scores(bias, width)
    mask = None if mask is None else _scores(mask, width)
    return (bias, mask, _single(slopes), _single(sink), *lengths)


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
