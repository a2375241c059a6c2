"""Bit masks: one bit for each query and key, as in speculative decoding and FlashInfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from flash_attention.arguments.keywords import refuse_keywords


@dataclass(frozen=True)
class BitMask:
    """A bit for each query and key of attention_over_cache(bit_mask=...), from the lowest bit of a byte up.

    bits: uint8. Of drafts [batch, seq_q, bytes] (with packed queries [total_q, bytes]): bit c of a query is the key of the
    sequence's query c, one of its last; it sees all keys before those. Of all keys [bytes], with offsets.
    offsets: int32 [batch + 1]; the byte at which each sequence begins, and the end. A sequence without bytes has no mask.
    With offsets, bits of drafts are [rows, bytes].
    """

    bits: Any
    offsets: Any = None

    def to(self, device) -> BitMask:
        return BitMask(self.bits.to(device), None if self.offsets is None else self.offsets.to(device))


def bytes_of(mask):
    """(bits, offsets) of the argument of attention_over_cache()."""
    if mask is None:
        return None, None
    if not isinstance(mask, BitMask):
        raise TypeError(
            f"bit_mask: expected a flash_attention.masks.BitMask, as draft_tree() and from_bits() make it, got "
            f"{type(mask).__name__}"
        )
    return mask.bits, mask.offsets


def draft_tree(parents: Any, **wrong: NoReturn) -> BitMask:
    """Trees of drafted tokens: each sees itself, its ancestors and all keys before the tree.

        from flash_attention import attention_over_cache
        drafts = draft_tree(torch.tensor([[-1, 0, 0, 1]] * 2))  # a root, two children, a grandchild
        out = attention_over_cache(q[:, :4], k, v, bit_mask=drafts)

    parents: [batch, drafts], of any type of integers; the parent of each draft in the same sequence, or -1. Drafts are the
    sequence's queries, and its last keys, in the same order; any order will do. Nothing is read on the host, so a CUDA
    graph can contain the call.
    """
    if wrong:
        refuse_keywords(draft_tree, wrong)
    import torch

    if not isinstance(parents, torch.Tensor) or parents.dim() != 2 or parents.is_floating_point():
        got = list(parents.shape) if isinstance(parents, torch.Tensor) else type(parents).__name__
        raise ValueError(f"parents: got {got}; expected a tensor of integers [batch, drafts]")
    drafts = parents.shape[1]
    places = torch.arange(drafts, device=parents.device)
    sees = (parents[..., None] == places) | (places[:, None] == places)
    steps = 1
    while steps < drafts:  # each doubles the generations that are seen; sums of a path stay small
        sees = torch.bmm(sees.float(), sees.float()) > 0
        steps *= 2
    return pack_drafts(sees)


def pack_drafts(visible: Any, **wrong: NoReturn) -> BitMask:
    """From a matrix of the drafts that each draft sees: bool [batch, drafts, drafts], or [total_q, drafts] if packed.

        from flash_attention import attention_over_cache
        chain = pack_drafts(torch.ones(2, 4, 4).bool().tril())  # the same as causal=True
        out = attention_over_cache(q[:, :4], k, v, bit_mask=chain)

    Bits are packed on the device, a byte for eight drafts.
    """
    if wrong:
        refuse_keywords(pack_drafts, wrong)
    import torch

    rows = torch.nn.functional.pad(visible.to(torch.uint8), (0, -visible.shape[-1] % 8))
    eights = rows.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8, device=rows.device)
    return BitMask(eights.sum(-1, dtype=torch.uint8))


def from_bits(bits: Any, offsets: Any, **wrong: NoReturn) -> BitMask:
    """A bit for every key of a sequence, queries one after another without gaps: FlashInfer's packed_custom_mask.

        from flash_attention import attention_over_cache
        offsets = torch.tensor([0, 8, 8], dtype=torch.int32)  # 4 queries of 16 keys; the second sequence has no mask
        mask = from_bits(torch.full((8,), 0b01111111, dtype=torch.uint8), offsets)
        out = attention_over_cache(q[:, :4], k, v, bit_mask=mask)

    bits: uint8 [bytes]. offsets: int32 [batch + 1], FlashInfer's mask_indptr of bytes.
    """
    if wrong:
        refuse_keywords(from_bits, wrong)
    return BitMask(bits, offsets)
