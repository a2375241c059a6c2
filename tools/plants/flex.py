"""Mistakes of meaning in block masks of flex_attention: full blocks, parts, heads."""

from .plant import Plant

FLEX = "python/flash_attention/flex/"
BLOCKS = "tests/python/masks/test_block_masks.py"
OBJECTS = "tests/python/masks/test_flex_objects.py"

PLANTS = (
    Plant(
        "full blocks of torch's BlockMask are hidden",
        FLEX + "torch_mask.py",
        "return visible if full is None else visible | full[at]",
        "return visible",
        BLOCKS + " -k full",
    ),
    Plant(
        "the function decides in full blocks alone",
        FLEX + "torch_mask.py",
        "visible = partial[at] & inner(b, h, i, j) if inner is not None else partial[at]",
        "visible = partial[at]",
        BLOCKS + " -k full",
    ),
    Plant(
        "blocks of the first head serve all",
        FLEX + "torch_mask.py",
        "h if heads > 1 else 0, i // rows",
        "0, i // rows",
        BLOCKS + " -k full",
    ),
    Plant(
        "a part of a block mask has the function of the first heads",
        FLEX + "block_mask.py",
        "return inner(b + b0, h + h0, i + i0, j)",
        "return inner(b + b0, h, i + i0, j)",
        OBJECTS,
    ),
)
