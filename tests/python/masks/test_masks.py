"""Masks as data: hidden rows, block masks, their builders, against the dense formula in float64."""

import math

import flash_attention
import pytest
import reference
import torch
from flash_attention import attention, attention_packed, masks

BUILDERS = {
    "documents": lambda: masks.documents([0, 61, 97, 97, 211]),
    "documents_both_ways": lambda: masks.documents([0, 61, 97, 211], causal=False),
    "documents_with_a_rest": lambda: masks.documents([0, 61, 97], total=211),
    "tree": lambda: masks.tree([-1, 0, 1, 1, 0, 4], [50, 40, 30, 31, 29, 31]),
    "shared_prefix": lambda: masks.shared_prefix(70, [50, 41, 50]),
    "prefix_lm": lambda: masks.prefix_lm(67, 211),
    "spans": lambda: masks.spans([10, 90], [50, 140], 211),
    "sink_window": lambda: masks.sink_window(5, 40, 211),
    "block_causal": lambda: masks.block_causal(16, 211),
    "block_diffusion": lambda: masks.block_diffusion(104, 16),
}


def expected_visible(name):
    """Each mask again, from its description alone."""
    n = 208 if name == "block_diffusion" else 211
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    if name.startswith("documents"):
        edges = torch.tensor([61, 97] if name != "documents" else [61, 97, 97])
        document = torch.bucketize(torch.arange(n), edges, right=True)
        same = document[:, None] == document[None, :]
        return same if name == "documents_both_ways" else same & (j <= i)
    if name == "tree":
        lengths, parents = [50, 40, 30, 31, 29, 31], [-1, 0, 1, 1, 0, 4]
        node = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
        path = torch.zeros(6, 6, dtype=torch.bool)
        for leaf in range(6):
            at = leaf
            while at >= 0:
                path[leaf, at] = True
                at = parents[at]
        return path[node][:, node] & (j <= i)
    if name == "shared_prefix":
        node = torch.repeat_interleave(torch.arange(4), torch.tensor([70, 50, 41, 50]))
        return ((node[None, :] == 0) | (node[:, None] == node[None, :])) & (j <= i)
    if name == "prefix_lm":
        return (j <= i) | (j < 67)
    if name == "spans":
        both = sum(((i >= a) & (i < b) & (j >= a) & (j < b)) for a, b in ((10, 50), (90, 140))) > 0
        return (j <= i) | both
    if name == "sink_window":
        return (j <= i) & ((j > i - 40) | (j < 5))
    if name == "block_causal":
        return j // 16 <= i // 16
    block_i, block_j = i % 104 // 16, j % 104 // 16
    noised_i, noised_j = i < 104, j < 104
    clean = torch.where(noised_i, block_j < block_i, block_j <= block_i)
    return torch.where(noised_j, noised_i & (block_i == block_j), clean)


