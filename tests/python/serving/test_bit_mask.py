"""Bit masks and windows of sequences over a cache, against float64: trees of drafts, FlashInfer's bits, mixed batches."""

import pytest
import reference
import torch
from flash_attention import masks
from flash_attention.torch_cache import attention_over_cache
from test_kv_cache import cache_in_pages

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
NAN = float("nan")


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def ancestors(parents):
    """bool [drafts, drafts]: by walking up from each draft."""
    sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for draft in range(len(parents)):
        at = draft
        while at >= 0:
            sees[draft, at] = True
            at = parents[at]
    return sees


def random_trees(batch, drafts, generator):
    """Parents in any order of nodes: a draft's parent may come after it."""
    trees = []
    for _ in range(batch):
        order = torch.randperm(drafts, generator=generator).tolist()
        parents = [-1] * drafts
        for n in range(1, drafts):
            parents[order[n]] = order[int(torch.randint(n, (), generator=generator))]
        trees.append(parents)
    return trees


def check(found, q, rows, visible):
    """Each sequence's (out, lse) with its own bool mask, or None."""
    out, lse = found
    for b, (k, v) in enumerate(rows):
        mask = None if visible[b] is None else visible[b].to(q[b].device)
        want = reference.attention(q[b][None].double(), k[None].double(), v[None].double(), mask=mask)
        torch.testing.assert_close(out[b].double(), want[0][0], **CLOSE)
        torch.testing.assert_close(lse[b].double(), want[1][0], **CLOSE)


@pytest.mark.parametrize("drafts", [1, 5, 8, 13, 40])
@pytest.mark.parametrize("page", [7, 16])
def test_trees_over_pages(drafts, page, device):
    generator = torch.Generator().manual_seed(drafts)
    lengths = [61, drafts, drafts + 3]
    k, v, table, rows = cache_in_pages(lengths, page, 2, 40, device, seed=page)
    trees = random_trees(3, drafts, generator)
    q = torch.randn(3, drafts, 6, 40, device=device)
    mask = masks.draft_tree(torch.tensor(trees, device=device))
    found = attention_over_cache(
        q, k, v, page_table=table, seqused_kv=int32(lengths, device), bit_mask=mask, return_lse=True
    )
    visible = []
    for length, parents in zip(lengths, trees, strict=True):
        visible.append(torch.cat([torch.ones(drafts, length - drafts).bool(), ancestors(parents)], 1))
    check(found, q, rows, visible)


def test_a_tree_of_nobody(device):
    """Drafts that see nothing of the tree see the context; without a context out is 0 and lse -inf."""
    lengths = [20, 4]
    k, v, table, rows = cache_in_pages(lengths, 16, 2, 32, device)
    q = torch.randn(2, 4, 4, 32, device=device)
    mask = masks.pack_drafts(torch.zeros(2, 4, 4, dtype=torch.bool, device=device))
    out, lse = attention_over_cache(
        q, k, v, page_table=table, seqused_kv=int32(lengths, device), bit_mask=mask, return_lse=True
    )
    context = [part[:16] for part in rows[0]]
    check((out[:1], lse[:1]), q[:1], [context], [None])
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_a_hidden_draft_may_be_nan(device):
    k, v = (torch.randn(1, 30, 2, 32, device=device) for _ in range(2))
    q = torch.randn(1, 3, 4, 32, device=device)
    mask = masks.draft_tree(torch.tensor([[-1, 0, 0]], device=device))  # brothers do not see each other
    clean = attention_over_cache(q, k, v, bit_mask=mask)
    k[:, 28] = v[:, 28] = NAN
    out = attention_over_cache(q, k, v, bit_mask=mask)
    torch.testing.assert_close(out[:, [0, 2]], clean[:, [0, 2]], **CLOSE)
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sequence_has_its_own_mask(dtype, device):
    """A causal prompt, a tree, a window, one that sees all, and no query, packed in one batch."""
    lengths, counts = [40, 33, 50, 20, 9], [40, 6, 3, 2, 0]
    k, v, table, rows = cache_in_pages(lengths, 16, 2, 32, device, dtype=dtype)
    parents = [-1, 0, 0, 2, 1, 2]
    tree = masks.draft_tree(torch.tensor([parents], device=device)).bits[0]
    mask = masks.BitMask(tree, int32([0, 0, 6, 6, 6, 6], device))
    windows = int32([[-1, 0], [-1, -1], [7, 0], [-1, -1], [-1, 0]], device)
    starts = int32([0, *torch.tensor(counts).cumsum(0).tolist()], device)
    q = torch.randn(sum(counts), 4, 32, device=device, dtype=dtype)
    out, lse = attention_over_cache(
        q, k, v, page_table=table, seqused_kv=int32(lengths, device), cu_seqlens_q=starts, max_seqlen_q=40,
        bit_mask=mask, sequence_windows=windows, return_lse=True,
    )  # fmt: skip
    close = CLOSE if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count == 0:
            continue
        key, diagonal = torch.arange(length), torch.arange(count)[:, None] + length - count
        visible = torch.ones(count, length).bool()
        if b == 0:
            visible = key <= diagonal
        elif b == 1:
            visible[:, -6:] = ancestors(parents)
        elif b == 2:
            visible = (key <= diagonal) & (key >= diagonal - 7)
        part = slice(int(starts[b]), int(starts[b + 1]))
        keys = [of[None].double() for of in rows[b]]
        want = reference.attention(q[part][None].double(), *keys, mask=visible.to(device))
        torch.testing.assert_close(out[part].double(), want[0][0], **close)
        torch.testing.assert_close(lse[:, part].double(), want[1][0], **close)


