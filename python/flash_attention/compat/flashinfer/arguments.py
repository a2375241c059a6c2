"""Shared by FlashInfer's functions: layouts, scales, hints, and options that are refused."""

import math

import torch

LN_2 = math.log(2)


def nhd(name, tensor, kv_layout):
    """A view with the axis of heads after that of tokens."""
    check_layout(kv_layout)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return tensor.transpose(-3, -2) if kv_layout == "HND" else tensor


def check_layout(kv_layout):
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: got {kv_layout!r}; allowed are 'NHD' and 'HND'")


def check_heads(num_qo_heads, num_kv_heads):
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads: got {num_qo_heads}; allowed are multiples of num_kv_heads, {num_kv_heads}")


def split_cache(paged_kv_cache, kv_layout, name="paged_kv_cache"):
    """(k, v), views [num_pages, page_size, heads, head_dim] of a pair of tensors or of one tensor that holds both. Pages of
    one key may come without that axis."""
    check_layout(kv_layout)
    axes = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
    one_key = -3 if kv_layout == "NHD" else -2
    if isinstance(paged_kv_cache, torch.Tensor):
        whole = paged_kv_cache.unsqueeze(one_key) if paged_kv_cache.dim() == 4 else paged_kv_cache
        if whole.dim() != 5 or whole.shape[1] != 2:
            raise ValueError(
                f"{name}: got shape {list(paged_kv_cache.shape)}; expected [num_pages, 2, {axes}, head_dim] "
                "or a pair (k, v)"
            )
        pair = whole.unbind(1)
    else:
        pair = tuple(paged_kv_cache)
        if len(pair) != 2 or not all(isinstance(part, torch.Tensor) and part.dim() in (3, 4) for part in pair):
            raise ValueError(
                f"{name}: expected a pair (k, v) of tensors [num_pages, {axes}, head_dim], or one tensor of both"
            )
        pair = tuple(part.unsqueeze(one_key) if part.dim() == 3 else part for part in pair)
    return tuple(nhd(name, part, kv_layout) for part in pair)


def four_bit_options(k, kv_cache_sf, kv_layout, split=None):
    """Options for attention() over keys of 4 bits: in nvfp4, packed in uint8, whose scales kv_cache_sf has, two tensors or
    both in one. None for other keys. split(kv_cache_sf): those of K and V, if they are not in pages."""
    if k.dtype != torch.uint8 and kv_cache_sf is None:
        return None
    if k.dtype != torch.uint8:
        raise ValueError(f"kv_cache_sf: got scales for keys of {k.dtype}; expected codes of 4 bits in torch.uint8")
    if kv_cache_sf is None:
        raise ValueError("kv_cache_sf: got None; keys of 4 bits in torch.uint8 need their scales")
    scales = split_cache(kv_cache_sf, kv_layout, "kv_cache_sf") if split is None else split(kv_cache_sf)
    return {"cache_dtype": "nvfp4", "k_scale": scales[0], "v_scale": scales[1]}


def columns_of(tensor, four_bits):
    """The columns of a row of K or V."""
    return tensor.shape[-1] * (1 if four_bits is None else 2)


def refuse_given(**options):
    """Refuses options that change results and are not supported."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name}: got a value; only None is supported")


def asks_for_invariant(fixed_split_size, disable_split_kv):
    """For attention(): both are FlashInfer's ways to bits that do not depend on the batch. None follows the environment."""
    return True if fixed_split_size is not None or disable_split_kv else None


def scale_of(head_dim, sm_scale, q_scale=None, k_scale=None):
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    for name, factor in (("q_scale", q_scale), ("k_scale", k_scale)):
        if isinstance(factor, torch.Tensor):
            raise NotImplementedError(f"{name}: got a tensor; allowed are numbers and None")
        scale *= 1.0 if factor is None else factor
    return scale


# The callers' names for the arguments of attention().
NAMES = {"softcap": "logits_soft_cap", "scale": "sm_scale", "sink": "sinks", "mask": "custom_mask"}


def finish(out, lse, v_scale, into, lse_into, return_lse, lse_base="log2", lse_layout="NH"):
    """FlashInfer's results from out and the natural lse (None if not requested), a row for each token; written to `into`
    and `lse_into` if given. lse_base: "log2" or "ln"; lse_layout: "NH", or "HN" for heads first."""
    for name, value, allowed in (("lse_base", lse_base, ("log2", "ln")), ("lse_layout", lse_layout, ("NH", "HN"))):
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}; allowed are {' and '.join(map(repr, allowed))}")
    if v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
        out = (out * v_scale).to(out.dtype)
    if into is not None:
        _check_into("out", into, out.shape, out.device)
        out = into.copy_(out)
    if lse is None:
        return out
    lse = lse / LN_2 if lse_base == "log2" else lse
    lse = lse.transpose(0, 1).contiguous() if lse_layout == "HN" else lse
    if lse_into is not None:
        _check_into("lse", lse_into, lse.shape, lse.device)
        lse = lse_into.copy_(lse)
    return (out, lse) if return_lse else out


def direct(out, q, width, v_scale):
    """`out` if the kernel can write the result of `width` columns there directly, otherwise None: it must not overwrite its
    queries."""
    if (
        out is None
        or out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
        or not (v_scale is None or (isinstance(v_scale, float) and v_scale == 1.0))
    ):
        return None
    same = out.shape == (*q.shape[:-1], width) and out.dtype == q.dtype and out.device == q.device
    return out if same and out.stride(-1) == 1 and width % 8 == 0 else None


def _check_into(name, tensor, shape, device):
    if tensor.shape != shape or tensor.device != device:
        raise ValueError(f"{name}: got {list(tensor.shape)} on {tensor.device}; expected {list(shape)} on {device}")
