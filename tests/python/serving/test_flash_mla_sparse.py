"""FlashMLA's functions over listed keys, against float64: slots, lengths, a sink, rows of 8 bits, two caches.

Rows of 8 bits are written here by formulas of this file, and the package's writer and reader are compared with a search for
the nearest code, column by column.
"""

import math

import pytest
import torch
from flash_attention import flash_mla


def want_of(q, rows, lists, scale, d_v, sink=None):
    """q [queries, heads, dim]; rows [keys, dim]; lists: python lists of keys. out, largest score, lse in float64."""
    out = torch.zeros(*q.shape[:2], d_v, dtype=torch.float64)
    largest = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    lse = torch.full(q.shape[:2], torch.inf, dtype=torch.float64)
    for i, keys in enumerate(lists):
        if not keys:
            continue
        picked = rows[keys].double()
        scores = q[i].double() @ picked.T * scale
        largest[i], lse[i] = scores.max(1).values, scores.logsumexp(1)
        out[i] = scores.softmax(1) @ picked[:, :d_v]
        if sink is not None:
            out[i] *= torch.sigmoid(lse[i] - sink.double())[:, None]
    return out, largest, lse


def kept(row, count, keys):
    return [int(j) for j in row[:count] if 0 <= int(j) < keys]


def close(got, want, dtype):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}[dtype]
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dim", "heads", "dtype"), [(576, 16, torch.float32), (512, 5, torch.float32), (576, 64, torch.bfloat16)]
)
def test_prefill(dim, heads, dtype, device):
    torch.manual_seed(dim + heads)
    queries, keys, topk = 7, 90, 70
    q, kv = torch.randn(queries, heads, dim).to(dtype), torch.randn(keys, 1, dim).to(dtype)
    indices = torch.randint(-3, keys + 3, (queries, 1, topk), dtype=torch.int32)
    indices[2] = -1
    indices[3, :, :4] = 5
    length = torch.tensor([70, 0, 9, 33, 70, 1, 65], dtype=torch.int32)
    sink = torch.randn(heads)
    sink[0], sink[1] = torch.inf, -torch.inf
    for counts, logits in ((None, None), (length, sink)):
        out, largest, lse = flash_mla.flash_mla_sparse_fwd(
            q.to(device), kv.to(device), indices.to(device), dim**-0.5, 512,
            None if logits is None else logits.to(device), None if counts is None else counts.to(device),
        )  # fmt: skip
        lists = [kept(indices[i, 0], topk if counts is None else int(counts[i]), keys) for i in range(queries)]
        want = want_of(q, kv[:, 0], lists, dim**-0.5, 512, logits)
        close(out, want[0], dtype)
        torch.testing.assert_close(largest.cpu().double(), want[1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse.cpu().double(), want[2], atol=1e-4, rtol=1e-4)


def write_656(rows):
    """Rows [n, 576] as 656 bytes each, and what they are worth."""
    scale = rows[:, :512].unflatten(1, (4, 128)).abs().amax(-1) / 448
    codes = (rows[:, :512].unflatten(1, (4, 128)) / scale[..., None]).to(torch.float8_e4m3fn)
    own = rows[:, 512:].bfloat16()
    packed = torch.cat((codes.flatten(1).view(torch.uint8), scale.view(torch.uint8), own.contiguous().view(torch.uint8)), 1)
    return packed, torch.cat(((codes.float() * scale[..., None]).flatten(1), own.float()), 1)


def write_584(rows, pages, size):
    """Pages of size * 584 bytes, a gap behind each, and what the rows are worth."""
    exponent = (rows[:, :448].unflatten(1, (7, 64)).abs().amax(-1) / 448).log2().ceil()
    codes = (rows[:, :448].unflatten(1, (7, 64)) * torch.exp2(-exponent)[..., None]).to(torch.float8_e4m3fn)
    own = rows[:, 448:].bfloat16()
    stride = -(-size * 584 // 576) * 576
    memory = torch.full((pages, stride), 0xFF, dtype=torch.uint8)
    data = torch.cat((codes.flatten(1).view(torch.uint8), own.contiguous().view(torch.uint8)), 1).view(pages, size * 576)
    scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1)).view(pages, size * 8)
    memory[:, : size * 576], memory[:, size * 576 : size * 584] = data, scales
    cache = memory.as_strided((pages, size, 1, 584), (stride, 584, 584, 1))
    return cache, torch.cat(((codes.float() * torch.exp2(exponent)[..., None]).flatten(1), own.float()), 1)


