"""New keys and values into a cache, with norms and the rotary embedding of queries and keys: one kernel on a GPU."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from flash_attention import _core
from flash_attention.arguments import names
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.narrow import as_bytes, group_bytes, scale_tensor
from flash_attention.arguments.rows import angle_tensor, norm_of, numbers
from flash_attention.pytorch import ops as torch_ops

_NUM_ARGUMENTS = 33  # of the op, without names


@torch.no_grad()
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rotary_offsets: Tensor | None = None,
    one_query_angle: bool = False,
    cu_seqlens_new: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    sequences: Tensor | None = None,
    positions: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    cache_dtype: str | None = None,
    q_out: Tensor | None = None,
    q_norm: Tensor | bool | None = None,
    k_norm: Tensor | bool | None = None,
    norm_eps: float = 1e-6,
    norm_plus_one: bool = False,
    angle_positions: Tensor | None = None,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    k_global_scale: Tensor | float | None = None,
    v_global_scale: Tensor | float | None = None,
    **wrong: NoReturn,
) -> Tensor | None:
    """Appends k and v to the caches, and writes nothing else there. First normalises and rotates k and q, if requested.

    Args:
        k_cache, v_cache: [batch, capacity, heads_kv, head_dim], or with page_table pages
            [num_pages, page_size, heads_kv, head_dim], in any strides (a cache with heads first is a transposed view).
            The dtype is float32, float16, bfloat16, or 8-bit: float8_e4m3fn, float8_e5m2, int8, or uint8 with a
            cache_dtype. Rows of 4 bits have head_dim / 2 bytes, of uint8 with a cache_dtype.
        k, v: [batch, seq_new, heads_kv, head_dim]; with cu_seqlens_new or sequences [total_new, heads_kv, head_dim].
        lengths: int32 [batch]; how many rows each sequence has already. None: none.
        page_table: int32 [batch, pages]. A row of a cache for each sequence is a table of one page.
        q: [batch, seq_q, heads_q, head_dim]; with cu_seqlens_q or sequences [total_q, heads_q, head_dim].
        cos, sin: [positions, rotary_dim / 2], from rotary_tables(); the first rotary_dim columns are rotated.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
        rotary_offsets: int32 [batch]; the position of the first new row and query of each sequence; lengths if None.
        one_query_angle: all queries of a sequence are rotated by the angle of its first query.
        cu_seqlens_new, cu_seqlens_q: int32 [batch + 1]; the first row of each sequence.
        sequences, positions: int32 [total_new]; the sequence of each new row (and query), and its place there.
        k_scale, v_scale: the scales of an 8-bit cache, whose elements have the value code * scale: a number, float32 [1],
            [batch, heads_kv], or one for each row, [batch, capacity, heads_kv] or [num_pages, page_size, heads_kv]. Scales
            of rows are computed and written.
            With a cache of 4 bits: the scales of groups of columns, in the shape of the caches with head_dim / group
            numbers in a row, computed and written; uint8 or a float8 type (nvfp4: e4m3, mxfp4: e8m0), the type of k (int4).
        cache_dtype: the type of the bytes of a uint8 cache: "e4m3", "e5m2" or "int8"; "nvfp4", "mxfp4" or "int4".
        q_norm, k_norm: [head_dim], the weights of an RMS norm of each row of a head, before it is rotated; True: a norm
            without weights.
        norm_eps: added to the mean of the squares.
        norm_plus_one: the factor of a column is 1 + weight, as in Gemma.
        angle_positions: int32, the position whose angle each new row and query has: [batch, seq_new], or [total_new] for
            packed rows. With sections [len(sections), batch, seq_new].
        sections: how many pairs each row of angle_positions rotates, as in multimodal models (M-RoPE).
        sections_interleaved: pair p belongs to section p mod len(sections), as long as that one has pairs left.
        k_zero, v_zero: of int4, in the shape of the scales; computed and written.
        k_global_scale, v_global_scale: of nvfp4, one number that multiplies all scales of the tensor; 1 if None.
        q_out: the tensor for the rotated queries; pass q itself to rotate in place. A new tensor if None.

    Returns the rotated queries, or None without q. Rows for which the cache has no room are refused if lengths, tables and
    positions are on the host; on a GPU such rows are not written.
    """
    if wrong:
        refuse_keywords(append_kv, wrong)
    if q is not None and q_out is None:
        q_out = torch.empty_like(q)
    k_cache, v_cache, codes = as_bytes(k_cache, v_cache, cache_dtype)
    has_q_norm, q_weight = norm_of(q_norm)
    has_k_norm, k_weight = norm_of(k_norm)
    tensors = (
        k_cache,
        v_cache,
        k,
        v,
        q,
        q_out,
        cos,
        sin,
        lengths,
        rotary_offsets,
        cu_seqlens_new,
        cu_seqlens_q,
        sequences,
        positions,
        page_table,
        group_bytes(scale_tensor(k_scale, k_cache.device), codes),
        group_bytes(scale_tensor(v_scale, k_cache.device), codes),
        q_weight,
        k_weight,
        angle_tensor(angle_positions),
        k_zero,
        v_zero,
        scale_tensor(k_global_scale, k_cache.device),
        scale_tensor(v_global_scale, k_cache.device),
    )
    scalars = numbers(has_q_norm, has_k_norm, norm_plus_one, norm_eps, sections, sections_interleaved)
    if torch_ops.is_watched(k_cache):
        torch.ops.flash_attention.append(*tensors, interleaved, one_query_angle, codes, *scalars, names.as_text())
    else:
        _append(*tensors, interleaved, one_query_angle, codes, *scalars)
    return q_out


def _append(*arguments):
    tensors, scalars = arguments[:24], arguments[24:]
    given, stream = (tensors, 0) if torch_ops.HAS_EXCHANGE else torch_ops.detached(tensors)
    _core.append(given, scalars, stream)
    # As torch's own functions that write in place: backward of what was computed from a cache before refuses to run.
    k_cache, v_cache, k, _, _, q_out = tensors[:6]
    for tensor in (q_out,) if k is None else (k_cache, v_cache, q_out, *tensors[15:17], *tensors[20:22]):
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


torch_ops.library.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? q, Tensor(c!)? q_out, Tensor? cos, "
    "Tensor? sin, Tensor? lengths, Tensor? rotary_offsets, Tensor? cu_seqlens_new, Tensor? cu_seqlens_q, "
    "Tensor? sequences, Tensor? positions, Tensor? page_table, Tensor(d!)? k_scale, Tensor(e!)? v_scale, "
    "Tensor? q_norm, Tensor? k_norm, Tensor? angle_positions, Tensor(f!)? k_zero, Tensor(g!)? v_zero, "
    "Tensor? k_global_scale, Tensor? v_global_scale, bool interleaved, bool one_query_angle, str codes, "
    "bool has_q_norm, bool has_k_norm, bool norm_plus_one, float norm_eps, int[] sections, bool sections_interleaved, "
    f"{torch_ops.NAMES}) -> ()"
)


def _append_op(*arguments):
    with names.renamed_by(*arguments[_NUM_ARGUMENTS:]):
        _append(*arguments[:_NUM_ARGUMENTS])


for _key in ("CPU", "CUDA"):
    torch_ops.library.impl("append", _append_op, _key)
torch.library.register_fake("flash_attention::append", lambda *_: None, lib=torch_ops.library)
