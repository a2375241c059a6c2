"""Queries, keys and values of 8 bits with a scale for each head: FlashInfer's scale_q, scale_k and scale_v."""

import torch


def head_scales(q, k, scale_q, scale_k, scale_v):
    """Float32 [heads of q] and twice [heads of k], of tensors with a scale for each head or one for all; or None."""
    given = {"scale_q": (scale_q, q), "scale_k": (scale_k, k), "scale_v": (scale_v, k)}
    scales = []
    for name, (scale, rows) in given.items():
        heads = rows.shape[-2]
        if scale is None:
            scales.append(None)
            continue
        if not isinstance(scale, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(scale).__name__}")
        if scale.numel() not in (1, heads):
            raise ValueError(f"{name}: got shape {list(scale.shape)}; expected [{heads}], a scale for each head, or [1]")
        if rows.element_size() != 1:
            raise ValueError(f"{name}: got a tensor for {rows.dtype}; only rows of 8 bits have scales")
        scales.append(scale.to(rows.device, torch.float32).reshape(-1).expand(heads))
    return scales


def scales_of_run(q, k, more):
    """The scales that run() gets after its tensors, and what is left of its positional arguments."""
    if q.element_size() == 1 and len(more) == 3:
        return head_scales(q, k, *more), ()
    return (None, None, None), more


def dtype_of(name, dtype):
    """A torch dtype of its name, as plan() takes both."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name}: got {dtype!r}; expected a dtype, its name or None")
    return found


def widened(rows, scale):
    """Rows of 8 bits as float16, times the scales of their heads. Every code is a float16."""
    wide = rows.to(torch.float16)
    return wide if scale is None else (wide * scale[:, None]).to(torch.float16)


def of_sequences(scale, batch):
    """As attention() and attention_over_cache() want the scales of heads."""
    return None if scale is None else scale.expand(batch, -1).contiguous()


def attend(run, q, k, v, scales, batch, **options):
    """run(q, k, v) and its lse.

    The library's scales of queries belong to key heads. If the query heads of a key head have scales of their own,
    there are as many calls: one for the first query head of each key head, one for the second, and so on.
    """
    scale_q, scale_k, scale_v = scales
    options |= {"k_descale": of_sequences(scale_k, batch), "v_descale": of_sequences(scale_v, batch)}
    group = q.shape[-2] // k.shape[-2]
    if scale_q is None or group == 1:
        return run(q, k, v, q_descale=of_sequences(scale_q, batch), **options)
    found = []
    for member in range(group):
        own = slice(member, None, group)
        of_heads = {name: options[name][own] for name in ("sink", "alibi_slopes") if options.get(name) is not None}
        its_scale = of_sequences(scale_q[own], batch)
        found.append(run(q[..., own, :], k, v, q_descale=its_scale, **{**options, **of_heads}))
    return tuple(torch.stack(parts, dim=-2).flatten(-3, -2) for parts in zip(*found, strict=True))
