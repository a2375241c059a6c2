"""FlashInfer's wrapper for prompts and single queries in one batch."""

from typing import Any

import torch
from torch import Tensor

from flash_attention.arguments.tables import check_integers, check_range
from flash_attention.compat.flashinfer.arguments import refuse_given
from flash_attention.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from flash_attention.compat.flashinfer.variant import SINK_VARIANT


class BatchAttention:
    """FlashInfer's wrapper: plan() takes the queries' starts, the page tables and the lengths of a batch, run() attends."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device), kv_layout)
        self._softcap = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Sequence b has the queries qo_indptr[b] : qo_indptr[b + 1], the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        and kv_len_arr[b] keys in them."""
        if use_profiler:
            raise NotImplementedError("use_profiler: got True; only False is supported")
        check_integers("kv_len_arr", kv_len_arr, (len(kv_indptr) - 1,))
        check_range("kv_len_arr", kv_len_arr, 0, 2**31 - 1)
        if not kv_indptr.is_cuda and not kv_len_arr.is_cuda and (kv_len_arr > kv_indptr.diff() * page_size).any():
            raise ValueError("kv_len_arr: a sequence has more keys than its pages hold")
        last_page_len = (kv_len_arr - 1) % page_size + 1
        tables = (qo_indptr, kv_indptr, kv_indices, last_page_len.to(torch.int32))
        self._prefill.plan(
            *tables,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            seq_lens=kv_len_arr,
        )
        self._softcap = logits_soft_cap or 0.0

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: keys and values may have different strides in any call."""

    def run(
        self,
        q: Tensor,
        kv_cache: Tensor | tuple[Tensor, Tensor],
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse float32 [qo_indptr[-1], num_qo_heads] of base 2) of q [qo_indptr[-1], num_qo_heads, head_dim_qk] over
        the planned pages of kv_cache. The soft cap is that of plan(): another one is refused."""
        refuse_given(profiler_buffer=profiler_buffer)
        if self._softcap is None:
            raise RuntimeError("run: plan() has not been called")
        if logits_soft_cap != self._softcap:
            raise ValueError(f"logits_soft_cap: got {logits_soft_cap}; expected {self._softcap}, as planned")
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return self._prefill.run(q, kv_cache, out=out, lse=lse, return_lse=True, kv_cache_sf=kv_cache_sf, **scales)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper with run(q, paged_kv_cache, sink, sm_scale, ...)."""

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, jit_args=SINK_VARIANT)
