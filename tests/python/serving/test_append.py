"""append_kv: new rows of a cache and the rotary embedding, against float64."""

import itertools

import pytest
import torch
import torch.utils.flop_counter
from flash_attention import attention
from flash_attention.append import append_kv

TYPES = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}
CODES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def tables(positions, pairs, dtype=torch.float32):
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * 0.3 ** torch.arange(pairs, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x, cos, sin, places, interleaved):
    """x [..., heads, dim] in float64, places [...]."""
    x, half = x.double().clone(), cos.shape[1]
    c, s = cos.double()[places][..., None, :], sin.double()[places][..., None, :]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def close(got, want, dtype):
    error = (got.double() - want).abs()
    assert (error <= TYPES[dtype] * (want.abs() + 1)).all(), error.max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [128, 96, 6, 2])
def test_rows_go_behind_what_is_there(dtype, interleaved, rotary_dim):
    torch.manual_seed(1)
    batch, capacity, new, heads_q, heads, dim = 3, 20, 4, 6, 2, 128
    k_cache, v_cache = (torch.randn(batch, capacity, heads, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, new, heads, dim).to(dtype) for _ in range(2))
    q = torch.randn(batch, 5, heads_q, dim).to(dtype)
    cos, sin = tables(40, rotary_dim // 2, dtype if rotary_dim == 96 else torch.float32)
    lengths = torch.tensor([0, 16, 7], dtype=torch.int32)
    before = k_cache.clone(), v_cache.clone()
    q_out = append_kv(k_cache, v_cache, k, v, lengths=lengths, q=q, cos=cos, sin=sin, interleaved=interleaved)
    places = lengths.long()[:, None] + torch.arange(5)
    close(q_out, rotated(q, cos, sin, places, interleaved), dtype)
    want = rotated(k, cos, sin, places[:, :new], interleaved)
    for b in range(batch):
        rows = slice(lengths[b], lengths[b] + new)
        close(k_cache[b, rows], want[b], dtype)
        assert torch.equal(v_cache[b, rows], v[b])
        for cache, old in zip((k_cache, v_cache), before, strict=True):
            rest = torch.ones(capacity, dtype=torch.bool)
            rest[rows] = False
            assert torch.equal(cache[b][rest], old[b][rest])


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("heads_first", [False, True])
def test_pages(page_size, heads_first):
    torch.manual_seed(2)
    batch, new, heads, dim = 3, 9, 2, 24
    lengths = torch.tensor([5, 0, 30], dtype=torch.int32)
    needed = [-(-(int(n) + new) // page_size) for n in lengths]
    table = torch.full((batch, max(needed) + 1), -7, dtype=torch.int32)  # garbage past the rows
    pages = torch.randperm(sum(needed) + 4).to(torch.int32)
    for b, count in enumerate(needed):
        table[b, :count], pages = pages[:count], pages[count:]
    num_pages = sum(needed) + 4
    caches = [torch.randn(num_pages, *((heads, page_size) if heads_first else (page_size, heads)), dim) for _ in range(2)]
    k_cache, v_cache = (c.transpose(1, 2) for c in caches) if heads_first else caches
    k, v = torch.randn(batch, new, heads, dim), torch.randn(batch, new, heads, dim + 0)
    wanted = k_cache.clone(), v_cache.clone()
    for b, t in itertools.product(range(batch), range(new)):
        place = int(lengths[b]) + t
        for cache, rows in zip(wanted, (k, v), strict=True):
            cache[table[b, place // page_size], place % page_size] = rows[b, t]
    assert append_kv(k_cache, v_cache, k, v, lengths=lengths, page_table=table) is None
    assert torch.equal(k_cache, wanted[0]) and torch.equal(v_cache, wanted[1])


def test_packed_rows_and_placed_rows_say_the_same():
    torch.manual_seed(3)
    heads, dim, counts, lengths = 2, 40, [3, 0, 5], torch.tensor([2, 9, 1], dtype=torch.int32)
    total, starts = sum(counts), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    sequences = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(torch.int32)
    positions = (torch.cat([torch.arange(c) + n for c, n in zip(counts, lengths.tolist(), strict=True)])).to(torch.int32)
    k, v, q = torch.randn(total, heads, dim), torch.randn(total, heads, dim), torch.randn(total, 4, dim)
    cos, sin = tables(20, 8)
    results = []
    for places in (
        {"lengths": lengths, "cu_seqlens_new": starts, "cu_seqlens_q": starts},
        {"sequences": sequences, "positions": positions},
    ):
        k_cache, v_cache = torch.zeros(3, 12, heads, dim), torch.zeros(3, 12, heads, dim)
        q_out = append_kv(k_cache, v_cache, k, v, q=q, cos=cos, sin=sin, **places)
        results.append((k_cache, v_cache, q_out))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    close(results[0][2], rotated(q, cos, sin, positions.long(), False), torch.float32)
    want = torch.zeros(3, 12, heads, dim, dtype=torch.float64)
    want[sequences.long(), positions.long()] = rotated(k, cos, sin, positions.long(), False)
    close(results[0][0], want, torch.float32)


def test_angles_of_their_own():
    torch.manual_seed(4)
    q, k = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    cos, sin = tables(50, 8)
    lengths, offsets = torch.tensor([4, 0], dtype=torch.int32), torch.tensor([1, 40], dtype=torch.int32)
    k_cache, v_cache = torch.zeros(2, 9, 2, 16), torch.zeros(2, 9, 2, 16)
    q_out = append_kv(
        k_cache, v_cache, k, k, lengths=lengths, q=q, cos=cos, sin=sin, rotary_offsets=offsets, one_query_angle=True
    )
    close(q_out, rotated(q, cos, sin, offsets.long()[:, None].expand(2, 3), False), torch.float32)
    want = rotated(k, cos, sin, offsets.long()[:, None] + torch.arange(3), False)
    close(k_cache[0, 4:7], want[0], torch.float32)
    close(k_cache[1, :3], want[1], torch.float32)
    same = q.clone()
    assert append_kv(k_cache, v_cache, q=same, q_out=same, lengths=lengths, cos=cos, sin=sin) is same
    close(same, rotated(q, cos, sin, lengths.long()[:, None] + torch.arange(3), False), torch.float32)


def grid_of(dtype):
    """Every number of the type, in float64."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = codes.double() if dtype == torch.int8 else codes.float().double()
    return torch.unique(values[values.isfinite() & (values >= -CODES[dtype])])


@pytest.mark.parametrize("dtype", CODES)
def test_codes_are_the_nearest_even_ones(dtype):
    """Every number, every midpoint between neighbours, their neighbours, and what lies outside of the range."""
    grid = grid_of(dtype)
    middle = (grid[1:] + grid[:-1]) / 2
    around = torch.cat([grid, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), grid[-1:] * 1e3, -grid[-1:] * 1e3])
    x = torch.cat([around, torch.zeros(-len(around) % 8, dtype=torch.float64)]).float().reshape(1, 1, -1, 8)
    heads = x.shape[2]
    k_cache = torch.zeros(1, 1, heads, 8, dtype=dtype)
    append_kv(k_cache, torch.zeros_like(k_cache), x, x)
    got = k_cache.double() if dtype == torch.int8 else k_cache.float().double()
    exact = x.double().clamp(-CODES[dtype], CODES[dtype])
    assert got.isfinite().all()
    distance = (grid - exact[..., None]).abs().min(-1).values
    assert torch.equal((got - exact).abs(), distance)
    tie = (grid - exact[..., None]).abs().eq(distance[..., None]).sum(-1) > 1
    assert tie.any()
    assert (k_cache.view(torch.uint8)[tie] % 2 == 0).all()


@pytest.mark.parametrize("dtype", CODES)
def test_scales(dtype):
    torch.manual_seed(5)
    k, v = torch.randn(2, 3, 4, 32) * 3, torch.randn(2, 3, 4, 32).bfloat16().float()
    k[0, 0, 0, 0], k[1, 1, 1, 1] = float("inf"), float("nan")
    heads = torch.rand(2, 4) + 0.01
    for scale in (0.02, torch.tensor([0.02]), heads):
        k_cache, v_cache = (torch.zeros(2, 8, 4, 32, dtype=dtype) for _ in range(2))
        append_kv(k_cache, v_cache, k, v, k_scale=scale, v_scale=scale, lengths=torch.tensor([1, 2], dtype=torch.int32))
        factor = scale[:, None, :, None] if scale is heads else torch.full((2, 1, 1, 1), 0.02)
        rows = torch.stack([v_cache[0, 1:4], v_cache[1, 2:5]]).to(torch.float32)
        exact = (v * (1 / factor)).clamp(-CODES[dtype], CODES[dtype]).double()
        grid = grid_of(dtype)
        assert torch.equal((rows.double() - exact).abs(), (grid - exact[..., None]).abs().min(-1).values)
        of_k = torch.stack([k_cache[0, 1:4], k_cache[1, 2:5]]).to(torch.float32)
        assert of_k[0, 0, 0, 0] == CODES[dtype]
        assert of_k[1, 1, 1, 1] == 0 if dtype == torch.int8 else of_k[1, 1, 1, 1].isnan()


@pytest.mark.parametrize("dtype", CODES)
def test_scales_of_rows_are_made(dtype):
    torch.manual_seed(6)
    k, v = torch.randn(3, 2, 2, 32) * 10 ** torch.randn(3, 2, 2, 1), torch.randn(3, 2, 2, 32)
    v[0, 0, 0] = 0
    table = torch.tensor([[3], [0], [1]], dtype=torch.int32)
    k_cache, v_cache = (torch.zeros(4, 5, 2, 32, dtype=dtype) for _ in range(2))
    k_scale, v_scale = torch.full((4, 5, 2), -1.0), torch.full((4, 5, 2), -1.0)
    lengths = torch.tensor([0, 3, 1], dtype=torch.int32)
    append_kv(k_cache, v_cache, k, v, lengths=lengths, page_table=table, k_scale=k_scale, v_scale=v_scale)
    written = torch.zeros(4, 5, dtype=torch.bool)
    for b, t in itertools.product(range(3), range(2)):
        page, row = int(table[b, 0]), int(lengths[b]) + t
        written[page, row] = True
        for cache, scale, x in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
            most = x[b, t].abs().amax(-1)
            assert torch.allclose(scale[page, row], most.clamp(min=2**-100) / CODES[dtype], rtol=1e-6, atol=0)
            value = cache[page, row].float() * scale[page, row][:, None]
            step = most[:, None] * (
                2**-4 if dtype == torch.float8_e4m3fn else 2**-3 if dtype == torch.float8_e5m2 else 2**-7
            )
            assert ((value - x[b, t]).abs() <= step).all()
    assert (k_scale[~written] == -1).all() and (v_cache.view(torch.uint8)[~written] == 0).all()


def test_wrong_arguments_are_named():
    cache, k, cos = torch.zeros(2, 8, 2, 16), torch.zeros(2, 3, 2, 16), torch.zeros(8, 8)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    narrow = torch.zeros(2, 8, 2, 16, dtype=torch.float8_e4m3fn)
    one = torch.ones(1)
    for message, change in {
        r"lengths\[1\]: got 6; with 3 new rows; the cache has room for 8": {"lengths": ints(0, 6)},
        r"lengths\[0\]: got -1": {"lengths": ints(-1, 0)},
        r"lengths: got int32\[3\]; expected \[2\]": {"lengths": ints(0, 0, 0)},
        r"lengths\[0\]: got 4; cos and sin have 6 positions, and 6 is needed": {
            "lengths": ints(4, 0), "cos": cos[:6], "sin": cos[:6]},
        r"cos: got float32\[8, 9\]": {"cos": torch.zeros(8, 9), "sin": torch.zeros(8, 9)},
        r"sin: got float32\[8, 4\]": {"cos": cos, "sin": torch.zeros(8, 4)},
        r"cos: got float32\[8, 8\]; cos and sin go together": {"cos": cos},
        r"page_table\[1\]\[0\]: got 5; a new row goes there": {"page_table": ints(0, 5)[:, None]},
        r"page_table: got int64": {"page_table": torch.zeros(2, 1, dtype=torch.int64)},
        r"k: got float32\[2, 3, 3, 16\]; expected \[2, 3, 2, 16\]": {"k": torch.zeros(2, 3, 3, 16)},
        r"v: got float16\[2, 3, 2, 16\]": {"v": k.half()},
        r"scales: got tensor; they belong to caches of float8": {"k_scale": one, "v_scale": one},
        r"k_scale: got 0.000000; allowed are positive": {"k_cache": narrow, "v_cache": narrow.clone(),
                                                         "k_scale": 0 * one, "v_scale": one},
        r"v_scale\[1\]\[0\]: got nan": {"k_cache": narrow, "v_cache": narrow.clone(), "k_scale": torch.ones(2, 2),
                                        "v_scale": torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])},
        r"k_scale: got float32\[3\]; expected one number": {"k_cache": narrow, "v_cache": narrow.clone(),
                                                            "k_scale": torch.ones(3), "v_scale": torch.ones(3)},
        r"cache_dtype: got 'fp4'": {"k_cache": narrow.view(torch.uint8), "v_cache": narrow.view(torch.uint8).clone(),
                                    "cache_dtype": "fp4"},
        r"v_cache: got memory shared with k_cache": {"v_cache": cache},
        r"k_cache_strides: got \(0, 32, 16\); an output must not overlap itself": {"k_cache": cache[:1].expand_as(cache)},
        r"v_cache_strides: got \(128, 16, 0\)": {"v_cache": torch.zeros(2, 8, 1, 16).expand(-1, -1, 2, -1)},
        r"k_scale_strides: got \(16, 2, 0\)": {"k_cache": narrow, "v_cache": narrow.clone(), "v_scale": torch.ones(2, 8, 2),
                                               "k_scale": torch.as_strided(torch.ones(32), (2, 8, 2), (16, 2, 0))},
    }.items():  # fmt: skip
        arguments = {"k_cache": cache, "v_cache": cache.clone(), "k": k, "v": k, "lengths": ints(0, 0), **change}
        with pytest.raises((ValueError, TypeError), match=message):
            append_kv(**arguments)


def test_places_are_looked_at():
    cache, k = torch.zeros(2, 8, 2, 16), torch.zeros(2, 2, 16)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    with pytest.raises(ValueError, match=r"positions\[1\]: got 8; the cache has room for 8"):
        append_kv(cache, cache.clone(), k, k, sequences=ints(0, 1), positions=ints(0, 8))
    with pytest.raises(ValueError, match=r"sequences\[0\]: got 2; allowed are 0 to 1"):
        append_kv(cache, cache.clone(), k, k, sequences=ints(2, 1), positions=ints(0, 1))
    with pytest.raises(ValueError, match=r"cu_seqlens_new\[2\]: got 1"):
        append_kv(cache, cache.clone(), k, k, cu_seqlens_new=ints(0, 2, 1))


def test_backward_sees_that_a_cache_was_written():
    """What was computed from the rows before is refused a gradient, as after torch's own functions in place."""
    q, k_cache, v_cache = (torch.randn(2, 8, 2, 16) for _ in range(3))
    new, lengths = torch.randn(2, 1, 2, 16), torch.tensor([3, 4], dtype=torch.int32)
    for watched in (False, True):
        weight = torch.ones((), requires_grad=True)
        out = attention(q * weight, k_cache, v_cache)
        if watched:  # by the op
            with torch.utils.flop_counter.FlopCounterMode(display=False):
                append_kv(k_cache, v_cache, new, new, lengths=lengths)
        else:
            append_kv(k_cache, v_cache, new, new, lengths=lengths)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = attention(q * weight, k_cache, v_cache)
    assert append_kv(k_cache, v_cache, q=q, cos=torch.ones(8, 4), sin=torch.zeros(8, 4)) is not q  # no new rows
    out.sum().backward()
    with torch.inference_mode():
        caches = [torch.zeros(2, 8, 2, 16) for _ in range(2)]
        append_kv(*caches, new, new, lengths=lengths)


def test_compiled():
    cache, k = torch.zeros(2, 8, 2, 16), torch.randn(2, 3, 2, 16)
    cos, sin = tables(8, 8)
    lengths = torch.tensor([0, 4], dtype=torch.int32)

    def step(k_cache, v_cache, q):
        out = append_kv(k_cache, v_cache, k, k, lengths=lengths, q=q, cos=cos, sin=sin)
        return out * 2, k_cache.sum()

    want_k, want_v, got_k, got_v = (cache.clone() for _ in range(4))
    want = step(want_k, want_v, k)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(got_k, got_v, k)
    assert torch.equal(want_k, got_k) and torch.equal(want_v, got_v)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_pages_of_keys_and_values_may_come_from_one_pool():
    """As in transformers, whose values lie a page behind the keys: only the table says which pages are which."""
    pool = torch.zeros(9, 4, 2, 8)
    k_cache, v_cache = pool[:8], pool[1:]
    k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    table = torch.tensor([[6, 2]], dtype=torch.int32)
    append_kv(k_cache, v_cache, k, v, lengths=torch.tensor([2], dtype=torch.int32), page_table=table)
    assert torch.equal(torch.cat([pool[6, 2:], pool[2, :1]]), k[0]) and torch.equal(
        torch.cat([pool[7, 2:], pool[3, :1]]), v[0]
    )
    assert pool[[0, 1, 4, 5, 8]].abs().sum() == 0
    with pytest.raises(ValueError, match="v_cache"):
        append_kv(k_cache, k_cache, k, v, lengths=torch.tensor([2], dtype=torch.int32), page_table=table)
