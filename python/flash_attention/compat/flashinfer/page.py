"""Page tables of FlashInfer: (indptr, indices, last_page_len), and writing to the pages that they name."""

import math

import torch
from torch import Tensor

from flash_attention.append import append_kv
from flash_attention.arguments.tables import as_int32, check_integers, check_range, check_starts
from flash_attention.compat.flashinfer.arguments import split_cache

_MOST_ENTRIES = 1 << 22  # of a table that is wider than necessary, so that nothing waits for the GPU: 16 MB


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """int32 [batch]: the number of keys in the pages of each sequence, 0 if it has none.

    For example:

        ends, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 8], dtype=torch.int32)
        lengths = get_seq_lens(ends, last, 8)  # 9 and 8
    """
    pages = kv_indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0).to(torch.int32)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sequence and position of each of `nnz` new tokens, int32 [nnz] each, packed end to end by append_indptr.

        starts, lengths = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([9, 8], dtype=torch.int32)
        batch, places = get_batch_indices_positions(starts, lengths, 5)

    seq_lens includes the new tokens. Tokens after the last of append_indptr belong to no sequence: -1.
    """
    append_indptr = check_starts("append_indptr", as_int32("append_indptr", append_indptr, ("batch + 1",)), nnz)
    seq_lens = as_int32("seq_lens", seq_lens, (len(append_indptr) - 1,), append_indptr.device)
    token = torch.arange(nnz, dtype=torch.int32, device=append_indptr.device)
    sequence = torch.searchsorted(append_indptr[1:].contiguous(), token, right=True, out_int32=True)
    known = sequence < len(seq_lens)
    if len(seq_lens):
        owner = sequence.clamp(max=len(seq_lens) - 1).long()
        place = (seq_lens - append_indptr[1:])[owner] + token
    else:
        place = token
    results = (torch.where(known, sequence, -1), torch.where(known, place, -1))
    for into, found in ((batch_indices, results[0]), (positions, results[1])):
        if into is not None:
            into[:nnz].copy_(found)
    return (
        results[0] if batch_indices is None else batch_indices,
        results[1] if positions is None else positions,
    )


@torch.no_grad()
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes keys and values [nnz, num_kv_heads, head_dim] to places of the cache: token t is position positions[t] of
    sequence batch_indices[t]. The tables already include the new tokens. Tokens with a negative index are left out.

    For example:

        pages = torch.zeros(3, 2, 8, 4, 64)
        starts, ends = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
        last = torch.tensor([1, 8], dtype=torch.int32)  # tokens in the last page of each sequence
        batch, places = get_batch_indices_positions(starts, get_seq_lens(ends, last, 8), 5)
        table = torch.tensor([0, 2, 1], dtype=torch.int32)
        append_paged_kv_cache(k[0, :5], v[0, :5], batch, places, pages, table, ends, last)
    """
    pages = split_cache(paged_kv_cache, kv_layout)
    new = {"append_key": append_key, "append_value": append_value}
    _append(new, pages, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)


@torch.no_grad()
def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """append_paged_kv_cache() for a latent cache: append_ckv [nnz, ckv_dim] and append_kpe [nnz, kpe_dim] into ckv_cache
    [num_pages, page_size, ckv_dim] and kpe_cache [num_pages, page_size, kpe_dim].

    For example:

        ckv, kpe = torch.zeros(3, 8, 512), torch.zeros(3, 8, 64)
        batch, places = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([8, 7], dtype=torch.int32)
        ends, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 8], dtype=torch.int32)
        table = torch.tensor([0, 2, 1], dtype=torch.int32)
        append_paged_mla_kv_cache(torch.randn(2, 512), torch.randn(2, 64), batch, places, ckv, kpe, table, ends, last)
    """
    for name, tensor, axes in (
        ("append_ckv", append_ckv, 2),
        ("append_kpe", append_kpe, 2),
        ("ckv_cache", ckv_cache, 3),
        ("kpe_cache", kpe_cache, 3),
    ):
        if not isinstance(tensor, Tensor) or tensor.dim() != axes:
            raise ValueError(f"{name}: expected a tensor of {axes} axes")
    new = {"append_ckv": append_ckv[:, None], "append_kpe": append_kpe[:, None]}
    pages = (ckv_cache[:, :, None], kpe_cache[:, :, None])
    _append(new, pages, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)


