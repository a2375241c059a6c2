"""Mistakes of meaning in flashmask_attention."""

from .plant import Plant

MASKS = "python/flash_attention/masks/"
FLASHMASK = "tests/python/masks/test_masks.py -k TestFlashMask"

PLANTS = (
    Plant(
        "flashmask: blocks of key heads in another order",
        MASKS + "flashmask.py",
        "found.repeat_interleave(group, dim=1)",
        "found.repeat(1, group, 1, 1)",
        FLASHMASK,
    ),
)
