"""flashinfer.msa_ops: MiniMax's sparse attention, each query over the blocks of 128 keys that are selected for it."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention import attention_over_cache, attention_packed
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.compat.flashinfer.arguments import refuse_given, scale_of

__all__ = ["SUPPORTS_PACKED_KV", "msa_sparse_attention", "msa_sparse_decode_attention"]

SUPPORTS_PACKED_KV = True  # k and v may be views of one cache
_KEYS = 128  # of a block


@torch.no_grad()
def msa_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: Any = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
    workspace: Any = None,
    **wrong: NoReturn,
) -> Any:
    """Attention of packed queries, each over its blocks of 128 keys.

        q, k, v = torch.randn(8, 4, 32), torch.randn(300, 2, 32), torch.randn(300, 2, 32)
        blocks = torch.tensor([[[0, 2]] * 8, [[1, -1]] * 8], dtype=torch.int32)  # of each key head and query
        starts, starts_k = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 300], dtype=torch.int32)
        out, lse = msa_sparse_attention(q, k, v, blocks, starts, starts_k, causal=True, return_softmax_lse=True)

    Args:
        q: [total_q, num_qo_heads, head_dim]; float32, float16 or bfloat16, any head_dim.
        k, v: [total_k, num_kv_heads, head_dim], or with page_table [num_pages, num_kv_heads, 128, head_dim], of q's type.
        q2k_indices: int32 [num_kv_heads, total_q, topk], blocks counted within each sequence, in any order. Negative
            entries, and those past its keys, are no blocks. A block that is in a list twice counts once.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1]; cu_seqlens_k is not read with page_table.
        causal: the last query sees all keys, each earlier query one key less.
        page_table: int32 [batch, pages], with seqused_k, int32 [batch].
        v_global_scale: a factor of out.

    Returns out [total_q, num_qo_heads, head_dim], and with return_softmax_lse the natural logarithm of the sum of
    exponentials, float32 [total_q, num_qo_heads]; of a query that sees no key 0 and -inf. Keys of 8 and of 4 bits, q_offset
    and the temperature's logarithm are refused by name. Forward only; attention_packed(key_blocks=...) has gradients.
    """
    if wrong:
        refuse_keywords(msa_sparse_attention, wrong)
    refuse_given(k_scale=k_scale, v_scale=v_scale, k_global_scale=k_global_scale, q_offset=q_offset)
    if return_temperature_lse:
        raise NotImplementedError("return_temperature_lse: got True; only False is supported")
    lists = _lists(q, k, v, q2k_indices)
    given = {"causal": causal, "scale": scale_of(q.shape[-1], softmax_scale), "return_lse": True}
    given |= {"key_blocks": lists, "key_block_size": (1, _KEYS)}
    if page_table is not None:
        if seqused_k is None:
            raise ValueError("seqused_k: got None; expected int32 [batch], which goes with page_table")
        k, v = _pages(k, v)
        out, lse = attention_over_cache(
            q, k, v, page_table=page_table, seqused_kv=seqused_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=None, **given
        )
    elif cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: got None; expected int32 [batch + 1], or page_table with seqused_k")
    else:
        out, lse = attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_kv=seqused_k, **given)
    return _finish(out, lse.T.contiguous(), v_global_scale, return_softmax_lse)


@torch.no_grad()
def msa_sparse_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: Any = None,
    partial_dtype: Any = None,
    force_fused: bool | None = None,
    workspace: Any = None,
    out: Tensor | None = None,
    **wrong: NoReturn,
) -> Any:
    """msa_sparse_attention for sequences of seqlen_q queries each, q [batch * seqlen_q, num_qo_heads, head_dim].

        q, cache = torch.randn(2, 4, 32), torch.randn(5, 2, 128, 32)
        table, lengths = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32), torch.tensor([200, 9], dtype=torch.int32)
        blocks = torch.tensor([[[1, 0], [0, -1]]] * 2, dtype=torch.int32)
        out = msa_sparse_decode_attention(q, cache, cache, blocks, page_table=table, seqused_k=lengths)

    partial_dtype, force_fused and workspace choose an implementation and have no effect. out: a tensor for the result. The
    other arguments and the results are those of msa_sparse_attention.
    """
    if wrong:
        refuse_keywords(msa_sparse_decode_attention, wrong)
    if not isinstance(q, Tensor) or q.dim() != 3 or seqlen_q < 1 or q.shape[0] % seqlen_q:
        raise ValueError(
            f"seqlen_q: got {seqlen_q}; expected a divisor of the rows of q [batch * seqlen_q, heads, head_dim]"
        )
    starts = torch.arange(0, q.shape[0] + 1, seqlen_q, dtype=torch.int32, device=q.device)
    found = msa_sparse_attention(
        q, k, v, q2k_indices, starts, cu_seqlens_k, causal, softmax_scale, page_table, seqused_k, return_softmax_lse,
        k_scale, v_scale, k_global_scale, v_global_scale, q_offset,
    )  # fmt: skip
    if out is None:
        return found
    result, lse = found if return_softmax_lse else (found, None)
    if out.shape != result.shape or out.device != result.device:
        got, wanted = (f"{list(each.shape)} on {each.device}" for each in (out, result))
        raise ValueError(f"out: got {got}; expected {wanted}")
    return (out.copy_(result), lse) if return_softmax_lse else out.copy_(result)


def _lists(q, k, v, indices):
    """int32 [total_q, num_kv_heads, topk]."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("q2k_indices", indices)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise NotImplementedError(
                f"{name}: got {tensor.dtype}; only the type of q, {q.dtype}, is supported over blocks"
            )
    wanted = [k.shape[1], q.shape[0]]
    if indices.dtype != torch.int32 or indices.dim() != 3 or list(indices.shape[:2]) != wanted:
        raise ValueError(
            f"q2k_indices: got {indices.dtype} {list(indices.shape)}; expected int32 [num_kv_heads, total_q, topk], "
            f"[{wanted[0]}, {wanted[1]}, topk]"
        )
    return indices.transpose(0, 1).contiguous()


def _pages(k, v):
    """Views [num_pages, 128, heads, head_dim]."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[2] != _KEYS:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}; expected [num_pages, num_kv_heads, {_KEYS}, head_dim]"
            )
    return k.transpose(1, 2), v.transpose(1, 2)


def _finish(out, lse, scale, return_lse):
    if scale is not None:
        out = (out * scale).to(out.dtype)
    return (out, lse) if return_lse else out
