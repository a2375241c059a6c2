"""FlashInfer's names over this library: signatures, layouts, tables and base 2, against float64."""

import importlib
import math

import pytest
import reference
import torch
from flash_attention import flashinfer

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
LENGTHS = [33, 1, 70, 16]


def workspace(device):
    return torch.empty(1, dtype=torch.uint8, device=device)


def paged(lengths, page, heads, dim, device, layout="NHD", as_pair=False, dtype=torch.float32):
    """(cache, (indptr, indices, last_page_len), [(k, v) of each sequence]); NaN wherever nobody may look."""
    torch.manual_seed(page)
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 2).tolist()
    shape = (page, heads, dim) if layout == "NHD" else (heads, page, dim)
    cache = torch.full((len(order), 2, *shape), float("nan"), dtype=dtype)
    indices, rows = [], []
    for length, count in zip(lengths, counts, strict=True):
        mine = [order.pop() for _ in range(count)]
        pair = [torch.randn(length, heads, dim).to(dtype) for _ in range(2)]
        for which, values in enumerate(pair):
            for j in range(length):
                place = cache[mine[j // page], which]
                (place if layout == "NHD" else place.transpose(0, 1))[j % page] = values[j]
        indices += mine
        rows.append([values.to(device) for values in pair])
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    last = torch.tensor([(length - 1) % page + 1 if length else 0 for length in lengths])
    tables = (starts, torch.tensor(indices, dtype=torch.int32), last.int())
    cache = cache.to(device)
    return (cache[:, 0], cache[:, 1]) if as_pair else cache, tuple(table.to(device) for table in tables), rows


def exact(q, k, v, **options):
    """(out [seq, heads, dim], lse [seq, heads] of base 2) in float64."""
    out, lse = reference.attention(q[None].double(), k[None].double(), v[None].double(), **options)
    return out[0], lse[0].transpose(0, 1) / math.log(2)


def check(found, q_parts, rows, **options):
    out, lse = found
    done = 0
    for q, (k, v) in zip(q_parts, rows, strict=True):
        want, want_lse = exact(q, k, v, **options)
        torch.testing.assert_close(out[done : done + len(q)].double(), want, **CLOSE)
        torch.testing.assert_close(lse[done : done + len(q)].double(), want_lse, **CLOSE)
        done += len(q)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{}, {"window_left": 9}, {"logits_soft_cap": 5.0, "sm_scale": 0.3}], ids=str)
def test_single(layout, options, device):
    q, (k, v) = torch.randn(5, 8, 32, device=device), (torch.randn(40, 2, 32, device=device) for _ in range(2))
    given = [tensor if layout == "NHD" else tensor.transpose(0, 1).contiguous() for tensor in (k, v)]
    same = {"softcap": options.get("logits_soft_cap", 0.0), "scale": options.get("sm_scale")}
    window = (options.get("window_left", -1), 0)
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], *given, kv_layout=layout, return_lse=True, **options)
    want, want_lse = exact(q[:1], k, v, window=window, **same)
    torch.testing.assert_close(out.double(), want[0], **CLOSE)
    torch.testing.assert_close(lse.double(), want_lse[0], **CLOSE)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, *given, kv_layout=layout, causal=True, return_lse=True, **options)
    check((out, lse), [q], [(k, v)], window=window, **same)


def test_scales_of_single_decode(device):
    q, k, v = torch.randn(4, 16, device=device), *(torch.randn(9, 4, 16, device=device) for _ in range(2))
    out = flashinfer.single_decode_with_kv_cache(q, k, v, q_scale=0.5, k_scale=3.0, v_scale=0.25)
    want, _ = exact(q[None] * 0.5, k * 3.0, v * 0.25)
    torch.testing.assert_close(out.double(), want[0], **CLOSE)


