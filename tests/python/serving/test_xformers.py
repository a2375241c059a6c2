"""xformers' memory_efficient_attention and its biases, against what the names of the classes say, pair by pair, in fp64."""

import pytest
import torch
from flash_attention import xformers
from flash_attention.xformers import attn_bias

Q_LENGTHS, K_LENGTHS = [3, 1, 7], [5, 4, 7]
PAGES, PAGE = [[3, 0], [4, 2], [1, 5]], 4


def info(bias, name):
    return list(getattr(bias, name).seqstart_py)


def causal(begin, end, first, last):
    return lambda i, j: j - last <= i - end


def top_left(begin, end, first, last):
    return lambda i, j: j - first <= i - begin


def everything(*block):
    return lambda i, j: True


def window(left, right):
    return lambda begin, end, first, last: lambda i, j: -left <= (j - last) - (i - end) <= right


def both(rule, other):
    return lambda *block: lambda i, j: rule(*block)(i, j) and other(*block)(i, j)


def first_window(size):
    return lambda begin, end, first, last: lambda i, j: (i - begin) - (j - first) < size


QUERIES = [(0, 3), (3, 4), (4, 11)]
KEYS = [(0, 5), (5, 9), (9, 16)]
PADDED = [(0, 5), (8, 12), (16, 23)]
GAPPY = [(1, 6), (9, 13), (13, 20)]
TABLE = torch.tensor(PAGES, dtype=torch.int32)


def places(lengths, starts=(0, 0, 0)):
    """Of keys in pages: where they are in memory, for each sequence."""
    return [
        [PAGES[b][j // PAGE] * PAGE + j % PAGE for j in range(start, start + length)]
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


# name: (bias of a module of biases, keys of each sequence in memory or a range, rows of keys in memory, rule of a block)
PAGED_LENGTHS = [5, 4, 7]
BLOCKS = {
    "block diagonal": (lambda of: of.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS), KEYS, 16, everything),
    "causal": (lambda of: of.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS).make_causal(), KEYS, 16, top_left),
    "causal from bottom right": (
        lambda of: of.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS).make_causal_from_bottomright(),
        KEYS,
        16,
        causal,
    ),
    "local": (
        lambda of: of.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS).make_local_attention(2),
        KEYS,
        16,
        both(top_left, first_window(2)),
    ),
    "local from bottom right": (
        lambda of: of.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS).make_local_attention_from_bottomright(3),
        KEYS,
        16,
        window(2, 0),
    ),
    "padded keys": (
        lambda of: of.BlockDiagonalPaddedKeysMask.from_seqlens(Q_LENGTHS, 8, K_LENGTHS),
        PADDED,
        24,
        everything,
    ),
    "causal padded keys": (
        lambda of: of.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q_LENGTHS, 8, K_LENGTHS),
        PADDED,
        24,
        causal,
    ),
    "local padded keys": (
        lambda of: of.BlockDiagonalPaddedKeysMask.from_seqlens(Q_LENGTHS, 8, K_LENGTHS).make_local_attention(2, 1),
        PADDED,
        24,
        window(2, 1),
    ),
    "causal local padded keys": (
        lambda of: of.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q_LENGTHS, 8, K_LENGTHS, 3),
        PADDED,
        24,
        window(2, 0),
    ),
    "gappy keys": (
        lambda of: of.BlockDiagonalGappyKeysMask.from_seqlens(Q_LENGTHS, [1, 9, 13, 22], K_LENGTHS),
        GAPPY,
        22,
        everything,
    ),
    "causal gappy keys": (
        lambda of: of.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q_LENGTHS, [1, 9, 13, 22], K_LENGTHS),
        GAPPY,
        22,
        causal,
    ),
    "pages": (
        lambda of: of.PagedBlockDiagonalPaddedKeysMask.from_seqlens(Q_LENGTHS, PAGED_LENGTHS, TABLE, PAGE),
        places(PAGED_LENGTHS),
        24,
        everything,
    ),
    "causal pages": (
        lambda of: of.BlockDiagonalPaddedKeysMask.from_seqlens(Q_LENGTHS, 8, PAGED_LENGTHS).make_paged(
            TABLE, PAGE, of.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        ),
        places(PAGED_LENGTHS),
        24,
        causal,
    ),
    "gappy pages": (
        lambda of: of.BlockDiagonalGappyKeysMask.from_seqlens(Q_LENGTHS, [2, 8, 17, 24], [5, 4, 7]).make_paged(
            TABLE, PAGE, 8, of.PagedBlockDiagonalGappyKeysMask
        ),
        places([5, 4, 7], [2, 0, 1]),
        24,
        everything,
    ),
    "causal gappy pages": (
        lambda of: of.BlockDiagonalGappyKeysMask.from_seqlens(Q_LENGTHS, [2, 8, 17, 24], [5, 4, 7]).make_paged(
            TABLE, PAGE, 8, of.PagedBlockDiagonalCausalWithOffsetGappyKeysMask
        ),
        places([5, 4, 7], [2, 0, 1]),
        24,
        causal,
    ),
}


