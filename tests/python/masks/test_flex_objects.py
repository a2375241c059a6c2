"""What torch has beside the function itself: its objects, in and out."""

import pytest
import torch
from flash_attention import create_block_mask, flex_attention, masks
from flash_attention.flex import BlockMask
from flex_formula import tensors


def test_what_is_asked_for_besides():
    """torch's own AuxOutput, which may be taken apart by name and by place."""
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(torch_flex, "AuxRequest"):
        pytest.skip("this torch has no AuxRequest")
    q, k, v = (tensor.detach() for tensor in tensors())
    out, found = flex_attention(q, k, v, return_aux=torch_flex.AuxRequest(lse=True))
    assert isinstance(found, torch_flex.AuxOutput) and found.max_scores is None
    same, lse = flex_attention(q, k, v, return_lse=True)
    assert torch.equal(out, same) and torch.equal(found.lse, lse)
    assert flex_attention(q, k, v, return_aux=torch_flex.AuxRequest())[1].lse is None


def slanted(b, h, i, j):
    return (i >= j) & (j >= 20 * b + 10 * h)


def both(B=2, H=3, rows=200, keys=300, block=64):
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    sizes = slanted, B, H, rows, keys
    return create_block_mask(*sizes, BLOCK_SIZE=block), torch_flex.create_block_mask(*sizes, device="cpu", BLOCK_SIZE=block)


def test_block_masks_tell_of_themselves_as_torchs_do():
    for sizes in ({}, {"block": (32, 128)}, {"B": None, "H": None}, {"rows": 64, "keys": 128}):
        ours, torchs = both(**sizes)
        assert ours.shape == tuple(torchs.shape) and ours.numel() == torchs.numel()
        assert tuple(ours.seq_lengths) == tuple(torchs.seq_lengths) and tuple(torchs.BLOCK_SIZE) == ours.BLOCK_SIZE
        hidden_blocks = 1 - torchs.to_dense().float().mean().item()  # torch before 2.15 counted pairs beyond the end, too
        assert ours.sparsity() == pytest.approx(100 * hidden_blocks, abs=1e-4)
    assert ours.to("cpu") is ours
    assert "(0, 1)" in ours.to_string() and "mask_mod=slanted" in str(ours)
    with pytest.raises(ValueError, match="made without Q_LEN"):
        create_block_mask(slanted).sparsity()


def test_parts_of_block_masks():
    """By batch and head, and by blocks of queries: a mask of its own, whose function counts from there."""
    mask = both()[0]
    whole = mask.to_dense()
    assert torch.equal(mask[1].to_dense(), whole[1:2])
    assert torch.equal(mask[:, -1].to_dense(), whole[:, 2:])
    assert torch.equal(mask[1:, 1:, 2].to_dense(), whole[1:, 1:, 128:192])
    assert torch.equal(mask[:, :, 1:].to_dense(), whole[:, :, 64:])
    assert torch.equal(mask._adjust(90, 100).to_dense(), whole[:, :, :90, :100])
    q, k, v = (torch.randn(2, 3, size, 16) for size in (200, 300, 300))
    part = flex_attention(q[1:, :, 128:192], k[1:], v[1:], block_mask=mask[1, :, 2])
    torch.testing.assert_close(part, flex_attention(q, k, v, block_mask=mask)[1:, :, 128:192])
    for wrong in (4, (0, 0, 0, 0), slice(None, None, 2), "a"):
        with pytest.raises(IndexError, match="allowed are"):
            mask[wrong]


def test_block_masks_from_lists():
    torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    lists = torch.tensor([[[[1, 0, 0], [2, 0, 0]]]], dtype=torch.int32)
    full_counts, full_lists = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32)
    q, k, v = (tensor.detach() for tensor in tensors(rows=90, keys=134))
    for arguments in (
        {"kv_num_blocks": counts, "kv_indices": lists},
        {"kv_num_blocks": counts, "kv_indices": lists, "full_kv_num_blocks": full_counts, "full_kv_indices": full_lists},
    ):
        named = {**arguments, "BLOCK_SIZE": 48, "mask_mod": slanted, "seq_lengths": (90, 134)}
        ours, torchs = BlockMask.from_kv_blocks(**named), torch_flex.BlockMask.from_kv_blocks(**named)
        assert torch.equal(flex_attention(q, k, v, block_mask=ours), flex_attention(q, k, v, block_mask=torchs))
    assert BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=48).shape == (1, 1, 96, 144)


def test_pictures_see_numbers_without_axes():
    """As kernels do: a function may take a captured row apart."""
    places = torch.randint(0, 20, (40, 2), generator=torch.Generator().manual_seed(0))

    def near(b, h, i, j):
        (x, y), (u, w) = places[i], places[j]
        return ((x - u).abs() < 6) & ((y - w).abs() < 6)

    apart = (places[:, None] - places[None]).abs().lt(6).all(-1)
    assert torch.equal(create_block_mask(near, None, None, 40, 40).to_dense()[0, 0], apart)
    assert f"{100 * apart.sum() / 1600:.1f} % visible" in masks.show(near, seq_q=40, seq_kv=40)