@pytest.mark.parametrize("page", [1, 7, 16])
@pytest.mark.parametrize("layout, as_pair", [("NHD", False), ("HND", True)])
def test_batch_decode(page, layout, as_pair, device):
    cache, tables, rows = paged(LENGTHS, page, 2, 40, device, layout, as_pair)
    q = torch.randn(len(LENGTHS), 8, 40, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(*tables, 8, 2, 40, page, q_data_type=q.dtype)
    check(wrapper.run_return_lse(q, cache), q.split(1), rows)
    assert torch.equal(wrapper.run(q, cache), wrapper.run(q, cache, return_lse=True)[0])
    into, lse_into = torch.empty_like(q), torch.empty(len(q), 8, device=device)
    assert wrapper.run(q, cache, out=into, lse=lse_into, return_lse=True)[0] is into
    over = q.clone()
    assert torch.equal(wrapper.run(over, cache, out=over.view_as(over)), into)  # over the queries themselves
    check((into, lse_into), q.split(1), rows)


def test_batch_decode_of_several_tokens_with_options(device):
    cache, tables, rows = paged(LENGTHS[2:], 16, 2, 32, device)
    q = torch.randn(6, 4, 32, device=device)
    sinks = torch.randn(4, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    host = [table.cpu() for table in tables]
    wrapper.plan(*host, 4, 2, 32, 16, "NONE", 20, 4.0, q_len_per_req=3, sm_scale=0.2)  # positional as in old programs
    found = wrapper.run(q, cache, sinks=sinks, return_lse=True)
    check(found, q.split(3), rows, window=(20, 0), softcap=4.0, scale=0.2, sink=sinks.double())


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_every_plan_refills_the_tables_of_a_graph(kind, device):
    """On every device, without a capture: each plan has the sequences in another order and its pages in other rows."""
    page, batch = 7, len(LENGTHS)
    cache, (starts, indices, last), rows = paged(LENGTHS, page, 2, 32, device)
    pages = indices.split(starts.diff().tolist())
    q, q_starts = torch.randn(batch, 4, 32, device=device), torch.arange(batch + 1, dtype=torch.int32, device=device)
    sizes = {"indptr": batch + 1, "indices": len(indices) + 5, "last_page_len": batch}
    buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    if kind == "decode":
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers.values())
    else:
        of_graph = {f"paged_kv_{name}_buf": buffer for name, buffer in buffers.items()}
        of_graph["qo_indptr_buf"] = torch.zeros_like(q_starts)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **of_graph)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        counts = torch.tensor([0, *(len(pages[b]) for b in order)])
        tables = (counts.cumsum(0).int().to(device), torch.cat([pages[b] for b in order]), last[order])
        wrapper.plan(*([q_starts] if kind == "prefill" else []), *tables, 4, 2, 32, page)
        check(wrapper.run(q, cache, return_lse=True), q.split(1), [rows[b] for b in order])


def test_sequences_without_pages(device):
    cache, tables, rows = paged([5, 0, 20], 8, 2, 16, device)
    q = torch.randn(3, 4, 16, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*tables, 4, 2, 16, 8)
    out, lse = wrapper.run(q, cache, return_lse=True)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    check((out, lse), q.split(1), rows)