def test_bits_that_are_not_there_hide(device):
    """Offsets of too few bytes read nothing behind them."""
    k, v = (torch.randn(2, 24, 2, 32, device=device) for _ in range(2))
    q = torch.randn(2, 2, 4, 32, device=device)
    bits = torch.full((64,), 255, dtype=torch.uint8, device=device)
    mask = masks.from_bits(bits, int32([5, 9, 9], device))  # 32 bits of 48; the second sequence has no mask
    found = attention_over_cache(q, k, v, bit_mask=mask, return_lse=True)
    first = torch.ones(2, 24).bool()
    first[1, 8:] = False
    check(found, q, list(zip(k, v, strict=True)), [first, None])


def test_options_beside_a_tree(device):
    lengths = [50, 12]
    k, v, table, rows = cache_in_pages(lengths, 16, 2, 32, device)
    q, sink = torch.randn(2, 4, 4, 32, device=device), torch.randn(4, device=device)
    parents = [[-1, 0, 1, 0], [-1, -1, 0, 1]]
    out = attention_over_cache(
        q, k, v, page_table=table, seqused_kv=int32(lengths, device), window=(9, -1), softcap=4.0, sink=sink,
        bit_mask=masks.draft_tree(torch.tensor(parents, device=device)),
    )  # fmt: skip
    for b, length in enumerate(lengths):
        key, diagonal = torch.arange(length), torch.arange(4)[:, None] + length - 4
        visible = key >= diagonal - 9
        visible[:, -4:] &= ancestors(parents[b])
        keys = [of[None].double() for of in rows[b]]
        want, _ = reference.attention(q[b][None].double(), *keys, mask=visible.to(device), softcap=4.0, sink=sink.double())
        torch.testing.assert_close(out[b].double(), want[0], **CLOSE)


def test_a_compiled_function_sees_the_mask(device):
    k, v = (torch.randn(2, 24, 2, 32, device=device) for _ in range(2))
    q = torch.randn(2, 4, 4, 32, device=device)

    def step(q, parents, windows):
        return attention_over_cache(q, k, v, bit_mask=masks.draft_tree(parents), sequence_windows=windows)

    parents, windows = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]], device=device), int32([[-1, 0], [5, 0]], device)
    torch.testing.assert_close(torch.compile(step, backend="aot_eager")(q, parents, windows), step(q, parents, windows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_stays_right_with_another_tree(dtype):
    """Trees, bits, windows and lengths change between replays."""
    device, drafts = "cuda", 6
    k, v, table, _ = cache_in_pages([90, 70], 16, 2, 64, device, dtype=dtype)
    q = torch.randn(2, drafts, 8, 64, device=device, dtype=dtype)
    parents = torch.tensor(random_trees(2, drafts, torch.Generator().manual_seed(1)), device=device)
    lengths, windows = int32([90, 70], device), int32([[-1, -1], [-1, 0]], device)

    def step():
        return attention_over_cache(
            q, k, v, page_table=table, seqused_kv=lengths, bit_mask=masks.draft_tree(parents), sequence_windows=windows
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (2, 3):
        generator = torch.Generator().manual_seed(seed)
        parents.copy_(torch.tensor(random_trees(2, drafts, generator)))
        lengths.copy_(torch.randint(drafts, 70, (2,), generator=generator))
        windows.copy_(torch.tensor([[seed, 0], [-1, -1]]))
        graph.replay()
        torch.testing.assert_close(out, step(), rtol=0, atol=0)


def test_refusals():
    q, keys = torch.randn(2, 9, 2, 16), torch.randn(2, 20, 2, 16)
    run = lambda **options: attention_over_cache(q, keys, keys, **options)  # noqa: E731
    bits = torch.zeros(2, 9, 2, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"bit_mask: expected a flash_attention.masks.BitMask, .* got Tensor"):
        run(bit_mask=bits)
    with pytest.raises(TypeError, match=r"bit_mask: got .*; expected dtype uint8"):
        run(bit_mask=masks.BitMask(bits.int()))
    with pytest.raises(ValueError, match=r"bit_mask: got .*; expected \[2, 9, 2\]"):
        run(bit_mask=masks.BitMask(bits[:, :8].contiguous()))
    with pytest.raises(ValueError, match=r"bit_mask.row_bytes: got 1; 9 queries need 2 bytes a row"):
        run(bit_mask=masks.BitMask(bits[..., :1].contiguous()))
    with pytest.raises(ValueError, match=r"bit_mask: got .*; bits of keys need the offsets"):
        run(bit_mask=masks.BitMask(bits.flatten()))
    with pytest.raises(ValueError, match=r"bit_mask: got .*; bit_mask_offsets ends at 40 bytes"):
        run(bit_mask=masks.from_bits(bits.flatten(), int32([0, 20, 40])))
    with pytest.raises(ValueError, match=r"bit_mask_offsets\[1\]: got -3"):
        run(bit_mask=masks.from_bits(bits.flatten(), int32([0, -3, 4])))
    with pytest.raises(ValueError, match=r"sequence_windows: got .*; expected \[2, 2\]"):
        run(sequence_windows=int32([[-1, 0]]))
    with pytest.raises(TypeError, match=r"sequence_windows: got .*; expected dtype int32"):
        run(sequence_windows=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"parents: got \[4\]; expected a tensor of integers \[batch, drafts\]"):
        masks.draft_tree(torch.tensor([-1, 0, 0, 1]))
    lists = {"key_indices": torch.zeros(2, 9, 1, 3, dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"sequence_windows: .* not combined with lists of keys"):
        run(sequence_windows=int32([[-1, 0]] * 2), **lists)
