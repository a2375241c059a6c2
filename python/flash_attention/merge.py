"""Merges attention over parts of the keys: partial results are weighted by their lse."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords


def merge_states(
    out: Tensor | Sequence[Tensor], lse: Tensor | Sequence[Tensor], *, dtype: torch.dtype | None = None, **wrong: NoReturn
) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, from out and lse over each part of the keys. Differentiable in both.

        halves = [attention(q, k[:, at], v[:, at], return_lse=True) for at in (slice(0, 8), slice(8, 16))]
        out, lse = merge_states(*zip(*halves))

    Args:
        out: one tensor for each part, [batch, seq, heads, dim] ([total, heads, dim] if packed); or one tensor with the
            parts as its first axis.
        lse: one tensor for each part, [batch, heads, seq] (packed: [heads, total]), natural logarithm; or one for all.
        dtype: of the returned out; that of the parts if None.

    The sum is taken in float32 (float64 for float64 parts), part after part, so their order decides the last bits. A part
    with lse -inf does not count, whatever its out holds. A row without any other part is 0, its lse -inf.
    """
    if wrong:
        refuse_keywords(merge_states, wrong)
    outs, lses = list(out), list(lse)
    _check(outs, lses)
    wide = torch.promote_types(outs[0].dtype, torch.float32)
    lses = [part.to(wide) for part in lses]
    with torch.no_grad():
        top = torch.stack(lses).amax(0) if len(lses) > 1 else lses[0].detach()
        top = top.masked_fill(top == -torch.inf, 0.0)
    weights = [torch.exp(part - top) for part in lses]
    total = sum(weights[1:], weights[0])
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    merged = None
    for part, weight in zip(outs, weights, strict=True):
        share = (weight / total).transpose(-1, -2)[..., None]
        term = share * part.to(wide).masked_fill(share == 0, 0.0)
        merged = term if merged is None else merged + term
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf)
    return merged.to(dtype or outs[0].dtype), lse


def _check(outs, lses):
    if not outs or len(outs) != len(lses):
        raise ValueError(f"out, lse: got {len(outs)} and {len(lses)} parts; allowed: the same number, 1 or more")
    shape = outs[0].shape
    if outs[0].dim() not in (3, 4):
        raise ValueError(f"out: got parts of shape {list(shape)}; expected [batch, seq, heads, dim] or [total, heads, dim]")
    rows = (*shape[:-3], shape[-2], shape[-3])
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != shape:
            raise ValueError(f"out: got part {index} of shape {list(out.shape)}; expected {list(shape)}, as part 0 has")
        if lse.shape != rows:
            raise ValueError(f"lse: got part {index} of shape {list(lse.shape)}; expected {list(rows)}")
