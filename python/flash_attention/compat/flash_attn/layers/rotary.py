"""Rotary position embedding, with the names and arguments of FlashAttention-2's layers.rotary."""

import torch
from torch import Tensor

from flash_attention.compat.flash_attn.layers.rotate import (
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]

apply_rotary_emb_func = apply_rotary_emb


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys by angles position * base ** (-2 i / dim), i = 0 ... dim / 2 - 1.

    Args:
        dim: how many dimensions of a head are rotated.
        interleaved: pairs are neighbours, instead of dim / 2 apart.
        scale_base: if given, position m of a sequence of length s is scaled, too: pairs of q by
            ((2 i + 0.4 dim) / (1.4 dim)) ** ((m - s // 2) / scale_base), pairs of k by the inverse.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim: got {dim}; allowed are positive even numbers")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        evens = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-evens / dim), persistent=False)
        self.register_buffer("scale", None if scale_base is None else (evens + 0.4 * dim) / (1.4 * dim), persistent=False)
        self._tables = None  # (length, device, dtype), (cos, sin, cos of k, sin of k)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place. qkv as in apply_rotary_emb_qkv_(); with kv, qkv is q [batch, seq, heads, head_dim].

        seqlen_offset: int or int [batch], the position of the first token; a tensor needs max_seqlen.
        Returns qkv, or (q, kv).
        """
        if isinstance(seqlen_offset, int):
            length = qkv.shape[1] + seqlen_offset
        elif max_seqlen is None:
            raise ValueError("max_seqlen: got None; a tensor as seqlen_offset needs the longest length")
        else:
            length = max_seqlen
        cos, sin, cos_k, sin_k = self._tables_for(max(length, max_seqlen or 0), qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _tables_for(self, length, device, dtype):
        """Recomputes the tables if they are too short; with a scale, which depends on the length, if the length differs."""
        if self._tables is not None:
            (known, *place), tables = self._tables
            enough = known >= length if self.scale is None else known == length
            if enough and place == [device, dtype] and not (self.training and tables[0].is_inference()):
                return tables
        position = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(position, self.inv_freq.to(device=device, dtype=torch.float32))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            tables = (cos.to(dtype), sin.to(dtype)) * 2
        else:
            power = (position - length // 2) / self.scale_base
            scale = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
            tables = tuple(table.to(dtype) for table in (cos * scale, sin * scale, cos / scale, sin / scale))
        self._tables = ((length, device, dtype), tables)
        return tables
