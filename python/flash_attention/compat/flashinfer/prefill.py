"""FlashInfer's prefill: many queries a sequence, end to end, over a cache."""

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.head_dim import padded, padded_cache, padded_narrow
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import Renamed
from flash_attention.arguments.tables import check_starts
from flash_attention.compat.flashinfer.arguments import (
    NAMES,
    asks_for_invariant,
    check_heads,
    columns_of,
    direct,
    finish,
    four_bit_options,
    nhd,
    refuse_given,
    scale_of,
    split_cache,
)
from flash_attention.compat.flashinfer.masks import (
    MOST_QUERIES_WITH_BITS,
    Items,
    bits_of_batch,
    mask_buffers,
    single_bits,
    unpacked,
)
from flash_attention.compat.flashinfer.narrow import attend, dtype_of, head_scales, of_sequences, scales_of_run, widened
from flash_attention.compat.flashinfer.plan import Tables
from flash_attention.compat.flashinfer.positions import Positions
from flash_attention.compat.flashinfer.ragged import (
    BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
)
from flash_attention.compat.flashinfer.variant import sinks_and_scale, takes_sinks
from flash_attention.masks import BitMask


@torch.no_grad()
def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **wrong: NoReturn,
) -> Any:
    """Attention of q [qo_len, num_qo_heads, head_dim] over k, v [kv_len, num_kv_heads, head_dim] (HND: heads first).

        out = single_prefill_with_kv_cache(q[0], k[0], v[0], causal=True)

    custom_mask: bool [qo_len, kv_len], True = visible; or packed_custom_mask, its bits in bytes, the lowest first. Either
    replaces causal. scale_q, scale_k, scale_v: of q, k and v in float8, float32 [heads] or [1]; o_dtype is the type of out,
    bfloat16 if q is float8. Returns out as q, or (out, lse [qo_len, num_qo_heads] of base 2).
    """
    if wrong:
        refuse_keywords(single_prefill_with_kv_cache, wrong)
    positions = Positions(pos_encoding_mode, rope_scale, rope_theta, causal and custom_mask is packed_custom_mask is None)
    if q.dim() != 3:
        raise ValueError(f"q: got shape {list(q.shape)}; expected [qo_len, num_qo_heads, head_dim]")
    k, v = (nhd(name, tensor, kv_layout) for name, tensor in (("k", k), ("v", v)))
    four_bits = four_bit_options(
        k, kv_cache_sf, kv_layout, lambda pair: [nhd("kv_cache_sf", x, kv_layout)[None] for x in pair]
    )
    mask, bits = custom_mask, None
    if packed_custom_mask is not None and (k.element_size() == 1 or q.shape[0] > MOST_QUERIES_WITH_BITS):
        mask = unpacked(packed_custom_mask, q.shape[0] * k.shape[0]).view(q.shape[0], k.shape[0])
    elif packed_custom_mask is not None:
        mask, bits = None, single_bits(packed_custom_mask, q.shape[0] * k.shape[0])
    if mask is not None and tuple(mask.shape) != (q.shape[0], k.shape[0]):
        raise ValueError(f"custom_mask: got shape {list(mask.shape)}; expected {[q.shape[0], k.shape[0]]}")
    scales = head_scales(q, k, scale_q, scale_k, scale_v)
    q, k, v = positions.rotated(q, k, v, four_bits)
    if q.element_size() == 1 and four_bits is None:
        run = functools.partial(attend, padded, scales=scales, batch=1, out_dtype=o_dtype)
    else:
        run = padded_narrow if bits is None else functools.partial(padded_cache, bit_mask=bits)
        if k.element_size() == 1 and four_bits is None:
            run = functools.partial(run, k_scale=of_sequences(scales[1], 1), v_scale=of_sequences(scales[2], 1))
    with Renamed(NAMES):
        out, lse = run(
            q[None],
            k[None],
            v[None],
            scale=scale_of(q.shape[-1], sm_scale, None, k_scale),
            softcap=logits_soft_cap or 0.0,
            causal=causal and mask is None and bits is None,
            window=(window_left, -1),
            mask=None if mask is None else mask.bool()[None, None],
            alibi_slopes=positions.slopes(q.shape[1], q.device),
            return_lse=True,
            **(four_bits or {}),
        )
    out, lse = out[0], lse[0].transpose(0, 1)
    return finish(out if o_dtype is None else out.to(o_dtype), lse, v_scale, None, None, return_lse)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's wrapper: plan() takes the queries' starts and the page tables of a batch, run() attends.

    The buffers and use_cuda_graph are as in BatchDecodeWithPagedKVCacheWrapper; in a graph the number of query tokens is
    that of the q which was captured, and a mask needs its two buffers, uint8 [most bytes] and int32 [batch + 1].
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        self._takes_sinks = takes_sinks(jit_args)
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        self._tables = Tables(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._starts = self._bits = self._bit_buffers = None
        if use_cuda_graph and (custom_mask_buf is None) != (mask_indptr_buf is None):
            raise ValueError("custom_mask_buf, mask_indptr_buf: got one of them; expected both or neither")
        if use_cuda_graph and custom_mask_buf is not None:
            self._bit_buffers = mask_buffers(custom_mask_buf, mask_indptr_buf, self._tables)
        if use_cuda_graph:
            self._starts = check_starts("qo_indptr_buf", qo_indptr_buf, None, self._tables.device)
        self._options, self._masked = None, False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._tables.fixed

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def workspace_size(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        """(0, 0), of the arguments of plan(): no workspace of the caller is used."""
        return 0, 0

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: keys and values may have different strides in any call."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Sequence b has the queries qo_indptr[b] : qo_indptr[b + 1] and the pages of plan() of BatchDecode...Wrapper.

        causal: the last query sees the last key. custom_mask: bool, [queries x keys] of each sequence end to end (or packed
        bits, each sequence from a new byte); it replaces causal. prefix_len_ptr and token_pos_in_items_ptr: several items
        follow one prefix, and each sees the prefix and itself. fixed_split_size, disable_split_kv: with any
        number, or True, the bits of a row do not depend on the batch.
        """
        items = Items.of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        masked = custom_mask is not None or packed_custom_mask is not None
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta, (causal or items is not None) and not masked)
        check_heads(num_qo_heads, num_kv_heads)
        check_starts("qo_indptr", qo_indptr, None)
        if len(qo_indptr) != len(paged_kv_indptr):
            raise ValueError(
                f"qo_indptr: got {len(qo_indptr)} entries; expected {len(paged_kv_indptr)}, as paged_kv_indptr"
            )
        table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._tables.plan(*table, page_size, block_tables, seq_lens)
        most = max_token_per_sequence
        if most is None and not qo_indptr.is_cuda and not self._tables.fixed:
            most = int(qo_indptr.diff().max()) if len(qo_indptr) > 1 else 0
        starts = qo_indptr.to(self._tables.device, non_blocking=True)
        if self._tables.fixed:
            starts = self._starts.copy_(starts)
        self._mask = None
        self._plan_bits(custom_mask, packed_custom_mask, starts)
        if items is not None and not masked:
            if self._tables.fixed:
                raise NotImplementedError("prefix_len_ptr: got items; with use_cuda_graph only None is supported")
            width = self._tables.table.shape[1] * page_size
            self._mask = items.mask(starts, self._tables.lengths, width)
            most = self._mask.shape[2]
        self._starts, self._most = starts, most
        self._invariant = asks_for_invariant(fixed_split_size, disable_split_kv)
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._masked = masked or self._mask is not None
        self._options = {
            "causal": causal and not masked,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        }
        self._out_dtype = dtype_of("o_data_type", o_data_type)

    begin_forward = plan

    def _plan_bits(self, custom_mask, packed_custom_mask, starts):
        masked = custom_mask is not None or packed_custom_mask is not None
        buffers = self._bit_buffers
        if masked and self._tables.fixed and buffers is None:
            raise ValueError("custom_mask: with use_cuda_graph it needs custom_mask_buf and mask_indptr_buf")
        self._bits = None
        if masked:
            self._bits = bits_of_batch(custom_mask, packed_custom_mask, starts, self._tables.lengths, buffers)
        elif buffers is not None:  # no sequence has bits, so none has a mask
            self._bits = BitMask(buffers[0], buffers[1].zero_())

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim] over the planned pages of paged_kv_cache.

        Returns out as q, or (out, lse float32 [qo_indptr[-1], num_qo_heads] of base 2). kv_cache_sf is that of
        BatchDecode...Wrapper. lse_base, lse_layout: "ln" for the natural logarithm, "HN" for heads first. Three more
        positional arguments are scale_q, scale_k and scale_v of q and a cache in float8: float32 [heads] or [1]. Such
        queries become float16; out is of plan()'s o_data_type.
        """
        if self._options is None:
            raise RuntimeError("run: plan() has not been called")
        refuse_given(
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            uses_spcompress=uses_spcompress,
        )
        with_lse = return_lse or lse is not None  # lse= is written in any case
        options = self._options
        heads_q, heads_kv, head_dim = self._heads
        if q.dim() != 3 or list(q.shape[1:]) != [heads_q, head_dim]:
            raise ValueError(f"q: got shape {list(q.shape)}; expected [qo_indptr[-1], {heads_q}, {head_dim}], as planned")
        k, v = split_cache(paged_kv_cache, self._tables.kv_layout)
        scales, args = scales_of_run(q, k, args)
        sinks, sm_scale = sinks_and_scale(self._takes_sinks, args, sinks, options["sm_scale"])
        as_planned = None
        if q.element_size() == 1:
            q, as_planned = widened(q, scales[0]), self._out_dtype
        four_bits = four_bit_options(k, kv_cache_sf, self._tables.kv_layout)
        table, lengths = self._tables.over(k, heads_kv, head_dim if four_bits is None else head_dim // 2)
        q, k, v, table = self._positions.over_pages(q, k, v, table, lengths, self._starts, four_bits)
        place = direct(out, q, columns_of(v, four_bits), v_scale)
        of_cache = four_bits or {}
        if k.element_size() == 1 and four_bits is None:
            of_cache = dict(zip(("k_scale", "v_scale"), (of_sequences(s, len(lengths)) for s in scales[1:]), strict=True))
        with Renamed(NAMES):
            found = padded_cache(
                q,
                k,
                v,
                page_table=table,
                seqused_kv=lengths,
                cu_seqlens_q=self._starts,
                max_seqlen_q=self._most,
                mask=self._mask,
                bit_mask=self._bits,
                sink=sinks,
                alibi_slopes=self._positions.slopes(heads_q, q.device),
                scale=scale_of(head_dim, sm_scale, q_scale, k_scale),
                softcap=options["logits_soft_cap"] or 0.0,
                causal=options["causal"],
                window=(options["window_left"] if window_left is None else window_left, -1),
                invariant=self._invariant,
                return_lse=with_lse,
                out=place,
                **of_cache,
            )
        found, natural = found if with_lse else (found, None)
        found = found if as_planned is None else found.to(as_planned)
        natural = natural.transpose(0, 1) if with_lse else None
        if place is not None:
            return finish(place, natural, None, None, lse, return_lse, lse_base, lse_layout)
        return finish(found, natural, v_scale, out, lse, return_lse, lse_base, lse_layout)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """run() with other options, in FlashInfer's old order."""
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta, causal and not self._masked)
        self._options = {
            "causal": causal and not self._masked,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        }
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing."""
