"""The arguments of a call over a cache of keys and values: checked, and converted to the kernels' form."""

import operator

import torch

from flash_attention.arguments.tables import as_int32, check_range, check_starts
from flash_attention.compat.flash_attn.paging import usable_pages


class CacheFull(ValueError, RuntimeError):
    """More keys than a cache holds: a wrong argument here, and a RuntimeError for code that catches flash-attn's."""


def check_room(keys, room):
    if keys > room:
        raise CacheFull(f"cache_seqlens: {keys} keys; the cache or its block_table holds {room}")


class CacheCall:
    """q, caches, new (k and v or None), table, lengths, left_padding, cu_seqlens_q, ..., and the rotary embedding."""

    def __init__(
        self, q, caches, new, rotary, lengths, cache_rows, left_padding, table,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    ):  # fmt: skip
        self.q, self.caches, self.new = q, caches, new if new[0] is not None else None
        self.cu_seqlens_q, self.cu_seqlens_new, self.max_seqlen_q = cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q
        self._check_q()
        self._check_caches(table is not None)
        self._find_rows(cache_rows, table)
        self._find_lengths(lengths)
        self._check_new(new)
        self._check_pages(table is not None)
        self._check_padding(left_padding)
        self._check_rotary(*rotary)

    def _check_q(self):
        rank = 4 if self.cu_seqlens_q is None else 3
        axes = "[batch, seq_q, heads, head_dim]" if rank == 4 else "[total_q, heads, head_dim], with cu_seqlens_q"
        if not isinstance(self.q, torch.Tensor) or self.q.dim() != rank:
            got = list(self.q.shape) if isinstance(self.q, torch.Tensor) else type(self.q).__name__
            raise ValueError(f"q: got {got}; expected {axes}")
        self.device = self.q.device
        if rank == 3:
            check_starts("cu_seqlens_q", self.cu_seqlens_q, self.q.shape[0], self.device)
        self.batch = self.q.shape[0] if rank == 4 else len(self.cu_seqlens_q) - 1

    def _check_caches(self, paged):
        axes = "[num_pages, page_size, heads_k, head_dim]" if paged else "[batch_cache, seq_cache, heads_k, head_dim]"
        for name, cache in zip(("k_cache", "v_cache"), self.caches, strict=True):
            if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
                got = list(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
                raise ValueError(f"{name}: got {got}; expected {axes}")
            if cache.device != self.device:
                raise ValueError(f"{name}: is on {cache.device}; expected {self.device}, where q is")
            if cache.shape[:3] != self.caches[0].shape[:3]:
                raise ValueError(f"{name}: got {list(cache.shape)}; expected {list(self.caches[0].shape[:3])}, as k_cache")

    def _find_rows(self, cache_rows, table):
        """If the rows of a cache are not those of q, it is treated as pages, with one page a sequence."""
        rows, size = self.caches[0].shape[:2]
        if table is not None:
            if cache_rows is not None:
                raise ValueError("cache_batch_idx: is given besides a table of pages; allowed is one of the two")
            self.table = as_int32("block_table", table, (self.batch, "pages"), self.device)
            self.capacity = size * self.table.shape[1]
            return
        self.table, self.capacity = None, size
        if cache_rows is not None:
            rows_of_batch = as_int32("cache_batch_idx", cache_rows, (self.batch,), self.device)
            check_range("cache_batch_idx", rows_of_batch, 0, rows - 1)
            self.table = rows_of_batch[:, None]
            return
        if rows < self.batch:
            raise ValueError(f"k_cache: has {rows} rows; expected at least {self.batch}, one for each entry of q")
        if self.cu_seqlens_q is not None:
            self.table = torch.arange(self.batch, dtype=torch.int32, device=self.device)[:, None]
        else:
            self.caches = tuple(cache[: self.batch] for cache in self.caches)

    def _find_lengths(self, lengths):
        self.known_length = None  # of the longest, where the host knows it
        if isinstance(lengths, torch.Tensor):
            self.lengths = as_int32("cache_seqlens", lengths, (self.batch,), self.device)
            check_range("cache_seqlens", self.lengths, 0, 2**31 - 1)
            if not self.lengths.is_cuda:
                self.known_length = int(self.lengths.max()) if self.batch else 0
            return
        if type(lengths).__module__ == "numpy" and getattr(lengths, "ndim", 1) == 0 and hasattr(lengths, "__index__"):
            lengths = operator.index(lengths)
        if lengths is not None and (not isinstance(lengths, int) or isinstance(lengths, bool)):
            raise TypeError(f"cache_seqlens: expected an int, int32 [batch] or None, got {type(lengths).__name__}")
        self.known_length = self.capacity if lengths is None else lengths
        if self.known_length < 0:
            raise ValueError(f"cache_seqlens: got {lengths}; allowed are 0 to {self.capacity}")
        self.lengths = torch.full((self.batch,), self.known_length, dtype=torch.int32, device=self.device)

    def _check_new(self, new):
        if (new[0] is None) != (new[1] is None):
            missing = "k" if new[0] is None else "v"
            raise ValueError(f"{missing}: got None; k and v are given together, or neither")
        most = 0
        if self.new is not None:
            most = self._check_new_rows()
        if self.known_length is not None and self.batch:
            check_room(self.known_length + most, self.capacity)

    def _check_new_rows(self):
        """A lower bound of the longest length."""
        k = self.new[0]
        packed = self.cu_seqlens_new is not None
        for name, rows, cache in zip(("k", "v"), self.new, self.caches, strict=True):
            ahead = [k.shape[0]] if packed else [self.batch, k.shape[1] if k.dim() > 1 else 0]
            expected = [*ahead, *cache.shape[2:]]
            if list(rows.shape) != expected:
                raise ValueError(f"{name}: got {list(rows.shape)}; expected {expected}")
            if rows.device != self.device:
                raise ValueError(f"{name}: is on {rows.device}; expected {self.device}, where q is")
        if not packed:
            return k.shape[1]
        starts = check_starts("cu_seqlens_k_new", self.cu_seqlens_new, k.shape[0], self.device)
        if len(starts) != self.batch + 1:
            raise ValueError(f"cu_seqlens_k_new: got {len(starts)} entries; expected {self.batch + 1}")
        return 0 if starts.is_cuda else int((self.lengths + starts.diff()).max()) - self.known_length if self.batch else 0

    def _check_pages(self, paged):
        """Checks a table on the host. To read a GPU's table, the host would have to wait for the GPU."""
        if not paged or self.table.is_cuda:
            return
        usable_pages(self.table, self.caches[0].shape[0], self.new_lengths(), self.caches[0].shape[1])

    def new_lengths(self):
        if self.new is None:
            return self.lengths
        if self.cu_seqlens_new is not None:
            return self.lengths + self.cu_seqlens_new.diff()
        return self.lengths + self.new[0].shape[1]

    def _check_padding(self, left_padding):
        self.left_padding = None
        if left_padding is not None:
            self.left_padding = as_int32("cache_leftpad", left_padding, (self.batch,), self.device)
            check_range("cache_leftpad", self.left_padding, 0, self.capacity)

    def _check_rotary(self, cos, sin, interleaved, first_angles):
        self.rotary = None
        if cos is None and sin is None:
            return
        if cos is None or sin is None:
            raise ValueError(f"rotary_{'cos' if cos is None else 'sin'}: got None; both are given, or neither")
        if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > self.q.shape[-1]:
            raise ValueError(
                f"rotary_cos, rotary_sin: got {list(cos.shape)} and {list(sin.shape)}; expected the same, "
                f"[positions, rotary_dim / 2] with a rotary_dim of at most {self.q.shape[-1]}"
            )
        if cos.device != self.device or sin.device != self.device:
            raise ValueError(f"rotary_cos, rotary_sin: are on {cos.device} and {sin.device}; expected {self.device}")
        offsets = self.lengths
        if first_angles is not None:
            offsets = as_int32("rotary_seqlens", first_angles, (self.batch,), self.device)
        self.rotary = (cos, sin, interleaved, offsets)
