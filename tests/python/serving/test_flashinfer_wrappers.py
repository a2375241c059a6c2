"""FlashInfer's other wrappers (ragged, mixed batches, sinks, prompts beside single queries, shared prefixes, items to be
scored, latent appends) against float64."""

import functools
import math

import pytest
import reference
import torch
from flash_attention import flashinfer

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
QUERIES, KEYS = [5, 1, 13, 4], [33, 7, 13, 70]
# A jit_args as programs write it: uri, four types, two sizes, the names and types of more tensors and numbers, the variant.
SINKS = (
    "uri",
    *[torch.float32] * 3,
    torch.int32,
    32,
    32,
    ["sink"],
    ["float"],
    ["sm_scale"],
    ["double"],
    "AttentionSink",
    "source",
)


def workspace(device):
    return torch.empty(1, dtype=torch.uint8, device=device)


def starts_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def rows_of(lengths, heads, dim, device):
    return [torch.randn(length, heads, dim, device=device) for length in lengths]


def exact(q, k, v, **options):
    """(out [seq, heads, dim], lse [seq, heads] of base 2) in float64."""
    out, lse = reference.attention(q[None].double(), k[None].double(), v[None].double(), **options)
    return out[0], lse[0].transpose(0, 1) / math.log(2)


def check(found, q, k, v, **each):
    """found: (out, lse) of sequences end to end; q, k, v: of each. Options that are lists have an entry a sequence."""
    out, lse = found
    done = 0
    for b, parts in enumerate(zip(q, k, v, strict=True)):
        options = {name: value[b] if isinstance(value, list) else value for name, value in each.items()}
        want, want_lse = exact(*parts, **options)
        rows = slice(done, done + len(parts[0]))
        torch.testing.assert_close(out[rows].double(), want, **CLOSE)
        torch.testing.assert_close(lse[rows].double(), want_lse, **CLOSE)
        done += len(parts[0])
    assert done == len(out)


