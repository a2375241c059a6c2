"""FlashInfer's masks, [queries x keys] of each sequence end to end, as one tensor for the batch."""

import torch


def unpacked(bits, count):
    """bool [count] from bytes, the lowest bit first."""
    if bits.dtype != torch.uint8 or bits.dim() != 1:
        raise TypeError(f"packed_custom_mask: got {bits.dtype} {list(bits.shape)}; expected uint8 [bytes]")
    if bits.numel() * 8 < count:
        raise ValueError(f"packed_custom_mask: has {bits.numel() * 8} bits; expected at least {count}")
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shift) & 1).bool().flatten()[:count]


def mask_of_batch(custom_mask, packed_custom_mask, starts, tables):
    """bool [batch, 1, longest queries, capacity of the table]; what is outside of a sequence is hidden anyway."""
    lengths = tables.lengths.long()
    queries = starts.diff().long()
    sizes = queries * lengths
    flat = custom_mask
    if packed_custom_mask is not None:
        sizes = -(-sizes // 8) * 8  # each sequence begins a byte
        flat = unpacked(packed_custom_mask, int(sizes.sum()))
    flat = flat.to(starts.device)
    if flat.dim() != 1 or flat.numel() != int(sizes.sum()):
        raise ValueError(
            f"custom_mask: got shape {list(flat.shape)}; expected [{int(sizes.sum())}], queries x keys of each sequence"
        )
    begin = (sizes.cumsum(0) - sizes)[:, None, None]
    width = tables.table.shape[1] * tables.page_size
    row = torch.arange(int(queries.max()) if len(queries) else 0, device=starts.device)[None, :, None]
    column = torch.arange(width, device=starts.device)[None, None, :]
    inside = (row < queries[:, None, None]) & (column < lengths[:, None, None])
    place = torch.where(inside, begin + row * lengths[:, None, None] + column, 0)
    seen = flat.bool()[place] & inside if flat.numel() else inside
    return seen[:, None]
