"""Which rows of a sequence a rank holds, and helpers that split and join tensors accordingly.

contiguous: rank r of W holds the r-th of W equal chunks.
zigzag: of 2 W equal chunks rank r holds chunks r and 2 W - 1 - r, so all ranks have the same work under a causal mask.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords

LAYOUTS = ("zigzag", "contiguous")


class Segment(NamedTuple):
    """Rows begin .. begin + length of the sequence; the rank that holds them has them from its row `local` on."""

    begin: int
    length: int
    local: int


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; allowed are 'zigzag' and 'contiguous'")


@lru_cache(maxsize=4096)
def segments(seq: int, world: int, rank: int, layout: str) -> tuple[Segment, ...]:
    """The segments that `rank` holds, in the order of the sequence."""
    check_layout(layout)
    chunks = 2 * world if layout == "zigzag" and world > 1 else world
    if seq % chunks:
        raise ValueError(f"seq: got {seq}; a group of {world} does not divide it: {layout} needs a multiple of {chunks}")
    size = seq // chunks
    mine = (rank,) if chunks == world else (rank, chunks - 1 - rank)
    return tuple(Segment(chunk * size, size, index * size) for index, chunk in enumerate(mine))


def positions(seq: int, world: int, rank: int, *, layout: str = "zigzag", device=None, **wrong: NoReturn) -> Tensor:
    """int64 [seq / world]: the position in the sequence of each row of `rank`.

    For example:

        places = positions(16, world=4, rank=1)
    """
    if wrong:
        refuse_keywords(positions, wrong)
    parts = [torch.arange(s.begin, s.begin + s.length, device=device) for s in segments(seq, world, rank, layout)]
    return torch.cat(parts)


def split(tensor: Tensor, world: int, rank: int, *, dim: int = 1, layout: str = "zigzag", **wrong: NoReturn) -> Tensor:
    """A contiguous copy of the rows that `rank` holds; `tensor` has the whole sequence along `dim`.

    For example:

        mine = split(q, world=4, rank=1)
    """
    if wrong:
        refuse_keywords(split, wrong)
    parts = segments(tensor.shape[dim], world, rank, layout)
    return torch.cat([tensor.narrow(dim, part.begin, part.length) for part in parts], dim=dim).contiguous()


def join(tensors: Sequence[Tensor], *, dim: int = 1, layout: str = "zigzag", **wrong: NoReturn) -> Tensor:
    """The whole sequence from the rows of every rank: the inverse of split().

    For example:

        whole = join([split(q, 4, rank) for rank in range(4)])
    """
    if wrong:
        refuse_keywords(join, wrong)
    world, local = len(tensors), tensors[0].shape[dim]
    pieces = []
    for rank, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise ValueError(
                f"tensors: rank {rank} has {list(tensor.shape)}; expected {list(tensors[0].shape)}, as rank 0 has"
            )
        pieces += [(s.begin, tensor.narrow(dim, s.local, s.length)) for s in segments(local * world, world, rank, layout)]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda entry: entry[0])], dim=dim)


def shift_labels(labels: Tensor, *, cu_seqlens=None, ignore: int = -100, **wrong: NoReturn) -> Tensor:
    """For next-token losses: labels[..., t + 1] at t, and `ignore` at the end. Call it before the sequence is split.

        labels = shift_labels(torch.arange(16)[None])

    With documents end to end, the last token of each document gets `ignore`, too.
    """
    if wrong:
        refuse_keywords(shift_labels, wrong)
    shifted = torch.full_like(labels, ignore)
    shifted[..., :-1] = labels[..., 1:]
    if cu_seqlens is not None:
        ends = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=labels.device)[1:] - 1
        shifted[..., ends[ends >= 0]] = ignore
    return shifted


def document_positions(cu_seqlens, *, device=None, **wrong) -> Tensor:
    """int64 [total]: positions that begin at 0 in every document; split() this tensor like the tokens.

    For example:

        places = document_positions(torch.tensor([0, 5, 16]))
    """
    if wrong:
        refuse_keywords(document_positions, wrong)
    starts = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=device)
    return torch.arange(int(starts[-1]), device=device) - torch.repeat_interleave(starts[:-1], starts.diff())


def pad_packed(tensor: Tensor, cu_seqlens, world: int, *, dim: int = 0, layout: str = "zigzag", value=0, **wrong: NoReturn):
    """(tensor, cu_seqlens) with rows of `value` at the end, as a separate document, so that the group divides the total.

        longer, starts = pad_packed(q[0], torch.tensor([0, 5, 16], dtype=torch.int32), world=4)

    No real row moves or is dropped, and none of them sees the padding.
    """
    if wrong:
        refuse_keywords(pad_packed, wrong)
    check_layout(layout)
    chunks = 2 * world if layout == "zigzag" and world > 1 else world
    starts = [int(start) for start in cu_seqlens]
    missing = -tensor.shape[dim] % chunks
    if not missing:
        return tensor, starts
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim), [*starts, starts[-1] + missing]