def test_a_rectangle_of_pages_may_be_given(device):
    cache, tables, rows = paged([5, 20], 8, 2, 16, device)
    q = torch.randn(2, 4, 16, device=device)
    block_tables = torch.tensor([[int(tables[1][0]), -1, 99], tables[1][1:].tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 20], dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*tables, 4, 2, 16, 8, block_tables=block_tables, seq_lens=lengths)
    check(wrapper.run(q, cache, return_lse=True), q.split(1), rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("host", [False, True], ids=["tables here", "tables on the host"])
def test_batch_prefill(causal, host, device):
    cache, tables, rows = paged(LENGTHS, 16, 2, 32, device, "HND")
    counts = [20, 1, 0, 5]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    q = torch.randn(26, 8, 32, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND")
    given = [table.cpu() if host else table for table in (starts, *tables)]
    wrapper.plan(*given, 8, 2, 32, 16, causal=causal)
    check(wrapper.run(q, cache, return_lse=True), q.split(counts), rows, causal=causal)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_a_batch(packed, device):
    lengths, counts = [33, 5], [6, 3]
    cache, tables, rows = paged(lengths, 16, 2, 32, device)
    masks = [torch.rand(count, length) < 0.5 for count, length in zip(counts, lengths, strict=True)]
    if packed:
        bits = [torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8) for mask in masks]
        given = {"packed_custom_mask": torch.cat([(bit * 2 ** torch.arange(8)).sum(1).to(torch.uint8) for bit in bits])}
    else:
        given = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    given = {name: value.to(device) for name, value in given.items()}
    starts = torch.tensor([0, 6, 9], dtype=torch.int32, device=device)
    q = torch.randn(9, 4, 32, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(starts, *tables, 4, 2, 32, 16, causal=True, **given)
    out, lse = wrapper.run(q, cache, return_lse=True)
    for part, row, mask in zip((slice(0, 6), slice(6, 9)), rows, masks, strict=True):
        check((out[part], lse[part]), [q[part]], [row], mask=mask.to(device))
    alone = flashinfer.single_prefill_with_kv_cache(q[:6], *rows[0], custom_mask=masks[0].to(device))
    torch.testing.assert_close(alone, out[:6], **CLOSE)


def test_tokens_behind_the_pages_of_their_sequence(device):
    """The next page of the list is another sequence's: nothing is written there."""
    indptr, indices, last = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 5], [7, 6, 0, 1, 2], [1, 1])
    )
    cache, new = torch.zeros(8, 2, 4, 2, 16, device=device), torch.ones(1, 2, 16, device=device)
    for position, page in ((7, 6), (8, None), (11, None)):
        place = (
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.full((1,), position, dtype=torch.int32, device=device),
        )
        call = lambda: flashinfer.append_paged_kv_cache(new, new, *place, cache, indices, indptr, last)  # noqa: B023, E731
        if page is None and device == "cpu":
            with pytest.raises(ValueError, match=rf"positions: entry \[0\] is {position}; sequence 0 has pages for 8 keys"):
                call()
        else:
            call()
        assert cache.sum((1, 2, 3, 4)).nonzero().flatten().tolist() == ([] if page is None else [page])
        cache.zero_()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_then_attend(layout, device):
    """Exactly the new rows of the cache change."""
    cache, tables, rows = paged(LENGTHS, 7, 2, 16, device, layout)
    fresh = [3, 1, 20, 0]
    total = sum(fresh)
    starts = torch.tensor([0, *fresh]).cumsum(0).int().to(device)
    lengths = flashinfer.get_seq_lens(tables[0], tables[2], 7)
    assert lengths.tolist() == LENGTHS
    sequences, positions = flashinfer.get_batch_indices_positions(starts, lengths, total + 2)
    assert sequences.tolist()[-2:] == [-1, -1] and positions.tolist()[:4] == [30, 31, 32, 0]
    k, v = (torch.randn(total + 2, 2, 16, device=device) for _ in range(2))
    before = cache.clone()
    flashinfer.append_paged_kv_cache(k, v, sequences, positions, cache, tables[1], tables[0], tables[2], layout)
    changed = ((cache != before) & ~(cache.isnan() & before.isnan())).sum().item()
    assert changed == 2 * total * 2 * 16
    done = 0
    for row, count in zip(rows, fresh, strict=True):
        for which, new in enumerate((k, v)):
            row[which][len(row[which]) - count :] = new[done : done + count]
        done += count
    q = torch.randn(4, 4, 16, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(*tables, 4, 2, 16, 7)
    check(wrapper.run(q, cache, return_lse=True), q.split(1), rows)


def test_tokens_for_sequences_without_any_page():
    """They have no place: refused, not dropped; tokens of no sequence are nobody's."""
    cache, new = torch.zeros(2, 2, 4, 2, 16), torch.ones(2, 2, 16)
    none, ends = torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    place, last = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"positions: entry \[0\] is 0; sequence 0 has pages for 0 keys"):
        flashinfer.append_paged_kv_cache(new, new, place, place, cache, none, ends, last)
    flashinfer.append_paged_kv_cache(new, new, place - 1, place, cache, none, ends, last)
    assert not cache.any()


