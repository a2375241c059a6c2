"""torch's BlockMask as a mask_mod: tables of its blocks, which are kept while its fields are what they were."""

import operator
import weakref

import torch

from flash_attention.masks.blocks import lists_to_map
from flash_attention.masks.prepared import new_kept

_FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_kept = {}  # id of a BlockMask: (a reference to it, its fields, their versions, its tables, what GPUs found out about them)


def mask_mod_of(block_mask):
    """A key is visible in a full block, and in a partial one where the BlockMask's own mask_mod shows it."""
    rows, keys = block_mask.BLOCK_SIZE
    partial, full = _tables(block_mask)
    batches, heads = partial.shape[:2]
    inner = block_mask.mask_mod

    def mask_mod(b, h, i, j):
        at = (b if batches > 1 else 0, h if heads > 1 else 0, i // rows, j // keys)
        visible = partial[at] & inner(b, h, i, j) if inner is not None else partial[at]
        return visible if full is None else visible | full[at]

    return mask_mod


def _tables(block_mask):
    """The lists of partial blocks and of full ones; None if there are no such blocks."""
    fields = [getattr(block_mask, name, None) for name in _FIELDS]
    versions = _versions([tensor for tensor in fields if tensor is not None])
    if versions is None:
        return _made(*fields)
    number = id(block_mask)
    kept = _kept.get(number)
    if kept is None or kept[2] != versions or not all(map(operator.is_, kept[1], fields)):
        of_mask = weakref.ref(block_mask, lambda _: _kept.pop(number, None))
        kept = _kept[number] = of_mask, fields, versions, _made(*fields), new_kept()
    return kept[3]


def kept_of(block_mask):
    """Where what GPUs found out about its tiles is kept; None where its tables are not."""
    kept = _kept.get(id(block_mask))
    return None if kept is None else kept[4]


def _versions(tensors):
    """How often each was written to, and the stream on which tables of them are made and read. None if that is not known,
    and while a graph is captured: its replays read what the fields hold then."""
    if any(type(tensor) is not torch.Tensor or tensor.is_inference() for tensor in tensors):
        return None
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    versions = [tensor._version for tensor in tensors]
    if tensors[0].is_cuda:
        versions.append(torch.cuda.current_stream(tensors[0].device).cuda_stream)
    return versions


def _made(counts, lists, full_counts, full_lists):
    return _table(counts, lists), None if full_counts is None else _table(full_counts, full_lists)


def _table(counts, lists):
    """bool [B, H, row blocks, key blocks]"""
    return lists_to_map(counts, lists, lists.shape[-1]).bool()
