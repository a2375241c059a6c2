"""The options of one context-parallel call, and single passes over blocks of it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attention.arguments.options import make_options
from flash_attention.options import Tensors
from flash_attention.parallel.cut import Block, Shape
from flash_attention.parallel.peers import Peers
from flash_attention.pytorch import ops as torch_ops


@dataclass(frozen=True)
class Call:
    """q [batch, rows, heads_q, head_dim] of this rank, k, v alike; a packed call has batch 1."""

    peers: Peers
    shape: Shape
    agreement: Any
    scale: float | None = None
    softcap: float = 0.0
    deterministic: bool = False
    kernel: str | None = None
    mask: Tensor | None = None  # [batch | 1, heads_q | 1, rows | 1, seq]
    key_lengths: Tensor | None = None  # int32 [batch]

    def some_heads(self, heads: slice):
        """The same call for some heads."""
        if self.mask is None or self.mask.shape[1] == 1:
            return self
        return replace(self, mask=self.mask[:, heads])

    def bind(self, block: Block, q, k, v, bias, sink):
        """(tensors, options) of the binding for one block; q, k, v are those of the block."""
        seq_q, seq_kv = q.shape[1], k.shape[1]
        lengths = starts_q = starts_kv = None
        if self.key_lengths is not None:
            parts = [(self.key_lengths - begin).clamp(0, length) for begin, length in block.keys]
            lengths = sum(parts[1:], parts[0]).to(torch.int32)
        if block.lengths:
            starts_q, starts_kv = (starts_of(each, q.device) for each in (block.lengths, block.kv_lengths))
            q, k, v = q[0], k[0], v[0]
        bias, mask = (_cut(scores, block) for scores in (bias, self.mask))
        own_sink = sink if block.own else None
        tensors = Tensors(
            q, k, v, bias, mask, sink=own_sink, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, key_lengths=lengths
        )
        # If a plain call's options mean the same, use them: their kernels are compiled already.
        plain = bool(block.lengths) or seq_q == seq_kv or block.left < 0 > block.right
        causal = block.left < 0 and block.right == (0 if plain else seq_kv - seq_q)
        options = make_options(
            max_seqlen_q=max(block.lengths, default=0),
            max_seqlen_kv=max(block.kv_lengths, default=0),
            scale=self.scale,
            softcap=self.softcap,
            causal=causal,
            alignment="bottom_right" if plain or causal else "top_left",
            window=(-1, -1) if causal else (block.left, block.right),
            deterministic=self.deterministic,
            kernel=self.kernel,
        )
        return tensors, options

    def forward(self, block: Block, q, k, v, bias, sink):
        """(out, lse) of the rows block.q over the keys block.kv."""
        tensors, options = self.bind(block, _rows(q, block.q), _rows(k, block.kv), _rows(v, block.kv), bias, sink)
        out, lse, _ = torch_ops.forward(tensors, options, None, 0, True)
        return (out[None], lse[None]) if block.lengths else (out, lse)

    def backward(self, block: Block, q, k, v, bias, sink, results, gradients, needs):
        """(dq, dk, dv, dbias, dsink) of a block from (out, lse) over all keys and (dout, dlse)."""
        tensors, options = self.bind(block, _rows(q, block.q), _rows(k, block.kv), _rows(v, block.kv), bias, sink)
        rows = slice(*block.q)
        out, lse = results[0][:, rows], results[1][..., rows]
        dout = None if gradients[0] is None else gradients[0][:, rows]
        dlse = None if gradients[1] is None else gradients[1][..., rows]
        if block.lengths:
            out, lse = out[0], lse[0]
            dout, dlse = (None if gradient is None else gradient[0] for gradient in (dout, dlse))
        need_dbias, need_dsink = needs
        found = torch_ops.backward(
            tensors, options, out, lse, None, dout, dlse, need_dbias, need_dsink and tensors.sink is not None
        )
        if block.lengths:
            found = (*(gradient[None] for gradient in found[:3]), *found[3:])
        return found


def starts_of(lengths, device):
    """cu_seqlens"""
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _rows(tensor, rows):
    return tensor if rows == (0, tensor.shape[1]) else tensor[:, slice(*rows)]


def _cut(scores, block):
    """Rows and columns of a bias or mask; cut() gave blocks of one piece of keys."""
    if scores is None:
        return None
    (first, count) = block.keys[0]
    scores = scores[..., first : first + count]
    return scores if scores.shape[-2] == 1 else scores[..., slice(*block.q), :]