def test_places_of_tokens_are_written_where_they_are_given(device):
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 3, 3], dtype=torch.int32, device=device)
    into = [torch.full((8,), 9, dtype=torch.int32, device=device) for _ in range(2)]
    found = flashinfer.get_batch_indices_positions(starts, lengths, 6, *into)
    assert found[0] is into[0] and found[1] is into[1]
    assert found[0].tolist() == [0, 0, 2, 2, 2, -1, 9, 9] and found[1].tolist() == [5, 6, 0, 1, 2, -1, 9, 9]
    nobody = flashinfer.get_batch_indices_positions(starts[:1], lengths[:0], 2)
    assert [x.tolist() for x in nobody] == [[-1, -1]] * 2


def test_merging_is_attention_over_all_keys(device):
    q = torch.randn(6, 4, 16, device=device)
    k, v = (torch.randn(30, 4, 16, device=device) for _ in range(2))
    cuts = ((0, 9), (9, 10), (10, 30))
    parts = [flashinfer.single_prefill_with_kv_cache(q, k[a:b], v[a:b], return_lse=True) for a, b in cuts]
    outs, lses = zip(*parts, strict=True)
    check(flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1)), [q], [(k, v)])
    two = flashinfer.merge_state(*parts[0], *parts[1])
    check(two, [q], [(k[:10], v[:10])])
    out, lse = (tensor.clone() for tensor in two)
    keep = torch.tensor([True, False] * 3, device=device)
    flashinfer.merge_state_in_place(out, lse, *parts[2], mask=keep)
    check((out[keep], lse[keep]), [q[keep]], [(k, v)])
    assert torch.equal(out[~keep], two[0][~keep]) and torch.equal(lse[~keep], two[1][~keep])


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_cascade_is_attention_over_prefix_and_own_keys(tokens, device):
    """Level 0: a prefix for all; level 1: two groups; level 2: each sequence alone."""
    cache, tables, rows = paged([40, 17, 9, 12, 4, 30, 8], 8, 2, 32, device)
    owners = [[0], [1, 2], [3, 4, 5, 6]]
    level_tables = []
    for mine in owners:
        pages = [tables[1][int(tables[0][b]) : int(tables[0][b + 1])] for b in mine]
        starts = torch.tensor([0, *map(len, pages)]).cumsum(0).int().to(device)
        level_tables.append((starts, torch.cat(pages), tables[2][mine[0] : mine[-1] + 1]))
    groups = [[4], [2, 2], [1, 1, 1, 1]]
    queries = [torch.tensor([0, *(tokens * size for size in sizes)]).cumsum(0).int().to(device) for sizes in groups]
    q = torch.randn(4 * tokens, 4, 32, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device))
    wrapper.plan(queries, *map(list, zip(*level_tables, strict=True)), 4, 2, 32, 8, causal=True)
    out = wrapper.run(q, cache)
    for b in range(4):
        keys = [torch.cat([rows[0][i], rows[1 + b // 2][i], rows[3 + b][i]]) for i in range(2)]
        part = slice(b * tokens, (b + 1) * tokens)
        torch.testing.assert_close(out[part].double(), exact(q[part], *keys, causal=True)[0], **CLOSE)


def test_what_is_given_to_run_stands_in_place_of_the_plan(device):
    """Window, tokens a sequence and scales of decode; window, sinks and soft cap of prefill."""
    cache, tables, rows = paged([70, 16], 16, 2, 32, device)
    q = torch.randn(6, 4, 32, device=device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*tables, 4, 2, 32, 16, window_left=40, window_right=1, q_len_per_req=2)
    check(decode.run(q[:4], cache, return_lse=True), q[:4].split(2), rows, window=(40, 1))
    check(decode.run(q, cache, return_lse=True, window_left=5, q_len_per_req=3), q.split(3), rows, window=(5, 1))
    decode.plan(*tables, 4, 2, 32, 16)
    v_scale = torch.full((), 0.25, device=device)
    scaled = decode.run(q[:2], cache, q_scale=0.5, k_scale=3.0, v_scale=v_scale, return_lse=True)
    check(scaled, (q[:2] * 0.5).split(1), [(k * 3.0, v * 0.25) for k, v in rows])
    place = torch.empty_like(q[:2])
    for scale in (v_scale, 0.25):
        found = decode.run(q[:2], cache, q_scale=0.5, k_scale=3.0, v_scale=scale, return_lse=True, out=place.zero_())
        check((place, found[1]), (q[:2] * 0.5).split(1), [(k * 3.0, v * 0.25) for k, v in rows])
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    starts = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    sinks = torch.randn(4, device=device)
    prefill.plan(starts, *tables, 4, 2, 32, 16, causal=True, window_left=40, logits_soft_cap=2.0, sm_scale=0.4)
    seen = {"causal": True, "softcap": 2.0, "scale": 0.4}
    check(prefill.run(q, cache, return_lse=True), q.split([4, 2]), rows, window=(40, -1), **seen)
    found = prefill.run(q, cache, return_lse=True, window_left=5, sinks=sinks)
    check(found, q.split([4, 2]), rows, window=(5, -1), sink=sinks.double(), **seen)
    out = flashinfer.single_prefill_with_kv_cache(q[:4], *rows[0], o_dtype=torch.float64)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, exact(q[:4], *rows[0])[0], **CLOSE)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_fixed_split_size_fixes_the_bits_of_a_row(kind, device, monkeypatch):
    """Alone and beside longer sequences. The wrapper says so to the kernels."""
    asked = []
    module = importlib.import_module(f"flash_attention.flashinfer.{kind}")
    whole = module.padded_cache

    def noting(*tensors, **options):
        asked.append(options["invariant"])
        return whole(*tensors, **options)

    monkeypatch.setattr(module, "padded_cache", noting)
    cache, tables, rows = paged([70, 700], 16, 2, 32, device)
    q = torch.randn(2, 4, 32, device=device)

    def run(count, **options):
        given = (tables[0][: count + 1], tables[1], tables[2][:count])
        if kind == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
            wrapper.plan(*given, 4, 2, 32, 16, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
            wrapper.plan(torch.arange(count + 1, dtype=torch.int32, device=device), *given, 4, 2, 32, 16, **options)
        return wrapper.run(q[:count], cache, return_lse=True)

    for asking in ({"fixed_split_size": 64}, {"disable_split_kv": True}):
        both, alone = run(2, **asking), run(1, **asking)
        assert torch.equal(both[0][:1], alone[0]) and torch.equal(both[1][:1], alone[1])
        check(both, q.split(1), rows)
    run(1)
    assert asked == [True, True, True, True, None]  # None: as the environment says


def test_lse_is_written_where_it_is_given(device):
    """With and without return_lse, as FlashInfer's kernels do."""
    cache, tables, rows = paged([33, 5], 8, 2, 32, device)
    q = torch.randn(2, 4, 32, device=device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*tables, 4, 2, 32, 8)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    prefill.plan(torch.tensor([0, 1, 2], dtype=torch.int32, device=device), *tables, 4, 2, 32, 8)
    for wrapper in (decode, prefill):
        lse = torch.full((2, 4), 7.0, device=device)
        out = wrapper.run(q, cache, lse=lse)
        check((out, lse), q.split(1), rows)
        with pytest.raises(ValueError, match=r"lse: got \[2, 3\]"):
            wrapper.run(q, cache, lse=lse[:, :3])


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dim", [64, 20])
def test_keys_of_eight_bits_under_wider_queries(dim, codes, mode, device):
    """The oracle has the values of the codes: single and paged calls read the same numbers."""
    q = torch.randn(5, 8, dim, device=device)
    k, v = (torch.randn(30, 2, dim, device=device).to(codes) for _ in range(2))
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    wide_k, wide_v = (x.float() for x in (k, v))
    options = {}
    if mode == "ROPE_LLAMA":
        q_used, wide_k, _ = flashinfer_positions().rotated(q, wide_k, wide_v)
    else:
        q_used = q
    if mode == "ALIBI":
        options = {"alibi_slopes": 2.0 ** -torch.arange(1.0, 9.0, device=device)}
    wide = [(wide_k * 0.5, wide_v * 2.0)]
    call = {"pos_encoding_mode": mode, "return_lse": True, **scales}
    check(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, **call), [q_used], wide, causal=True, **options)
    check(
        flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=7, **call),
        [q_used], wide, causal=True, window=(7, -1), **options,
    )  # fmt: skip
    out, lse = flashinfer.single_decode_with_kv_cache(q[-1], k, v, **call)
    check((out[None], lse[None]), [q_used[-1:]], wide, **options)
    if mode == "NONE":
        mask = torch.rand(5, 30, device=device) < 0.5
        check(flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, **call), [q], wide, mask=mask)
    pages = [x.unflatten(0, (3, 10)) for x in (k, v)]
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3], [0, 1, 2], [10])]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*tables, 8, 2, dim, 10, mode)
    check(wrapper.run(q[-1:], pages, return_lse=True, **scales), [q_used[-1:]], wide, **options)


