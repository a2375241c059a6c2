"""xformers' attention over this library: `from flash_attention.xformers import memory_efficient_attention`.

Its bias classes are in attn_bias and here; objects of the real package are accepted, too.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.head_dim import padded
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import Renamed
from flash_attention.compat.xformers import attn_bias
from flash_attention.compat.xformers.attn_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from flash_attention.compat.xformers.bands import band_of
from flash_attention.merge import merge_states
from flash_attention.torch_cache import attention_over_cache

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    **wrong: NoReturn,
) -> Tensor:
    """Attention of query [batch, seq_q, heads, head_dim] over key and value, differentiable.

        out = memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask(), p=0.0)

    [batch, seq, head_dim] is one head; [batch, seq, groups, heads, head_dim] is grouped: keys that are expanded over the
    heads of a group (stride 0) are read once. attn_bias is one of the classes here, or xformers' own, or a tensor that is
    added: [batch, heads, seq_q, seq_kv], each size may be 1. Block-diagonal biases need a batch of 1. p is the dropout
    probability. op is accepted, without effect. Keys in pages have no gradients.
    """
    if wrong:
        refuse_keywords(memory_efficient_attention, wrong)
    return _run(query, key, value, attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    **wrong: NoReturn,
) -> Tensor:
    """memory_efficient_attention() without a gradient.

    For example:

        out = memory_efficient_attention_forward(q, k, v, LowerTriangularMask())
    """
    if wrong:
        refuse_keywords(memory_efficient_attention_forward, wrong)
    with torch.no_grad():
        return _run(query, key, value, attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """(out, lse), lse float32 [batch, heads, seq_q] ([batch, groups, heads, seq_q] of grouped heads).

    For example:

        out, lse = memory_efficient_attention_forward_requires_grad(q, k, v, LowerTriangularMask())
    """
    if wrong:
        refuse_keywords(memory_efficient_attention_forward_requires_grad, wrong)
    return _run(query, key, value, attn_bias, p, scale, output_dtype)


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over some of the keys; merge_attentions() merges such parts.

    For example:

        out, lse = memory_efficient_attention_partial(q, k[:, :8], v[:, :8])
    """
    if wrong:
        refuse_keywords(memory_efficient_attention_partial, wrong)
    if p != 0.0:
        raise NotImplementedError(f"p: got {p}; parts take no dropout")
    return _run(query, key, value, attn_bias, p, scale, output_dtype)


