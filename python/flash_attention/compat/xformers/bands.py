"""The meaning of a bias of xformers, or of attn_bias.py here, read from its class name and from xformers' attributes."""

from typing import NamedTuple

import torch

# For each class: its shape, and the keys of a block that a query sees. "causal" and "window" align the last query with the
# last key.
_CLASSES = {
    "LowerTriangularMask": ("dense", "top_left"),
    "LowerTriangularMaskWithTensorBias": ("dense", "top_left"),
    "LowerTriangularFromBottomRightMask": ("dense", "causal"),
    "LowerTriangularFromBottomRightLocalAttentionMask": ("dense", "causal"),
    "LocalAttentionFromBottomRightMask": ("dense", "window"),
    "BlockDiagonalMask": ("packed", "all"),
    "BlockDiagonalCausalMask": ("packed", "top_left"),
    "BlockDiagonalCausalFromBottomRightMask": ("packed", "causal"),
    "BlockDiagonalCausalLocalAttentionMask": ("packed", "top_left"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": ("packed", "causal"),
    "BlockDiagonalPaddedKeysMask": ("packed", "all"),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("packed", "causal"),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("packed", "window"),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("packed", "causal"),
    "BlockDiagonalGappyKeysMask": ("packed", "all"),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ("packed", "causal"),
    "PagedBlockDiagonalPaddedKeysMask": ("paged", "all"),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": ("paged", "causal"),
    "PagedBlockDiagonalGappyKeysMask": ("paged", "all"),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": ("paged", "causal"),
}


class Band(NamedTuple):
    """shape: "dense", "packed" or "paged". left, right: keys before and after the diagonal, -1 = all."""

    shape: str
    left: int
    right: int
    top_left: bool

    def options(self):
        """attention()'s."""
        return {"window": (self.left, self.right), "alignment": "top_left" if self.top_left else "bottom_right"}


def band_of(bias):
    name = type(bias).__name__
    if name not in _CLASSES:
        raise TypeError(f"attn_bias: got {name}; allowed are a tensor, {', '.join(_CLASSES)}")
    shape, kind = _CLASSES[name]
    size = getattr(bias, "_window_size", None)
    left, right = -1 if size is None else size - 1, -1 if kind == "all" else 0
    if kind == "window":
        left, right = bias.window_left, bias.window_right
    return Band(shape, left, right, kind == "top_left")


def visible(bias, queries, keys):
    """bool [queries, keys]: the pairs that the bias shows. Keys in pages are in their order in memory."""
    band = band_of(bias)
    if band.shape == "dense":
        return _block(band, queries, keys)
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    paged = band.shape == "paged"
    rows = _places(bias, keys) if paged else None
    first, ends = bias.k_seqinfo.seqstart_py, getattr(bias.k_seqinfo, "seqlen_py", None)
    blocks = bias.k_seqinfo.intervals()
    if paged:
        gaps = getattr(bias.k_seqinfo, "padding", None) is None
        blocks = [(first[n] if gaps else 0, end) for n, end in enumerate(ends)]
    for n, ((begin, end), (low, high)) in enumerate(zip(bias.q_seqinfo.intervals(), blocks, strict=True)):
        at = torch.arange(low, high)
        seen[begin:end, rows[n][at] if paged else at] = _block(band, end - begin, high - low)
    return seen


def _places(bias, keys):
    """The place in memory of key j of each sequence, [batch, pages of a sequence * page_size]."""
    tables = bias.block_tables.cpu().long()
    return (tables[:, :, None] * bias.page_size + torch.arange(bias.page_size)).flatten(1)


def _block(band, queries, keys):
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (0 if band.top_left else keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if band.left >= 0:
        seen &= distance >= -band.left
    if band.right >= 0:
        seen &= distance <= band.right
    return seen