def flashinfer_positions():
    from flash_attention.flashinfer.positions import Positions

    return Positions("ROPE_LLAMA")


@pytest.mark.parametrize("of", [torch.int32, torch.int64])
def test_starts_of_appended_tokens_in_either_type(of, device):
    starts, lengths = (torch.tensor(x, device=device, dtype=of) for x in ([0, 3, 3, 4], [9, 2, 1]))
    sequences, positions = flashinfer.get_batch_indices_positions(starts, lengths, 5)
    assert sequences.tolist() == [0, 0, 0, 2, -1] and positions.tolist() == [6, 7, 8, 0, -1]
    assert sequences.dtype == positions.dtype == torch.int32


def tables_for_errors(**changes):
    tables = {
        "indptr": torch.tensor([0, 2, 3], dtype=torch.int32),
        "indices": torch.tensor([0, 1, 2], dtype=torch.int32),
        "last_page_len": torch.tensor([4, 8], dtype=torch.int32),
    }
    return {**tables, **changes}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"indptr": torch.tensor([0, 2, 3])}, "indptr: got int64"),
        ({"indptr": torch.tensor([1, 2, 3], dtype=torch.int32)}, "indptr: begins with 1"),
        ({"indptr": torch.tensor([0, 2, 1], dtype=torch.int32)}, "indptr: entry 2 is 1"),
        ({"indptr": torch.tensor([0, 2, 9], dtype=torch.int32)}, "indptr: ends with 9; allowed is at most 3"),
        ({"indices": torch.zeros(3)}, "indices: got float32"),
        ({"indices": torch.zeros(1, 3, dtype=torch.int32)}, r"indices: got shape \[1, 3\]"),
        ({"last_page_len": torch.tensor([9, 1], dtype=torch.int32)}, r"last_page_len: entry \[0\] is 9; allowed are 1 t"),
        ({"last_page_len": torch.tensor([4, 0], dtype=torch.int32)}, r"last_page_len: entry \[1\] is 0"),
        ({"last_page_len": torch.tensor([4], dtype=torch.int32)}, r"last_page_len: got shape \[1\]"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"num_qo_heads": 5}, "num_qo_heads: got 5; allowed are multiples of num_kv_heads, 2"),
        ({"num_kv_heads": 0}, "num_qo_heads: got 4; allowed are multiples of num_kv_heads, 0"),
        ({"pos_encoding_mode": "XPOS"}, "pos_encoding_mode: got 'XPOS'"),
        ({"q_len_per_req": 0}, "q_len_per_req: got 0"),
        ({"block_tables": torch.zeros(3, 1, dtype=torch.int32)}, "block_tables: got shape"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_plans_that_are_refused(changes, message):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    arguments = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 8, **tables_for_errors(**changes)}
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        wrapper.plan(**arguments)