def seen_of(name):
    """bool [11, rows of keys], pair by pair."""
    _, blocks, rows, rule = BLOCKS[name]
    seen = torch.zeros(11, rows, dtype=torch.bool)
    for (begin, end), block in zip(QUERIES, blocks, strict=True):
        where = list(range(*block)) if isinstance(block, tuple) else block
        shows = rule(begin, end, 0, len(where))
        for i in range(begin, end):
            for j, row in enumerate(where):
                seen[i, row] = shows(i, j)
    return seen


DENSE = {
    "lower triangular": (lambda of: of.LowerTriangularMask(), top_left),
    "lower triangular from bottom right": (lambda of: of.LowerTriangularFromBottomRightMask(), causal),
    "and local": (lambda of: of.LowerTriangularFromBottomRightMask().make_local_attention(3), window(2, 0)),
    "local": (lambda of: of.LocalAttentionFromBottomRightMask(2, 1), window(2, 1)),
}


def formula(q, k, v, seen, bias=0.0, scale=None):
    """[batch, seq, heads, dim] in fp64, with [queries, keys] that are seen."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    scores = scores.masked_fill(~seen, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", p, v), scores.logsumexp(-1)


def assert_close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_biases_of_blocks(name, device):
    make, _, rows, _ = BLOCKS[name]
    seen = seen_of(name)
    bias = make(attn_bias)
    torch.manual_seed(len(name))
    q = torch.randn(1, 11, 3, 16, device=device)
    k, v = torch.randn(1, rows, 3, 16, device=device), torch.randn(1, rows, 3, 24, device=device)
    unseen = ~seen.any(0)
    want, want_lse = formula(q.double().cpu(), k.double().cpu(), v.double().cpu(), seen, scale=0.4)
    k[:, unseen], v[:, unseen] = torch.nan, torch.inf  # space between sequences
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=0.4)
    assert_close(out.cpu(), want)
    assert_close(lse.cpu(), want_lse)
    assert torch.equal(bias.materialize((11, rows)) == 0, seen)
    if "pages" not in name:
        q.requires_grad_()
        xformers.memory_efficient_attention(q, k, v, bias, scale=0.4).square().sum().backward()
        ref = q.detach().double().cpu().requires_grad_()
        clean = [tensor.nan_to_num(0.0, 0.0).double().cpu() for tensor in (k, v)]
        formula(ref, *clean, seen, scale=0.4)[0].square().sum().backward()
        torch.testing.assert_close(q.grad.cpu().double(), ref.grad, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("sizes", [(5, 5), (4, 9), (9, 4)])
def test_biases_of_a_batch(name, sizes, device):
    make, rule = DENSE[name]
    queries, keys = sizes
    shows = rule(0, queries, 0, keys)
    seen = torch.tensor([[bool(shows(i, j)) for j in range(keys)] for i in range(queries)])
    q = torch.randn(2, queries, 2, 16, device=device)
    k, v = (torch.randn(2, keys, 2, 16, device=device) for _ in range(2))
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, make(attn_bias))
    want, want_lse = formula(*(t.double().cpu() for t in (q, k, v)), seen)
    assert_close(out.cpu(), want)
    assert_close(lse.cpu(), want_lse)
    assert torch.equal(make(attn_bias).materialize((2, 2, queries, keys)) == 0, seen.expand(2, 2, -1, -1))


@pytest.mark.parametrize("name", [*BLOCKS, *(f"batch: {name}" for name in DENSE)])
def test_biases_of_the_package_itself(name, xformers_wheel):
    """The real package's objects mean the same, and its own masks are ours."""
    theirs = xformers_wheel.take("ops.fmha.attn_bias")
    if name.startswith("batch: "):
        make, shape = DENSE[name.removeprefix("batch: ")][0], (4, 9)
    else:
        make, shape = BLOCKS[name][0], (11, BLOCKS[name][2])
    ours, real = make(attn_bias), make(theirs)
    assert torch.equal(real.materialize(shape), ours.materialize(shape))
    q, k, v = (torch.randn(1, rows, 2, 16) for rows in (shape[0], shape[1], shape[1]))
    assert torch.equal(
        xformers.memory_efficient_attention(q, k, v, real), xformers.memory_efficient_attention(q, k, v, ours)
    )


