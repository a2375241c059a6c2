"""Any head dimension and stride, for the entries that stand in for those of others."""

import torch

from flash_attention.functional import attention, attention_packed


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
    from flash_attention.torch_cache import attention_over_cache, check_out

    if out is None or v.shape[-1] % 8 == 0:
        return _padded(attention_over_cache, q, k, v, scale, return_lse, out=out, **options)
    check_out(out, q, v)
    found = _padded(attention_over_cache, q, k, v, scale, return_lse, **options)
    return (out.copy_(found[0]), found[1]) if return_lse else out.copy_(found)


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