@pytest.mark.parametrize(
    "q, cache, options, message",
    [
        ((3, 4, 16), (5, 2, 8, 2, 16), {}, r"q: got shape \[3, 4, 16\]; expected \[2, 4, 16\]"),
        ((2, 4, 16), (5, 2, 16, 2, 16), {}, "paged_kv_cache: got pages"),
        ((2, 4, 16), (5, 3, 8, 2, 16), {}, "paged_kv_cache: got shape"),
        ((2, 4, 16), (2, 2, 8, 2, 16), {}, "page_table"),
        ((2, 4, 16), (5, 2, 8, 2, 16), {"kv_cache_sf": torch.ones(1)}, "kv_cache_sf"),
        ((2, 4, 16), (5, 2, 8, 2, 16), {"out": torch.empty(2, 4, 8)}, r"out: got \[2, 4, 8\]"),
        ((2, 4, 16), (5, 2, 8, 2, 16), {"k_scale": torch.ones(1)}, "k_scale"),
    ],
)
def test_runs_that_are_refused(q, cache, options, message):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(torch.zeros(q), torch.zeros(cache))
    wrapper.plan(**tables_for_errors(), num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=8)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        wrapper.run(torch.zeros(q), torch.zeros(cache), **options)


def test_layouts_and_appends_that_are_refused():
    with pytest.raises(ValueError, match="kv_layout: got 'NDH'; allowed are 'NHD' and 'HND'"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "NDH")
    cache, tables, _ = paged([5], 8, 2, 16, "cpu")
    new, one = torch.zeros(1, 2, 16), torch.zeros(1, dtype=torch.int32)
    call = [new, new, one, one, cache, tables[1], tables[0], tables[2]]
    for place, value, message in [
        (0, torch.zeros(1, 2, 8), "append_key: got"),
        (2, torch.tensor([7], dtype=torch.int32), r"batch_indices: entry \[0\] is 7; allowed are -1 to 0"),
        (3, torch.zeros(2, dtype=torch.int32), "positions: got shape"),
        (5, torch.tensor([1000], dtype=torch.int32), r"kv_indices: entry \[0\] is 1000"),
    ]:
        with pytest.raises(ValueError, match=message):
            flashinfer.append_paged_kv_cache(*call[:place], value, *call[place + 1 :])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_graph_is_replayed_after_another_plan():
    batch, page, most = 4, 16, 40
    cache = torch.randn(most + 3, 2, page, 2, 64, device="cuda", dtype=torch.float16)
    buffers = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in (batch + 1, most, batch)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cuda"), *buffers)
    q = torch.randn(batch, 8, 64, device="cuda", dtype=torch.float16)

    def plan(lengths, seed):
        counts = [-(-length // page) for length in lengths]
        order = torch.randperm(most + 3, generator=torch.Generator().manual_seed(seed))[: sum(counts)].int()
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        last = torch.tensor([length - (count - 1) * page for length, count in zip(lengths, counts, strict=True)]).int()
        wrapper.plan(starts, order, last, 8, 2, 64, page)
        return starts.tolist(), order.tolist()

    plan([16] * batch, 0)
    wrapper.run(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    for seed, lengths in enumerate([[1, 200, 33, 320], [160] * 4, [5, 4, 3, 2]]):
        starts, order = plan(lengths, seed + 1)
        graph.replay()
        for b, length in enumerate(lengths):
            rows = cache[order[starts[b] : starts[b + 1]]].transpose(0, 1).flatten(1, 2)[:, :length]
            torch.testing.assert_close(out[b].double(), exact(q[b : b + 1], *rows)[0][0], atol=3e-3, rtol=0)


def test_decode_in_the_old_order(device):
    """forward() gives options with the call, and what was planned stands for the rest."""
    cache = torch.randn(4, 2, 8, 2, 64, device=device)
    q = torch.randn(2, 4, 64, device=device)
    ends, pages, last = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 4], [2, 0, 1, 3], [8, 3]))
    found = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=device))
    found.plan(ends, pages, last, 4, 2, 64, 8)
    options = {"window_left": 5, "logits_soft_cap": 2.0, "sm_scale": 0.3}
    out, lse = found.forward(q, cache, **options, return_lse=True)
    for b, rows in enumerate(([2, 0], [1, 3])):
        length = 8 + [8, 3][b]
        k, v = (cache[rows, part].flatten(0, 1)[max(0, length - 6) : length].double() for part in (0, 1))
        for h in range(4):
            scores = 2.0 * torch.tanh(0.3 * (k[:, h // 2] @ q[b, h].double()) / 2.0)
            torch.testing.assert_close(out[b, h].double(), scores.softmax(0) @ v[:, h // 2], atol=2e-6, rtol=1e-5)
            assert abs(lse[b, h].item() - scores.logsumexp(0).item() / math.log(2)) < 1e-5
    plain = found.forward(q, cache)
    again = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=device))
    again.plan(ends, pages, last, 4, 2, 64, 8)
    torch.testing.assert_close(plain, again.run(q, cache))
