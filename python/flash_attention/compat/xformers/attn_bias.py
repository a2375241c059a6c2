"""xformers' attention biases: the blocks of keys, and the keys of its block that a query sees.

Names, constructors and attributes are xformers', so that bands.py reads its objects and these in the same way. Query i of
a LowerTriangularMask sees keys j <= i. FromBottomRight, WithOffset and windows over PaddedKeys align the last query with
the last key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class AttentionBias:
    """A value of memory_efficient_attention()'s attn_bias that is not a tensor."""

    def to(self, device: Any) -> AttentionBias:
        """A copy with its tensors on the device."""
        if not dataclasses.is_dataclass(self):
            return self
        moved = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor | SequenceInfo)
        }
        return dataclasses.replace(self, **moved) if moved else self

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        """0 if a query sees a key, else -inf: [..., queries, keys], for inspection."""
        from flash_attention.compat.xformers.bands import visible

        seen = visible(self, *shape[-2:])
        return torch.zeros(shape[-2:], dtype=dtype).masked_fill(~seen, -torch.inf).expand(*shape).to(device)


class LowerTriangularMask(AttentionBias):
    def __init__(self, device: Any = None) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: Any) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias.to(device, dtype)


class LowerTriangularFromBottomRightMask(AttentionBias):
    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclasses.dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclasses.dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}; it must not be negative")


@dataclasses.dataclass
class SequenceInfo:
    """Sequences end to end: where each begins, as a tensor and on the host.

    seqlen: the length of each sequence if there is unused space after it, else None. padding: the rows from one start to
    the next, if they are the same for all.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]
    seqlen: Tensor | None = None
    seqlen_py: list[int] | None = None
    padding: int | None = None

    def to(self, device: Any) -> SequenceInfo:
        lengths = None if self.seqlen is None else self.seqlen.to(device)
        return dataclasses.replace(self, seqstart=self.seqstart.to(device), seqlen=lengths)

    def intervals(self) -> list[tuple[int, int]]:
        starts, ends = self.seqstart_py[:-1], self.seqstart_py[1:]
        if self.seqlen_py is not None:
            ends = [start + length for start, length in zip(starts, self.seqlen_py, strict=True)]
        return list(zip(starts, ends, strict=True))

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], *, device: Any = None) -> SequenceInfo:
        lengths = [int(length) for length in seqlens]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        return cls(_int32(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts)

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Any = None) -> SequenceInfo:
        lengths = [int(length) for length in seqlens]
        if any(length > padding for length in lengths):
            raise ValueError(f"kv_padding: got {padding}; a sequence has {max(lengths)} keys")
        starts = [padding * n for n in range(len(lengths) + 1)]
        return cls._with_space(starts, lengths, lengths, padding, device)

    @classmethod
    def from_seqlens_gappy(cls, seqstarts, seqlens, paged, *, device=None):
        """paged: starts count within each sequence's pages, and seqlen becomes the end of its last key."""
        starts, lengths = [int(start) for start in seqstarts], [int(length) for length in seqlens]
        if paged:
            starts.append(-1)
        if len(starts) != len(lengths) + 1:
            raise ValueError(f"kv_seqstarts: got {len(seqstarts)} of them for {len(lengths)} sequences")
        ends = [a + b for a, b in zip(starts, lengths, strict=False)] if paged else lengths
        return cls._with_space(starts, ends, lengths, None, device)

    @classmethod
    def _with_space(cls, starts, ends, lengths, padding, device):
        longest, shortest = max(lengths), min(lengths)
        return cls(_int32(starts, device), longest, shortest, starts, _int32(ends, device), ends, padding)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """x [1, total, ...] in pieces [batch, rows, ...], each of sequences of the same length."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"x: got shape {list(x.shape)}; expected [1, {self.seqstart_py[-1]}, ...]")
        counts = list(batch_sizes or [1] * (len(self.seqstart_py) - 1))
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        marks = [self.seqstart_py[first] for first in firsts]
        rows = [end - begin for begin, end in pairwise(marks)]
        return [part.reshape(count, -1, *part.shape[2:]) for count, part in zip(counts, x.split(rows, dim=1), strict=True)]


@dataclasses.dataclass
class BlockDiagonalMask(AttentionBias):
    """Sequences end to end, [1, total, heads, head_dim]: a query sees its own sequence."""

    q_seqinfo: SequenceInfo
    k_seqinfo: SequenceInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None):
        if kv_seqlen is not None and len(q_seqlen) != len(kv_seqlen):
            raise ValueError(f"kv_seqlen: got {len(kv_seqlen)} of them for {len(q_seqlen)} sequences")
        queries = SequenceInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(queries, queries if same else SequenceInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """(bias, the tensors end to end) of tensors [batch, rows, ...]."""
        bias = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])], device=tensors[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors]
        return bias, _end_to_end(tensors)

    @classmethod
    def from_tensor_lists_qkv(cls, tensors_q, tensors_k, tensors_v=None):
        lengths = [[x.shape[1] for x in of for _ in range(x.shape[0])] for of in (tensors_q, tensors_k)]
        bias = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors_q]
        return (bias, *(None if of is None else _end_to_end(of) for of in (tensors_q, tensors_k, tensors_v)))

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("split: queries and keys have other lengths; see split_queries() and split_kv()")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Query i of a sequence sees keys j <= i of the sequence."""


