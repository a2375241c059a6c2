"""scale, softcap and alibi_slopes that require a gradient.

A scale that learns multiplies q before the call, so that every kernel serves it. A soft cap or slopes that learn become a
program, whose tensors have gradients, together with what follows them in a score."""

import torch

from flash_attention.arguments.names import refusal


def without_learned(q, k, scale, softcap, slopes, bias, score_mod, lengths, layout):
    """(q, scale, softcap, slopes, bias, score_mod) in which no option learns; steps are in the order of docs/numerics.md.
    `lengths`: (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv)."""
    if not isinstance(q, torch.Tensor) or q.dtype.itemsize == 1:
        name = next(n for n, x in (("scale", scale), ("softcap", softcap), ("alibi_slopes", slopes)) if learns(x))
        raise refusal(
            NotImplementedError, name, "a gradient is computed for q of torch in float32, float16 and bfloat16; detach() it"
        )
    steps = []
    if learns(scale):
        q, scale = Scaled.apply(q, _one("scale", scale)), 1.0
    if learns(softcap):
        steps.append(_soft_cap(_one("softcap", softcap)))
        softcap = 0.0
    if bias is not None and steps:
        steps.append(_bias(bias))
        bias = None
    if slopes is not None and (steps or learns(slopes)):
        steps.append(_alibi(slopes, _shift(q, k, lengths, layout)))
        slopes = None
    if steps:
        score_mod = _in_turn([*steps, *([] if score_mod is None else [score_mod])])
    return q, scale, softcap, slopes, bias, score_mod


class Scaled(torch.autograd.Function):
    """q * scale, rounded once; the gradient of scale is summed in float32."""

    @staticmethod
    def forward(ctx, q, scale):
        ctx.save_for_backward(q, scale)
        return _times(q, scale)

    @staticmethod
    def backward(ctx, dq):
        q, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # these gradients have gradients themselves
            scale = scale.to(dq.device)
            return (dq.float() * scale).to(dq.dtype), (dq.float() * q.float()).sum()
        dscale = (dq.float() * q).sum(dtype=torch.float32).to(scale.device) if ctx.needs_input_grad[1] else None
        return _times(dq, scale) if ctx.needs_input_grad[0] else None, dscale


def _times(tensor, scale):
    """tensor * scale in float32, rounded once; in one pass, because an axis makes the scale count among the types."""
    return torch.mul(tensor, scale.to(tensor.device).reshape(1), out=torch.empty_like(tensor))


def learns(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def _one(name, value):
    if value.numel() != 1 or not value.is_floating_point():
        raise refusal(
            ValueError, name, f"got {value.dtype} {list(value.shape)}; expected a number or a tensor of one float"
        )
    return value.float().reshape(())


def _in_turn(steps):
    def score_mod(score, b, h, i, j):
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    return score_mod


def _soft_cap(cap):
    def step(score, b, h, i, j):
        positive = torch.where(cap > 0, cap, 1.0)
        return torch.where(cap > 0, positive * torch.tanh(score / positive), score)

    return step


def _bias(bias):
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    batches, heads, rows, columns = (size > 1 for size in bias.shape)
    return lambda score, b, h, i, j: score + bias[b * batches, h * heads, i * rows, j * columns]


def _alibi(slopes, shift):
    slopes, by_batch = slopes.float(), slopes.dim() == 2

    def step(score, b, h, i, j):
        distance = abs(i + (shift[b] if isinstance(shift, torch.Tensor) else shift) - j)
        return score - (slopes[b, h] if by_batch else slopes[h]) * distance

    return step


def _shift(q, k, lengths, layout):
    """Keys more than queries, of the call or [batch]."""
    starts_q, starts_kv, used_q, used_kv = lengths
    axis = -2 if layout == "bhsd" and starts_q is None else -3
    queries, keys = (
        whole if used is None else used.clamp(max=whole)
        for used, whole in ((used_q, _whole(q, starts_q, axis)), (used_kv, _whole(k, starts_kv, axis)))
    )
    return keys - queries


def _whole(tensor, starts, axis):
    return tensor.shape[axis] if starts is None else starts.diff()
