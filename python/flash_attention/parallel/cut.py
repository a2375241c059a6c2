"""A problem cut by rank: which call attends which rows to which keys. Pure data, no tensors and no communication.

Every visible (query, key) pair is in exactly one block of exactly one rank and source;
tests/python/parallel/test_parallel_cut.py counts them.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from flash_attention.parallel.layout import Segment, segments


@dataclass(frozen=True)
class Shape:
    """The inputs of the cut. A bound of the window is -1 if it is not set; causal is right = 0."""

    seq: int
    world: int
    layout: str
    left: int = -1
    right: int = -1
    documents: tuple[int, ...] = ()  # cu_seqlens of the whole sequence; empty: one document
    whole_segments: bool = False  # no block spans two segments of keys, because a mask or bias is cut by columns


@dataclass(frozen=True)
class Block:
    """Rows q of the rank and rows kv of what it received from the source: one call, or one call of packed documents."""

    q: tuple[int, int]
    kv: tuple[int, int]
    keys: tuple[tuple[int, int], ...]  # (first key in the sequence, how many) of each piece of kv
    left: int = -1  # window around the diagonal j = i of the block's own rows
    right: int = -1
    lengths: tuple[int, ...] = ()  # rows of each document of the block; the diagonal is then bottom-right
    kv_lengths: tuple[int, ...] = ()  # keys of each
    own: bool = False  # holds the diagonal of its rows; the sink is counted in this block


@dataclass(frozen=True)
class Step:
    """A rank's work on the keys of one source."""

    source: int
    blocks: tuple[Block, ...]
    needs: tuple[tuple[int, int], ...]  # rows of the source that are sent, packed in this order; Block.kv indexes these

    @property
    def rows(self) -> int:
        return sum(end - begin for begin, end in self.needs)


@lru_cache(maxsize=4096)
def step(shape: Shape, rank: int, source: int) -> Step:
    """The work of `rank` on the keys of `source`; no blocks if it sees none of them."""
    mine = segments(shape.seq, shape.world, rank, shape.layout)
    theirs = segments(shape.seq, shape.world, source, shape.layout)
    if shape.documents or shape.left >= 0 or shape.right > 0 or shape.whole_segments:
        blocks = _pairs(shape, mine, theirs)
    else:
        blocks = _whole(shape, mine, theirs, rank == source)
    if rank == source:
        return Step(source, tuple(blocks), ((0, shape.seq // shape.world),))
    needs = _union(block.kv for block in blocks)
    return Step(source, tuple(replace(block, kv=_packed(block.kv, needs)) for block in blocks), needs)


def steps(shape: Shape, rank: int) -> list[Step]:
    """The rank's own keys, then those of rank - 1, rank - 2 ... up to the last of which any key is visible."""
    found = [step(shape, rank, (rank - turn) % shape.world) for turn in range(shape.world)]
    return [found[0]] + [one for one in found[1:] if one.blocks]


def _whole(shape, mine, theirs, own):
    """No window, no documents: all keys visible, or causal. As few calls as possible."""
    rows, keys = _rows(mine), tuple((s.begin, s.length) for s in theirs)
    if shape.right < 0:
        return [Block(rows, _rows(theirs), keys, own=own)]
    if own:
        return [Block(rows, rows, keys, right=0, own=True)]
    blocks = []
    for segment in mine:
        seen = [other for other in theirs if other.begin < segment.begin]
        if not seen:
            continue
        block = Block(_rows([segment]), _rows(seen), keys[: len(seen)])
        if blocks and blocks[-1].kv == block.kv and blocks[-1].q[1] == block.q[0]:
            block = replace(block, q=(blocks.pop().q[0], block.q[1]))
        blocks.append(block)
    return blocks


def _pairs(shape, mine, theirs):
    blocks = []
    for segment in mine:
        for other in theirs:
            if shape.documents and segment.begin == other.begin:
                blocks.append(_documents(shape, segment))
            elif shape.documents:
                q, kv = _shared_document(shape.documents, segment, other)
                blocks.append(band(q, kv, shape, own=False) if q and kv else None)
            else:
                blocks.append(band(segment, other, shape, own=segment.begin == other.begin))
    return [block for block in blocks if block]


def band(q: Segment, kv: Segment, shape, own):
    """The rows and the keys between which some pair is visible; None if no pair is."""
    left, right = (shape.seq if bound < 0 else bound for bound in (shape.left, shape.right))
    first, last = max(q.begin, kv.begin - right), min(q.begin + q.length, kv.begin + kv.length + left)
    low, high = max(kv.begin, first - left), min(kv.begin + kv.length, last + right)
    if first >= last or low >= high:
        return None
    rows, keys = q.local - q.begin, kv.local - kv.begin
    return Block(
        (first + rows, last + rows),
        (low + keys, high + keys),
        ((low, high - low),),
        -1 if low >= last - 1 - left else left - first + low,
        -1 if high - 1 <= first + right else right + first - low,
        own=own,
    )


def _documents(shape, segment):
    """The documents of one segment, or their parts in it, each attending itself."""
    pieces = [crop(segment, begin, end) for begin, end in zip(shape.documents, shape.documents[1:], strict=False)]
    lengths = tuple(piece.length for piece in pieces if piece)
    rows, keys = _rows([segment]), ((segment.begin, segment.length),)
    lengths = lengths if len(lengths) > 1 else ()
    return Block(rows, rows, keys, shape.left, shape.right, lengths, lengths, own=True)


def _shared_document(starts, q, kv):
    """The parts of two segments that belong to the one document that may be in both."""
    first = min(q, kv)
    inside = first.begin + first.length - 1
    for begin, end in itertools.pairwise(starts):
        if begin <= inside < end:
            return crop(q, begin, end), crop(kv, begin, end)
    return None, None


def crop(segment, begin, end):
    low, high = max(segment.begin, begin), min(segment.begin + segment.length, end)
    return Segment(low, high - low, segment.local + low - segment.begin) if low < high else None


def _rows(parts):
    return (parts[0].local, parts[-1].local + parts[-1].length)


def _union(ranges):
    merged = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def _packed(rows, needs):
    before = 0
    for begin, end in needs:
        if begin <= rows[0] < end:
            return (rows[0] - begin + before, rows[1] - begin + before)
        before += end - begin
    raise AssertionError(rows)
