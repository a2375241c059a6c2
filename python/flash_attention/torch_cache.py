"""Attention over a cache of keys and values, on torch tensors: in pages, with left padding. Forward only.

As in pytorch.ops, eager code calls the binding, and traced code goes through torch.ops.flash_attention.forward_cache.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention import _core
from flash_attention.arguments import names
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import refusal
from flash_attention.arguments.narrow import as_bytes, columns, group_bytes, scale_tensor
from flash_attention.arguments.options import make_options
from flash_attention.arguments.shapes import lse_shape
from flash_attention.masks.bits import bytes_of
from flash_attention.options import NUM_OPTIONS, NUM_TENSORS, Options, Tensors
from flash_attention.pytorch import flops as torch_flops
from flash_attention.pytorch import ops as torch_ops
from flash_attention.pytorch.gradients import refusing_gradients
from flash_attention.routes import OVER_CACHE, route

_CACHE_TENSORS = f"{torch_ops.TENSORS}, Tensor? page_table, Tensor? left_padding"
_NUM_TENSORS = NUM_TENSORS + 2
_MORE = ("bit_mask", "bit_mask_offsets", "sequence_windows", "k_zero", "v_zero", "k_global_scale", "v_global_scale")
_NARROW = "Tensor? k_scale=None, Tensor? v_scale=None, str codes='', bool latent=False"
_NUM_NARROW = 4


def attention_over_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    left_padding: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = 0,
    seqused_q: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    invariant: bool | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    cache_dtype: str | None = None,
    latent: bool = False,
    attention_chunk: int = 0,
    out: Tensor | None = None,
    key_indices: Tensor | None = None,
    key_blocks: Tensor | None = None,
    key_counts: Tensor | None = None,
    key_block_size: tuple[int, int] | None = None,
    bit_mask: Any = None,
    sequence_windows: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    k_global_scale: Tensor | float | None = None,
    v_global_scale: Tensor | float | None = None,
    **wrong: NoReturn,
) -> Any:
    """attention() over a cache of keys and values, in pages or not. Forward only; nothing waits for a GPU.

        lengths = torch.tensor([9, 16], dtype=torch.int32)
        out = attention_over_cache(q[:, :1], k, v, seqused_kv=lengths)  # one new token a sequence

    Args:
        q: [batch, seq_q, heads_q, head_dim]; with cu_seqlens_q [total_q, heads_q, head_dim].
        k, v: [batch, seq, heads_kv, head_dim], or with page_table pages [num_pages, page_size, heads_kv, head_dim], in any
            strides with a unit last one (pages with heads first are a transposed view).
        seqused_kv: int32 [batch]; how many keys each sequence has. The diagonal of causal and window follows it.
        page_table: int32 [batch, pages]; row j of sequence b is row j % page_size of page page_table[b, j // page_size].
            Entries after a sequence's keys may be anything.
        left_padding: int32 [batch]; keys before it are hidden.
        cu_seqlens_q, max_seqlen_q: the first query of each sequence, and the most queries of one; 0 or None = unknown.
        mask: bool, as wide as the table: [batch, heads_q, max_seqlen_q, pages * page_size]; all sizes but the last may
            be 1.
        k_scale, v_scale: of k and v in 8 bits (float8_e4m3fn, float8_e5m2, int8), whose elements have the value
            code * scale: a number, float32 [1], [batch, heads_kv], or one for each row and head of k.
        latent: a key is its value followed by the columns of k, which is [..., head_dim - head_dim_v]: multi-head latent
            attention. One cache of both has them as views: k = cache[..., head_dim_v:], v = cache[..., :head_dim_v].
        cache_dtype: the type of the bytes of k and v in uint8: "e4m3", "e5m2" or "int8"; or of 4 bits, two columns in a
            byte: "nvfp4", "mxfp4" or "int4". Then k_scale and v_scale are those of groups of columns, in the shape of k and
            v with head_dim / group numbers in a row: uint8 or a float8 type (nvfp4: e4m3, mxfp4: e8m0), the type of q
            (int4).
        k_zero, v_zero: of int4, in the shape of the scales: the value of the code 0.
        k_global_scale, v_global_scale: of nvfp4, one number that multiplies all scales of the tensor; 1 if None.
        bit_mask: masks.BitMask, a bit for each query and key (masks.from_bits()) or drafted token (masks.draft_tree()), for
            all heads. A query sees a key if the mask and all other rules show it.
        sequence_windows: int32 [batch, 2], a window (left, right) for each sequence, in addition to causal and window;
            -1 is unlimited.
        out: a tensor for the result, the shape of q with the last size of v, any strides, the last one 1; new if None.

    The other arguments are those of attention(). Returns out, or (out, lse); a backward pass through them is refused.
    """
    if wrong:
        refuse_keywords(attention_over_cache, wrong)
    return route()(
        q, k, v, seqused_kv, page_table, left_padding, cu_seqlens_q, max_seqlen_q, seqused_q, causal, window, softcap,
        alibi_slopes, mask, sink, scale, return_lse, kernel, invariant, k_scale, v_scale, cache_dtype, latent,
        attention_chunk, out, (
            key_indices, key_blocks, key_counts, key_block_size, bit_mask, sequence_windows, k_zero, v_zero,
            k_global_scale, v_global_scale,
        ), caller=OVER_CACHE,
    )  # fmt: skip


def run(
    q, k, v, *, seqused_kv=None, page_table=None, left_padding=None, cu_seqlens_q=None, max_seqlen_q=0, seqused_q=None,
    causal=False, window=(-1, -1), softcap=0.0, alibi_slopes=None, mask=None, sink=None, scale=None, return_lse=False,
    kernel=None, invariant=None, k_scale=None, v_scale=None, cache_dtype=None, latent=False, attention_chunk=0, out=None,
    key_indices=None, key_blocks=None, key_counts=None, key_block_size=None, bit_mask=None, sequence_windows=None,
    k_zero=None, v_zero=None, k_global_scale=None, v_global_scale=None, caller="attention_over_cache",
):  # fmt: skip
    """attention_over_cache() of any form."""
    sources = q, k, v, sink, alibi_slopes
    k, v, codes = as_bytes(k, v, cache_dtype)
    bits, offsets = bytes_of(bit_mask)
    tensors = Tensors(
        q, k, v, mask=mask, alibi_slopes=_single(alibi_slopes), sink=_single(sink), cu_seqlens_q=cu_seqlens_q,
        seqused_q=seqused_q, seqused_kv=seqused_kv, key_indices=key_indices, key_blocks=key_blocks, key_counts=key_counts,
        page_table=page_table, left_padding=left_padding, bit_mask=bits, bit_mask_offsets=offsets,
        sequence_windows=sequence_windows, k_zero=k_zero, v_zero=v_zero,
        k_global_scale=scale_tensor(k_global_scale, k.device), v_global_scale=scale_tensor(v_global_scale, k.device),
    )  # fmt: skip
    scales = (group_bytes(scale_tensor(scale, k.device), codes) for scale in (k_scale, v_scale))
    narrow = (*scales, codes, latent)
    options = make_options(
        scale=scale, softcap=softcap, causal=causal, window=window, max_seqlen_q=max_seqlen_q or 0,
        kernel=kernel, invariant=invariant, attention_chunk=attention_chunk, key_block_size=key_block_size,
    )  # fmt: skip
    if out is not None:
        check_out(out, q, columns(v, codes))
    if torch_ops.is_watched(q):
        more = (getattr(tensors, name) for name in _MORE)
        found, lse = torch.ops.flash_attention.forward_cache(
            *tensors[:_NUM_TENSORS], *options, *narrow, *more, names.as_text()
        )
        out = found if out is None else out.copy_(found)
    else:
        out, lse = _forward(tensors, options, return_lse, *narrow, out=out)
    return refusing_gradients(caller, (out, lse) if return_lse else out, *sources)


def check_out(out, q, width):
    """Checks what the kernels cannot check themselves, since they do not know the type of out."""
    shape = [*q.shape[:-1], width]
    if not isinstance(out, Tensor):
        raise refusal(TypeError, "out", f"expected a tensor, got {type(out).__name__}")
    if list(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        got = f"{out.dtype} {list(out.shape)} on {out.device}"
        raise refusal(ValueError, "out", f"got {got}; expected {q.dtype} {shape} on {q.device}")


def _single(values):
    """Slopes and sinks in float32: models keep them in their own type."""
    return values.float() if isinstance(values, Tensor) and values.is_floating_point() else values


def _forward(tensors, options, need_lse, k_scale=None, v_scale=None, codes="", latent=False, out=None):
    if out is None:
        out, lse = torch_ops.empty_results(tensors, options, need_lse, _width(tensors, codes))
    else:
        lse = out.new_empty(lse_shape(tensors, options), dtype=torch.float32) if need_lse else None
    tensors = tensors._replace(k_scale=k_scale, v_scale=v_scale)
    tensors, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    _core.forward(
        tensors, options, out, lse, 0, 0, stream, lambda size: torch_ops.workspace(out, size), codes=codes, latent=latent
    )
    return out, lse


def _width(tensors, codes):
    return columns(tensors.v, codes) if codes else None


torch_ops.library.define(
    f"forward_cache({_CACHE_TENSORS}, {torch_ops.OPTIONS}, {_NARROW}, "
    f"{', '.join(f'Tensor? {name}=None' for name in _MORE)}, {torch_ops.NAMES}) -> (Tensor out, Tensor lse)",
    tags=torch_ops.EXACT_STRIDES,
)


def _split(arguments):
    end = _NUM_TENSORS + NUM_OPTIONS
    narrow, more = arguments[end : end + _NUM_NARROW], dict(zip(_MORE, arguments[end + _NUM_NARROW :], strict=False))
    return Tensors(*arguments[:_NUM_TENSORS], **more), Options(*arguments[_NUM_TENSORS:end]), narrow


def _forward_op(*arguments):
    tensors, options, narrow = _split(arguments)
    with names.renamed_by(*arguments[_NUM_TENSORS + NUM_OPTIONS + _NUM_NARROW + len(_MORE) :]):
        return _forward(tensors, options, True, *narrow)


def _forward_fake(*arguments):
    tensors, options, narrow = _split(arguments)
    return torch_ops.empty_results(tensors, options, True, _width(tensors, narrow[2] if len(narrow) > 2 else ""))


for _key in ("CPU", "CUDA"):
    torch_ops.library.impl("forward_cache", _forward_op, _key)
torch.library.register_fake("flash_attention::forward_cache", _forward_fake, lib=torch_ops.library)
torch_flops.counts_as(torch.ops.flash_attention.forward_cache, torch_flops.cache_flops)
