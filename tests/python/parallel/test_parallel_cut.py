"""Context parallelism without communication: every visible pair is met once, and the work is shared evenly."""

import itertools

import pytest
import torch
from flash_attention.parallel import (
    cut,
    document_positions,
    gather,
    join,
    layout,
    pad_packed,
    positions,
    shift_labels,
    split,
)
from flash_attention.parallel.heads import head_ranges


def visible(seq, left, right, documents):
    i, j = torch.arange(seq)[:, None], torch.arange(seq)[None, :]
    seen = torch.ones(seq, seq, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    if documents:
        number = torch.bucketize(torch.arange(seq), torch.tensor(documents[1:]), right=True)
        seen &= number[:, None] == number[None, :]
    return seen


def block_pairs(block):
    """Local (rows, keys) that a block attends, by its own window and documents."""
    rows, keys = block.q[1] - block.q[0], block.kv[1] - block.kv[0]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if block.lengths:
        assert sum(block.lengths) == rows and sum(block.kv_lengths) == keys
        ends_q, ends_kv = (torch.tensor(each).cumsum(0) for each in (block.lengths, block.kv_lengths))
        of_q = torch.bucketize(torch.arange(rows), ends_q, right=True)[:, None]
        of_kv = torch.bucketize(torch.arange(keys), ends_kv, right=True)[None, :]
        seen &= of_q == of_kv
        j = j - (ends_kv[of_kv] - ends_q[of_kv])  # bottom-right
    if block.left >= 0:
        seen &= j >= i - block.left
    if block.right >= 0:
        seen &= j <= i + block.right
    return seen


WINDOWS = [(-1, -1), (-1, 0), (5, 0), (0, 0), (3, 4), (-1, 2), (2, -1), (1, 9)]
DOCUMENTS = [(), (0, 48), (0, 7, 7, 30, 48), (0, 1, 2, 46, 48), (0, 24, 48)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout_name", ["zigzag", "contiguous"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_visible_pair_is_in_one_block(world, layout_name, documents):
    seq = 48
    for (left, right), whole in itertools.product(WINDOWS, (False, True)):
        shape = cut.Shape(seq, world, layout_name, left, right, documents, whole)
        count = torch.zeros(seq, seq, dtype=torch.int64)
        gathered = torch.zeros(seq, seq, dtype=torch.int64)
        owned = torch.zeros(seq, dtype=torch.int64)
        for rank in range(world):
            rows = positions(seq, world, rank, layout=layout_name)
            for source in range(world):
                step = cut.step(shape, rank, source)
                keys = positions(seq, world, source, layout=layout_name)
                keys = torch.cat([keys[low:high] for low, high in step.needs]) if step.needs else keys[:0]
                for block in step.blocks:
                    i, j = rows[slice(*block.q)], keys[slice(*block.kv)]
                    assert torch.equal(j, torch.cat([torch.arange(b, b + n) for b, n in block.keys]))
                    assert not whole or len(block.keys) == 1
                    count[i[:, None], j[None, :]] += block_pairs(block)
                    owned[i] += block.own
            for block in gather.blocks(shape, rank):
                i, j = rows[slice(*block.q)], torch.arange(*block.kv)
                gathered[i[:, None], j[None, :]] += block_pairs(block)
        expected = visible(seq, left, right, documents).long()
        assert torch.equal(count, expected), (left, right)
        assert torch.equal(gathered, expected), (left, right)
        assert (owned == 1).all()  # a sink counts once in every row


@pytest.mark.parametrize("world", [2, 4, 8])
def test_zigzag_shares_the_work_and_sends_no_row_in_vain(world):
    seq = 64 * world
    shape = cut.Shape(seq, world, "zigzag", -1, 0)
    work = []
    for rank in range(world):
        steps = cut.steps(shape, rank)
        work.append(sum(int(block_pairs(block).sum()) for step in steps for block in step.blocks))
        assert all(len(step.blocks) == 1 for step in steps)
        for step in steps[1:]:
            assert step.rows == (32 if step.source < rank else 64)
    assert max(work) == min(work)


def test_a_window_exchanges_neighbours_alone():
    shape = cut.Shape(1024, 8, "contiguous", 100, 0)
    assert [step.source for step in cut.steps(shape, 3)] == [3, 2]
    assert cut.step(shape, 3, 2).rows == 100
    assert [step.source for step in cut.steps(shape, 0)] == [0]


@pytest.mark.parametrize("layout_name", ["zigzag", "contiguous"])
def test_split_and_join(layout_name):
    tensor = torch.arange(2 * 24 * 3).reshape(2, 24, 3)
    parts = [split(tensor, 4, rank, layout=layout_name) for rank in range(4)]
    assert torch.equal(join(parts, layout=layout_name), tensor)
    for rank, part in enumerate(parts):
        assert torch.equal(part, tensor[:, positions(24, 4, rank, layout=layout_name)])
    with pytest.raises(ValueError, match="seq: got 25; a group of 4 does not divide it"):
        layout.segments(25, 4, 0, layout_name)


def test_labels_positions_and_padding():
    labels = torch.tensor([[10, 11, 12, 13, 14, 15]])
    assert shift_labels(labels).tolist() == [[11, 12, 13, 14, 15, -100]]
    assert shift_labels(labels, cu_seqlens=[0, 2, 6]).tolist() == [[11, -100, 13, 14, 15, -100]]
    assert document_positions([0, 2, 2, 6]).tolist() == [0, 1, 0, 1, 2, 3]
    padded, starts = pad_packed(torch.arange(6), [0, 2, 6], 2, value=-1)
    assert padded.tolist() == [0, 1, 2, 3, 4, 5, -1, -1] and starts == [0, 2, 6, 8]


@pytest.mark.parametrize(
    "heads_q,heads_kv,world", [(8, 8, 4), (8, 2, 4), (6, 2, 4), (7, 7, 4), (6, 3, 2), (2, 1, 4), (12, 4, 3)]
)
def test_every_head_is_computed_once(heads_q, heads_kv, world):
    seen = []
    for rank in range(world):
        for share in head_ranges(heads_q, heads_kv, world, rank):
            seen += range(*share.q)
            group = (share.q[1] - share.q[0]) // (share.kv[1] - share.kv[0])
            for head in range(*share.q):
                assert share.kv[0] + (head - share.q[0]) // group == head // (heads_q // heads_kv)
    assert seen == list(range(heads_q))
