"""The result of a builder: hidden rows, with their causal mask and window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LAST = 2**31 - 1  # after every row


@dataclass(frozen=True)
class IntervalMask:
    """A mask: key j is hidden from the queries [r0, inf), [r0, r1), or [r0, r1) and [r2, r3), and by causal and window.

    hidden_rows is an int32 tensor [batch|1, heads_kv|1, seq_kv, 1|2|4]; packed [heads_kv|1, total_kv, 1|2|4].
    """

    hidden_rows: Any
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    seq_q: int | None = None  # None: as many queries as keys

    def to(self, device) -> IntervalMask:
        return IntervalMask(self.hidden_rows.to(device), self.causal, self.window, self.seq_q)

    def rows_from(self, row: int) -> IntervalMask:
        """The mask of the queries from `row` to the last, for a call with only these queries and all keys."""
        import torch

        seq_q = self._seq_q()
        if not 0 <= row <= seq_q:
            raise ValueError(f"row: got {row}; allowed are 0 to {seq_q}, the queries of the mask")
        rows = self.hidden_rows
        rows = torch.where(rows == LAST, LAST, rows.clamp(min=row) - row)
        return IntervalMask(rows, self.causal, self.window, seq_q - row)

    def _seq_q(self):
        return self.hidden_rows.shape[-2] if self.seq_q is None else self.seq_q

    def visible(self, seq_q: int | None = None):
        """bool [batch|1, heads_kv|1, seq_q, seq_kv]: the mask as a matrix, for tests and small pictures."""
        import torch

        rows = self.hidden_rows
        rows = rows.reshape(*(1,) * (4 - rows.dim()), *rows.shape)
        seq_kv = rows.shape[2]
        seq_q = seq_q or self.seq_q or seq_kv
        i = torch.arange(seq_q, device=rows.device)[:, None]
        j = torch.arange(seq_kv, device=rows.device)[None, :]
        bound = [rows[..., n][:, :, None, :] for n in range(rows.shape[3])]
        hidden = i >= bound[0]
        if len(bound) > 1:
            hidden = hidden & (i < bound[1])
        if len(bound) == 4:
            hidden = hidden | ((i >= bound[2]) & (i < bound[3]))
        left, right = self.window
        diagonal = i + (seq_kv - seq_q)
        seen = torch.ones(seq_q, seq_kv, dtype=torch.bool, device=rows.device)
        if self.causal:
            right = 0
        if right >= 0:
            seen = seen & (j <= diagonal + right)
        if left >= 0:
            seen = seen & (j >= diagonal - left)
        return seen & ~hidden


def plain_rows(hidden_rows, causal, window, seq_q=None):
    """(tensor, causal, window) of the argument of attention(). seq_q: the queries of the call; None: it is packed."""
    if not isinstance(hidden_rows, IntervalMask):
        return hidden_rows, causal, window
    if seq_q is not None and seq_q != hidden_rows._seq_q():
        raise ValueError(
            f"hidden_rows: the mask was made for {hidden_rows._seq_q()} queries; this call has {seq_q}: make one of that "
            "size, or take mask.rows_from(r) for queries r, r + 1, ..."
        )
    if hidden_rows.window != (-1, -1):
        if tuple(window) not in ((-1, -1), (None, None), hidden_rows.window):
            raise ValueError(f"window: got {window!r}; the mask in hidden_rows has one of its own, {hidden_rows.window!r}")
        window = hidden_rows.window
    return hidden_rows.hidden_rows, causal or hidden_rows.causal, window
