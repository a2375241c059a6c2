"""FlashAttention-4's functions (flash_attn.cute) over this library: `from flash_attention import flash_attn_4`.

score_mod and mask_mod are Python functions of torch's operations on tensors without axes. They are called as
in FlashAttention-4 (keywords q_idx, kv_idx, seqlen_info, aux_tensors, and aux_scalars if given), or, if they have five and
four parameters, as in FlexAttention. Functions that CuTe has compiled are refused by name: their body is GPU code.
Derivatives are those of score_mod itself, so score_mod_bwd is refused; aux_tensors that require gradients get them. Both
functions return (out, lse), lse None unless return_lse.

num_splits, pack_gqa, scheduler_metadata, seqlen_k_per_split, min_seqlen_k, the choices of the backward pass and
block_sparse_tensors_bwd do not change results; they are accepted, without effect.
"""

import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention import functional
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import Renamed
from flash_attention.compat.flash_attn.flash_attn_interface import NAMES
from flash_attention.compat.flash_attn_3 import with_qv
from flash_attention.flex.block_mask import BlockMask
from flash_attention.torch_cache import attention_over_cache

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of q [batch, seq_q, heads, head_dim], k and v [batch, seq_k, heads_k, ...]. lse is [batch, heads, seq_q];
    with qv it is [batch, seq_q, heads]. mask_mod replaces causal and window_size.

    For example:

        out, _ = flash_attn_func(q, k, v, causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_func, wrong)
    _refuse(gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd)
    mods = _Mods(aux_tensors, aux_scalars, _Lengths(q.shape[1], k.shape[1]))
    options = _common(causal, window_size, softcap, learnable_sink, mask_mod, deterministic)
    options |= mods.options(score_mod, mask_mod, block_sparse_tensors)
    if qv is not None:
        q, k, softmax_scale = with_qv(q, k, v, qv, softmax_scale)
    with Renamed(NAMES):
        found = functional.attention(q, k, v, scale=softmax_scale, return_lse=return_lse, **options)
    out, lse = found if return_lse else (found, None)
    return out, lse if lse is None or qv is None else lse.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """The same for sequences of different lengths. q, and k and v, are [total, heads, head_dim] with cu_seqlens, or
    [batch, seq, heads, head_dim], of which the first seqused rows count. With page_table, int32 [batch, pages], k and v are
    pages [num_pages, page_size, heads_k, head_dim]; that is forward only, without score_mod and mask_mod. lse is
    [heads, total_q] or [batch, heads, seq_q]; with qv the heads are its last axis.

    For example:

        starts = torch.tensor([0, 5, 16], dtype=torch.int32)  # sequences of 5 and 11 tokens
        out, _ = flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_varlen_func, wrong)
    _refuse(gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd, block_sparse_tensors=block_sparse_tensors)
    options = _common(causal, window_size, softcap, learnable_sink, mask_mod, deterministic)
    dense = q.dim() == 4
    batch, shape = (q.shape[0] if dense else len(cu_seqlens_q) - 1), q.shape
    with_pages = page_table is not None
    rows = {"q": _rows("q", q, cu_seqlens_q, max_seqlen_q)}
    if not with_pages:
        rows["k"] = _rows("k", k, cu_seqlens_k, max_seqlen_k)
        v = _rows("v", v, cu_seqlens_k, max_seqlen_k)[0]
    q, starts_q, most_q = rows["q"]
    if qv is not None:
        qv = _rows("qv", qv, cu_seqlens_q, max_seqlen_q)[0]
    if with_pages:
        if score_mod is not None or mask_mod is not None:
            raise NotImplementedError("score_mod, mask_mod: got a function; with page_table only None is supported")
        options.pop("deterministic")
        if qv is not None:
            q, k, softmax_scale = with_qv(q, k, v, qv, softmax_scale)
        options |= {"page_table": page_table, "seqused_kv": seqused_k, "seqused_q": seqused_q}
        with Renamed(NAMES):
            found = attention_over_cache(
                q, k, v, cu_seqlens_q=starts_q, max_seqlen_q=most_q, scale=softmax_scale, return_lse=return_lse, **options
            )
    else:
        k, starts_k, most_k = rows["k"]
        if qv is not None:
            q, k, softmax_scale = with_qv(q, k, v, qv, softmax_scale)
        lengths = [
            starts.diff() if used is None else used for starts, used in ((starts_q, seqused_q), (starts_k, seqused_k))
        ]
        mods = _Mods(aux_tensors, aux_scalars, _Lengths(*lengths, starts_q, starts_k))
        options |= mods.options(score_mod, mask_mod, None)
        options |= {"max_seqlen_q": most_q, "max_seqlen_kv": most_k, "seqused_q": seqused_q, "seqused_kv": seqused_k}
        with Renamed(NAMES):
            found = functional.attention_packed(
                q, k, v, starts_q, starts_k, scale=softmax_scale, return_lse=return_lse, **options
            )
    out, lse = found if return_lse else (found, None)
    if dense:
        out = out.unflatten(0, (batch, shape[1]))
        lse = None if lse is None else lse.unflatten(1, (batch, shape[1])).transpose(0, 1)
    return out, lse if lse is None or qv is None else lse.transpose(-1, -2)


class _Lengths:
    """seqlen_info of a function: the lengths of its sequence, and its first rows."""

    def __init__(self, seqlen_q, seqlen_k, starts_q=None, starts_k=None, sequence=None):
        self._given, self._sequence = (seqlen_q, seqlen_k, starts_q, starts_k), sequence

    def of(self, sequence):
        return _Lengths(*self._given, sequence)

    seqlen_q = property(lambda self: self._entry(0))
    seqlen_k = property(lambda self: self._entry(1))
    offset_q = property(lambda self: self._entry(2))
    offset_k = property(lambda self: self._entry(3))

    def _entry(self, which):
        given = self._given[which]
        if given is None:
            return 0
        return given[self._sequence] if isinstance(given, Tensor) else given


class _Mods:
    """FlashAttention-4's functions as FlexAttention's, with their tensors, numbers and lengths."""

    def __init__(self, tensors, scalars, lengths):
        self._aux = {"aux_tensors": tuple(tensors or ())}
        if scalars:
            self._aux["aux_scalars"] = tuple(scalars)
        self._lengths = lengths

    def options(self, score_mod, mask_mod, blocks):
        score = None if score_mod is None else self._score(score_mod)
        mask = None if mask_mod is None else self._mask(mask_mod)
        if blocks is None:
            return {"score_mod": score, "mask_mod": mask}
        if blocks.block_size is None:
            raise NotImplementedError("block_sparse_tensors: got block_size None; its tiles are FlashAttention-4's own")
        lists = (blocks.mask_block_cnt, blocks.mask_block_idx, blocks.full_block_cnt, blocks.full_block_idx)
        sizes = (self._lengths.seqlen_q, self._lengths.seqlen_k)
        block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=blocks.block_size, mask_mod=mask, seq_lengths=sizes)
        return {"score_mod": score, "block_mask": block_mask}

    def _score(self, score_mod):
        if _parameters("score_mod", score_mod) == 5:
            return score_mod

        def with_aux(score, b, h, i, j):
            return score_mod(score, b, h, q_idx=i, kv_idx=j, seqlen_info=self._lengths.of(b), **self._aux)

        return with_aux

    def _mask(self, mask_mod):
        if _parameters("mask_mod", mask_mod) == 4:
            return mask_mod

        def with_aux(b, h, i, j):
            return mask_mod(b, h, i, j, self._lengths.of(b), *self._aux.values())

        return with_aux


def _parameters(name, function):
    """The number of parameters. Functions that CuTe has compiled are refused."""
    if not callable(function):
        raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    # The wrapper of CuTe's decorators has the module and the name of the wrapped function, but CuTe's globals.
    home = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    if home.partition(".")[0] == "cutlass":
        raise NotImplementedError(
            f"{name}: {getattr(function, '__name__', function)} is compiled by CuTe; expected a Python function of torch's "
            "operations, with the same parameters"
        )
    return len(inspect.signature(function).parameters)


def _common(causal, window, softcap, sink, mask_mod, deterministic):
    left, right = (-1 if size is None else size for size in ((None, None) if mask_mod is not None else window))
    options = {"causal": causal and mask_mod is None, "window": (left, right), "softcap": softcap or 0.0}
    return {**options, "sink": None if sink is None else sink.float(), "deterministic": deterministic}


def _rows(name, tensor, starts, most):
    """(tensor [total, heads, dim], starts, longest): rows of a rectangle are sequences of one length."""
    if tensor.dim() == 3 and starts is not None:
        return tensor, starts, most
    if tensor.dim() != 4 or starts is not None:
        raise ValueError(
            f"{name}: got shape {list(tensor.shape)} {'with' if starts is not None else 'without'} cu_seqlens; expected "
            "[total, heads, head_dim] with it, or [batch, seq, heads, head_dim] without"
        )
    batch, length = tensor.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=tensor.device) * length
    return tensor.flatten(0, 1), starts, length


def _refuse(**given):
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: got a value; only None is supported")
