"""FlashInfer's wrappers for a prompt and a batch of single queries in one call: here two calls, one after the other."""

from typing import Any

import torch
from torch import Tensor

from flash_attention.compat.flashinfer.arguments import refuse_given
from flash_attention.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flash_attention.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


class PODWithPagedKVCacheWrapper:
    """FlashInfer's wrapper: plan() is that of the decode wrapper, run() also attends one prompt without pages."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, *buffers, jit_args=jit_args
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """plan() of BatchDecodeWithPagedKVCacheWrapper."""
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
        rotary = {"rope_scale": rope_scale, "rope_theta": rope_theta}
        self._decode.plan(indptr, indices, last_page_len, *sizes, **options, **rotary)

    begin_forward = plan

    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: Tensor | tuple[Tensor, Tensor],
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Tensor, Tensor]:
        """(out_p, out_d): single_prefill_with_kv_cache() of the arguments that end in _p, and run() of the planned pages.

        As in FlashInfer the other options of _d are those of plan(), the scales are of q_d and its cache, and no lse is
        returned.
        """
        refuse_given(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        out_p = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        return out_p, self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def end_forward(self) -> None:
        """Does nothing."""


class BatchPODWithPagedKVCacheWrapper:
    """FlashInfer's wrapper for a batch of prompts and a batch of single queries, both over pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._planned = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """plan() of the prefill wrapper for the tables that end in _p, and of the decode wrapper for those in _d, whose
        qo_indptr_d says one query a sequence."""
        if not qo_indptr_d.is_cuda and (qo_indptr_d.diff() != 1).any():
            raise NotImplementedError("qo_indptr_d: a sequence has another number of queries than 1")
        rotary = {"rope_scale": rope_scale, "rope_theta": rope_theta}
        options = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale, **rotary}
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._tables = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *sizes)
        self._decode.plan(kv_indptr_d, kv_indices_d, last_page_len_d, *sizes, **options)
        self._options, self._planned = options, None
        self._plan_prompts(causal=pos_encoding_mode == "ALIBI")

    begin_forward = plan

    @torch.no_grad()
    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: Tensor | tuple[Tensor, Tensor],
        q_d: Tensor,
        paged_kv_cache_d: Tensor | tuple[Tensor, Tensor],
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """(out_p, out_d), or ((out_p, out_d), (lse_p, lse_d)); the scales are of q_d and its cache."""
        if self._planned is None:
            raise RuntimeError("run: plan() has not been called")
        self._plan_prompts(custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p)
        out_p, lse_p = self._prefill.run(q_p, paged_kv_cache_p, return_lse=True)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        out_d, lse_d = self._decode.run(q_d, paged_kv_cache_d, return_lse=True, **scales)
        return ((out_p, out_d), (lse_p, lse_d)) if return_lse else (out_p, out_d)

    def _plan_prompts(self, **options):
        """The prompts' mask is an argument of run(), so the plan is updated when the mask changes."""
        masked = any(options.get(name) is not None for name in ("custom_mask", "packed_custom_mask"))
        if masked or options != self._planned:
            self._prefill.plan(*self._tables, **options, **self._options)
            self._planned = options

    def end_forward(self) -> None:
        """Does nothing."""
