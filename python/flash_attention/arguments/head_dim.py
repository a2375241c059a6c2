"""Any head dimension and stride, for the entries that stand in for those of others."""

import torch

from flash_attention.arguments.tables import check_range
from flash_attention.functional import attention, attention_packed


def in_kernel_form(q, k, v, *, run, out=None, scale=None, return_lse=False, **given):
    """run(q, k, v, ...) with zeros up to a multiple of 8 and rows without gaps.

    Zeros change no score; the scale stays that of the real head dimension. Of a cache: numbers of 64 bits become int32,
    and rows after those of q are left out.
    """
    for name in ("seqused_kv", "page_table"):
        if getattr(given.get(name), "dtype", None) is torch.int64:
            check_range(name, given[name], -(2**31), 2**31 - 1)
            given[name] = given[name].to(torch.int32)
    if given.get("caller") and given.get("page_table") is None and q.dim() == 4 and k.shape[0] > q.shape[0]:
        k, v = k[: q.shape[0]], v[: q.shape[0]]
    if out is None or v.shape[-1] % 8 == 0:
        return _padded(run, q, k, v, scale, return_lse, **given, **({} if out is None else {"out": out}))
    from flash_attention.torch_cache import check_out

    check_out(out, q, v.shape[-1])
    found = _padded(run, q, k, v, scale, return_lse, **given)
    return (out.copy_(found[0]), found[1]) if return_lse else out.copy_(found)


def padded(q, k, v, *, scale=None, return_lse=False, packed=None, **options):
    """attention() or, with `packed` (its cu_seqlens and lengths), attention_packed() for any head dimension and stride.

    Zeros up to a multiple of 8 change no score; the scale stays that of the real head dimension.
    """
    function = attention if packed is None else attention_packed
    return _padded(function, q, k, v, scale, return_lse, **(packed or {}), **options)


def padded_narrow(q, k, v, **options):
    """padded(), or padded_cache() for keys and values of 8 bits under queries that are not."""
    narrow = k.element_size() == 1 and q.element_size() > 1
    return padded_cache(q, k, v, **options) if narrow else padded(q, k, v, **options)


def padded_cache(q, k, v, *, scale=None, return_lse=False, out=None, **options):
    """attention_over_cache() in the same way."""
    from flash_attention.torch_cache import attention_over_cache

    return in_kernel_form(q, k, v, run=attention_over_cache, out=out, scale=scale, return_lse=return_lse, **options)


def _padded(function, q, k, v, scale, return_lse, **options):
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    result = function(_pad(q), _pad(k), _pad(v), scale=scale, return_lse=return_lse, **options)
    if head_dim_v % 8 == 0:
        return result
    return (result[0][..., :head_dim_v], result[1]) if return_lse else result[..., :head_dim_v]


def _pad(tensor):
    if tensor.shape[-1] % 8:
        return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 8))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
