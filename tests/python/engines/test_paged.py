"""What the engines share."""

import pytest
import torch
from flash_attention.engines.paged import write_slots

PAGE, HEADS, DIM = 4, 2, 32


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_exactly_the_slots_are_written(kind, heads_first, device):
    """Tokens that fill up a captured batch have no slot, and every other place keeps its bits."""
    caches = [torch.randn(4, PAGE, HEADS, DIM, device=device) for _ in range(2)]
    if heads_first:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    before = [cache.clone() for cache in caches]
    rows = [torch.randn(3, HEADS, DIM, device=device) for _ in range(2)]
    write_slots(*caches, *rows, torch.tensor([6, -1, 13], device=device, dtype=kind))
    for cache, old, new in zip(caches, before, rows, strict=True):
        changed = (cache != old).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[1, 2], [3, 1]]
        assert torch.equal(cache[1, 2], new[0]) and torch.equal(cache[3, 1], new[2])
    write_slots(*caches, *rows, torch.tensor([-1, -1, -1], device=device, dtype=kind))
    write_slots(*caches, *(row[:0] for row in rows), torch.tensor([], device=device, dtype=kind))
