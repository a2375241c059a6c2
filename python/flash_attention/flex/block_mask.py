"""create_block_mask and its kin. Ours build nothing: which tiles are hidden follows from the mask program itself."""

import torch
from torch.nn.attention import flex_attention as torch_flex

from flash_attention.flex import torch_mask

_ONE_BLOCK_FOR_ALL = 1 << 30


class BlockMask:
    """A mask_mod with the sizes it is for. Nothing of size Q_LEN * KV_LEN exists, now or later."""

    def __init__(self, mask_mod, B=None, H=None, Q_LEN=None, KV_LEN=None, BLOCK_SIZE=128):
        self.mask_mod = mask_mod
        self.shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
        self.BLOCK_SIZE = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)

    @property
    def seq_lengths(self):
        return self.shape[2:]

    def to(self, *unused, **also_unused):
        return self

    def to_dense(self):
        """bool [B, H, Q_LEN, KV_LEN]: for pictures and tests."""
        B, H, rows, keys = self.shape
        axes = [torch.arange(size).view([-1 if n == axis else 1 for n in range(4)]) for axis, size in enumerate(self.shape)]
        return torch.broadcast_to(_as_mask(self.mask_mod(*axes)), (B, H, rows, keys))

    def __repr__(self):
        return f"BlockMask(shape={self.shape}, mask_mod={getattr(self.mask_mod, '__name__', self.mask_mod)})"


def _as_mask(mask):
    return mask if isinstance(mask, torch.Tensor) else torch.tensor(bool(mask))


def create_block_mask(
    mask_mod, B=None, H=None, Q_LEN=None, KV_LEN=None, device=None, BLOCK_SIZE=128, _compile=False, **unused
):
    """A mask for flex_attention from mask_mod(b, h, i, j). torch's signature; nothing is computed here, so device, blocks
    and what a version of torch has besides to compute them (with a leading underscore) change nothing."""
    for name in unused:
        if not name.startswith("_"):
            raise TypeError(f"{name}: is not an argument of create_block_mask")
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: expected a function, got {type(mask_mod).__name__}")
    return BlockMask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE)


def _combined(name, masks, combine):
    if not masks or not all(callable(mask) for mask in masks):
        raise RuntimeError(f"{name}: all inputs must be functions mask_mod(b, h, i, j), got {masks}")

    def mask_mod(b, h, i, j):
        result = masks[0](b, h, i, j)
        for mask in masks[1:]:
            result = combine(result, mask(b, h, i, j))
        return result

    return mask_mod


def and_masks(*mask_mods):
    """A mask_mod that shows what all of them show."""
    return _combined("and_masks", mask_mods, lambda x, y: x & y)


def or_masks(*mask_mods):
    """A mask_mod that shows what one of them shows."""
    return _combined("or_masks", mask_mods, lambda x, y: x | y)


def mask_mods_of(block_mask):
    """The mask_mods whose conjunction a block mask is: ours, or one of torch by its fields."""
    if isinstance(block_mask, BlockMask):
        return [block_mask.mask_mod]
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    return [torch_mask.mask_mod_of(block_mask)]


def as_program(block_mask, mask_mod, query, key, layout):
    """(block_mask, mask_mod) of a call of attention(): a function inside of the blocks makes a program of them."""
    if block_mask.mask_mod is torch_flex.noop_mask:
        return block_mask, mask_mod
    mask_mods = mask_mods_of(block_mask)
    sizes = [tensor.shape for tensor in (query, key)]
    check_sizes(block_mask, *([(size[0], size[2], size[1]) for size in sizes] if layout == "bshd" else sizes))
    return None, mask_mods[0] if mask_mod is None else and_masks(mask_mod, *mask_mods)


def check_sizes(block_mask, of_query, of_key):
    """Refuses a block mask that was made for other sizes: it would show or hide other keys than its maker meant. Of queries
    and keys it is given their shapes, [batch, heads, rows, ...]."""
    shape = tuple(block_mask.shape)
    if shape in ((1, 1, of_query[2], of_key[2]), (of_query[0], of_query[1], of_query[2], of_key[2])):
        return
    if len(shape) != 4:
        raise ValueError(f"block_mask: has the shape {shape}; expected (batch, heads, Q_LEN, KV_LEN)")
    batch, heads, seq_q, seq_kv = shape
    if hasattr(block_mask, "kv_num_blocks") and min(block_mask.BLOCK_SIZE) >= _ONE_BLOCK_FOR_ALL:
        return  # torch's way to say that there is no mask
    for name, got, allowed in (("batch", batch, {1, of_query[0]}), ("heads", heads, {1, of_query[1]})):
        if got not in allowed:
            raise ValueError(
                f"block_mask: was made for {name} {got}; allowed are {' and '.join(map(str, sorted(allowed)))}"
            )
    lengths = ("Q_LEN", seq_q, of_query[2]), ("KV_LEN", seq_kv, of_key[2])
    for (name, got, needed), block in zip(lengths, block_mask.BLOCK_SIZE, strict=True):
        whole_blocks = hasattr(block_mask, "kv_num_blocks") and got == -(-needed // block) * block  # from_kv_blocks
        if got is not None and got != needed and not whole_blocks:
            raise ValueError(f"block_mask: was made for {name} {got}; this call needs {needed}: make one of that size")
