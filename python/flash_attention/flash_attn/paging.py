"""Paged keys and values, laid end to end."""

import torch


def gather_pages(pages, block_table, cu_seqlens):
    """[total, heads, dim] from pages [num_pages, page_size, heads, dim]: sequence b lies in the pages block_table[b]."""
    if pages.dim() != 4:
        raise ValueError(
            f"k: got {pages.dim()} axes; with block_table, k and v are [num_pages, page_size, heads, head_dim]"
        )
    page_size = pages.shape[1]
    lengths = cu_seqlens.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(len(sequence), device=lengths.device) - cu_seqlens[:-1].long()[sequence]
    return pages[block_table.long()[sequence, position // page_size], position % page_size]
