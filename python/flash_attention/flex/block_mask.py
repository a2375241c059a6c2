"""create_block_mask and its kin. Ours build nothing: which tiles are hidden follows from the mask program itself."""

import math

import torch
from torch.nn.attention import flex_attention as torch_flex

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.flex import dense, torch_mask
from flash_attention.masks.blocks import has_function
from flash_attention.masks.prepared import new_kept

_ONE_BLOCK_FOR_ALL = 1 << 30


class BlockMask:
    """A mask_mod with the sizes it is for, and what GPUs have found out about its tiles (`kept`). Nothing of size Q_LEN *
    KV_LEN exists unless a picture or a count is asked for."""

    def __init__(self, mask_mod, B=None, H=None, Q_LEN=None, KV_LEN=None, BLOCK_SIZE=128):
        self.mask_mod, self.kept = mask_mod, new_kept()
        self.shape = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
        self.BLOCK_SIZE = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)

    @property
    def seq_lengths(self):
        return self.shape[2:]

    @classmethod
    def from_kv_blocks(
        cls, kv_num_blocks, kv_indices, full_kv_num_blocks=None, full_kv_indices=None, BLOCK_SIZE=128, mask_mod=None,
        seq_lengths=None, **unused,
    ):  # fmt: skip
        """From lists of blocks of keys, as torch's: those where mask_mod decides, and those that are visible whole."""
        given = torch_flex.BlockMask.from_kv_blocks(
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, BLOCK_SIZE, mask_mod, seq_lengths
        )
        return cls(torch_mask.mask_mod_of(given), *given.shape, given.BLOCK_SIZE)

    def to(self, *unused, **also_unused):
        """Itself: what its function captures is where it is."""
        return self

    def numel(self):
        return math.prod(self._sizes())

    def to_dense(self):
        """bool [B, H, Q_LEN, KV_LEN]: for pictures and tests."""
        return dense.shown([self.mask_mod], *map(range, self._sizes()))

    def sparsity(self):
        """The percentage of blocks of BLOCK_SIZE that show nothing, as torch has it from 2.15. Looks at all pairs."""
        return 100 * (1 - dense.seen_blocks([self.mask_mod], self._sizes(), self.BLOCK_SIZE).float().mean().item())

    def to_string(self, grid_size=None, limit=4):
        """A picture of each of the first `limit` batches and heads."""
        from flash_attention.masks import show

        sizes = self._sizes()
        heads = [(b, h) for b in range(sizes[0]) for h in range(sizes[1])][:limit]
        return "\n".join(f"({b}, {h})\n" + show(self, tile=self.BLOCK_SIZE, batch=b, head=h) for b, h in heads)

    def __getitem__(self, index):
        """The mask of some batches, heads and blocks of queries, by ints and slices. Its function counts from there."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > 3 or not all(
            isinstance(part, int) or (isinstance(part, slice) and part.step in (None, 1)) for part in parts
        ):
            raise IndexError(f"block_mask[{index}]: allowed are up to three ints and slices without steps")
        batch, heads, seq_q, seq_kv = self._sizes()
        block = self.BLOCK_SIZE[0]
        starts, sizes = [0, 0, 0], [batch, heads, seq_q]
        for axis, part in enumerate(parts):
            count = -(-seq_q // block) if axis == 2 else sizes[axis]
            if isinstance(part, int) and not -count <= part < count:
                raise IndexError(f"block_mask[{index}]: allowed are {-count} to {count - 1}")
            chosen = range(count)[part if isinstance(part, slice) else slice(part % count, part % count + 1)]
            unit = block if axis == 2 else 1
            starts[axis] = chosen.start * unit
            sizes[axis] = max(min(chosen.stop * unit, sizes[axis]) - starts[axis], 0)
        inner, (b0, h0, i0) = self.mask_mod, starts

        def mask_mod(b, h, i, j):
            return inner(b + b0, h + h0, i + i0, j)

        return BlockMask(mask_mod, *sizes, seq_kv, self.BLOCK_SIZE)

    def _adjust(self, new_q_len, new_kv_len):
        return BlockMask(self.mask_mod, *self.shape[:2], new_q_len, new_kv_len, self.BLOCK_SIZE)

    def _sizes(self):
        if None in self.shape:
            raise ValueError(
                "block_mask: was made without Q_LEN and KV_LEN, so it has no size; create_block_mask takes both"
            )
        return self.shape

    def __repr__(self):
        return f"BlockMask(shape={self.shape}, mask_mod={getattr(self.mask_mod, '__name__', self.mask_mod)})"


def create_block_mask(
    mask_mod, B=None, H=None, Q_LEN=None, KV_LEN=None, device=None, BLOCK_SIZE=128, _compile=False, **unused
):
    """A mask for flex_attention from mask_mod(b, h, i, j), with torch's signature. Nothing is computed here, so device,
    BLOCK_SIZE and torch's arguments with a leading underscore change nothing.

    For example:

        mask = create_block_mask(lambda b, h, i, j: i >= j)
        out = flex_attention(q, k, v, block_mask=mask)  # [batch, heads, seq, head_dim]
    """
    for name in unused:
        if not name.startswith("_"):
            refuse_keywords(create_block_mask, {name: unused[name]})
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: expected a function, got {type(mask_mod).__name__}")
    return BlockMask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE)


def _combined(name, masks, combine, of_none):
    if not all(callable(mask) for mask in masks):
        raise RuntimeError(f"{name}: all inputs must be functions mask_mod(b, h, i, j), got {masks}")

    if not masks:
        return lambda b, h, i, j: b.new_full((), of_none, dtype=torch.bool)

    def mask_mod(b, h, i, j):  # no module, no generator: programs are remembered by what a function reads
        result = masks[0](b, h, i, j)
        for mask in masks[1:]:
            result = combine(result, mask(b, h, i, j))
        return result

    return mask_mod


def and_masks(*mask_mods):
    """A mask_mod that shows a key if all of the given ones show it; without arguments it shows every key.

    For example:

        band = and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j < 4)
        out = attention(q, k, v, mask_mod=band)
    """
    return _combined("and_masks", mask_mods, lambda x, y: x & y, True)


def or_masks(*mask_mods):
    """A mask_mod that shows a key if one of the given ones shows it; without arguments it shows no key.

    For example:

        prefix = or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: j < 4)
        out = attention(q, k, v, mask_mod=prefix)
    """
    return _combined("or_masks", mask_mods, lambda x, y: x | y, False)


def mask_mods_of(block_mask):
    """The mask_mods whose conjunction a block mask is: ours, or one of torch by its fields."""
    if isinstance(block_mask, BlockMask):
        return [block_mask.mask_mod]
    if not hasattr(block_mask, "kv_num_blocks"):
        got = f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        raise TypeError(f"block_mask: expected what create_block_mask gives, got {got}; attention() takes other masks")
    return [torch_mask.mask_mod_of(block_mask)]


def kept_of(block_mask):
    """Where what GPUs found out about a block mask is kept, once mask_mods_of() has seen it; None where nowhere."""
    return block_mask.kept if isinstance(block_mask, BlockMask) else torch_mask.kept_of(block_mask)


def as_program(block_mask, mask_mod, query, key, layout):
    """(block_mask, mask_mod) of a call of attention(): a function inside of the blocks makes a program of them."""
    if not has_function(block_mask):
        return block_mask, mask_mod
    mask_mods = mask_mods_of(block_mask)
    sizes = [tensor.shape for tensor in (query, key)]
    if all(len(size) == 4 for size in sizes):  # other shapes are refused by name later
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
