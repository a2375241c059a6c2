"""scaled_dot_product_attention with torch's signature and meaning."""

from typing import NoReturn

import torch

from flash_attention import routes
from flash_attention.arguments.head_dim import padded
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import Renamed


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **wrong: NoReturn,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention: same arguments, same result.

        out = scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, seq, head_dim]

    Args:
        query: [..., heads, seq_q, head_dim].
        key: [..., heads_kv, seq_kv, head_dim].
        value: [..., heads_kv, seq_kv, head_dim_v].
        attn_mask: bool (True = visible) or float (added to the scores), broadcastable to [..., heads, seq_q, seq_kv].
        is_causal: query i sees keys j <= i (top-left). Not together with attn_mask.
        enable_gqa: heads may be a multiple of heads_kv.

    Inputs that the kernels do not support (float64, head_dim above 576) go to torch's own function.
    """
    if wrong:
        refuse_keywords(scaled_dot_product_attention, wrong)
    if attn_mask is None and _is_regular(query, key, value, dropout_p):
        return routes.route()(
            query, key, value, caller=_CALLER, causal=is_causal, scale=scale, dropout_p=dropout_p,
            layout="bhsd", alignment="top_left",
        )  # fmt: skip
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if torch.overrides.has_torch_function(tensors) and not isinstance(query, torch.Tensor):  # a proxy of torch.fx
        keywords = {"scale": scale, "enable_gqa": enable_gqa}
        arguments = (*tensors[:3], attn_mask, dropout_p, is_causal)
        return torch.overrides.handle_torch_function(scaled_dot_product_attention, tensors, *arguments, **keywords)
    for name, tensor in zip(("query", "key", "value", "attn_mask"), tensors, strict=False):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not _taken(query, key, value, dropout_p):
        if query.layout is torch.strided and not query.is_nested and query.shape[-3:-2] == (0,):
            return query @ key.mT @ value  # nothing: torch 2.9 divides by the number of heads and ends the process
        return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: must be None with is_causal=True")
    leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = _heads(query, key, value, enable_gqa)
    query = _four_axes(query, leading, heads[0])
    key, value = _four_axes(key, leading, heads[1]), _four_axes(value, leading, heads[1])
    mask = bias = None
    if attn_mask is not None:
        attn_mask = _four_axes_mask(attn_mask, leading)
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    with Renamed(_NAMES):
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


_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask", "causal": "is_causal"}
_CALLER = routes.Caller(names=_NAMES, any_form=True, function="scaled_dot_product_attention")
_torch_sdpa = torch.nn.functional.scaled_dot_product_attention
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _is_regular(query, key, value, dropout_p):
    """Whether attention() takes the call without changes: four axes, the same batch and heads."""
    if not type(query) is type(key) is type(value) is torch.Tensor or query.is_nested or dropout_p == 1:
        return False
    shape, of_key = query.shape, key.shape
    same = len(shape) == 4 and shape[:2] == of_key[:2] and of_key[:3] == value.shape[:3]
    return same and query.dtype in _DTYPES and query.layout is torch.strided and 0 < shape[3] <= 576 and shape[1] > 0


def _taken(query, key, value, dropout_p):
    tensors = (query, key, value)
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return False
    if query.dtype not in _DTYPES or dropout_p == 1 or any(tensor.dim() < 3 for tensor in tensors):
        return False
    return all(tensor.shape[-3] > 0 and 0 < tensor.shape[-1] <= 576 for tensor in tensors)


def _heads(query, key, value, enable_gqa):
    """The number of heads that query, and key and value, must get."""
    heads = [tensor.shape[-3] for tensor in (query, key, value)]
    if enable_gqa:
        return heads[0], heads[1] if heads[1] == heads[2] else heads[0]
    most = max(heads)
    for name, count in zip(("query", "key", "value"), heads, strict=True):
        if count not in (1, most):
            raise ValueError(f"{name}: has {count} heads, another has {most}; enable_gqa=True allows that")
    return most, 1 if heads[1] == heads[2] == 1 else most


def _four_axes(tensor, leading, heads):
    """[batch, heads, seq, dim] from [..., heads, seq, dim]; axes of size 1 are expanded, heads are repeated."""
    if tensor.dim() == 4 and tensor.shape[:1] == leading and tensor.shape[1] == heads:
        return tensor
    if tensor.shape[-3] not in (1, heads):
        if heads % tensor.shape[-3]:
            raise ValueError(f"query: has {heads} heads; with enable_gqa a multiple of {tensor.shape[-3]} is needed")
        tensor = tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)
    return tensor.expand(*leading, heads, *tensor.shape[-2:]).reshape(-1, heads, *tensor.shape[-2:])


def _four_axes_mask(mask, leading):
    if mask.dim() == 0:
        return mask.reshape(1)
    if mask.dim() <= 4 and len(leading) <= 1:
        return mask
    if mask.dim() <= 3:
        return mask
    return mask.expand(*leading, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
