"""The tables that a wrapper keeps between plan() and run(): a rectangle of pages and a length for each sequence."""

import torch

from flash_attention.arguments.tables import check_integers, check_range
from flash_attention.compat.flashinfer.arguments import check_layout
from flash_attention.compat.flashinfer.page import check_table, get_seq_lens, rectangle, table_over, table_width


class Tables:
    """With `fixed` (a CUDA graph) they keep their addresses and the size of the caller's buffers; plan() writes to them."""

    def __init__(self, workspace, kv_layout, fixed, buffers):
        check_layout(kv_layout)
        if not isinstance(workspace, torch.Tensor):
            raise TypeError(f"float_workspace_buffer: expected a tensor, got {type(workspace).__name__}")
        self.device, self.kv_layout, self.fixed = workspace.device, kv_layout, fixed
        self.table = self.lengths = None
        if not fixed:
            return
        for name, buffer in buffers.items():
            check_integers(name, buffer, ("entries",), self.device)
        self._indptr, self._indices, self._last_page_len = buffers.values()
        name, batch = list(buffers)[2], len(self._last_page_len)
        if len(self._indptr) != batch + 1:
            raise ValueError(f"{name}: got {batch} entries; expected {len(self._indptr) - 1}, one less than indptr has")
        self.table = torch.zeros(batch, len(self._indices), dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)

    @property
    def batch(self):
        return self.lengths.shape[0]

    def plan(self, indptr, indices, last_page_len, page_size, block_tables=None, seq_lens=None):
        check_table(indptr, indices, last_page_len, page_size)
        self.page_size, batch = page_size, len(last_page_len)
        if self.fixed:
            self._check_fixed(batch, indices, block_tables)
        # Width and lengths are computed on the device of indptr: on the host nothing waits.
        width = table_width(indptr, indices) if block_tables is None else 0
        here = [tensor.to(self.device, non_blocking=True) for tensor in (indptr, indices, last_page_len)]
        lengths = get_seq_lens(here[0], here[2], page_size) if seq_lens is None else self._checked_lengths(seq_lens, batch)
        if block_tables is None:
            table = rectangle(here[0], here[1], width)
        else:
            table = check_integers("block_tables", block_tables, (batch, "pages")).to(self.device)
        if not self.fixed:
            self.table, self.lengths = table, lengths
            return
        for buffer, tensor in zip((self._indptr, self._indices, self._last_page_len), here, strict=True):
            buffer[: len(tensor)].copy_(tensor)
        self.table[:, : table.shape[1]].copy_(table)
        self.lengths.copy_(lengths)

    def over(self, pages, num_kv_heads, head_dim):
        """(table, lengths) for k [num_pages, page_size, heads, head_dim], which must be as planned."""
        expected = (self.page_size, num_kv_heads, head_dim)
        if pages.shape[1:] != expected:
            raise ValueError(
                f"paged_kv_cache: got pages of [page_size, heads, head_dim] {list(pages.shape[1:])}; expected "
                f"{list(expected)}, as planned"
            )
        if pages.device != self.device:
            raise ValueError(f"paged_kv_cache: is on {pages.device}; expected {self.device}, as float_workspace_buffer")
        return table_over(self.table, pages), self.lengths

    def _checked_lengths(self, seq_lens, batch):
        check_integers("seq_lens", seq_lens.flatten(), (batch,))
        check_range("seq_lens", seq_lens, 0, 2**31 - 1)
        return seq_lens.flatten().to(self.device)

    def _check_fixed(self, batch, indices, block_tables):
        if batch != self.batch:
            raise ValueError(
                f"last_page_len: got {batch} sequences; expected {self.batch}, as the buffers of the graph have"
            )
        pages = len(indices) if block_tables is None else block_tables.shape[1]
        if pages > self.table.shape[1]:
            raise ValueError(f"indices: got {pages} pages; allowed are at most {self.table.shape[1]}, as the buffer has")
