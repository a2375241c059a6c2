"""Block masks: which blocks of queries see which blocks of keys, ours and torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BlockMask:
    """visible: bool or uint8 [batch|1, heads_q|1, blocks of queries, blocks of keys]; block_size: (queries, keys)."""

    visible: Any
    block_size: tuple[int, int] = (128, 128)

    @classmethod
    def from_kv_indices(cls, kv_num_blocks, kv_indices, num_kv_blocks: int, block_size=(128, 128)) -> BlockMask:
        """From the blocks that each block of queries sees: the first kv_num_blocks[..., i] of kv_indices[..., i, :]."""
        return cls(lists_to_map(kv_num_blocks, kv_indices, num_kv_blocks), tuple(block_size))

    def to(self, device) -> BlockMask:
        return BlockMask(self.visible.to(device), self.block_size)


def lists_to_map(counts, indices, num_kv_blocks):
    """uint8 [..., blocks of queries, num_kv_blocks]: 1 for the first counts[..., i] of indices[..., i, :]."""
    import torch

    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    columns = torch.where(listed, indices, num_kv_blocks).long()  # what is not listed goes to an extra column
    shape = (*indices.shape[:-1], num_kv_blocks + 1)
    found = torch.zeros(shape, dtype=torch.uint8, device=indices.device)
    found.scatter_(-1, columns, 1)
    return found[..., :num_kv_blocks].contiguous()


def _of_torch(mask):
    """From the fields of torch.nn.attention.flex_attention.BlockMask."""
    block_q, block_kv = mask.BLOCK_SIZE
    num_kv_blocks = -(-mask.seq_lengths[1] // block_kv) if hasattr(mask, "seq_lengths") else mask.kv_indices.shape[-1]
    found = lists_to_map(mask.kv_num_blocks, mask.kv_indices, num_kv_blocks)
    if mask.full_kv_num_blocks is not None:
        found = found | lists_to_map(mask.full_kv_num_blocks, mask.full_kv_indices, num_kv_blocks)
    return found, block_q, block_kv


def has_function(mask):
    """Whether a function hides pairs inside of the blocks."""
    from torch.nn.attention.flex_attention import noop_mask

    return getattr(mask, "mask_mod", None) not in (None, noop_mask)


def block_map(mask):
    """(map or None, (block_q, block_kv)) of the argument of attention()."""
    if mask is None:
        return None, (0, 0)
    if isinstance(mask, BlockMask):
        found, (block_q, block_kv) = mask.visible, mask.block_size
    elif has_function(mask):
        raise ValueError(
            "block_mask: its mask_mod is a function, which decides inside of the blocks; packed calls take functions as "
            "mask_mod=, and block masks without one (masks.BlockMask, torch's BlockMask.from_kv_blocks)"
        )
    elif hasattr(mask, "kv_num_blocks") and hasattr(mask, "BLOCK_SIZE"):
        found, block_q, block_kv = _of_torch(mask)
    else:
        raise TypeError(
            f"block_mask: expected flash_attention.masks.BlockMask or torch's BlockMask, got {type(mask).__name__}"
        )
    return found, (int(block_q), int(block_kv))
