"""Keys and values in pages: read in place, or packed end to end."""

import torch

from flash_attention.arguments.head_dim import padded_cache
from flash_attention.arguments.tables import as_int32


def attention_in_pages(q, k, v, block_table, cu_seqlens_q, lengths, max_seqlen_q, **options):
    """(out, lse) of packed q over pages. lengths: int32 [batch], or their running sums [batch + 1]. Forward only."""
    _check_pages(k)
    table = as_int32("block_table", block_table, (len(cu_seqlens_q) - 1, "pages"), q.device)
    if len(lengths) == len(cu_seqlens_q):
        lengths = lengths.diff()
    if not q.is_cuda:
        usable_pages(table, k.shape[0], lengths, k.shape[1])
    return padded_cache(
        q,
        k,
        v,
        page_table=table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_kv=lengths,
        return_lse=True,
        **options,
    )


def _check_pages(pages):
    if pages.dim() != 4:
        raise ValueError(
            f"k: got {pages.dim()} axes; with block_table, k and v are [num_pages, page_size, heads, head_dim]"
        )


def gather_pages(pages, block_table, cu_seqlens):
    """[total, heads, dim] from pages [num_pages, page_size, heads, dim]: sequence b is in the pages block_table[b]."""
    _check_pages(pages)
    page_size = pages.shape[1]
    lengths = cu_seqlens.diff()
    block_table = usable_pages(block_table, pages.shape[0], lengths, page_size)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(len(sequence), device=lengths.device) - cu_seqlens[:-1].long()[sequence]
    column = (position // page_size).clamp(max=block_table.shape[1] - 1)
    return pages[block_table[sequence, column], position % page_size]


def usable_pages(block_table, num_pages, lengths, page_size):
    """The table in int64, with entries that exist. Entries after a sequence's last page may be anything.

    A table on the host is checked, and refused if a needed entry does not exist. A GPU's table is not checked, since the
    host would have to wait for the GPU.
    """
    table = block_table.long()
    if not table.is_cuda and not lengths.is_cuda:
        needed = torch.arange(table.shape[1], device=lengths.device)[None, :] * page_size < lengths[:, None]
        wrong = needed & ((table < 0) | (table >= num_pages))
        if wrong.any():
            entry = tuple(wrong.nonzero()[0].tolist())
            raise PageMissing(
                f"block_table: entry {list(entry)} is {int(table[entry])}; k and v have the pages 0 to {num_pages - 1}"
            )
        if table.shape[1] * page_size < int(lengths.max() if lengths.numel() else 0):
            raise PageMissing(
                f"block_table: has {table.shape[1]} pages of {page_size} keys a sequence; one has {int(lengths.max())}"
            )
    return table.clamp(0, max(num_pages - 1, 0))


class PageMissing(ValueError, RuntimeError):
    """A page that does not exist: a wrong argument here, and a RuntimeError for code that catches flash-attn's."""
