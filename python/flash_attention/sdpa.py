"""scaled_dot_product_attention with torch's signature and meaning."""

import torch

from flash_attention import _core, functional, torch_autograd  # noqa: F401  (it says what the short way is)
from flash_attention.head_dim import padded


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention: same arguments, same result.

    Args:
        query: [..., heads, seq_q, head_dim].
        key: [..., heads_kv, seq_kv, head_dim].
        value: [..., heads_kv, seq_kv, head_dim_v].
        attn_mask: bool (True = visible) or float (added to the scores), broadcastable to [..., heads, seq_q, seq_kv].
        is_causal: query i sees keys j <= i (top-left). Not together with attn_mask.
        enable_gqa: heads may be a multiple of heads_kv.

    Inputs that the kernels do not take (float64, head_dim above 256) go to torch's own function.
    """
    grouped = enable_gqa or query.dim() != 4 or query.size(1) == key.size(1)
    if grouped and type(query) is functional.eager_type and not functional.is_tracing():
        out = _core.attend(
            query, key, value, is_causal, _NO_WINDOW, 0.0, scale, dropout_p, False, "bhsd", "top_left", attn_mask
        )
        if out is not None:
            return out
    if not _taken(query, value):
        return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: must be None with is_causal=True")
    leading = query.shape[:-3]
    query, key, value = _four_axes(query, leading), _four_axes(key, leading), _four_axes(value, leading)
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not enable_gqa and heads_kv != 1:
        raise ValueError(f"key: has {heads_kv} heads and query has {heads}; enable_gqa=True allows that")
    mask = bias = None
    if attn_mask is not None:
        attn_mask = _four_axes_mask(attn_mask, leading)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    out = padded(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=is_causal,
        alignment="top_left",
        dropout_p=dropout_p,
        scale=scale,
        layout="bhsd",
    )
    if len(leading) == 1:
        return out
    return out.reshape(*leading, *out.shape[1:]) if leading else out.squeeze(0)


_NO_WINDOW = (-1, -1)
_torch_sdpa = torch.nn.functional.scaled_dot_product_attention
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _taken(query, value):
    return query.dtype in _DTYPES and query.dim() >= 3 and 0 < query.shape[-1] <= 256 and 0 < value.shape[-1] <= 256


def _four_axes(tensor, leading):
    """[batch, heads, seq, dim] from [..., heads, seq, dim]; batch axes of size 1 are expanded."""
    if tensor.dim() == 4 and tensor.shape[:1] == leading:
        return tensor
    return tensor.expand(*leading, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def _four_axes_mask(mask, leading):
    if mask.dim() <= 4 and len(leading) <= 1:
        return mask
    if mask.dim() <= 3:
        return mask
    return mask.expand(*leading, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