@pytest.mark.parametrize(("dim", "d_v"), [(20, 12), (600, 520)])
def test_widths_that_no_latent_kernel_has(dim, d_v, device):
    torch.manual_seed(dim)
    q, kv = torch.randn(5, 3, dim), torch.randn(40, 1, dim)
    if dim > 576:
        with pytest.raises(ValueError, match="600"):
            flash_mla.flash_mla_sparse_fwd(q, kv, torch.zeros(5, 1, 9, dtype=torch.int32), 0.1, d_v)
        return
    indices = torch.randint(-2, 42, (5, 1, 9), dtype=torch.int32)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q.to(device), kv.to(device), indices.to(device), 0.1, d_v)
    want = want_of(q, kv[:, 0], [kept(row[0], 9, 40) for row in indices], 0.1, d_v)
    for one, other in zip((out, largest, lse), want, strict=True):
        close(one, other, torch.float32)


def test_pages_whose_distance_is_no_number_of_rows(device):
    torch.manual_seed(5)
    rows, q = torch.randn(32, 576), torch.randn(2, 1, 8, 576)
    memory = torch.full((2 * 16 * 576 + 40,), math.nan)
    cache = memory.as_strided((2, 16, 1, 576), (16 * 576 + 40, 576, 576, 1))
    cache.copy_(rows.view(2, 16, 1, 576))
    cache = memory.to(device).as_strided(cache.shape, cache.stride())
    indices = torch.randint(-2, 34, (2, 1, 20), dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q.to(device), cache, None, None, 512, softmax_scale=0.05, indices=indices.to(device)
    )
    for b in range(2):
        want, _, want_lse = want_of(q[b], rows, [kept(indices[b, 0], 20, 32)], 0.05, 512)
        close(out[b], want, torch.float32)
        torch.testing.assert_close(lse[b].T.cpu().double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "gaps", "656", "584"])
@pytest.mark.parametrize("extra", [False, True])
def test_decode(kind, extra, device):
    torch.manual_seed(len(kind) + extra)
    batch, seq_q, heads, pages, size, topk = 3, 2, 8, 5, 16, 40
    dim = 512 if kind == "584" else 576
    q = torch.randn(batch, seq_q, heads, dim)
    caches, worth = [], []
    for _ in range(1 + extra):
        rows = torch.randn(pages * size, dim)
        if kind == "656":
            packed, rows = write_656(rows)
            cache = packed.view(pages, size, 1, 656)
        elif kind == "584":
            cache, rows = write_584(rows, pages, size)
        else:
            cache = torch.full((pages, size + 3 * (kind == "gaps"), 1, dim), torch.nan)
            cache[:, :size] = rows.view(pages, size, 1, dim)
            cache = cache[:, :size]
        caches.append(cache.to(device) if kind != "584" else cache if device == "cpu" else _moved(cache, device))
        worth.append(rows)
    indices = [torch.randint(-2, pages * size, (batch, seq_q, topk + 7 * n), dtype=torch.int32) for n in range(1 + extra)]
    for lists in indices:
        lists[1, 0] = -1
    length = torch.tensor([topk, 11, 0], dtype=torch.int32)
    sink = torch.randn(heads)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q.to(device), caches[0], None, None, 512, softmax_scale=0.05, is_fp8_kvcache=kind in ("656", "584"),
        indices=indices[0].to(device), attn_sink=sink.to(device), topk_length=length.to(device),
        extra_k_cache=caches[1] if extra else None, extra_indices_in_kvcache=indices[1].to(device) if extra else None,
    )  # fmt: skip
    for b in range(batch):
        lists = []
        for i in range(seq_q):
            own = kept(indices[0][b, i], int(length[b]), pages * size)
            second = [pages * size + j for j in kept(indices[1][b, i], 999, pages * size)] if extra else []
            lists.append(own + second)
        want, _, want_lse = want_of(q[b], torch.cat(worth), lists, 0.05, 512, sink)
        close(out[b], want, torch.float32)
        torch.testing.assert_close(lse[b].T.cpu().double(), want_lse, atol=1e-4, rtol=1e-4)


def test_a_table_beside_indices_is_not_read():
    """Servers pass what they have, as FlashMLA allows."""
    q, cache = torch.randn(2, 1, 4, 576), torch.randn(3, 8, 1, 576)
    lists = torch.randint(0, 24, (2, 1, 9), dtype=torch.int32)
    table = torch.full((2, 1), 10**6, dtype=torch.int32)
    want = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=lists)
    got = flash_mla.flash_mla_with_kvcache(q, cache, table, torch.tensor([-5, 10**6]), 512, indices=lists)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(("width", "dim"), [(656, 576), (584, 512)])
