"""FlashInfer's masks, [queries x keys] of each sequence end to end or described by items, as one tensor for the batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attention.arguments.tables import check_integers
from flash_attention.masks import BitMask


def unpacked(bits, count, name="packed_custom_mask"):
    """bool [count] from bytes, the lowest bit first."""
    if bits.dtype != torch.uint8 or bits.dim() != 1:
        raise TypeError(f"{name}: got {bits.dtype} {list(bits.shape)}; expected uint8 [bytes]")
    if bits.numel() * 8 < count:
        raise ValueError(f"{name}: has {bits.numel() * 8} bits; expected at least {count}")
    shift = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shift) & 1).bool().flatten()[:count]


def mask_of_batch(custom_mask, packed_custom_mask, starts, lengths, width):
    """bool [batch, 1, longest queries, width]; pairs outside of a sequence are hidden anyway."""
    lengths = lengths.long()
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
    row = torch.arange(int(queries.max()) if len(queries) else 0, device=starts.device)[None, :, None]
    column = torch.arange(width, device=starts.device)[None, None, :]
    inside = (row < queries[:, None, None]) & (column < lengths[:, None, None])
    place = torch.where(inside, begin + row * lengths[:, None, None] + column, 0)
    seen = flat.bool()[place] & inside if flat.numel() else inside
    return seen[:, None]


# The kernels for few queries and forward/sm80 read bits. Longer prompts without pages are unpacked to bytes, for
# forward/sm90. It was not measured which is faster when.
MOST_QUERIES_WITH_BITS = 64


def single_bits(bits, count):
    """masks.BitMask of one sequence with `count` pairs."""
    if bits.dtype != torch.uint8 or bits.dim() != 1:
        raise TypeError(f"packed_custom_mask: got {bits.dtype} {list(bits.shape)}; expected uint8 [bytes]")
    if bits.numel() * 8 < count:
        raise ValueError(f"packed_custom_mask: has {bits.numel() * 8} bits; expected at least {count}")
    offsets = torch.arange(2, dtype=torch.int32, device=bits.device) * (-(-count // 8))
    return BitMask(bits.contiguous(), offsets)


def mask_buffers(custom_mask_buf, mask_indptr_buf, tables):
    """(bits, offsets) of a graph, checked."""
    if custom_mask_buf.dtype != torch.uint8 or custom_mask_buf.dim() != 1:
        got = f"{custom_mask_buf.dtype} {list(custom_mask_buf.shape)}"
        raise TypeError(f"custom_mask_buf: got {got}; expected uint8 [most bytes]")
    check_integers("mask_indptr_buf", mask_indptr_buf, (tables.batch + 1,), tables.device)
    return custom_mask_buf, mask_indptr_buf


def bits_of_batch(custom_mask, packed_custom_mask, starts, lengths, buffers=None):
    """masks.BitMask of the batch: a packed mask unchanged, a bool mask packed to bits.

    buffers: (bits, offsets) of a graph, to which both are copied.
    """
    device = starts.device
    sizes = starts.diff().long() * lengths.long()
    ends = (-(-sizes // 8)).cumsum(0)  # each sequence begins a byte
    offsets = torch.nn.functional.pad(ends, (1, 0)).int()
    bits, needed = packed_custom_mask, int(offsets[-1])
    if bits is None:
        bits = _packed(custom_mask, sizes, offsets, needed)
    elif bits.dtype != torch.uint8 or bits.dim() != 1:
        raise TypeError(f"packed_custom_mask: got {bits.dtype} {list(bits.shape)}; expected uint8 [bytes]")
    if len(bits) < needed:  # after them a kernel would read the bits of an earlier plan
        raise ValueError(f"packed_custom_mask: has {len(bits) * 8} bits; expected at least {needed * 8}")
    if buffers is None:
        return BitMask(bits.to(device), offsets)
    if len(buffers[0]) < needed:
        raise ValueError(f"custom_mask_buf: has {len(buffers[0])} bytes; expected at least {needed}, for this mask")
    buffers[0][:needed].copy_(bits[:needed])
    return BitMask(buffers[0], buffers[1].copy_(offsets))


def _packed(flat, sizes, offsets, needed):
    """Bytes of bools, [queries x keys] of each sequence end to end."""
    if flat.dim() != 1 or flat.numel() != int(sizes.sum()):
        raise ValueError(
            f"custom_mask: got shape {list(flat.shape)}; expected [{int(sizes.sum())}], queries x keys of each sequence"
        )
    flat = flat.to(sizes.device)
    places = torch.arange(flat.numel(), device=flat.device)
    sequence = torch.searchsorted(sizes.cumsum(0), places, right=True)
    begin = sizes.cumsum(0) - sizes
    spread = torch.zeros(8 * needed, dtype=torch.uint8, device=flat.device)
    spread[8 * offsets.long()[sequence] + places - begin[sequence]] = flat.to(torch.uint8)
    shifted = spread.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=flat.device)
    return shifted.sum(1, dtype=torch.uint8)


class Items(NamedTuple):
    """Multi-item scoring: after a prefix there are items, each preceded by a separator token. A token sees the prefix and,
    if it belongs to an item, the tokens of its item up to itself."""

    prefixes: Tensor
    places: Tensor  # [batch, length]: the place in its item of each token after the prefix, 0 for a separator

    @classmethod
    def of(cls, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len):
        """From FlashInfer's arguments; None without them."""
        if prefix_len_ptr is None and token_pos_in_items_ptr is None:
            return None
        if prefix_len_ptr is None or token_pos_in_items_ptr is None:
            raise ValueError("prefix_len_ptr, token_pos_in_items_ptr: got one of them; expected both or neither")
        prefixes, places = prefix_len_ptr.flatten().long(), token_pos_in_items_ptr.flatten().long()
        batch, length = len(prefixes), token_pos_in_items_len
        if batch > 1 and len(places) < (batch - 1) * length + 1:
            raise ValueError(
                f"token_pos_in_items_ptr: got {len(places)} entries; expected {batch} sequences of "
                f"token_pos_in_items_len, {length}, each"
            )
        if batch == 1:
            length = max(length, len(places))
        padded = places.new_zeros(batch * length)
        padded[: len(places)] = places[: batch * length]
        return cls(prefixes, padded.view(batch, length))

    def mask(self, starts, lengths, width):
        """bool [batch, 1, longest queries, width]: FlashInfer's rule, causal included."""
        device, queries, lengths = starts.device, starts.diff().long(), lengths.long()
        if len(self.prefixes) != len(queries):
            raise ValueError(f"prefix_len_ptr: got {len(self.prefixes)} entries; expected {len(queries)}, one a sequence")
        prefix = self.prefixes.to(device)[:, None]
        row = torch.arange(int(queries.max()) if len(queries) else 0, device=device)
        token = row + (lengths - queries)[:, None]  # [batch, rows]: the place of each query among the keys
        behind = (token - prefix).clamp(0, self.places.shape[1] - 1)
        place = self.places.to(device).gather(1, behind)
        key = torch.arange(width, device=device)
        token, prefix = token[..., None], prefix[..., None]
        in_item = token - key < place[..., None]
        return ((key <= token) & ((token < prefix) | (key < prefix) | in_item))[:, None]