@pytest.fixture(scope="module")
def xformers_wheel():
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
    try:
        from engine_wheels import Wheel
    finally:
        sys.path.pop(0)
    wheel = Wheel("xformers")
    yield wheel
    wheel.close()


def test_a_tensor_of_biases_and_its_gradient(device):
    q, k, v = (torch.randn(2, 6, 3, 16, device=device) for _ in range(3))
    bias = torch.randn(2, 3, 6, 6, device=device, requires_grad=True)
    wide = bias.detach().double().cpu().requires_grad_()
    doubles = [tensor.double().cpu() for tensor in (q, k, v)]
    everywhere = torch.ones(6, 6, dtype=torch.bool)
    for added, seen in ((bias, everywhere), (attn_bias.LowerTriangularMask().add_bias(bias), everywhere.tril())):
        bias.grad = wide.grad = None
        xformers.memory_efficient_attention(q, k, v, added).square().sum().backward()
        formula(*doubles, seen, wide)[0].square().sum().backward()
        torch.testing.assert_close(bias.grad.double().cpu(), wide.grad, atol=1e-5, rtol=1e-5)


def test_one_head_groups_and_output_dtype(device):
    q, k, v = (torch.randn(2, 7, 4, 16, device=device) for _ in range(3))
    everywhere = torch.ones(7, 7, dtype=torch.bool)
    out = xformers.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], torch.zeros(2, 7, 7, device=device))
    assert_close(out.cpu(), formula(*(t[:, :, :1].double().cpu() for t in (q, k, v)), everywhere)[0][:, :, 0])
    grouped = q.view(2, 7, 2, 2, 16)
    shared = [t[:, :, :2, None].expand(2, 7, 2, 2, 16) for t in (k, v)]
    want, want_lse = formula(q.double().cpu(), *(t.flatten(2, 3).double().cpu() for t in shared), everywhere.tril())
    run = xformers.memory_efficient_attention_forward_requires_grad
    for keys, values in (shared, [t.contiguous() for t in shared], (shared[0], shared[1].contiguous())):
        out, lse = run(grouped, keys, values, attn_bias.LowerTriangularMask())
        assert_close(out.cpu(), want.view(2, 7, 2, 2, 16))
        assert_close(lse.cpu(), want_lse.view(2, 2, 2, 7))
    half = xformers.memory_efficient_attention(q, k, v, output_dtype=torch.float16)
    assert half.dtype == torch.float16


def test_a_bias_moves_with_its_tensors(device):
    """to() of every bias, and the forward pass by its own name."""
    for name, (make, _, rows, _) in BLOCKS.items():
        bias, moved = make(attn_bias), make(attn_bias).to(device)
        assert type(moved) is type(bias)
        assert torch.equal(moved.materialize((11, rows)), bias.materialize((11, rows))), name
    q = torch.randn(1, 11, 2, 16, device=device, requires_grad=True)
    added = attn_bias.LowerTriangularMask().add_bias(torch.randn(1, 2, 11, 11))
    seen, dense = torch.ones(11, 11).tril().bool(), added._bias
    shown = torch.zeros(1, 2, 11, 11).masked_fill(~seen, -torch.inf) + dense
    assert torch.equal(added.materialize((1, 2, 11, 11)), shown)
    out = xformers.memory_efficient_attention_forward(q, q, q, added.to(device))
    assert not out.requires_grad
    x = q.detach().double().cpu()
    p = (torch.einsum("bqhd,bkhd->bhqk", x, x) / 4 + shown.double()).softmax(-1)
    assert_close(out.cpu(), torch.einsum("bhqk,bkhd->bqhd", p, x))


