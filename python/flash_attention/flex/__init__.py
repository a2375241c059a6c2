"""Scores as programs: flex_attention's functions over this library. docs/masks.md, "Programs"."""

from flash_attention.flex.attention import flex_attention
from flash_attention.flex.block_mask import BlockMask, and_masks, create_block_mask, or_masks
from flash_attention.flex.program import Program, ProgramError

__all__ = ["BlockMask", "Program", "ProgramError", "and_masks", "create_block_mask", "flex_attention", "or_masks"]