def test_few_listed_rows_of_a_large_cache(width, dim, device, monkeypatch):
    """Fewer entries than rows: the listed rows alone are expanded, some queries at a time."""
    monkeypatch.setattr(flash_mla, "_EXPANDED_BYTES", 3 * 5 * dim * 4)
    torch.manual_seed(width)
    caches, worth = [], []
    for _ in range(2):
        cache = flash_mla.new_fp8_cache(20, 7, width, device)
        flash_mla.write_fp8_cache(cache, torch.arange(140, device=device), torch.randn(140, dim, device=device))
        worth.append(flash_mla.read_fp8_cache(cache, torch.arange(140, device=device), torch.float32).cpu())
        flat = cache.as_strided((20 * cache.stride(0),), (1,))
        unnamed = flash_mla.new_fp8_cache(20, 7, width, device)
        unnamed.as_strided(flat.shape, (1,)).fill_(0xFF)
        caches.append((cache, unnamed))
    q = torch.randn(7, 2, 3, dim)
    first, second = (torch.randint(-2, 140, (7, 2, n), dtype=torch.int32) for n in (3, 2))
    for (cache, unnamed), lists in zip(caches, (first, second), strict=True):  # NaN in every row that no list names
        named = lists[lists >= 0].unique().long().to(device)
        rows = flash_mla.read_fp8_cache(cache, named, torch.float32)
        flash_mla.write_fp8_cache(unnamed, named, rows)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q.to(device), caches[0][1], None, None, 512, is_fp8_kvcache=True, indices=first.to(device),
        extra_k_cache=caches[1][1], extra_indices_in_kvcache=second.to(device), softmax_scale=0.05,
    )  # fmt: skip
    for b in range(7):
        lists = [kept(first[b, i], 9, 140) + [140 + j for j in kept(second[b, i], 9, 140)] for i in range(2)]
        want, _, want_lse = want_of(q[b], torch.cat(worth), lists, 0.05, 512)
        close(out[b], want, torch.float32)
        torch.testing.assert_close(lse[b].T.cpu().double(), want_lse, atol=1e-4, rtol=1e-4)


def nearest(row, width, scales):
    """What a row is worth in 8 bits, by search: the smallest factor that fits, then the nearest of all codes."""
    columns, block = (512, 128) if width == 656 else (448, 64)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes, worth = codes[codes.isfinite()], []
    for part in row[:columns].split(block):
        largest = part.abs().max()
        factor = float(largest / 448)
        if scales == "power_of_two":
            factor = 2.0**-100
            while factor * 448 < float(largest):
                factor *= 2
        factor = max(factor, 2.0**-100)
        worth.append(codes[(part.double()[:, None] / factor - codes).abs().argmin(1)] * factor)
    return torch.cat((*worth, row[columns:].bfloat16().double()))


