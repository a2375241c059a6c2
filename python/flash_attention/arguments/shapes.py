"""Shapes that follow from the tensors of a call, for any library: Tensors and Options of flash_attention.options."""

from flash_attention.arguments.names import refusal
from flash_attention.options import Tensors


def lse_shape(tensors, options):
    """[batch, heads_q, seq_q], or [heads_q, total_q] for a packed call."""
    shape = tensors.q.shape
    if tensors.cu_seqlens_q is not None:
        return (shape[1], shape[0])
    return (shape[0], shape[1], shape[2]) if options.heads_first else (shape[0], shape[2], shape[1])


def max_logit_shape(tensors, options):
    """[batch, heads_q]."""
    shape = tensors.q.shape
    if tensors.cu_seqlens_q is not None:
        return (tensors.cu_seqlens_q.shape[0] - 1, shape[1])
    return (shape[0], shape[1] if options.heads_first else shape[2])


def key_mass_shape(tensors, options):
    """[batch, heads_q, seq_kv], or [heads_q, total_kv] for a packed call."""
    shape = tensors.k.shape
    if tensors.cu_seqlens_q is not None:
        return (tensors.q.shape[1], shape[0])
    return (*max_logit_shape(tensors, options), shape[2] if options.heads_first else shape[1])


def score_width(tensors, options):
    """The last size of a bias or a mask."""
    shape = tensors.k.shape
    if tensors.cu_seqlens_q is not None:
        return options.max_seqlen_kv or shape[0]
    return shape[2] if options.heads_first else shape[1]


def check_tensors(tensors):
    """Refuses what is no tensor, and q, k, v of a wrong rank, before any result is allocated from their shapes."""
    rank = 3 if tensors.cu_seqlens_q is not None else 4
    axes = "[total, heads, head_dim]" if rank == 3 else "[batch, seq, heads, head_dim] or [batch, heads, seq, head_dim]"
    for name, tensor in zip(Tensors._fields, tensors, strict=True):
        needed = name in ("q", "k", "v")
        if (needed or tensor is not None) and not hasattr(tensor, "ndim"):
            raise refusal(TypeError, name, f"expected a tensor, got {type(tensor).__name__}")
        if needed and tensor.ndim != rank:
            raise refusal(ValueError, name, f"got shape {list(tensor.shape)}; expected {rank} axes, {axes}")


def parts_of(name, tensor, count, leading="[batch, seq"):
    """q, k and v of a tensor [..., 3, heads, head_dim] of torch, or k and v of one [..., 2, heads, head_dim]."""
    rank = leading.count(",") + 4
    if not hasattr(tensor, "unbind"):
        raise refusal(TypeError, name, f"expected a tensor, got {type(tensor).__name__}")
    if tensor.dim() != rank or tensor.shape[-3] != count:
        raise refusal(ValueError, name, f"got shape {list(tensor.shape)}; expected {leading}, {count}, heads, head_dim]")
    return tensor.unbind(-3)
