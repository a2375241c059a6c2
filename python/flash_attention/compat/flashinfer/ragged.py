"""FlashInfer's prefill over keys and values end to end, without a cache."""

import functools
from typing import Any

import torch
from torch import Tensor

from flash_attention.arguments.head_dim import padded, padded_cache
from flash_attention.arguments.names import Renamed
from flash_attention.arguments.tables import check_starts
from flash_attention.compat.flashinfer.arguments import (
    NAMES,
    asks_for_invariant,
    check_heads,
    check_layout,
    finish,
    four_bit_options,
    nhd,
    refuse_given,
    scale_of,
)
from flash_attention.compat.flashinfer.masks import MOST_QUERIES_WITH_BITS, Items, bits_of_batch, mask_of_batch
from flash_attention.compat.flashinfer.narrow import attend, dtype_of, of_sequences, scales_of_run, widened
from flash_attention.compat.flashinfer.positions import Positions
from flash_attention.compat.flashinfer.variant import sinks_and_scale, takes_sinks


class BatchPrefillWithRaggedKVCacheWrapper:
    """FlashInfer's wrapper: plan() takes the starts of queries and keys of a batch, run() attends, for as many layers as
    there are.

    float_workspace_buffer only determines the device; its memory is not used. With use_cuda_graph the two buffers hold the
    starts, the batch is fixed, and a graph with run() may be replayed after a plan() with other lengths.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        check_layout(kv_layout)
        if not isinstance(float_workspace_buffer, Tensor):
            raise TypeError(f"float_workspace_buffer: expected a tensor, got {type(float_workspace_buffer).__name__}")
        self._takes_sinks = takes_sinks(jit_args)
        self._device, self._layout, self._fixed = float_workspace_buffer.device, kv_layout, None
        if use_cuda_graph:
            buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
            self._fixed = [check_starts(name, buffer, None, self._device) for name, buffer in buffers.items()]
        self._options = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._fixed is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Sequence b has the queries qo_indptr[b] : qo_indptr[b + 1] and the keys kv_indptr[b] : kv_indptr[b + 1].

        causal, custom_mask, fixed_split_size, disable_split_kv and the arguments of items are those of
        BatchPrefillWithPagedKVCacheWrapper.plan().
        """
        refuse_given(v_indptr=v_indptr, o_indptr=o_indptr)
        items = Items.of(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len)
        masked = custom_mask is not None or packed_custom_mask is not None
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta, (causal or items is not None) and not masked)
        check_heads(num_qo_heads, num_kv_heads)
        check_starts("qo_indptr", qo_indptr, None)
        check_starts("kv_indptr", kv_indptr, None)
        if len(qo_indptr) != len(kv_indptr):
            raise ValueError(f"kv_indptr: got {len(kv_indptr)} entries; expected {len(qo_indptr)}, as qo_indptr has")
        host = None if qo_indptr.is_cuda or kv_indptr.is_cuda else (qo_indptr, kv_indptr)
        self._total = None if host is None else int(qo_indptr[-1])
        most, most_kv = max_token_per_sequence, max_sequence_kv
        if host is not None and self._fixed is None and len(qo_indptr) > 1:
            most, most_kv = (int(starts.diff().max()) for starts in host)
        starts = [tensor.to(self._device, non_blocking=True) for tensor in (qo_indptr, kv_indptr)]
        if self._fixed is not None:
            starts = self._refilled(starts)
        self._mask = self._bits = None
        if masked or items is not None:
            if self._fixed is not None:
                raise NotImplementedError("custom_mask: got a mask; with use_cuda_graph only None is supported")
            lengths = starts[1].diff()
            most_kv = int(lengths.max()) if len(lengths) else 0
            few = most is not None and most <= MOST_QUERIES_WITH_BITS
            if few and packed_custom_mask is not None:
                self._bits = bits_of_batch(None, packed_custom_mask, starts[0], lengths)
            elif masked:
                self._mask = mask_of_batch(custom_mask, packed_custom_mask, starts[0], lengths, most_kv)
            else:
                self._mask = items.mask(starts[0], lengths, most_kv)
            most = most if self._mask is None else self._mask.shape[2]
        self._starts, self._most = starts, (most, most_kv)
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo)
        self._options = {
            "causal": causal and not masked,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "invariant": asks_for_invariant(fixed_split_size, disable_split_kv),
        }
        self._out_dtype = dtype_of("o_data_type", o_data_type)

    begin_forward = plan

    @torch.no_grad()
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim_qk] over k [kv_indptr[-1], num_kv_heads, head_dim_qk] and
        v [kv_indptr[-1], num_kv_heads, head_dim_vo] (HND: heads first).
        kv_cache_sf: a pair, the scales of k and v in nvfp4, as those of BatchDecodeWithPagedKVCacheWrapper.

        Returns out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse float32 [qo_indptr[-1], num_qo_heads] of
        base 2). lse_base, lse_layout: "ln" for the natural logarithm, "HN" for heads first. Three more positional arguments
        are scale_q, scale_k and scale_v of q, k and v in float8: float32 [heads] or [1]. Then out is of plan()'s
        o_data_type, or bfloat16.
        """
        if self._options is None:
            raise RuntimeError("run: plan() has not been called")
        refuse_given(o_scale=o_scale)
        options = self._options
        k, v = (nhd(name, tensor, self._layout) for name, tensor in (("k", k), ("v", v)))
        four_bits = four_bit_options(
            k, kv_cache_sf, self._layout, lambda pair: [nhd("kv_cache_sf", x, self._layout)[:, None] for x in pair]
        )
        self._check(q, k, v, four_bits)
        scales, args = scales_of_run(q, k, args)
        sinks, sm_scale = sinks_and_scale(self._takes_sinks, args, None, options["sm_scale"])
        if self._positions.mode == "ROPE_LLAMA":
            q, k, v = self._positions.of_packed(q, k, v, *self._starts, four_bits)
        given = {
            "mask": self._mask,
            "sink": sinks,
            "alibi_slopes": self._positions.slopes(self._heads[0], q.device),
            "scale": scale_of(q.shape[-1], sm_scale, q_scale, k_scale),
            "softcap": options["logits_soft_cap"] or 0.0,
            "causal": options["causal"],
            "window": (options["window_left"], -1),
            "invariant": options["invariant"],
            "return_lse": True,
            **(four_bits or {}),
        }
        narrow = k.element_size() == 1 and q.element_size() > 1
        over_rows = narrow or self._bits is not None
        with Renamed(NAMES):
            batch = len(self._starts[0]) - 1
            if over_rows:
                if q.element_size() == 1:
                    q = widened(q, scales[0])
                if k.element_size() == 1 and four_bits is None:
                    given |= {"k_scale": of_sequences(scales[1], batch), "v_scale": of_sequences(scales[2], batch)}
                found, natural = self._over_rows(q, k, v, **given)
            elif q.element_size() == 1:
                found, natural = attend(self._packed, q, k, v, scales, batch, out_dtype=self._out_dtype, **given)
            else:
                found, natural = self._packed(q, k, v, **given)
        return finish(found, natural.transpose(0, 1), v_scale, out, lse, return_lse, lse_base, lse_layout)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _packed(self, q, k, v, **given):
        lengths = {"max_seqlen_q": self._most[0], "max_seqlen_kv": self._most[1]}
        starts = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), self._starts, strict=True))
        return padded(q, k, v, packed={**starts, **lengths}, **given)

    def _over_rows(self, q, k, v, **given):
        """For keys and values of 8 bits with wider queries, and bit masks, which need a cache: each row becomes a page."""
        lengths = self._starts[1].diff()
        width = len(k) if self._most[1] is None else self._most[1]
        table = self._starts[1][:-1, None] + torch.arange(width, dtype=torch.int32, device=k.device)
        table = table.clamp(max=max(len(k) - 1, 0))
        sequences = {"page_table": table, "seqused_kv": lengths, "cu_seqlens_q": self._starts[0]}
        return padded_cache(
            q, k[:, None], v[:, None], max_seqlen_q=self._most[0], bit_mask=self._bits, **sequences, **given
        )

    def _refilled(self, starts):
        for name, buffer, tensor in zip(("qo_indptr", "kv_indptr"), self._fixed, starts, strict=True):
            if len(tensor) != len(buffer):
                raise ValueError(
                    f"{name}: got {len(tensor)} entries; expected {len(buffer)}, as the buffer of the graph has"
                )
            buffer.copy_(tensor)
        return self._fixed

    def _check(self, q, k, v, four_bits):
        heads_q, heads_kv, head_dim, head_dim_v = self._heads
        total = q.shape[0] if self._total is None or self._fixed is not None else self._total
        for name, tensor, shape in (
            ("q", q, (total, heads_q, head_dim)),
            ("k", k, (k.shape[0], heads_kv, head_dim // (1 if four_bits is None else 2))),
            ("v", v, (k.shape[0], heads_kv, head_dim_v // (1 if four_bits is None else 2))),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}; expected {list(shape)}, as planned")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """run() with other options, in FlashInfer's old order."""
        causal = causal and self._mask is None and self._bits is None
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta, causal)
        self._options = {
            **(self._options or {}),
            "causal": causal,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        }
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing."""
