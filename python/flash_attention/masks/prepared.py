"""Masks that serve many calls: what a GPU finds out about them is kept with the mask. docs/masks.md, "Prepared masks"."""

from __future__ import annotations

from typing import Any, NoReturn

from flash_attention import _core
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.masks.blocks import BlockMask
from flash_attention.masks.intervals import IntervalMask


class PreparedMask:
    """A mask of attention() with what GPUs have found out about it, for each pass, size and stream that used it.

    Made by prepare(); attention() takes it where it takes the mask. `made` counts how often it was found out.
    """

    def __init__(self, mask):
        self.mask, self.kept = mask, new_kept()

    @property
    def made(self) -> int:
        return self.kept.made

    def to(self, device) -> PreparedMask:
        return PreparedMask(self.mask.to(device))

    def __repr__(self):
        return f"PreparedMask({self.mask!r})"


def prepare(mask: Any, **wrong: NoReturn) -> PreparedMask:
    """The mask for many calls: a GPU finds out once which of its tiles are hidden or full, and not in each call.

        mask = prepare(torch.rand(16, 16) < 0.5)  # once, for many calls
        out = attention(q, k, v, mask=mask)

    Args:
        mask: an IntervalMask or int32 tensor of hidden_rows=, a BlockMask of block_mask=, or a bool tensor of mask=.

    The first call does the work; others of the same sizes, pass and stream find it done. A change in place that torch
    counts (tensor._version) is seen, and the mask is prepared anew; one that it does not count (another library's kernel,
    .data) is not. CUDA graphs prepare the mask in the graph, and a CPU has nothing to prepare. flex_attention keeps what
    it finds out about masks of create_block_mask without being asked.
    """
    if wrong:
        refuse_keywords(prepare, wrong)
    import torch

    if isinstance(mask, PreparedMask):
        return mask
    if isinstance(mask, torch.Tensor) and mask.dtype in (torch.bool, torch.int32):
        return PreparedMask(mask if mask.stride(-1) == 1 else mask.contiguous())
    if isinstance(mask, (IntervalMask, BlockMask)):
        return PreparedMask(mask)
    kind = f"a tensor of {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise TypeError(
        f"mask: expected an IntervalMask, masks.BlockMask or a tensor of bools or int32, got {kind}; masks of "
        "create_block_mask are prepared by flex_attention as they are"
    )


def new_kept():
    return _core.KeptMasks(_allocate)


def _allocate(size, index):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))


def bare_masks(mask, hidden_rows, block_mask):
    """The masks of a call without what is kept of them, and where that is kept: None unless all of them were prepared."""
    given = (mask, hidden_rows, block_mask)
    prepared = [isinstance(one, PreparedMask) for one in given]
    if not any(prepared):
        return *given, None
    kept = next(one.kept for one, is_prepared in zip(given, prepared, strict=True) if is_prepared)
    if any(one is not None and not is_prepared for one, is_prepared in zip(given, prepared, strict=True)):
        kept = None
    return *(one.mask if is_prepared else one for one, is_prepared in zip(given, prepared, strict=True)), kept