@pytest.mark.parametrize(("width", "scales"), [(656, "power_of_two"), (656, "float32"), (584, "power_of_two")])
def test_writes_rows_of_8_bits(width, scales, device):
    torch.manual_seed(width + len(scales))
    pages, size, dim = 5, 7, 576 if width == 656 else 512
    stride = pages * size * width + 11  # pages apart, and out of order in memory
    memory = torch.full((2 * stride,), 0xAB, dtype=torch.uint8, device=device)
    apart = -(-size * 584 // 576) * 576 if width == 584 else size * width + 16
    cache = memory[16:].as_strided((pages, size, 1, width), (apart, width, width, 1))
    before = memory.clone()
    rows = torch.randn(11, dim) * torch.tensor([1e-6, 1, 1e3, 1e-30, 1, 1, 1, 0, 1e30, 1, 1])[:, None]
    rows[4, :64], rows[9, 5], rows[10, 70] = 448.0, torch.nan, torch.inf
    table, positions = torch.tensor([[4, 0, 2]], dtype=torch.int32), torch.tensor([0, 6, 7, 20, 14])
    slots = torch.full((11,), -1, dtype=torch.int64)
    slots[:5] = table[0][positions // size].long() * size + positions % size
    slots[5:] = torch.tensor([2**40, -(2**31), 24, 25, 26, 27])
    flash_mla.write_fp8_cache(cache, slots.to(device), rows.to(device), scales)
    written = [t for t in range(11) if 0 <= slots[t] < pages * size]
    got = flash_mla.read_fp8_cache(cache, slots[written].to(device), torch.float32).cpu().double()
    exact = scales == "power_of_two"
    for t, row in zip(written, got, strict=True):
        if t < 9:
            torch.testing.assert_close(row, nearest(rows[t], width, scales), rtol=0 if exact else 1e-6, atol=0)
        else:  # NaN and Inf stay in their block
            block = 128 if width == 656 else 64
            bad = torch.zeros(dim, dtype=torch.bool)
            at = 5 if t == 9 else 70
            bad[at // block * block : at // block * block + block] = True
            assert torch.equal(row.isnan(), bad)
    changed = (memory != before).nonzero()[:, 0].cpu() - 16
    page, byte = changed // apart, changed % apart
    of_rows = byte < size * (width if width == 656 else 576)
    row = torch.where(of_rows, byte // (width if width == 656 else 576), (byte - size * 576) // 8)
    assert set((page * size + row).tolist()) <= {int(slots[t]) for t in written} and int(byte.max()) < size * width


def test_writing_nothing_changes_nothing(device):
    cache = flash_mla.new_fp8_cache(3, 4, 584, device)
    flash_mla.write_fp8_cache(cache, torch.arange(12, device=device), torch.randn(12, 512, device=device))
    before = cache.clone()
    flash_mla.write_fp8_cache(cache, torch.tensor([-1, 12], device=device), torch.randn(2, 512, device=device))
    flash_mla.write_fp8_cache(cache, torch.zeros(0, dtype=torch.int32, device=device), torch.randn(0, 512, device=device))
    assert torch.equal(cache, before)
    refused = {
        "row_bytes": lambda: flash_mla.new_fp8_cache(3, 4, 576),
        "num_pages": lambda: flash_mla.new_fp8_cache(-1, 4, 584),
        "cache": lambda: flash_mla.write_fp8_cache(cache.float(), torch.zeros(1).int(), torch.zeros(1, 512)),
        "slots": lambda: flash_mla.write_fp8_cache(cache, torch.zeros(1), torch.zeros(1, 512)),
        "kv": lambda: flash_mla.write_fp8_cache(cache, torch.zeros(1).int(), torch.zeros(1, 576)),
        "scales": lambda: flash_mla.write_fp8_cache(cache, torch.zeros(1).int(), torch.zeros(1, 512), "float32"),
    }
    for name, call in refused.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            call()


def _moved(cache, device):
    memory = torch.empty(cache.shape[0] * cache.stride(0), dtype=torch.uint8, device=device)
    moved = memory.as_strided(cache.shape, cache.stride())
    flat = cache.as_strided((cache.shape[0] * cache.stride(0),), (1,))
    memory.copy_(flat)
    return moved


def test_refuses_by_name():
    q, cache = torch.randn(1, 1, 4, 576), torch.randn(2, 8, 1, 576)
    lists = torch.zeros(1, 1, 4, dtype=torch.int32)

    def call(**changes):
        given = {"q": q, "k_cache": cache, "indices": lists, **changes}
        flash_mla.flash_mla_with_kvcache(given.pop("q"), given.pop("k_cache"), None, None, 512, **given)

    for name, changes in {
        "indices": {"indices": lists.long()},
        "causal": {"causal": True},
        "topk_length": {"topk_length": torch.ones(2, dtype=torch.int32)},
        "extra_indices_in_kvcache": {"extra_k_cache": cache},
        "extra_topk_length": {"extra_topk_length": torch.ones(1, dtype=torch.int32)},
        "attn_sink": {"attn_sink": torch.zeros(3)},
        "k_cache": {"is_fp8_kvcache": True, "k_cache": torch.zeros(2, 8, 1, 584, dtype=torch.uint8)},
        "k_scale": {"k_scale": 1.0},
        "is_fp8_kvcache": {"k_cache": torch.zeros(2, 8, 1, 656, dtype=torch.uint8)},
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            call(**changes)
    with pytest.raises(ValueError, match=r"^k_cache: got rows of 100 bytes"):
        call(is_fp8_kvcache=True, k_cache=torch.zeros(2, 8, 1, 100, dtype=torch.uint8))
    with pytest.raises(NotImplementedError, match=r"^attn_sink: "):
        call(indices=None, attn_sink=torch.zeros(4))
    assert math.isfinite(flash_mla.flash_mla_sparse_fwd(q[0], cache[0], lists, 1.0)[0].sum())
