"""Attention over a cache of keys and values, on torch tensors: in pages, with left padding. Forward only.

As torch_ops: eager code calls the binding, whatever traces goes through torch.ops.flash_attention.forward_cache.
"""

import torch

from flash_attention import _core, torch_ops
from flash_attention.functional import _planned, _scalars

_CACHE_TENSORS = f"{torch_ops.TENSORS}, Tensor? page_table, Tensor? left_padding"
_NUM_TENSORS = torch_ops.NUM_TENSORS + 2


def attention_over_cache(
    q,
    k,
    v,
    *,
    seqused_kv=None,
    page_table=None,
    left_padding=None,
    cu_seqlens_q=None,
    max_seqlen_q=0,
    seqused_q=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    mask=None,
    sink=None,
    scale=None,
    return_lse=False,
    kernel=None,
    invariant=False,
):
    """attention() over k and v [batch, seq, heads_kv, head_dim], or pages [num_pages, page_size, heads_kv, head_dim].

    Row j of sequence b is row j % page_size of page page_table[b, j // page_size]; entries behind its seqused_kv[b] keys
    may be anything. Keys before left_padding[b] are hidden. With cu_seqlens_q, q is [total_q, heads_q, head_dim]. A mask
    is as wide as the table: [batch, heads_q, max_seqlen_q, pages * page_size], or 1 in place of any but the last.
    """
    tensors = (
        q,
        k,
        v,
        None,
        mask,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        None,
        seqused_q,
        seqused_kv,
        None,
        None,
        None,
        page_table,
        left_padding,
    )
    scalars = _scalars(
        max_seqlen_q or 0,
        0,
        scale,
        softcap,
        causal,
        "bottom_right",
        window,
        0.0,
        False,
        "bshd",
        _planned(kernel, invariant),
    )
    if torch_ops.is_watched(q):
        out, lse = torch.ops.flash_attention.forward_cache(*tensors, *scalars)
    else:
        out, lse = _forward(tensors, scalars, return_lse)
    return (out, lse) if return_lse else out


def _forward(tensors, scalars, need_lse):
    out, lse = torch_ops.empty_results(tensors, scalars, need_lse)
    tensors, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    _core.forward(tensors, scalars, out, lse, 0, 0, stream, lambda size: torch_ops.workspace(out, size))
    return out, lse


torch_ops.library.define(
    f"forward_cache({_CACHE_TENSORS}, {torch_ops.SCALARS}) -> (Tensor out, Tensor lse)", tags=torch_ops.EXACT_STRIDES
)


def _forward_op(*arguments):
    return _forward(arguments[:_NUM_TENSORS], arguments[_NUM_TENSORS:], True)


def _forward_fake(*arguments):
    return torch_ops.empty_results(arguments[:_NUM_TENSORS], arguments[_NUM_TENSORS:], True)


for _key in ("CPU", "CUDA"):
    torch_ops.library.impl("forward_cache", _forward_op, _key)
torch.library.register_fake("flash_attention::forward_cache", _forward_fake, lib=torch_ops.library)