def inputs(seq_q, seq_kv, heads_q=4, heads_kv=2, dim=32, dim_v=32, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seq_q * 31 + seq_kv)
    shapes = ((batch, seq_q, heads_q, dim), (batch, seq_kv, heads_kv, dim), (batch, seq_kv, heads_kv, dim_v))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def formula(q, k, v, visible, keep=None):
    """(out, lse) in float64; visible [batch|1, heads|1, seq_q, seq_kv]. A row that sees nothing is 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    if keep is not None:
        weights = weights * keep
    return (weights @ v).transpose(1, 2), lse


def check(call, tensors, visible, keep=None, tolerance=2e-5):
    """Out, lse and all gradients of a call, with a gradient through lse."""
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    want, want_lse = formula(*doubles, visible, keep)
    out, lse = call(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(6))
    seen = want_lse > -math.inf
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=tolerance, rtol=tolerance)
    got = torch.autograd.grad((out.double() * dout).sum() + (lse[seen] * dlse[seen]).sum(), tensors)
    expected = torch.autograd.grad((want * dout).sum() + (want_lse[seen] * dlse[seen]).sum(), doubles)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=5 * tolerance, rtol=5 * tolerance)


def groups(visible, group=2):
    return visible.repeat_interleave(group, dim=1) if visible.shape[1] > 1 else visible


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_say_what_they_describe(name):
    assert torch.equal(BUILDERS[name]().visible()[0, 0], expected_visible(name))


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_in_attention(name):
    mask = BUILDERS[name]()
    n = mask.hidden_rows.shape[2]
    check(
        lambda q, k, v: attention(q, k, v, hidden_rows=mask, return_lse=True),
        inputs(n, n),
        expected_visible(name)[None, None],
    )


@pytest.mark.parametrize("bounds", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_random_rows(bounds, causal):
    tensors = inputs(131, 197, dim_v=24)
    generator = torch.Generator().manual_seed(bounds)
    rows = torch.randint(-20, 160, (2, 2, 197, bounds), generator=generator, dtype=torch.int32)
    visible = groups(masks.IntervalMask(rows, causal).visible(131))
    check(lambda q, k, v: attention(q, k, v, hidden_rows=rows, causal=causal, return_lse=True), tensors, visible)


def test_rows_shared_by_batch_and_heads():
    rows = torch.randint(0, 97, (97, 2), dtype=torch.int32)
    visible = masks.IntervalMask(rows).visible()
    check(lambda q, k, v: attention(q, k, v, hidden_rows=rows, return_lse=True), inputs(97, 97), visible)


def test_nan_behind_the_mask():
    mask = masks.documents([0, 61, 131])
    q, k, v = (t.detach() for t in inputs(131, 131, batch=1))
    want = attention(q, k, v, hidden_rows=mask)
    k[:, :61], v[:, :61] = math.nan, math.inf
    out = attention(q, k, v, hidden_rows=mask)
    assert torch.equal(out[:, 61:], want[:, 61:])
    assert out[:, :61].isnan().any()


def test_a_tree_is_its_paths():
    """Each root-to-leaf path attended alone gives the same rows, and gradients are sums over paths."""
    lengths, paths = [20, 17, 23], ([0, 1], [0, 2])
    mask = masks.tree([-1, 0, 0], lengths)
    starts = [0, 20, 37, 60]
    tensors = inputs(60, 60, batch=1, heads_q=2)
    out = attention(*tensors, hidden_rows=mask)
    weight = torch.randn(out.shape)
    weight[:, :20] = 0  # the root's rows are in both paths
    got = torch.autograd.grad((out * weight).sum(), tensors)
    total = [torch.zeros_like(t) for t in tensors]
    for path in paths:
        rows = torch.cat([torch.arange(starts[node], starts[node + 1]) for node in path])
        part = attention(*(t[:, rows] for t in tensors), causal=True)
        torch.testing.assert_close(part[:, 20:], out[:, rows[20:]], atol=1e-5, rtol=1e-5)
        found = torch.autograd.grad((part * weight[:, rows]).sum(), tensors)
        total = [a + b for a, b in zip(total, found, strict=True)]
    for one, other in zip(got, total, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_documents_are_the_packed_call():
    starts = torch.tensor([0, 61, 97, 211], dtype=torch.int32)
    q, k, v = inputs(211, 211, batch=1)
    out = attention(q, k, v, hidden_rows=masks.documents(starts))
    packed = attention_packed(q[0], k[0], v[0], starts, causal=True)
    torch.testing.assert_close(out[0], packed, atol=1e-5, rtol=1e-5)


def test_packed():
    starts = torch.tensor([0, 70, 131], dtype=torch.int32)
    rows = torch.randint(0, 70, (131, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    q, k, v = (t[0] for t in inputs(131, 131, batch=1))
    out, lse = attention_packed(q, k, v, starts, hidden_rows=rows, causal=True, return_lse=True)
    for begin, end in ((0, 70), (70, 131)):
        part = [t[None, begin:end] for t in (q, k, v)]
        visible = masks.IntervalMask(rows[begin:end].contiguous(), causal=True).visible()
        want, want_lse = formula(*part, visible)
        torch.testing.assert_close(out[begin:end].double(), want[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[:, begin:end].double(), want_lse[0], atol=2e-5, rtol=2e-5)


def test_with_dropout_window_and_sink():
    mask = masks.documents([0, 50, 131], causal=False)
    tensors = inputs(131, 131)
    keep = torch.from_numpy(flash_attention.dropout_mask((2, 4, 131, 131), 0.25, 7, 3)) / 0.75
    visible = mask.visible()
    i, j = torch.arange(131)[:, None], torch.arange(131)[None, :]
    visible = visible & (j >= i - 30) & (j <= i + 11)
    check(
        lambda q, k, v: attention(
            q, k, v, hidden_rows=mask, window=(30, 11), dropout_p=0.25, seed=7, offset=3, return_lse=True
        ),
        tensors,
        visible,
        keep.double(),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    mask = masks.shared_prefix(70, [50, 91])
    tensors = inputs(211, 211, dtype=dtype)
    out = attention(*tensors, hidden_rows=mask)
    want, _ = formula(*tensors, mask.visible())
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


def test_compile_and_vmap():
    mask = masks.documents([0, 61, 131])
    q, k, v = inputs(131, 131)
    want = attention(q, k, v, hidden_rows=mask)
    compiled = torch.compile(lambda *t: attention(*t, hidden_rows=mask.hidden_rows, causal=True), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), want)
    stacked = torch.func.vmap(lambda a, b, c: attention(a[None], b[None], c[None], hidden_rows=mask)[0])(q, k, v)
    torch.testing.assert_close(stacked, want)


def test_numpy():
    q, k, v = (t.detach().numpy() for t in inputs(61, 61))
    mask = masks.documents([0, 20, 61])
    out = attention(q, k, v, hidden_rows=mask.hidden_rows.numpy(), causal=True)
    want = attention(*(torch.from_numpy(t) for t in (q, k, v)), hidden_rows=mask)
    assert torch.equal(torch.from_numpy(out), want)


def test_explain_names_it():
    q, k, v = inputs(61, 61)
    assert "hidden rows by 1" in flash_attention.explain(q, k, v, hidden_rows=masks.documents([0, 61]))


@pytest.mark.parametrize(
    "rows, message",
    [
        (torch.zeros(61, 3, dtype=torch.int32), "1, 2 or 4 bounds"),
        (torch.zeros(60, 2, dtype=torch.int32), "hidden_rows: got"),
        (torch.zeros(1, 3, 61, 2, dtype=torch.int32), "hidden_rows: got"),
        (torch.zeros(61, 4, dtype=torch.int32)[:, ::2], "must be dense"),
    ],
)
def test_wrong_shapes_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        attention(*inputs(61, 61), hidden_rows=rows)


@pytest.mark.parametrize(
    "build, kind, message",
    [
        (lambda: masks.documents([10, 24]), ValueError, r"cu_seqlens\[0\]: got 10; the first document begins at 0"),
        (lambda: masks.documents(torch.tensor([0, 9, 4])), ValueError, r"cu_seqlens\[2\]: got 4; it must not be less"),
        (lambda: masks.documents([0, -3]), ValueError, r"cu_seqlens\[1\]: got -3"),
        (lambda: masks.documents(torch.tensor([0.0, 9.5])), TypeError, "cu_seqlens: got torch.float32"),
        (lambda: masks.documents([0, 9.5]), TypeError, r"cu_seqlens\[1\]: expected an int, got float"),
        (lambda: masks.documents([]), ValueError, "cu_seqlens: got none"),
        (lambda: masks.documents(9), TypeError, "cu_seqlens: expected ints"),
        (lambda: masks.tree([-1, 0], [3, -1]), ValueError, r"lengths\[1\]: got -1"),
        (lambda: masks.shared_prefix(-2, [3]), ValueError, "prefix: got -2"),
        (lambda: masks.prefix_lm(4, -1), ValueError, "total: got -1"),
        (lambda: masks.spans([0, 3], [5, 9], 24), ValueError, r"begins\[1\]: got 3; spans are sorted"),
        (lambda: masks.spans([5], [2], 24), ValueError, r"ends\[0\]: got 2; a span ends behind"),
        (lambda: masks.spans([5], [7, 9], 24), ValueError, "ends: got 2 of them; there are 1 begins"),
        (lambda: masks.block_causal(0, 24), ValueError, "block: got 0; allowed are 1"),
        (lambda: masks.sink_window(4, -1, 24), ValueError, "window: got -1"),
        (lambda: masks.block_diffusion(24, 0), ValueError, "block: got 0"),
        (lambda: masks.tree([-1, 0], [3]), ValueError, "lengths: got 1 of them; there are 2 parents"),
        (lambda: masks.tree([-1, 2, 0]), ValueError, r"parents\[1\]: got 2; allowed are -1 \(a root\) and earlier nodes"),
        (lambda: masks.tree([-1, 0, -1, 0]), ValueError, r"parents\[3\]: got 0; a node comes right behind its parent"),
        (lambda: masks.from_bool(torch.ones(3, 3)), TypeError, "mask: expected a bool tensor of torch"),
        (lambda: masks.from_bool(torch.ones(3).bool()), TypeError, "mask: expected a bool tensor of torch"),
        (lambda: masks.show(torch.ones(3).bool()), TypeError, "mask: expected an IntervalMask, hidden rows, a bool tensor"),
    ],
)
def test_builders_refuse_what_is_no_mask(build, kind, message):
    with pytest.raises(kind, match=message):
        build()


def test_a_mask_moves_whole(device):
    """to() keeps what hides besides the tensor."""
    total = 24
    intervals = masks.IntervalMask(masks.documents([0, 10, total]).hidden_rows, False, (5, 2), total)
    moved = intervals.to(device)
    assert (moved.causal, moved.window, moved.seq_q) == (False, (5, 2), total)
    assert moved.hidden_rows.device.type == device and torch.equal(moved.visible().cpu(), intervals.visible())
    blocks = masks.BlockMask(torch.tensor([[1, 0], [0, 1]]).bool()[None, None], (8, 16)).to(device)
    assert blocks.block_size == (8, 16) and blocks.visible.device.type == device
    drafts = masks.draft_tree(torch.tensor([[-1, 0, 0]]))
    assert torch.equal(drafts.to(device).bits.cpu(), drafts.bits) and drafts.to(device).offsets is None
    bits = masks.from_bits(torch.tensor([3, 1], dtype=torch.uint8), torch.tensor([0, 1, 2], dtype=torch.int32)).to(device)
    assert bits.bits.tolist() == [3, 1] and bits.offsets.tolist() == [0, 1, 2]
    prepared = masks.prepare(intervals).to(device)
    q, k, v = (x.to(device) for x in inputs(total, total))
    assert torch.equal(attention(q, k, v, hidden_rows=prepared), attention(q, k, v, hidden_rows=moved))
    assert repr(prepared).startswith("PreparedMask(IntervalMask(")


@pytest.mark.parametrize("window", [2**31 - 1, 2**31 - 5, 10**9])
def test_a_sink_window_that_hides_nothing(window):
    assert torch.equal(masks.sink_window(2, window, 10).visible()[0, 0], torch.ones(10, 10, dtype=torch.bool).tril())


@pytest.mark.parametrize("window", [(7, 3), (7, -1), (-1, 3)])
def test_a_window_of_the_mask_itself(window):
    mask = masks.from_bool(torch.ones(61, 61, dtype=torch.bool), window=window)
    i, j = torch.arange(61)[:, None], torch.arange(61)[None]
    left, right = (61 if side < 0 else side for side in window)
    seen = ((j >= i - left) & (j <= i + right))[None, None]
    assert torch.equal(mask.visible(), seen)
    for given in ({}, {"window": window}):
        check(
            lambda q, k, v, given=given: attention(q, k, v, hidden_rows=mask, return_lse=True, **given),
            inputs(61, 61),
            seen,
        )


def test_builders_take_nothing():
    assert masks.tree([], []).hidden_rows.shape == (1, 1, 0, 1)
    assert masks.tree([]).visible().shape == (1, 1, 0, 0)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_mask_is_for_its_queries(name, layout):
    """Of another number of queries it would hide other keys."""
    mask, heads_first = BUILDERS[name](), layout == "bhsd"
    total = mask.hidden_rows.shape[2]
    q, k, v = (x.transpose(1, 2) if heads_first else x for x in inputs(total, total, batch=mask.hidden_rows.shape[0]))
    whole = attention(q, k, v, hidden_rows=mask, layout=layout)
    axis = 2 if heads_first else 1
    for first in (1, total // 2, total - 1):
        rest = q.narrow(axis, first, total - first)
        with pytest.raises(ValueError, match=rf"hidden_rows: the mask was made for {total} queries; this call has"):
            attention(rest, k, v, hidden_rows=mask, layout=layout)
        part = mask.rows_from(first)
        assert torch.equal(part.visible(), mask.visible()[:, :, first:])
        out = attention(rest, k, v, hidden_rows=part, layout=layout)
        assert (out - whole.narrow(axis, first, total - first)).abs().max() <= 1e-6
    with pytest.raises(ValueError, match=f"row: got {total + 1}; allowed are 0 to {total}"):
        mask.rows_from(total + 1)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match=r"hidden_rows.*int32"):
        attention(*inputs(61, 61), hidden_rows=torch.zeros(61, 2))
    with pytest.raises(TypeError, match="block_mask: expected"):
        attention(*inputs(61, 61), block_mask=torch.ones(1, 1, 1, 1))
    with pytest.raises(ValueError, match="window"):
        attention(*inputs(61, 61), hidden_rows=masks.IntervalMask(torch.zeros(61, 1).int(), window=(3, 0)), window=(4, 0))


class TestFromBool:
    @pytest.mark.parametrize("name", BUILDERS)
    def test_comes_back(self, name):
        want = expected_visible(name)
        try:
            mask = masks.from_bool(want)
        except ValueError:
            pytest.fail(f"{name} has at most two intervals a key")
        assert torch.equal(mask.visible()[0, 0], want)

    def test_causal_need_not_be_in_it(self):
        want = expected_visible("documents")
        mask = masks.from_bool(want, causal=True)
        assert mask.hidden_rows.shape[-1] == 1
        assert torch.equal(mask.visible()[0, 0], want)

    def test_too_many_intervals(self):
        stripes = (torch.arange(12) % 2 == 0)[:, None].expand(12, 5)
        with pytest.raises(ValueError, match="key 0 is hidden from 6 intervals"):
            masks.from_bool(stripes)

    def test_random(self):
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randint(0, 30, (2, 3, 17, 4), generator=generator, dtype=torch.int32)
            want = masks.IntervalMask(rows, seq_q=29).visible()
            assert torch.equal(masks.from_bool(want).visible(), want)


class TestFlashMask:
    @pytest.mark.parametrize("causal, bounds", [(True, 1), (True, 2), (False, 2), (False, 4)])
    def test_contract(self, causal, bounds):
        n = 131
        generator = torch.Generator().manual_seed(bounds + 10 * causal)
        rows = torch.sort(torch.randint(0, n, (2, 1, n, bounds), generator=generator), dim=-1).values.int()
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        r = [rows[..., b][:, :, None, :] for b in range(bounds)]
        if causal:
            hidden = (i >= r[0]) if bounds == 1 else (i >= r[0]) & (i < r[1])
            hidden = hidden | (j > i)
        elif bounds == 2:
            hidden = (i >= r[0]) | (i < r[1])
        else:
            hidden = ((i >= r[0]) & (i < r[1])) | ((i >= r[2]) & (i < r[3]))
        call = flash_attention.flashmask_attention
        check(lambda q, k, v: call(q, k, v, rows, causal=causal, return_softmax_lse=True), inputs(n, n), ~hidden)

    def test_refusals(self):
        q, k, v = inputs(20, 20)
        with pytest.raises(ValueError, match="startend_row_indices"):
            flash_attention.flashmask_attention(q, k, v, torch.zeros(1, 1, 20, 4).int(), causal=True)
        with pytest.raises(ValueError, match="window_size"):
            flash_attention.flashmask_attention(q, k, v, torch.zeros(1, 1, 20, 2).int(), window_size=3)

    def test_window_dropout_and_blocks(self):
        q, k, v = inputs(200, 200)
        call = flash_attention.flashmask_attention
        assert torch.equal(call(q, k, v, causal=True, window_size=7), attention(q, k, v, window=(7, 0)))
        out, state = call(q, k, v, dropout=0.5, return_seed_offset=True)
        assert torch.equal(out, call(q, k, v, dropout=0.5, fixed_seed_offset=state))
        assert torch.equal(call(q, k, v, dropout=0.5, training=False), attention(q, k, v))
        blocks = torch.tensor([[1, 0], [1, 1]], dtype=torch.int32)[None, None]
        want = attention(q, k, v, mask=blocks[0, 0].bool().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :200])
        torch.testing.assert_close(call(q, k, v, block_mask=blocks), want)

    @pytest.mark.parametrize(
        "causal, window", [(False, None), (True, None), (True, (30, 9)), (True, 30), (False, (30, 9)), (False, 30)]
    )
    def test_blocks_of_each_key_head(self, causal, window):
        """Query heads 0 and 1 have the blocks of key head 0, heads 2 and 3 those of key head 1; the oracle is dense."""
        q = torch.randn(2, 200, 4, 16)
        k, v = (torch.randn(2, 200, 2, 16) for _ in range(2))
        blocks = torch.tensor([[[1, 0], [1, 1]], [[1, 1], [0, 1]]], dtype=torch.int32)[None]
        seen = blocks.bool().repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :200, :200].repeat_interleave(2, 1)
        i, j = torch.arange(200)[:, None], torch.arange(200)[None, :]
        if causal:
            seen = seen & (j <= i)
        if window is not None:
            left, right = (window, window) if isinstance(window, int) else window
            seen = seen & (j >= i - left) & (j <= i + right)
        out, lse = flash_attention.flashmask_attention(
            q, k, v, causal=causal, window_size=window, block_mask=blocks, return_softmax_lse=True
        )
        want, want_lse = reference.attention(q.double(), k.double(), v.double(), mask=seen.expand(2, -1, -1, -1))
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-4)
