"""Pictures of masks with the classes of their tiles: text, SVG, PNG. They need only torch."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, NoReturn

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.masks.blocks import BlockMask
from flash_attention.masks.intervals import IntervalMask
from flash_attention.masks.prepared import PreparedMask

_TEXT = {"none": " ", "partial": "+", "full": "#"}
_COLOURS = {"none": (255, 255, 255), "partial": (246, 196, 83), "full": (58, 110, 165)}
_SEEN, _UNSEEN = (58, 110, 165), (255, 255, 255)


def show(
    mask: Any,
    path: str | Path | None = None,
    *,
    tile: int | tuple[int, int] = 64,
    batch: int = 0,
    head: int = 0,
    seq_q: int | None = None,
    seq_kv: int | None = None,
    **wrong: NoReturn,
) -> str:
    """A mask as text, a letter a tile: '#' all of it is visible, '+' some, ' ' nothing (never computed).

        print(show(documents([0, 5, 16])))

    mask: an IntervalMask, hidden rows, a bool tensor [..., seq_q, seq_kv], a block mask (ours, or torch's), a mask of
    create_block_mask, or a function mask_mod(b, h, i, j). path: also write an .svg, or a .png with a pixel for each pair.
    tile: (queries, keys) of a tile. batch, head: which of them. seq_q, seq_kv: needed for a block mask and for a function,
    and for hidden rows if there are not as many queries as keys.
    """
    if wrong:
        refuse_keywords(show, wrong)
    seen = visible(mask, batch, head, seq_q, seq_kv)
    tile_q, tile_kv = (tile, tile) if isinstance(tile, int) else tile
    classes = tile_classes(seen, tile_q, tile_kv)
    if path is not None:
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(_svg(classes, seen.shape, tile_q, tile_kv))
        elif path.suffix == ".png":
            path.write_bytes(_png(seen, classes, tile_q, tile_kv))
        else:
            raise ValueError(f"path: got {path.name!r}; allowed are names that end in .svg or .png")
    return "\n".join("".join(_TEXT[name] for name in row) for row in classes) + "\n" + _summary(seen, classes)


def visible(mask, batch=0, head=0, seq_q=None, seq_kv=None):
    """bool [seq_q, seq_kv] of one batch entry and head."""
    import torch

    if isinstance(mask, PreparedMask):
        mask = mask.mask
    if callable(getattr(mask, "mask_mod", None)) or (callable(mask) and not isinstance(mask, torch.Tensor)):
        return _of_function(mask, batch, head, seq_q, seq_kv)
    if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool:
        mask = IntervalMask(mask)
    if isinstance(mask, IntervalMask):
        mask = mask.visible(seq_q)
    elif isinstance(mask, BlockMask) or hasattr(mask, "kv_num_blocks"):
        from flash_attention.masks.blocks import block_map

        found, (block_q, block_kv) = block_map(mask)
        mask = (found != 0).repeat_interleave(block_q, dim=-2).repeat_interleave(block_kv, dim=-1)
        mask = mask[..., : seq_q or mask.shape[-2], : seq_kv or mask.shape[-1]]
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2:
        raise TypeError(
            "mask: expected an IntervalMask, hidden rows, a bool tensor [..., seq_q, seq_kv], a block mask or a mask_mod"
        )
    mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape).cpu()
    return mask[min(batch, mask.shape[0] - 1), min(head, mask.shape[1] - 1)]


def _of_function(mask, batch, head, seq_q, seq_kv):
    """The pairs that a mask_mod shows: a function, or a mask of create_block_mask, ours or torch's."""
    from flash_attention.flex.block_mask import mask_mods_of
    from flash_attention.flex.dense import shown

    mods = mask_mods_of(mask) if hasattr(mask, "mask_mod") else [mask]
    sizes = tuple(mask.seq_lengths) if hasattr(mask, "mask_mod") else (None, None)
    seq_q, seq_kv = seq_q or sizes[0], seq_kv or sizes[1]
    if seq_q is None or seq_kv is None:
        raise TypeError("mask: a function says nothing of lengths; pass seq_q= and seq_kv=")
    return shown(mods, [batch], [head], range(seq_q), range(seq_kv))[0, 0].cpu()


def tile_classes(seen, tile_q, tile_kv):
    """'none', 'partial' or 'full' for each tile of a bool matrix, row by row."""
    rows = []
    for i in range(0, seen.shape[0], tile_q):
        parts = [seen[i : i + tile_q, j : j + tile_kv] for j in range(0, seen.shape[1], tile_kv)]
        rows.append(["full" if bool(part.all()) else "partial" if bool(part.any()) else "none" for part in parts])
    return rows


def _summary(seen, classes):
    names = [name for row in classes for name in row]
    counts = ", ".join(f"{names.count(name)} {name}" for name in ("full", "partial", "none"))
    share = 100 * int(seen.sum()) / max(seen.numel(), 1)
    return f"{seen.shape[0]} queries x {seen.shape[1]} keys, {share:.1f} % visible; tiles: {counts}"


def _svg(classes, shape, tile_q, tile_kv, size=420):
    unit = size / max(*shape, 1)
    width, height = shape[1] * unit, shape[0] * unit
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2:.0f}" height="{height + 2:.0f}" '
        f'viewBox="-1 -1 {width + 2:.2f} {height + 2:.2f}">',
        f'<rect width="{width:.2f}" height="{height:.2f}" fill="#ffffff" stroke="#444444"/>',
    ]
    for name in ("full", "partial"):
        cells = []
        for i, row in enumerate(classes):
            for j, found in enumerate(row):
                if found == name:
                    right, bottom = min((j + 1) * tile_kv, shape[1]), min((i + 1) * tile_q, shape[0])
                    x, y = j * tile_kv * unit, i * tile_q * unit
                    cells.append(f"M{x:.2f} {y:.2f}H{right * unit:.2f}V{bottom * unit:.2f}H{x:.2f}Z")
        colour = "#{:02x}{:02x}{:02x}".format(*_COLOURS[name])
        lines.append(f'<path fill="{colour}" stroke="#ffffff" stroke-width="0.5" d="{"".join(cells)}"/>')
    return "\n".join([*lines, "</svg>", ""])


def _png(seen, classes, tile_q, tile_kv):
    """A pixel for each pair: blue where visible, a light tint over tiles that are tested, white elsewhere."""
    height, width = seen.shape
    matrix = seen.tolist()
    lines = bytearray()
    for i in range(height):
        lines.append(0)  # no filter
        for j in range(width):
            tested = classes[i // tile_q][j // tile_kv] == "partial"
            lines += bytes(_SEEN if matrix[i][j] else (253, 240, 213) if tested else _UNSEEN)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(lines), 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")
