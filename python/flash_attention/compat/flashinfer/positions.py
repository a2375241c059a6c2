"""FlashInfer's pos_encoding_mode: positions that are applied during attention, not when a key is appended.

"ALIBI" becomes slopes of the kernels. "ROPE_LLAMA" rotates queries and keys by their places, in halves. The kernels do not
rotate keys that they read, so each call makes a rotated copy of the planned pages. Keys that are rotated when they are
appended (flash_attention.append, pos_encoding_mode="NONE") cost nothing.
"""

import math

import torch

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


class Positions:
    """pos_encoding_mode with its rope_scale and rope_theta."""

    def __init__(self, mode="NONE", rope_scale=None, rope_theta=None, causal=True):
        if mode not in MODES:
            raise ValueError(f"pos_encoding_mode: got {mode!r}; allowed are {', '.join(map(repr, MODES))}")
        if mode == "ALIBI" and not causal:
            raise NotImplementedError(
                "pos_encoding_mode: got 'ALIBI' without causal, where FlashInfer favours distant keys"
            )
        self.mode = mode
        self.scale = 1.0 if rope_scale is None else rope_scale
        self.theta = 1e4 if rope_theta is None else rope_theta

    def slopes(self, heads, device):
        """alibi_slopes for the kernels, or None."""
        return alibi_slopes(heads).to(device) if self.mode == "ALIBI" else None

    def rotated(self, q, k, v, four_bits=None):
        """(q, k, v) with q [qo_len, heads, dim] and k [kv_len, heads, dim] of one sequence rotated, the last query at the
        last key."""
        if self.mode != "ROPE_LLAMA":
            return q, k, v
        _refuse_rotated(four_bits)
        of_q = torch.arange(len(k) - len(q), len(k), device=q.device)
        k, v = _widened(q, k, v)
        return self._turn(q, of_q), self._turn(k, torch.arange(len(k), device=q.device)), v

    def of_packed(self, q, k, v, starts_q, starts_kv, four_bits=None):
        """(q, k, v) of sequences end to end, each rotated as in rotated()."""
        _refuse_rotated(four_bits)
        of_k, _ = _places(len(k), starts_kv)
        of_q, sequence_of_q = _places(len(q), starts_q)
        behind = (starts_kv.diff() - starts_q.diff()).long()
        k, v = _widened(q, k, v)
        return self._turn(q, of_q + behind[sequence_of_q]), self._turn(k, of_k), v

    def over_pages(self, q, k, v, table, lengths, starts=None, four_bits=None):
        """(q, k, v, table) with q and the keys of the table's pages rotated.

        q is [batch, tokens, heads, dim], or with starts [total, heads, dim]; a sequence's last query is at its last key.
        """
        if self.mode != "ROPE_LLAMA":
            return q, k, v, table
        _refuse_rotated(four_bits)
        batch, pages = table.shape
        rows = table.long().clamp(0, len(k) - 1).flatten()
        places = torch.arange(pages * k.shape[1], device=q.device).view(pages, -1).repeat(batch, 1)
        own = torch.arange(batch * pages, dtype=torch.int32, device=q.device).view(batch, pages)
        if starts is None:
            first = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
        else:
            place, sequence = _places(len(q), starts)
            first = place + (lengths - starts.diff())[sequence]
        k, v = _widened(q, *(x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows] for x in (k, v)))
        return self._turn(q, first), self._turn(k, places), v, own

    def _turn(self, x, places):
        """x [..., heads, dim] by its places [...]: pairs are (i, i + dim / 2)."""
        half = x.shape[-1] // 2
        frequencies = self.theta ** (torch.arange(half, dtype=torch.float64, device=x.device) / -half) / self.scale
        angles = places.double()[..., None, None] * frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x[..., :half].float(), x[..., half:].float()
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


def _refuse_rotated(four_bits):
    if four_bits is not None:
        raise NotImplementedError("pos_encoding_mode: got 'ROPE_LLAMA' with keys of 4 bits; rotate them when appending")


def _places(total, starts):
    """(place in its sequence, sequence) of each of `total` tokens."""
    tokens = torch.arange(total, device=starts.device)
    sequence = (torch.searchsorted(starts.long(), tokens, right=True) - 1).clamp(max=max(len(starts) - 2, 0))
    return tokens - starts[sequence], sequence


def _widened(q, k, v):
    """Keys and values of 8 bits in the type of q, which holds every code: rotated keys are not rounded to codes again."""
    return (k.to(q.dtype), v.to(q.dtype)) if k.element_size() == 1 and q.element_size() > 1 else (k, v)


def alibi_slopes(heads):
    """2^(-8 i / n) for i = 1 ... n if n is a power of two; further heads get every other slope of twice the power below."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")
