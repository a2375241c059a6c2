"""FlashInfer's packed masks: of one prompt, of long prompts end to end, and in the buffers of a graph, against float64."""

import pytest
import torch
from flash_attention import flashinfer
from test_flashinfer import paged
from test_flashinfer_wrappers import check, starts_of, workspace

LENGTHS, COUNTS = [33, 7, 70], [20, 3, 9]


def bits_of(masks):
    """uint8, each mask from a new byte, the lowest bit first."""
    pieces = [torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8) for mask in masks]
    weights = 2 ** torch.arange(8, device=masks[0].device)
    return torch.cat([(piece * weights).sum(1) for piece in pieces]).to(torch.uint8)


def random_masks(counts, lengths, device):
    masks = [torch.rand(count, length, device=device) < 0.4 for count, length in zip(counts, lengths, strict=True)]
    masks[0][1] = False  # a row that sees no key
    return masks


@pytest.mark.parametrize("queries", [6, 70])
def test_bits_of_one_prompt(queries, device):
    """Few queries read the bits, more get bools."""
    q, k, v = (torch.randn(size, heads, 32, device=device) for size, heads in ((queries, 4), (91, 2), (91, 2)))
    (mask,) = random_masks([queries], [91], device)
    for given in ({"packed_custom_mask": bits_of([mask])}, {"custom_mask": mask}):
        found = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True, **given)
        check(found, [q], [k], [v], mask=mask)


def test_bits_of_one_prompt_over_keys_of_eight_bits(device):
    q = torch.randn(5, 4, 32, device=device)
    k, v = (torch.randn(37, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    (mask,) = random_masks([5], [37], device)
    given = {"packed_custom_mask": bits_of([mask]), "k_scale": 0.5, "v_scale": 2.0}
    found = flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **given)
    check(found, [q], [k.float() * 0.5], [v.float() * 2], mask=mask)


def test_bits_of_long_prompts_end_to_end(device):
    queries, keys = [70, 1, 3], [75, 7, 33]
    q, k, v = ([torch.randn(n, heads, 32, device=device) for n in of] for of, heads in ((queries, 4), (keys, 2), (keys, 2)))
    masks = random_masks(queries, keys, device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(starts_of(queries, device), starts_of(keys, device), 4, 2, 32, packed_custom_mask=bits_of(masks))
    check(wrapper.run(*map(torch.cat, (q, k, v)), return_lse=True), q, k, v, mask=masks)


def graph_wrapper(device, pages, most_bytes):
    """On every device, without a capture."""
    sizes = {"qo_indptr": 4, "paged_kv_indptr": 4, "paged_kv_indices": pages, "paged_kv_last_page_len": 3, "mask_indptr": 4}
    buffers = {f"{name}_buf": torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    buffers["custom_mask_buf"] = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, **buffers), buffers


@pytest.mark.parametrize("packed", [False, True])
def test_every_plan_refills_the_masks_of_a_graph(packed, device):
    """Other masks, other lengths, none, and causal after none: what an earlier plan left in the buffers is not seen."""
    page = 16
    cache, (starts, indices, last), rows = paged(LENGTHS, page, 2, 32, device)
    pages = indices.split(starts.diff().tolist())
    wrapper, buffers = graph_wrapper(device, len(indices) + 2, 400)
    q = torch.randn(sum(COUNTS), 4, 32, device=device)
    for order in ([0, 1, 2], [2, 0, 1], None, [1, 2, 0]):
        here = order or [0, 1, 2]
        counts, mine = [COUNTS[b] for b in here], list(zip(*(rows[b] for b in here), strict=True))
        tables = (starts_of([len(pages[b]) for b in here], device), torch.cat([pages[b] for b in here]), last[here])
        plan = (starts_of(counts, device), *tables, 4, 2, 32, page)
        if order is None:
            wrapper.plan(*plan, causal=True)
            check(wrapper.run(q, cache, return_lse=True), q.split(counts), *mine, causal=True)
            old = wrapper.forward(q, cache, causal=True, return_lse=True)  # FlashInfer's old name for a run
            check(old, q.split(counts), *mine, causal=True)
            continue
        masks = random_masks(counts, [LENGTHS[b] for b in here], device)
        given = {"packed_custom_mask": bits_of(masks)} if packed else {"custom_mask": torch.cat([m.flatten() for m in masks])}
        wrapper.plan(*plan, causal=True, **given)
        for found in (wrapper.run(q, cache, return_lse=True), wrapper.forward(q, cache, True, return_lse=True)):
            check(found, q.split(counts), *mine, mask=masks)
        assert int(buffers["mask_indptr_buf"][-1]) == len(bits_of(masks))


@pytest.mark.parametrize(
    ("given", "most_bytes", "message"),
    [
        ({"packed_custom_mask": torch.zeros(164, dtype=torch.uint8)}, 400, "packed_custom_mask: has 1312 bits; expected at l"),
        ({"packed_custom_mask": torch.zeros(165, dtype=torch.uint8)}, 164, "custom_mask_buf: has 164 bytes; expected at l"),
        ({"packed_custom_mask": torch.zeros(164)}, 400, "packed_custom_mask: got torch.float32"),
        ({"custom_mask": torch.ones(1310).bool()}, 400, r"custom_mask: got shape \[1310\]; expected \[1311\]"),
        ({"custom_mask": torch.ones(1312).bool()}, 400, r"custom_mask: got shape \[1312\]; expected \[1311\]"),
        ({"custom_mask": torch.ones(1311).bool()}, 164, "custom_mask_buf: has 164 bytes; expected at least 165"),
    ],
)
def test_masks_of_a_graph_that_are_refused(given, most_bytes, message):
    _, tables, _ = paged(LENGTHS, 16, 2, 32, "cpu")
    wrapper, _ = graph_wrapper("cpu", 20, most_bytes)
    with pytest.raises((TypeError, ValueError), match=message):
        wrapper.plan(starts_of(COUNTS), *tables, 4, 2, 32, 16, **given)


def test_buffers_of_masks_that_are_refused():
    _, tables, _ = paged(LENGTHS, 16, 2, 32, "cpu")
    _, buffers = graph_wrapper("cpu", 20, 400)
    for changes, message in (
        ({"mask_indptr_buf": None}, "custom_mask_buf, mask_indptr_buf: got one of them"),
        ({"custom_mask_buf": torch.zeros(400)}, r"custom_mask_buf: got torch.float32 \[400\]; expected uint8"),
        ({"mask_indptr_buf": torch.zeros(3, dtype=torch.int32)}, "mask_indptr_buf: got shape"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, **{**buffers, **changes})
    without = {name: value for name, value in buffers.items() if "mask" not in name}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, **without)
    with pytest.raises(ValueError, match="custom_mask: with use_cuda_graph it needs custom_mask_buf and mask_indptr_buf"):
        wrapper.plan(starts_of(COUNTS), *tables, 4, 2, 32, 16, custom_mask=torch.ones(1311).bool())
