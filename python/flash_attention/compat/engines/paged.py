"""Shared by the engines: writing new rows to slots of a cache, and attention over its pages."""

import functools

import torch

from flash_attention.append import append_kv
from flash_attention.arguments.head_dim import padded_cache


def write_slots(k_pages, v_pages, k, v, slots, **scales):
    """Writes rows k and v [tokens, heads, dim] to the slots of pages [pages, page_size, heads, dim].

    A slot below 0 belongs to a token that pads the batch: its row is not written. On a GPU the slots are not read, so a
    CUDA graph can be captured. scales: k_scale and v_scale of pages in 8 bits.
    """
    slots = slots.to(torch.int32)
    if not slots.is_cuda:
        used = slots >= 0
        k, v, slots = k[used], v[used], slots[used]
    if not len(slots):
        return
    # All pages are those of one sequence, in order.
    append_kv(
        k_pages, v_pages, k, v, sequences=slots.clamp(max=0), positions=slots,
        page_table=_all_pages(len(k_pages), k_pages.device), **scales,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _all_pages(count, device):
    return torch.arange(count, dtype=torch.int32, device=device)[None]


@torch.no_grad()
def attend(q, k_pages, v_pages, table, starts, lengths, longest, **options):
    """out as q [tokens, heads, dim]; sequence b has queries starts[b] : starts[b + 1], pages table[b], lengths[b] keys."""
    return padded_cache(
        q, k_pages, v_pages, page_table=table, cu_seqlens_q=starts, max_seqlen_q=longest, seqused_kv=lengths, **options
    )