def test_keys_in_pages_that_begin_late(device):
    """from_seqlens of the class is what make_paged makes."""
    made = attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens(Q_LENGTHS, [1, 1, 0], [5, 4, 7], TABLE.to(device), PAGE)
    gappy = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens(Q_LENGTHS, [1, 9, 16, 24], [5, 4, 7])
    same = gappy.make_paged(TABLE, PAGE, 8, attn_bias.PagedBlockDiagonalGappyKeysMask)
    assert torch.equal(made.materialize((11, 24)), same.materialize((11, 24)))


def test_dropout_takes_part():
    q = torch.randn(1, 64, 1, 16)
    dropped = xformers.memory_efficient_attention(q, q, torch.ones(1, 64, 1, 16), p=0.5)
    assert dropped.std() > 0.01
    assert 0.5 < dropped.mean() < 1.5


def test_parts_are_merged(device):
    q, k, v = (torch.randn(2, 9, 2, 16, device=device) for _ in range(3))
    halves = [xformers.memory_efficient_attention_partial(q, k[:, at], v[:, at]) for at in (slice(4), slice(4, 9))]
    out, lse = xformers.merge_attentions(*zip(*halves, strict=True))
    want, want_lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert xformers.merge_attentions(*zip(*halves, strict=True), write_lse=False)[1] is None


def test_tensors_end_to_end():
    tensors = [torch.randn(2, 3, 1, 8), torch.randn(1, 5, 1, 8)]
    bias, joined = attn_bias.BlockDiagonalMask.from_tensor_list(tensors)
    assert joined.shape == (1, 11, 1, 8)
    for part, tensor in zip(
        bias.split(xformers.memory_efficient_attention(joined, joined, joined, bias)), tensors, strict=True
    ):
        torch.testing.assert_close(part, xformers.memory_efficient_attention(tensor, tensor, tensor))
    bias, q, k, v = attn_bias.BlockDiagonalMask.from_tensor_lists_qkv(tensors, [t[:, 1:] for t in tensors], None)
    assert q.shape[1] == 11
    assert k.shape[1] == 8
    assert v is None
    assert [part.shape[1] for part in bias.split_kv(k)] == [2, 4]
    with pytest.raises(ValueError, match="other lengths"):
        bias.split(q)


def test_refusals():
    q = torch.randn(2, 4, 1, 8)
    blocks = attn_bias.BlockDiagonalMask.from_seqlens([4])
    for call, message in (
        (lambda: xformers.memory_efficient_attention(q, q, q, blocks), "query: got a batch of 2"),
        (lambda: xformers.memory_efficient_attention(q[:1, :3], q[:1], q[:1], blocks), "query: got 3 rows"),
        (lambda: xformers.memory_efficient_attention(q[:1], q[:1, :3], q[:1, :3], blocks), "key: got 3 rows"),
        (lambda: xformers.memory_efficient_attention(q[0, 0], q, q), r"query: got shape \[1, 8\]"),
        (
            lambda: attn_bias.BlockDiagonalMask.from_seqlens([4], [3]).make_causal_from_bottomright(),
            r"kv_seqlen\[0\]: got 3",
        ),
        (lambda: attn_bias.BlockDiagonalMask.from_seqlens([4]).make_local_attention(0), "window_size: got 0"),
        (lambda: attn_bias.LocalAttentionFromBottomRightMask(-1, 2), "window_left: got -1"),
        (lambda: attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [4]), "kv_padding: got 3"),
        (lambda: attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 4], [4, 4]), "kv_seqstarts: got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    gaps = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([2, 2], [0, 1, 4], [3, 3])
    with pytest.raises(ValueError, match="sequence 0 has 3 keys, and the next begins behind 1"):
        xformers.memory_efficient_attention(q[:1], q[:1], q[:1], gaps)
    with pytest.raises(TypeError, match="attn_bias: got dict"):
        xformers.memory_efficient_attention(q, q, q, {})
    with pytest.raises(NotImplementedError, match=r"p: got 0\.1"):
        xformers.memory_efficient_attention_partial(q, q, q, p=0.1)
    with pytest.raises(TypeError, match="'dropout_p'; it is called p here"):
        xformers.memory_efficient_attention(q, q, q, dropout_p=0.1)
