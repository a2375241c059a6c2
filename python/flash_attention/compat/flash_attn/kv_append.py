"""New keys and values of a CacheCall into its cache, and the rotary embedding of its queries and keys: one kernel."""

import torch

from flash_attention.append import append_kv


def append_and_turn(call, one_place, k_scale=None, v_scale=None):
    """Appends and rotates; returns (q, lengths). one_place: all queries of a sequence have the angle of the first. The
    scales are those of a cache in 8 bits; new rows in float8 are already codes of it."""
    if call.new is None and call.rotary is None:
        return call.q, call.lengths
    k, v = (None, None) if call.new is None else map(_with_unit_stride, call.new)
    options = {"lengths": call.lengths, "page_table": call.table, "cu_seqlens_new": call.cu_seqlens_new}
    if k is not None and k.element_size() == 1:
        k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)  # which holds every code
    else:
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    if call.rotary is None:
        append_kv(*call.caches, k, v, **options)
        return call.q, call.new_lengths()
    cos, sin, interleaved, offsets = call.rotary
    q = append_kv(
        *call.caches,
        k,
        v,
        q=_with_unit_stride(call.q),
        cos=_with_unit_stride(cos),
        sin=_with_unit_stride(sin),
        interleaved=interleaved,
        rotary_offsets=offsets,
        one_query_angle=one_place,
        cu_seqlens_q=call.cu_seqlens_q,
        **options,
    )
    return q, call.new_lengths()


def _with_unit_stride(tensor):
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