@dataclasses.dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The last query of a sequence is aligned with its last key."""

    def __post_init__(self) -> None:
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for n, ((begin, end), (first, last)) in enumerate(pairs):
            if last - first < end - begin:
                raise ValueError(f"kv_seqlen[{n}]: got {last - first}; it must be at least q_seqlen[{n}] = {end - begin}")


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(self._window_size)


@dataclasses.dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """Keys [1, batch * kv_padding, ...]; only the first kv_seqlen keys of each sequence are visible."""

    q_seqinfo: SequenceInfo
    k_seqinfo: SequenceInfo

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding, kv_seqlen, causal_diagonal=None, *, device=None):
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type) -> Any:
        keys = dataclasses.replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, keys, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The last query of a sequence is aligned with its last visible key."""


@dataclasses.dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(cls, q_seqlen, kv_padding, kv_seqlen, window_left, window_right):
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    _window_size: int

    @classmethod
    def from_seqlens_local(cls, q_seqlen, kv_padding, kv_seqlen, window_size):
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclasses.dataclass
class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """Keys in pages, [1, pages * page_size, ...]: block_tables [batch, pages of a sequence]."""

    q_seqinfo: SequenceInfo
    k_seqinfo: SequenceInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device=None):
        return cls(*_padded(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device), block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """The last query of a sequence is aligned with its last visible key."""


@dataclasses.dataclass
class BlockDiagonalGappyKeysMask(AttentionBias):
    """The keys of a sequence begin at its entry of kv_seqstarts; kv_seqlen of them are visible."""

    q_seqinfo: SequenceInfo
    k_seqinfo: SequenceInfo

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqstarts, kv_seqlen, *, device=None):
        queries = SequenceInfo.from_seqlens(q_seqlen, device=device)
        return cls(queries, SequenceInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device))

    def make_paged(self, block_tables: Tensor, page_size: int, notional_padding: int, paged_type: type) -> Any:
        """The same over pages: the keys of sequence b begin at row kv_seqstarts[b] - b * notional_padding of its pages."""
        if notional_padding % page_size:
            raise ValueError(f"notional_padding: got {notional_padding}; it must be a multiple of page_size = {page_size}")
        keys = self.k_seqinfo
        starts = [start - n * notional_padding for n, start in enumerate(keys.seqstart_py[:-1])]
        rows = block_tables.shape[1] * page_size
        if any(not 0 <= start < rows for start in starts):
            raise ValueError(f"notional_padding: got {notional_padding}; the keys begin at {keys.seqstart_py[:-1]}")
        info = SequenceInfo.from_seqlens_gappy(starts, keys.seqlen_py, True, device=keys.seqstart.device)
        return paged_type(self.q_seqinfo, info, block_tables, page_size)


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The last query of a sequence is aligned with its last visible key."""


@dataclasses.dataclass
class PagedBlockDiagonalGappyKeysMask(AttentionBias):
    """Keys in pages; keys before kv_seqstarts, counted within a sequence's pages, are not visible."""

    q_seqinfo: SequenceInfo
    k_seqinfo: SequenceInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqstarts, kv_seqlen, block_tables, page_size, *, device=None):
        device = block_tables.device if device is None else device
        queries = SequenceInfo.from_seqlens(q_seqlen, device=device)
        keys = SequenceInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(queries, keys, block_tables, page_size)


class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """The last query of a sequence is aligned with its last visible key."""


def _padded(q_seqlen, padding, kv_seqlen, device):
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(f"kv_seqlen: got {len(kv_seqlen)} of them for {len(q_seqlen)} sequences")
    keys = SequenceInfo.from_seqlens_padded(kv_seqlen, padding, device=device)
    return SequenceInfo.from_seqlens(q_seqlen, device=device), keys


def _end_to_end(tensors):
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)


def _int32(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _check_window(size):
    if size <= 0:
        raise ValueError(f"window_size: got {size}; it must be positive")
