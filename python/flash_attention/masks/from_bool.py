"""From a matrix of bools to hidden rows, if that is possible."""

from __future__ import annotations

from typing import Any, NoReturn

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.masks.intervals import IntervalMask


def from_bool(mask: Any, *, window: tuple[int, int] = (-1, -1), causal: bool = False, **wrong: NoReturn) -> IntervalMask:
    """The hidden rows of a bool tensor [..., seq_q, seq_kv], True = visible, leading axes [batch|1, heads_kv|1].

        mask = from_bool(torch.ones(16, 16, dtype=torch.bool).tril())
        out = attention(q, k, v, hidden_rows=mask)

    Each key may be hidden from at most two intervals of queries; pairs that `causal` and `window` hide may have any value
    in the mask. Raises ValueError for a mask with more intervals: attention(mask=...) accepts any mask.
    """
    if wrong:
        refuse_keywords(from_bool, wrong)
    import torch

    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
        raise TypeError("mask: expected a bool tensor of torch, [..., seq_q, seq_kv]")
    mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
    seq_q, seq_kv = mask.shape[2:]
    free = IntervalMask(torch.full((1, 1, seq_kv, 1), seq_q, dtype=torch.int32, device=mask.device), causal, window, seq_q)
    matters = free.visible()
    # Pairs that are hidden anyway may have any value: they get that of the row above, so that there are few intervals.
    hidden = _fill(~mask & matters, matters)
    above = torch.cat([torch.zeros_like(hidden[:, :, :1]), hidden[:, :, :-1]], dim=2)
    begins = (hidden & ~above).sum(dim=2)
    most = int(begins.max()) if begins.numel() else 0
    if most > 2:
        key = int(begins.amax(dim=(0, 1)).argmax())
        raise ValueError(
            f"mask: key {key} is hidden from {most} intervals of queries; hidden rows have at most 2. "
            "attention(mask=...) takes any mask"
        )
    columns = []
    for which in range(max(most, 1)):
        columns += _interval(hidden, above, which)
    if len(columns) == 2 and bool(((columns[1] >= seq_q) | (columns[0] >= columns[1])).all()):
        columns = [torch.where(columns[0] < columns[1], columns[0], seq_q)]
    rows = torch.stack(columns, dim=-1).to(torch.int32).contiguous()
    return IntervalMask(rows, causal, window, seq_q)


def _fill(hidden, matters):
    """Gives rows that do not matter the value of the nearest row above that does, or below if there is none."""
    import torch

    count = hidden.shape[2]
    place = torch.arange(count, device=hidden.device)[:, None]
    last = torch.where(matters, place, -1).cummax(dim=2).values
    first = torch.where(matters, place, count).flip(2).cummin(dim=2).values.flip(2)
    source = torch.where(last >= 0, last, first).clamp(max=max(count - 1, 0)).expand(*hidden.shape[:2], -1, -1)
    return torch.gather(hidden, 2, source)


def _interval(hidden, above, which):
    """The bounds of each key's first or second interval; an empty interval if the key has none."""
    import torch

    count = hidden.shape[2]
    place = torch.arange(count, device=hidden.device)[None, None, :, None]
    number = (hidden & ~above).cumsum(dim=2) - 1
    mine = hidden & (number == which)
    begin = torch.where(mine, place, count).amin(dim=2)
    end = torch.where(mine, place + 1, 0).amax(dim=2)
    empty = begin >= end
    return [torch.where(empty, 0, begin), torch.where(empty, 0, end)]