@torch.no_grad()
def nvfp4_quantize_append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_cache_sf: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    """append_paged_kv_cache() into a cache in nvfp4: uint8, head_dim / 2 bytes in a row, and kv_cache_sf with the scales
    of groups of 16 columns, e4m3 (or its bytes). A value is code * scale * k_scale or v_scale.

    For example:

        pages, scales = torch.zeros(3, 2, 8, 4, 32, dtype=torch.uint8), torch.zeros(3, 2, 8, 4, 4, dtype=torch.uint8)
        batch, places = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([8, 7], dtype=torch.int32)
        ends, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 8], dtype=torch.int32)
        new = k[0, :2], v[0, :2]
        table = torch.tensor([0, 2, 1], dtype=torch.int32)
        nvfp4_quantize_append_paged_kv_cache(*new, batch, places, pages, scales, table, ends, last, 1.0, 1.0)
    """
    new = {"append_key": append_key, "append_value": append_value}
    pages, four_bits = _in_nvfp4(paged_kv_cache, kv_cache_sf, kv_layout, k_scale, v_scale)
    _append(new, pages, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, four_bits)


@torch.no_grad()
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Tensor,
    append_value: Tensor,
    slot_mapping: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_cache_sf: Tensor | tuple[Tensor, Tensor],
    k_scale: float | Tensor,
    v_scale: float | Tensor,
    kv_layout: str = "NHD",
) -> None:
    """The same with a place for each token: slot_mapping[t] is page * page_size + entry. Tokens with a slot outside of the
    cache and tokens after the last slot are left out.

    For example:

        pages, scales = torch.zeros(3, 2, 8, 4, 32, dtype=torch.uint8), torch.zeros(3, 2, 8, 4, 4, dtype=torch.uint8)
        slots = torch.tensor([17, -1], dtype=torch.int32)
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k[0, :2], v[0, :2], slots, pages, scales, 1.0, 1.0)
    """
    pages, four_bits = _in_nvfp4(paged_kv_cache, kv_cache_sf, kv_layout, k_scale, v_scale)
    if slot_mapping.dtype not in (torch.int32, torch.int64) or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping: got {slot_mapping.dtype} {list(slot_mapping.shape)}; expected int32 or int64 [nnz]"
        )
    nnz, capacity = len(slot_mapping), pages[0].shape[0] * pages[0].shape[1]
    new = {"append_key": append_key, "append_value": append_value}
    for name, rows in new.items():
        if len(rows) < nnz:
            raise ValueError(f"{name}: got {len(rows)} rows; expected at least {nnz}, as slot_mapping has")
    new = {name: rows[:nnz] for name, rows in new.items()}
    _check_rows(new, pages, nnz, four_bits)
    if not nnz or not capacity:
        return
    inside = (slot_mapping >= 0) & (slot_mapping < capacity)
    sequences = torch.where(inside, 0, -1).to(torch.int32)
    positions = torch.where(inside, slot_mapping, -1).to(torch.int32)
    rows = tuple(new.values())
    if not slot_mapping.is_cuda:  # on a GPU rows of no sequence are not written
        rows = tuple(part[inside] for part in rows)
        sequences, positions = sequences[inside], positions[inside]
    table = torch.arange(pages[0].shape[0], dtype=torch.int32, device=pages[0].device)[None]
    append_kv(*pages, *rows, sequences=sequences, positions=positions, page_table=table, **four_bits)


def _in_nvfp4(paged_kv_cache, kv_cache_sf, kv_layout, k_scale, v_scale):
    """The pages of a cache in nvfp4, and what append_kv() must know of it."""
    pages, scales = split_cache(paged_kv_cache, kv_layout), split_cache(kv_cache_sf, kv_layout, "kv_cache_sf")
    for page in pages:
        if page.dtype != torch.uint8:
            raise ValueError(f"paged_kv_cache: got {page.dtype}; expected codes of 4 bits in torch.uint8")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        waits = isinstance(scale, Tensor) and scale.is_cuda
        if waits and torch.cuda.is_current_stream_capturing():  # its value cannot be looked at
            continue
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"{name}: got {float(scale)}; expected a positive finite global decode scale")
    # A number for the kernel's arguments, unless it is in a GPU's memory.
    of_tensors = {
        name: scale if isinstance(scale, Tensor) and scale.is_cuda else float(scale)
        for name, scale in (("k_global_scale", k_scale), ("v_global_scale", v_scale))
    }
    return pages, {"cache_dtype": "nvfp4", "k_scale": scales[0], "v_scale": scales[1], **of_tensors}


