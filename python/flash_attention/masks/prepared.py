"""Masks for many calls: the classes of tiles that a GPU finds are kept with the mask. docs/masks.md, "Prepared masks"."""

from __future__ import annotations

from typing import Any, NoReturn

from flash_attention import _core
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.masks.blocks import BlockMask
from flash_attention.masks.intervals import IntervalMask


class PreparedMask:
    """A mask of attention() with the results of GPUs that have classified it, for each pass, size and stream.

    prepare() makes it; attention() accepts it wherever it accepts the mask. `made` counts how often it was classified.
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
    """The mask for many calls: a GPU finds its hidden and full tiles once instead of in each call.

        mask = prepare(torch.rand(16, 16) < 0.5)  # once, for many calls
        out = attention(q, k, v, mask=mask)

    Args:
        mask: an IntervalMask or int32 tensor of hidden_rows=, a BlockMask of block_mask=, or a bool tensor of mask=.

    The first call does the work; later calls with the same sizes, pass and stream reuse it. If torch counts a change in
    place (tensor._version), the mask is prepared again. Changes that it does not count (another library's kernel,
    .data) are not seen. CUDA graphs prepare the mask in the graph, and a CPU has nothing to prepare. flex_attention
    prepares masks of create_block_mask by itself.
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
    """The masks of a call without their stored results, and the place of these: None unless all masks are prepared."""
    given = (mask, hidden_rows, block_mask)
    prepared = [isinstance(one, PreparedMask) for one in given]
    if not any(prepared):
        return *given, None
    kept = next(one.kept for one, is_prepared in zip(given, prepared, strict=True) if is_prepared)
    if any(one is not None and not is_prepared for one, is_prepared in zip(given, prepared, strict=True)):
        kept = None
    return *(one.mask if is_prepared else one for one, is_prepared in zip(given, prepared, strict=True)), kept
