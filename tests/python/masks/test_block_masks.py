"""Block masks, ours and torch's, against the dense formula in float64; and pictures of masks."""

import zlib

import flash_attention
import pytest
import torch
from flash_attention import attention, attention_packed, masks
from test_masks import check, expected_visible, inputs
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask


def dense(found, block, seq_q, seq_kv):
    return (found != 0).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :seq_q, :seq_kv]


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 48), (1, 200)])
@pytest.mark.parametrize("causal", [False, True])
def test_ours(block, causal):
    seq_q, seq_kv = 131, 197
    shape = (2, 4, -(-seq_q // block[0]), -(-seq_kv // block[1]))
    found = torch.rand(shape, generator=torch.Generator().manual_seed(block[0])) < 0.6
    visible = dense(found, block, seq_q, seq_kv)
    if causal:
        visible = visible & torch.ones(seq_q, seq_kv, dtype=torch.bool).tril(seq_kv - seq_q)
    mask = masks.BlockMask(found, block)
    tensors = inputs(seq_q, seq_kv)
    check(lambda q, k, v: attention(q, k, v, block_mask=mask, causal=causal, return_lse=True), tensors, visible)


def test_lists_of_blocks():
    counts = torch.tensor([2, 1, 0])
    indices = torch.tensor([[3, 0, 1, 1], [2, 2, 2, 2], [0, 1, 2, 3]])
    mask = masks.BlockMask.from_kv_indices(counts[None, None], indices[None, None], 4, (32, 32))
    want = torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    assert torch.equal(mask.visible[0, 0].int(), want.int())
    check(
        lambda q, k, v: attention(q, k, v, block_mask=mask, return_lse=True),
        inputs(90, 127),
        dense(want, (32, 32), 90, 127)[None, None],
    )


def test_torch_by_its_fields():
    """Without a mask_mod the listed blocks are visible, whole ones and others."""
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    mask = TorchBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(128, 128), seq_lengths=(200, 256))
    want = dense(torch.tensor([[0, 1], [1, 1]]), (128, 128), 200, 256)[None, None]
    check(lambda q, k, v: attention(q, k, v, block_mask=mask, return_lse=True), inputs(200, 256), want)
    whole = TorchBlockMask.from_kv_blocks(
        torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=(128, 128), seq_lengths=(200, 256)
    )
    q, k, v = inputs(200, 256)
    assert torch.equal(attention(q, k, v, block_mask=whole), attention(q, k, v, block_mask=mask))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_full_blocks_of_torch(layout):
    """Most blocks below the diagonal and some of the band are full: torch lists them apart from those in which its function
    decides."""
    shown = lambda b, h, i, j: (i + h >= j) & (i - j < 70)  # noqa: E731
    mask = create_block_mask(shown, 2, 4, 100, 100, device="cpu", BLOCK_SIZE=16)
    assert mask.full_kv_num_blocks.sum() > 0 and mask.kv_num_blocks.sum() > 0
    i, j, h = torch.arange(100)[:, None], torch.arange(100)[None], torch.arange(4)[:, None, None]
    visible = shown(0, h, i, j)[None]

    def call(q, k, v):
        given = [x if layout == "bshd" else x.transpose(1, 2) for x in (q, k, v)]
        out, lse = attention(*given, block_mask=mask, layout=layout, return_lse=True)
        return (out if layout == "bshd" else out.transpose(1, 2)), lse

    check(call, inputs(100, 100), visible)
    out = flash_attention.flex_attention(*(x.transpose(1, 2) for x in inputs(100, 100)), block_mask=mask, enable_gqa=True)
    assert torch.equal(out.transpose(1, 2), call(*inputs(100, 100))[0])


@pytest.mark.parametrize("create", [create_block_mask, flash_attention.create_block_mask], ids=["torch", "ours"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_function_inside(create, layout):
    """A block mask as torch's function makes it, alone and beside another mask_mod; heads and sizes that differ."""
    seq_q, seq_kv = 131, 197

    def banded(b, h, i, j):
        return (i - j < 40 + 16 * h) & (j - i < 90)

    def dotted(b, h, i, j):
        return j % 3 != 1

    mask = create(banded, None, 4, seq_q, seq_kv, device="cpu")
    b, (h, i, j) = 0, torch.meshgrid(*(torch.arange(n) for n in (4, seq_q, seq_kv)), indexing="ij")
    tensors = inputs(seq_q, seq_kv)

    def call(q, k, v, **options):
        if layout == "bshd":
            return attention(q, k, v, block_mask=mask, return_lse=True, **options)
        out, lse = attention(
            *(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask, layout=layout, return_lse=True, **options
        )
        return out.transpose(1, 2), lse

    check(call, tensors, banded(b, h, i, j))
    check(lambda q, k, v: call(q, k, v, mask_mod=dotted), tensors, banded(b, h, i, j) & dotted(b, h, i, j))
    with pytest.raises(ValueError, match="block_mask: was made for Q_LEN 131; this call needs 90"):
        attention(*inputs(90, 127), block_mask=mask)


def test_a_function_inside_is_refused_by_packed_calls():
    mask = flash_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
    q, k, v = (t[0].detach() for t in inputs(128, 128, batch=1))
    with pytest.raises(
        ValueError, match=r"block_mask: its mask_mod is a function.* packed calls take functions as mask_mod="
    ):
        attention_packed(q, k, v, torch.tensor([0, 60, 128], dtype=torch.int32), block_mask=mask)


def test_packed():
    starts = torch.tensor([0, 70, 131], dtype=torch.int32)
    q, k, v = (t[0].detach() for t in inputs(131, 131, batch=1))
    found = torch.tensor([[[[1, 0], [1, 1]]], [[[0, 1], [1, 0]]]]).bool()
    out = attention_packed(
        q, k, v, starts, max_seqlen_q=70, max_seqlen_kv=70, block_mask=masks.BlockMask(found, (64, 64)), causal=True
    )
    for b, (begin, end) in enumerate(((0, 70), (70, 131))):
        part = [t[None, begin:end] for t in (q, k, v)]
        visible = dense(found[b : b + 1], (64, 64), end - begin, end - begin)
        torch.testing.assert_close(out[begin:end], attention(*part, mask=visible, causal=True)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (3, 1, 1, 1), (1, 3, 1, 1)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"block_mask: got .*expected \[2, 4, 1, 1\] for blocks of 128 x 128"):
        attention(*inputs(61, 61), block_mask=masks.BlockMask(torch.ones(shape).bool()))


def test_together_with_hidden_rows():
    mask = masks.documents([0, 61, 97, 211])
    found = torch.rand((1, 4, 7, 4), generator=torch.Generator().manual_seed(9)) < 0.5
    visible = dense(found, (32, 64), 211, 211) & expected_visible("documents")
    blocks = masks.BlockMask(found, (32, 64))
    check(
        lambda q, k, v: attention(q, k, v, hidden_rows=mask, block_mask=blocks, return_lse=True), inputs(211, 211), visible
    )


class TestShow:
    def test_text(self):
        text = masks.show(masks.documents([0, 128, 256]), tile=64)
        assert masks.show(masks.prepare(masks.documents([0, 128, 256])), tile=64) == text
        assert text.splitlines()[:4] == ["+   ", "#+  ", "  + ", "  #+"]
        assert "2 full, 4 partial, 10 none" in text

    def test_other_forms(self):
        mask = torch.ones(70, 100).bool()
        assert masks.show(mask).splitlines()[:2] == ["##", "##"]
        assert masks.show(masks.BlockMask(torch.eye(2)[None, None].bool(), (64, 64))).splitlines()[:2] == ["# ", " #"]
        assert masks.show(torch.tensor([[0], [9]], dtype=torch.int32), tile=1, seq_q=2).splitlines()[:2] == [" #", " #"]

    def test_functions(self):
        document = torch.arange(256) // 100

        def mask_mod(b, h, i, j):
            return (document[i] == document[j]) & (i >= j) & (j >= 64 * h)

        expected = torch.block_diag(*(torch.ones(n, n) for n in (100, 100, 56))).tril().bool()
        expected[:, :64] = False  # of head 1
        text = masks.show(expected)
        for mask in (
            flash_attention.create_block_mask(mask_mod, None, 2, 256, 256),
            create_block_mask(mask_mod, None, 2, 256, 256, device="cpu", BLOCK_SIZE=64),
        ):
            assert masks.show(mask, head=1) == text
        assert masks.show(mask_mod, head=1, seq_q=256, seq_kv=256) == text
        with pytest.raises(TypeError, match="pass seq_q="):
            masks.show(mask_mod)

    def test_svg(self, tmp_path):
        masks.show(masks.prefix_lm(67, 211), tmp_path / "mask.svg")
        text = (tmp_path / "mask.svg").read_text()
        assert text.startswith("<svg") and text.rstrip().endswith("</svg>")

    def test_png_has_the_pairs(self, tmp_path):
        mask = masks.spans([3], [9], 20)
        masks.show(mask, tmp_path / "mask.png", tile=4)
        data = (tmp_path / "mask.png").read_bytes()
        start = data.index(b"IDAT") + 4
        size = int.from_bytes(data[start - 8 : start - 4], "big")
        rows = zlib.decompress(data[start : start + size])
        blue = [[rows[i * 61 + 1 + 3 * j] == 58 for j in range(20)] for i in range(20)]
        assert torch.equal(torch.tensor(blue), mask.visible()[0, 0])

    def test_other_endings_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"svg or \.png"):
            masks.show(torch.ones(3, 3).bool(), tmp_path / "mask.gif")