def paged(k, v, page, device):
    """((k_cache, v_cache), (indptr, indices, last_page_len)): pages in disorder, NaN wherever nobody may look."""
    counts = [-(-len(rows) // page) for rows in k]
    order = torch.randperm(sum(counts) + 2).tolist()
    caches = [torch.full((len(order), page, *rows[0].shape[1:]), float("nan"), device=device) for rows in (k, v)]
    indices = []
    for count, *rows in zip(counts, k, v, strict=True):
        mine = [order.pop() for _ in range(count)]
        for cache, values in zip(caches, rows, strict=True):
            for j, value in enumerate(values):
                cache[mine[j // page], j % page] = value
        indices += mine
    last = torch.tensor([(len(rows) - 1) % page + 1 if len(rows) else 0 for rows in k])
    tables = (starts_of(counts), torch.tensor(indices, dtype=torch.int32), last.int())
    return tuple(caches), tuple(table.to(device) for table in tables)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim, dim_v", [(32, 32), (192, 128), (40, 20)])
def test_ragged(layout, causal, dim, dim_v, device):
    """Head dimensions of a latent prefill too: keys of 192 columns, values of 128."""
    q, k, v = rows_of(QUERIES, 4, dim, device), rows_of(KEYS, 2, dim, device), rows_of(KEYS, 2, dim_v, device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    options = {"causal": causal, "window_left": 20, "logits_soft_cap": 7.0, "sm_scale": 0.15}
    wrapper.plan(starts_of(QUERIES), starts_of(KEYS, device), 4, 2, dim, dim_v, **options)
    given = [torch.cat(rows) for rows in (k, v)]
    given = given if layout == "NHD" else [rows.transpose(0, 1).contiguous() for rows in given]
    same = {"causal": causal, "window": (20, -1), "softcap": 7.0, "scale": 0.15}
    q_rows = torch.cat(q)
    check(wrapper.run(q_rows, *given, return_lse=True), q, k, v, **same)
    out, lse = wrapper.run_return_lse(q_rows, *given, lse_base="ln", lse_layout="HN")
    check((out, lse.T / math.log(2)), q, k, v, **same)
    assert lse.shape == (4, len(q_rows)) and lse.is_contiguous()
    into, lse_into = torch.empty_like(out), torch.empty(len(q_rows), 4, device=device)
    wrapper.run(q_rows, *given, out=into, lse=lse_into, return_lse=True, v_scale=0.5)
    check((2 * into, lse_into), q, k, v, **same)
    found = wrapper.forward_return_lse(q_rows, *given, causal=False, window_left=3, sm_scale=0.2)
    check(found, q, k, v, window=(3, -1), scale=0.2)


def test_ragged_with_rotated_keys(device):
    """ROPE_LLAMA rotates by places in the own sequence: each sequence alone, by the function for one, gives the same."""
    q, k, v = rows_of(QUERIES, 4, 32, device), rows_of(KEYS, 2, 32, device), rows_of(KEYS, 2, 32, device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(
        starts_of(QUERIES), starts_of(KEYS), 4, 2, 32, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=500.0
    )
    out = wrapper.run(*map(torch.cat, (q, k, v)))
    for part, *rows in zip(out.split(QUERIES), q, k, v, strict=True):
        turned = []
        for x, first in zip(rows[:2], (len(rows[1]) - len(rows[0]), 0), strict=True):
            places = torch.arange(first, first + len(x), device=device).double()
            angles = places[:, None] * 500.0 ** (-torch.arange(16, device=device).double() / 16)
            turned_pairs = (
                torch.complex(x[..., :16].double(), x[..., 16:].double())
                * torch.polar(torch.ones_like(angles), angles)[:, None]
            )
            turned.append(torch.cat((turned_pairs.real, turned_pairs.imag), -1))
        want, _ = exact(*turned, rows[2], causal=True)
        torch.testing.assert_close(part.double(), want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_a_ragged_batch(packed, device):
    q, k, v = rows_of(QUERIES, 4, 32, device), rows_of(KEYS, 2, 32, device), rows_of(KEYS, 2, 32, device)
    masks = [torch.rand(len(a), len(b), device=device) < 0.4 for a, b in zip(q, k, strict=True)]
    masks[0][1] = False  # a row that sees no key
    if packed:
        weights = 2 ** torch.arange(8, device=device)
        pieces = [torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8) for mask in masks]
        given = {"packed_custom_mask": torch.cat([(piece * weights).sum(1) for piece in pieces]).to(torch.uint8)}
    else:
        given = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(starts_of(QUERIES, device), starts_of(KEYS, device), 4, 2, 32, causal=True, **given)
    check(wrapper.run(*map(torch.cat, (q, k, v)), return_lse=True), q, k, v, mask=[mask[None, None] for mask in masks])


def test_ragged_with_keys_of_eight_bits(device):
    q = rows_of(QUERIES, 4, 32, device)
    k, v = ([rows.to(torch.float8_e4m3fn) for rows in rows_of(KEYS, 2, 32, device)] for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(starts_of(QUERIES), starts_of(KEYS), 4, 2, 32, causal=True)
    given = [torch.cat([rows.view(torch.uint8) for rows in of]).view(torch.float8_e4m3fn) for of in (k, v)]
    found = wrapper.run(torch.cat(q), *given, k_scale=0.5, v_scale=2.0, return_lse=True)
    k, v = [rows.float() * 0.5 for rows in k], [rows.float() * 2 for rows in v]
    check(found, q, k, v, causal=True)


def test_every_plan_refills_the_starts_of_a_graph(device):
    """On every device, without a capture: the total stays, the lengths change."""
    buffers = [torch.zeros(5, dtype=torch.int32, device=device) for _ in range(2)]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    q, k, v = (torch.randn(size, 4, 32, device=device) for size in (23, 123, 123))
    for queries, keys in ((QUERIES, KEYS), (QUERIES[::-1], KEYS[::-1]), ([23, 0, 0, 0], [100, 0, 23, 0])):
        wrapper.plan(starts_of(queries, device), starts_of(keys, device), 4, 4, 32, causal=True)
        check(wrapper.run(q, k, v, return_lse=True), q.split(queries), k.split(keys), v.split(keys), causal=True)


def test_sinks_by_the_name_of_their_variant(device):
    """Ragged and over pages, whose one key a page needs no axis; the scale of run() counts."""
    q, k, v = rows_of(QUERIES, 4, 32, device), rows_of(KEYS, 2, 32, device), rows_of(KEYS, 2, 32, device)
    sink = torch.randn(4, device=device) * 3
    same = {"causal": True, "sink": sink.double(), "scale": 0.3}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), backend="fa2", jit_args=SINKS, jit_kwargs={}
    )
    wrapper.plan(starts_of(QUERIES), starts_of(KEYS), 4, 2, 32, causal=True, window_left=11)
    found = wrapper.run(*map(torch.cat, (q, k, v)), sink, 0.3, return_lse=True)
    check(found, q, k, v, window=(11, -1), **same)

    (k_cache, v_cache), tables = paged(k, v, 1, device)
    over_pages = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device), head_dim_qk=32, head_dim_vo=32)
    over_pages.plan(starts_of(QUERIES), *tables, 4, 2, 32, 1, causal=True)
    found = over_pages.run(torch.cat(q), (k_cache[:, 0], v_cache[:, 0]), sink, 0.3, return_lse=True)
    check(found, q, k, v, **same)
    found = over_pages.run(torch.cat(q), torch.stack((k_cache[:, 0], v_cache[:, 0]), 1), sink, 0.3, return_lse=True)
    check(found, q, k, v, **same)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_prompts_and_single_queries_in_one_batch(causal, host, device):
    queries, keys = [5, 1, 0, 13], [33, 70, 7, 13]
    q, k, v = rows_of(queries, 6, 32, device), rows_of(keys, 2, 32, device), rows_of(keys, 2, 32, device)
    cache, (indptr, indices, _) = paged(k, v, 8, device)
    wrapper = flashinfer.BatchAttention(device=device)
    tables = (starts_of(queries, device), indptr, indices, torch.tensor(keys, dtype=torch.int32, device=device))
    tables = [table.cpu() for table in tables] if host else tables
    wrapper.plan(*tables, 6, 2, 32, 32, 8, causal=causal, logits_soft_cap=5.0)
    found = wrapper.run(torch.cat(q), cache, v_scale=2.0, logits_soft_cap=5.0)
    check(found, q, k, [2 * rows for rows in v], causal=causal, softcap=5.0)
    into = (torch.empty_like(found[0]), torch.empty_like(found[1]))
    assert wrapper.run(torch.cat(q), cache, *into, logits_soft_cap=5.0)[0] is into[0]
    check(into, q, k, v, causal=causal, softcap=5.0)


def test_a_fast_plan_stands_in_place_of_plan(device):
    """As programs use it; the starts on the host are those that count."""
    keys = [33, 7, 20, 70]
    q, k, v = rows_of([1] * 4, 4, 32, device), rows_of(keys, 2, 32, device), rows_of(keys, 2, 32, device)
    cache, (indptr, indices, last) = paged(k, v, 8, device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    wrapper.plan = wrapper.begin_forward
    wrapper.plan(
        torch.zeros_like(indptr), indices, last, 4, 2, 32, 8, global_override_indptr_cpu=indptr.cpu(), sm_scale=0.2
    )
    check(wrapper.run(torch.cat(q), cache, return_lse=True), q, k, v, scale=0.2)
    wrapper.plan(indptr, indices, last, 4, 2, 32, 8, "NONE", 9, 3.0, q_len_per_req=1)
    check(wrapper.run(torch.cat(q), cache, return_lse=True), q, k, v, window=(9, 0), softcap=3.0)


def test_a_prompt_beside_single_queries(device):
    keys = [33, 7, 20]
    q, k, v = rows_of([1] * 3, 4, 32, device), rows_of(keys, 2, 32, device), rows_of(keys, 2, 32, device)
    prompt, prompt_k, prompt_v = (torch.randn(size, heads, 32, device=device) for size, heads in ((9, 4), (17, 2), (17, 2)))
    cache, tables = paged(k, v, 8, device)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*tables, 4, 2, 32, 8, window_left=12, sm_scale=0.2)
    mask = torch.rand(9, 17, device=device) < 0.5
    heads_first = [tensor.transpose(0, 1).contiguous() for tensor in (prompt_k, prompt_v)]
    for options, same in (
        ({"causal_p": True, "sm_scale_p": 0.4}, {"causal": True, "scale": 0.4}),
        ({"custom_mask_p": mask}, {"mask": mask[None, None]}),
    ):
        given = {"kv_layout_p": "HND", "v_scale": 2.0, "k_scale": 0.5, **options}
        out_p, out_d = wrapper.run(prompt, *heads_first, torch.cat(q), cache, **given)
        torch.testing.assert_close(out_p.double(), exact(prompt, prompt_k, prompt_v, **same)[0], **CLOSE)
        for b in range(3):
            want = exact(q[b], k[b] * 0.5, v[b] * 2, window=(12, 0), scale=0.2)[0]
            torch.testing.assert_close(out_d[b : b + 1].double(), want, **CLOSE)


def test_prompts_beside_single_queries(device):
    k, v = rows_of([*KEYS, 21, 5], 2, 32, device), rows_of([*KEYS, 21, 5], 2, 32, device)
    q, single = rows_of(QUERIES, 4, 32, device), rows_of([1, 1], 4, 32, device)
    cache, tables_p = paged(k[:4], v[:4], 8, device)
    cache_d, tables_d = paged(k[4:], v[4:], 8, device)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(starts_of(QUERIES), *tables_p, starts_of([1, 1]), *tables_d, 4, 2, 32, 8, sm_scale=0.3)
    masks = [torch.rand(len(a), len(b), device=device) < 0.5 for a, b in zip(q, k[:4], strict=True)]
    for options, same in (
        ({"causal_p": True}, {"causal": True}),
        ({"custom_mask_p": torch.cat([mask.flatten() for mask in masks])}, {"mask": [mask[None, None] for mask in masks]}),
        ({}, {}),
    ):
        (out_p, out_d), (lse_p, lse_d) = wrapper.run(
            torch.cat(q), cache, torch.cat(single), cache_d, return_lse=True, **options
        )
        check((out_p, lse_p), q, k[:4], v[:4], scale=0.3, **same)
        check((out_d, lse_d), single, k[4:], v[4:], scale=0.3)
    assert torch.equal(wrapper.run(torch.cat(q), cache, torch.cat(single), cache_d)[0], out_p)


@pytest.mark.parametrize("stage", ["decode", "append"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_shared_prefix_beside_own_pages(stage, layout, device):
    queries, keys = ([1] * 4, KEYS) if stage == "decode" else (QUERIES, KEYS)
    q, k, v = rows_of(queries, 4, 32, device), rows_of(keys, 2, 32, device), rows_of(keys, 2, 32, device)
    prefix = [torch.randn(19, 2, 32, device=device) for _ in range(2)]
    cache, tables = paged(k, v, 8, device)
    shared = prefix
    if layout == "HND":
        cache, shared = (tuple(part.transpose(-3, -2).contiguous() for part in of) for of in (cache, prefix))
    if stage == "decode":
        wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
        wrapper.begin_forward(*tables, 4, 2, 32, 8)
        out = wrapper.forward(torch.cat(q), *shared, cache)
    else:
        wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
        wrapper.begin_forward(starts_of(queries), *tables, 4, 2, 32, 8)
        out = wrapper.forward(torch.cat(q), *shared, cache, causal=True)
    for part, q_rows, k_rows, v_rows in zip(out.split(queries), q, k, v, strict=True):
        whole = [torch.cat(pair) for pair in zip(prefix, (k_rows, v_rows), strict=True)]
        torch.testing.assert_close(part.double(), exact(q_rows, *whole, causal=stage == "append")[0], **CLOSE)


def item_mask(keys, queries, prefix, items):
    """From the description: a token sees the prefix; one of an item sees its item up to itself; one that separates no more.
    items: sizes of the items behind the prefix, each behind a token that separates."""
    owner, own = [None] * prefix, [False] * prefix
    for number, size in enumerate(items):
        owner += [number] * (size + 1)
        own += [False] + [True] * size
    owner += [len(items)] * (keys - len(owner))  # a last token that separates, if there is one
    own += [False] * (keys - len(own))
    mask = torch.zeros(keys, keys, dtype=torch.bool)
    for i in range(keys):
        for j in range(i + 1):
            in_prefix = owner[i] is None or owner[j] is None
            mask[i, j] = in_prefix or (own[i] and own[j] and owner[i] == owner[j])
    return mask[keys - queries :]


@pytest.mark.parametrize("over_pages", [False, True])
def test_items_are_scored_alone(over_pages, device):
    """Two prompts of different items; the queries begin inside of the prefix."""
    prefixes, items = [11, 6], [[4, 3, 7], [9, 2]]
    keys = [prefix + sum(size + 1 for size in sizes) + 1 for prefix, sizes in zip(prefixes, items, strict=True)]
    queries = [keys[0] - 8, keys[1] - 6]
    q, k, v = rows_of(queries, 4, 32, device), rows_of(keys, 2, 32, device), rows_of(keys, 2, 32, device)
    length = 20
    places = torch.zeros(2, length, dtype=torch.int64)
    for b, sizes in enumerate(items):
        mine = [place for size in sizes for place in range(size + 1)]
        places[b, : len(mine)] = torch.tensor(mine)
    given = {
        "prefix_len_ptr": torch.tensor(prefixes).to(torch.uint32).to(device),
        "token_pos_in_items_ptr": places.flatten().to(torch.uint16).to(device),
        "token_pos_in_items_len": length,
        "max_item_len_ptr": torch.tensor([7, 9]).to(torch.uint16).to(device),
    }
    if over_pages:
        cache, tables = paged(k, v, 8, device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(starts_of(queries), *tables, 4, 2, 32, 8, causal=True, window_left=15, **given)
        found = wrapper.run(torch.cat(q), cache, return_lse=True)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
        wrapper.plan(starts_of(queries), starts_of(keys), 4, 2, 32, causal=True, window_left=15, **given)
        found = wrapper.run(*map(torch.cat, (q, k, v)), return_lse=True)
    masks = [item_mask(*of).to(device)[None, None] for of in zip(keys, queries, prefixes, items, strict=True)]
    check(found, q, k, v, mask=masks, causal=True, window=(15, -1))


@pytest.mark.parametrize("dims", [(512, 64), (24, 8)])
def test_latent_rows_are_appended(dims, device):
    """Into pages in disorder; the rest of both caches keeps its NaN."""
    lengths, page = [9, 1, 4], 4
    latent, rope = rows_of(lengths, 1, dims[0], device), rows_of(lengths, 1, dims[1], device)
    (ckv, kpe), (indptr, indices, last) = paged(latent, rope, page, device)
    into = [torch.full_like(cache, float("nan"))[:, :, 0] for cache in (ckv, kpe)]
    total = sum(lengths)
    places = flashinfer.get_batch_indices_positions(
        starts_of(lengths, device), flashinfer.get_seq_lens(indptr, last, page), total
    )
    new = [torch.cat(rows)[:, 0] for rows in (latent, rope)]
    flashinfer.append_paged_mla_kv_cache(*new, *places, *into, indices, indptr, last)
    for cache, want in zip(into, (ckv, kpe), strict=True):
        torch.testing.assert_close(cache, want[:, :, 0], equal_nan=True, rtol=0, atol=0)


def test_wrong_uses_are_refused():
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(RuntimeError, match="plan"):
        ragged.run(*(torch.zeros(1, 1, 8) for _ in range(3)))
    with pytest.raises(NotImplementedError, match=r"jit_args.*'Other'"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), jit_args=(*SINKS[:11], "Other", "source"))
    with pytest.raises(ValueError, match="kv_indptr: got 2"):
        ragged.plan(starts_of([1, 1]), starts_of([2]), 4, 2, 8)
    ragged.plan(starts_of([2]), starts_of([3]), 4, 2, 8)
    with pytest.raises(ValueError, match=r"q: got shape \[3, 4, 8\]; expected \[2, 4, 8\]"):
        ragged.run(torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match="v: got shape"):
        ragged.run(torch.zeros(2, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 16))
    with pytest.raises(ValueError, match="lse_layout: got 'HH'"):
        ragged.run(torch.zeros(2, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), return_lse=True, lse_layout="HH")
    mixed = flashinfer.BatchAttention(device="cpu")
    with pytest.raises(ValueError, match="kv_len_arr"):
        mixed.plan(starts_of([1]), starts_of([1]), *(torch.tensor([n], dtype=torch.int32) for n in (0, 9)), 4, 2, 8, 8, 8)
    mixed.plan(starts_of([1]), starts_of([1]), *(torch.tensor([n], dtype=torch.int32) for n in (0, 5)), 4, 2, 8, 8, 8)
    with pytest.raises(ValueError, match=r"logits_soft_cap: got 3\.0; expected 0\.0"):
        mixed.run(torch.zeros(1, 4, 8), torch.zeros(1, 2, 8, 2, 8), logits_soft_cap=3.0)
    with pytest.raises(ValueError, match="both or neither"):
        ragged.plan(starts_of([2]), starts_of([3]), 4, 2, 8, prefix_len_ptr=torch.tensor([1]))
    pod = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"))
    table = (starts_of([1]), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="qo_indptr_d"):
        pod.plan(starts_of([2]), *table, starts_of([2]), *table, 4, 2, 8, 8)
