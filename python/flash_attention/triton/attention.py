"""The differentiable entry point, and its refusals."""

import math

import torch

from .backward import backward
from .forward import forward
from .tiles import INTERPRETED


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        out, lse = forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        return (*Gradients.apply(q, k, v, out, lse, grad_out, grad_lse, ctx.causal, ctx.scale), None, None)


class Gradients(torch.autograd.Function):
    """The backward pass as a separate node, so that a second derivative is refused, not dropped."""

    @staticmethod
    def forward(ctx, *arguments):
        return backward(*arguments)

    @staticmethod
    def backward(ctx, *unused):
        raise RuntimeError("attention: second derivatives are not computed")


def attention(q, k, v, causal=False, scale=None, return_lse=False):
    """softmax(scale q k^T) v, exactly, without storing the scores.

    q [batch, seq_q, heads_q, head_dim]; k, v [batch, seq_kv, heads_kv, head_dim]; fp16 or bf16; the last stride is 1, the
    others are free; heads_q is a multiple of heads_kv. Causal is aligned bottom-right: query i sees keys
    j <= i + seq_kv - seq_q. Returns out, shaped like q, and with return_lse also the log-sum-exp, fp32 [batch, heads_q,
    seq_q]. Both are differentiable.
    """
    check(q, k, v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if not scale > 0:
        raise ValueError(f"scale: got {scale}; allowed: a number above 0")
    out, lse = Attention.apply(q, k, v, bool(causal), float(scale))
    return (out, lse) if return_lse else out


def check(q, k, v):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions; allowed: 4, [batch, seq, heads, head_dim]")
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{name}: got dtype {tensor.dtype}; allowed: torch.float16, torch.bfloat16")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name}: got {tensor.dtype} on {tensor.device}; allowed: that of q, {q.dtype} on {q.device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(f"{name}: got last stride {tensor.stride(-1)}; allowed: 1")
    if q.device.type == "cpu" and not INTERPRETED:
        raise ValueError("q: got a CPU tensor; allowed: a GPU tensor, or set TRITON_INTERPRET=1 before Triton is imported")
    batch, _, heads_q, head_dim = q.shape
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"head_dim: got {head_dim}; allowed: a multiple of 8 from 8 to 256")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"k: got shape {tuple(k.shape)}; allowed: [{batch}, seq_kv, heads_kv, {head_dim}], as q has it")
    if v.shape != k.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}; allowed: that of k, {tuple(k.shape)}")
    if k.shape[2] == 0 or heads_q % k.shape[2]:
        raise ValueError(f"heads_kv: got {k.shape[2]}; allowed: a divisor of heads_q, {heads_q}")
