"""aten::_flash_attention_forward and its kin by this library: what torch's varlen_attn and nested tensors call.

Packed q, k, v are [total, heads, head_dim] with running sums of the lengths; dense ones [batch, seq, heads, head_dim].
torch has no such kernel for CPUs, so on a CPU they work only while this library is registered.
"""

import torch

from flash_attention.options import Options, Tensors
from flash_attention.pytorch import ops as torch_ops

OPS = {}  # name of the aten op -> function(original, *arguments)


def op(name):
    """Names the aten op that a function takes the place of."""

    def decorate(function):
        OPS[name] = function
        return function

    return decorate


def why_not(query, value, *, cum_seq_q=None, cum_seq_k=None, block_table=None, return_debug_mask=False, num_splits=None):
    """Why torch's own kernel gets the call, in words; None where this library takes it."""
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"query: {query.dtype} is taken by no kernel; float32, float16 and bfloat16 are"
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] % 8 or not 0 < tensor.shape[-1] <= 576:
            return f"{name}: a head_dim of {tensor.shape[-1]} is no multiple of 8 up to 576"
    if return_debug_mask:
        return "return_debug_mask: the mask of torch's dropout is not this library's"
    if num_splits not in (None, 0, 1):
        return f"num_splits: {num_splits} asks for a split of torch's kernel; the library chooses its own"
    if cum_seq_q is not None and cum_seq_k is None and block_table is None:
        return "cu_seq_k: None needs a block_table"
    return None


def _arguments(
    query, key, value, starts, longest, dropout_p, is_causal, scale, window, seqused_k=None, slopes=None, invariant=None
):
    """(Tensors, Options)"""
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    starts = [None if tensor is None else tensor.to(torch.int32) for tensor in starts]
    left, right = (-1 if size is None or size < 0 else size for size in window)
    tensors = Tensors(
        query, key, value, alibi_slopes=slopes, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], seqused_kv=seqused_k
    )
    longest = longest if starts[0] is not None else (0, 0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = Options(
        *longest, scale, causal=is_causal, window_left=left, window_right=right, dropout_p=dropout_p,
        deterministic=deterministic, invariant=invariant,
    )  # fmt: skip
    return tensors, options


def _run(
    query, key, value, starts, longest, dropout_p, is_causal, scale, window, seqused_k, slopes, block_table, invariant
):
    """(out, lse, rng_state or None)."""
    if block_table is None:
        arguments = _arguments(
            query, key, value, starts, longest, dropout_p, is_causal, scale, window, seqused_k, slopes, invariant
        )
        return torch_ops.forward(*arguments, None, 0, True)
    from flash_attention.compat.flash_attn.paging import attention_in_pages

    if dropout_p:
        raise NotImplementedError("dropout_p: must be 0 with block_table")
    if seqused_k is None and starts[1] is None:
        raise ValueError("seqused_k: is needed with block_table")
    out, lse = attention_in_pages(
        query,
        key,
        value,
        block_table,
        starts[0],
        starts[1] if seqused_k is None else seqused_k,
        longest[0],
        causal=is_causal,
        window=tuple(-1 if size is None else size for size in window),
        scale=scale,
        alibi_slopes=slopes,
        invariant=invariant,
    )
    return out, lse, None


@op("_flash_attention_forward")
def _forward(
    original,
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
    **later,
):
    choice = {"block_table": block_table, "return_debug_mask": return_debug_mask, "num_splits": num_splits}
    if why_not(query, value, cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k, **choice) is not None or later:
        given = {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "block_table": block_table, "num_splits": num_splits}
        return original(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale,
            window_size_left=window_size_left, window_size_right=window_size_right,
            **{name: value for name, value in given.items() if value is not None}, **later,
        )  # fmt: skip
    out, lse, state = _run(
        query, key, value, (cum_seq_q, cum_seq_k), (max_q, max_k), dropout_p, is_causal, scale,
        (window_size_left, window_size_right), seqused_k, alibi_slopes, block_table, True if num_splits == 1 else None,
    )  # fmt: skip
    state = torch.zeros(2, dtype=torch.int64, device="cpu") if state is None else state
    return out, lse, state, torch.empty(0, dtype=torch.int64), query.new_empty(0)


@op("_flash_attention_forward_no_dropout_inplace")
def _forward_into(
    original, out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
):
    choice = {name: options.get(name) for name in ("block_table", "num_splits")}
    reason = why_not(query, value, cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k, return_debug_mask=return_debug_mask, **choice)
    positional = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask)
    if reason is not None:
        return original(out, query, key, value, *positional, **options)
    result, lse, *_ = _forward(original, query, key, value, *positional, **options)
    out.copy_(result)
    return lse


@op("_flash_attention_backward")
def _backward(
    original,
    dout,
    query,
    key,
    value,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    if why_not(query, value) is not None:
        return original(
            dout, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
            unused, scale=scale, window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip
    window = (window_size_left, window_size_right)
    tensors, options = _arguments(
        query, key, value, (cum_seq_q, cum_seq_k), (max_q, max_k), dropout_p, is_causal, scale, window
    )
    return torch_ops.backward(tensors, options, out, lse, rng_state, dout, None, False, False)[:3]