def merge_attentions(
    attn_split: Any, lse_split: Any, write_lse: bool = True, output_dtype: torch.dtype | None = None, **wrong: NoReturn
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) over all keys from parts: lists, or tensors with the parts as first axis.

    For example:

        halves = [memory_efficient_attention_partial(q, k[:, at], v[:, at]) for at in (slice(0, 8), slice(8, 16))]
        out, lse = merge_attentions(*zip(*halves))
    """
    if wrong:
        refuse_keywords(merge_attentions, wrong)
    outs, lses = list(attn_split), list(lse_split)
    grouped = outs[0].dim() == 5
    flat = [out.flatten(2, 3) if grouped else out for out in outs]
    out, lse = merge_states(flat, [lse.flatten(1, 2) if grouped else lse for lse in lses], dtype=output_dtype)
    return out.view(outs[0].shape), lse.view(lses[0].shape) if write_lse else None


# The callers' names for our arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_bias", "mask": "attn_bias", "dropout_p": "p"}


def _run(query, key, value, bias, p, scale, dtype):
    """(out, lse) in the axes of query."""
    q, k, v = (_heads(name, tensor) for name, tensor in (("query", query), ("key", key), ("value", value)))
    if query.dim() == 5:
        k, v = _groups(key, value, k, v)
    options = {"dropout_p": p, "scale": scale, "return_lse": True}
    with Renamed(_NAMES):
        if bias is None or isinstance(bias, Tensor):
            out, lse = padded(q, k, v, bias=_tensor_bias(bias, query.dim()), **options)
        else:
            out, lse = _with_class(q, k, v, bias, query.dim(), options)
    out = out.reshape(*query.shape[:-1], v.shape[-1])
    if query.dim() == 5:
        lse = lse.unflatten(1, query.shape[2:4])
    elif query.dim() == 3:
        lse = lse[:, 0]
    return out if dtype is None else out.to(dtype), lse


def _heads(name, tensor):
    """[batch, seq, heads, head_dim]"""
    if tensor.dim() not in (3, 4, 5):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}; expected [batch, seq, heads, head_dim]")
    return tensor[:, :, None] if tensor.dim() == 3 else tensor.flatten(2, 3) if tensor.dim() == 5 else tensor


def _groups(key, value, k, v):
    """Keys that all heads of a group share, once."""
    if all(tensor.shape[3] == 1 or tensor.stride(3) == 0 for tensor in (key, value)):
        return key[:, :, :, 0], value[:, :, :, 0]
    return k, v


def _tensor_bias(bias, axes):
    if bias is None:
        return None
    return bias[:, None] if axes == 3 and bias.dim() == 3 else bias.flatten(1, 2) if axes == 5 and bias.dim() == 5 else bias


def _with_class(q, k, v, bias, axes, options):
    band = band_of(bias)
    if band.shape == "dense":
        added = _tensor_bias(getattr(bias, "_bias", None), axes)
        return padded(q, k, v, bias=added, **band.options(), **options)
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.shape[0] != 1:
            raise ValueError(f"{name}: got a batch of {tensor.shape[0]}; {type(bias).__name__} wants [1, rows of all, ...]")
    _check_total("query", q, bias.q_seqinfo)
    starts = bias.q_seqinfo.seqstart.to(q.device)
    run = _paged if band.shape == "paged" else _packed
    out, lse = run(q[0], k[0], v[0], bias, band, starts, options)
    return out[None], lse[None]


def _packed(q, k, v, bias, band, starts, options):
    keys = bias.k_seqinfo
    _check_total("key", k[None], keys)
    lengths = getattr(keys, "seqlen", None)
    if lengths is not None:
        room = [end - begin for begin, end in zip(keys.seqstart_py, keys.seqstart_py[1:], strict=False)]
        for n, (length, most) in enumerate(zip(keys.seqlen_py, room, strict=True)):
            if length > most:
                raise ValueError(f"attn_bias: sequence {n} has {length} keys, and the next begins behind {most} of them")
        lengths = lengths.to(q.device)
    first = keys.seqstart_py[0]
    k, v = k[first:], v[first:]
    sequences = {"cu_seqlens_q": starts, "cu_seqlens_kv": keys.seqstart.to(q.device) - first}
    sequences |= {
        "max_seqlen_q": bias.q_seqinfo.max_seqlen,
        "max_seqlen_kv": None if lengths is not None else keys.max_seqlen,
    }
    return padded(q, k, v, packed=sequences, seqused_kv=lengths, **band.options(), **options)


def _paged(q, k, v, bias, band, starts, options):
    if options["dropout_p"]:
        raise NotImplementedError(f"p: got {options['dropout_p']}; keys in pages take no dropout")
    k, v = (tensor.unflatten(0, (-1, bias.page_size)) for tensor in (k, v))
    keys = bias.k_seqinfo
    gaps = getattr(keys, "padding", None) is None
    return attention_over_cache(
        q, k, v, page_table=bias.block_tables.to(q.device), seqused_kv=keys.seqlen.to(q.device), cu_seqlens_q=starts,
        left_padding=keys.seqstart[:-1].to(q.device) if gaps else None, max_seqlen_q=bias.q_seqinfo.max_seqlen,
        window=(band.left, band.right), scale=options["scale"], return_lse=True,
    )  # fmt: skip


def _check_total(name, tensor, sequences):
    total = sequences.seqstart_py[-1]
    if tensor.shape[1] != total:
        raise ValueError(f"{name}: got {tensor.shape[1]} rows; attn_bias has sequences of {total} in all")
