"""Masks as data: the queries from which a key is hidden, or which blocks see which. Builders, and pictures of masks.

    from flash_attention import attention, masks
    mask = masks.documents([0, 300, 1000])
    out = attention(q, k, v, hidden_rows=mask)
    print(masks.show(mask))

A builder returns an IntervalMask: the numbers of attention(hidden_rows=...) with their causal and window. It needs torch.
"""

from flash_attention.masks.bits import BitMask, draft_tree, from_bits, pack_drafts
from flash_attention.masks.blocks import BlockMask
from flash_attention.masks.builders import (
    block_causal,
    block_diffusion,
    documents,
    prefix_lm,
    shared_prefix,
    sink_window,
    spans,
    tree,
)
from flash_attention.masks.drawing import show
from flash_attention.masks.from_bool import from_bool
from flash_attention.masks.intervals import IntervalMask
from flash_attention.masks.prepared import PreparedMask, prepare

__all__ = [
    "BitMask",
    "BlockMask",
    "IntervalMask",
    "PreparedMask",
    "block_causal",
    "block_diffusion",
    "documents",
    "draft_tree",
    "from_bits",
    "from_bool",
    "pack_drafts",
    "prefix_lm",
    "prepare",
    "shared_prefix",
    "show",
    "sink_window",
    "spans",
    "tree",
]