def _check_rows(new, pages, nnz, four_bits=None):
    for (name, rows), cache in zip(new.items(), pages, strict=True):
        wanted = [nnz, cache.shape[2], cache.shape[3] * (1 if four_bits is None else 2)]
        if list(rows.shape) != wanted or rows.device != cache.device:
            raise ValueError(f"{name}: got {list(rows.shape)} on {rows.device}; expected {wanted} on {cache.device}")


def _append(new, pages, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, four_bits=None):
    """new: two tensors [nnz, heads, dim] by their names, for pages [num_pages, page_size, heads, dim]."""
    first = pages[0]
    nnz, page_size = len(next(iter(new.values()))), first.shape[1]
    kv_indptr = as_int32("kv_indptr", kv_indptr, ("batch + 1",))
    kv_indices = as_int32("kv_indices", kv_indices, ("pages",))
    kv_last_page_len = as_int32("kv_last_page_len", kv_last_page_len, ("batch",))
    batch_indices = as_int32("batch_indices", batch_indices, (nnz,))
    positions = as_int32("positions", positions, (nnz,))
    check_table(kv_indptr, kv_indices, kv_last_page_len, page_size, first.device, "kv_")
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        check_integers(name, tensor, (nnz,), first.device)
    _check_rows(new, pages, nnz, four_bits)
    check_range("batch_indices", batch_indices, -1, len(kv_last_page_len) - 1)
    check_range("kv_indices", kv_indices, 0, first.shape[0] - 1)
    if not nnz:
        return
    rows = tuple(new.values())
    if not batch_indices.is_cuda:  # on a GPU rows of no sequence are not written
        known = (batch_indices >= 0) & (positions >= 0)
        rows = tuple(part[known] for part in rows)
        batch_indices, positions = batch_indices[known], positions[known]
        _check_room(batch_indices, positions, kv_indptr.diff() * page_size)
    if not len(kv_indices):  # so no token has a place
        return
    table = rectangle(kv_indptr, kv_indices, table_width(kv_indptr, kv_indices), behind=-1)
    places = {"sequences": batch_indices, "positions": positions, "page_table": table.contiguous()}
    append_kv(*pages, *rows, **places, **(four_bits or {}))


def _check_room(batch_indices, positions, room):
    """Refuses tokens after the pages of their sequence: these pages belong to another one."""
    wrong = (positions >= room[batch_indices.long()]).nonzero()
    if len(wrong):
        entry = int(wrong[0])
        sequence = int(batch_indices[entry])
        has = f"sequence {sequence} has pages for {int(room[sequence])} keys"
        raise ValueError(f"positions: entry [{entry}] is {int(positions[entry])}; {has}")


def check_table(indptr, indices, last_page_len, page_size, device=None, prefix=""):
    """Refuses malformed tables of pages, and entries out of range if they are on the host."""
    if page_size < 1:
        raise ValueError(f"page_size: got {page_size}; allowed are 1 and more")
    check_integers(f"{prefix}indices", indices, ("pages",), device)
    check_starts(f"{prefix}indptr", indptr, len(indices), device)
    check_integers(f"{prefix}last_page_len", last_page_len, (len(indptr) - 1,), device)
    if not indptr.is_cuda and not last_page_len.is_cuda:
        used = last_page_len[indptr.diff() > 0]
        check_range(f"{prefix}last_page_len", used, 1, page_size)


def table_width(indptr, indices):
    """The pages of the longest sequence. If only a GPU knows them: an upper bound, unless the table would be large."""
    batch = len(indptr) - 1
    if not batch or not len(indices):
        return 0
    if indptr.is_cuda and batch * len(indices) <= _MOST_ENTRIES:
        return len(indices)
    return int(indptr.diff().max())


def table_over(table, pages):
    """The table in the kernels' form: no columns for a cache without pages, however wide the table of a graph is."""
    return table if len(pages) else table[:, :0]


def rectangle(indptr, indices, width, behind=None):
    """int32 [batch, width]: the pages of each sequence, then `behind`; if None, any entries, which are never used."""
    place = indptr[:-1, None] + torch.arange(width, dtype=torch.int32, device=indptr.device)
    if not len(indices):
        return torch.zeros_like(place)
    table = indices[place.clamp(0, len(indices) - 1)]
    return table if behind is None else torch.where(place < indptr[1:, None], table, behind)
