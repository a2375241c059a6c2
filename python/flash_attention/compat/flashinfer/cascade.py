"""FlashInfer's cascade: attention over parts of the keys, merged; a prefix that sequences share is read once for all."""

import torch
from torch import Tensor

from flash_attention import merge
from flash_attention.compat.flashinfer.arguments import LN_2
from flash_attention.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flash_attention.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """(v, s) over the keys of both: v [seq, num_heads, head_dim], s float32 [seq, num_heads], logarithm of base 2.

    For example:

        a = single_prefill_with_kv_cache(q[0], k[0, :8], v[0, :8], return_lse=True)
        b = single_prefill_with_kv_cache(q[0], k[0, 8:], v[0, 8:], return_lse=True)
        out, lse = merge_state(*a, *b)
    """
    return _merged([v_a, v_b], [s_a, s_b])


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(v, s) over the keys of all: v [seq, num_states, num_heads, head_dim], s float32 [seq, num_states, num_heads].

    For example:

        a = single_prefill_with_kv_cache(q[0], k[0, :8], v[0, :8], return_lse=True)
        b = single_prefill_with_kv_cache(q[0], k[0, 8:], v[0, 8:], return_lse=True)
        out, lse = merge_states(torch.stack((a[0], b[0]), 1), torch.stack((a[1], b[1]), 1))
    """
    if v.dim() != 4 or s.shape != v.shape[:3]:
        raise ValueError(
            f"v, s: got shapes {list(v.shape)} and {list(s.shape)}; expected [seq, num_states, num_heads, head_dim] and "
            "the same without head_dim"
        )
    return _merged(v.unbind(1), s.unbind(1))


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """merge_state() into v and s. Rows for which mask (bool [seq]) is False stay unchanged.

    For example:

        a = single_prefill_with_kv_cache(q[0], k[0, :8], v[0, :8], return_lse=True)
        b = single_prefill_with_kv_cache(q[0], k[0, 8:], v[0, 8:], return_lse=True)
        merge_state_in_place(*a, *b)
    """
    new_v, new_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        keep = mask.bool()
        new_v, new_s = torch.where(keep[:, None, None], new_v, v), torch.where(keep[:, None], new_s, s)
    v.copy_(new_v)
    s.copy_(new_s)


def _merged(outs, lses):
    out, lse = merge.merge_states(outs, [part.float().transpose(0, 1) * LN_2 for part in lses])
    return out, (lse / LN_2).transpose(0, 1).contiguous()


class MultiLevelCascadeAttentionWrapper:
    """FlashInfer's wrapper for sequences that share prefixes, and prefixes that share prefixes.

    Each level divides the same query tokens into groups (qo_indptr) and has the pages of each group; the last level has
    those of each sequence. Attention is computed for each level separately, and the levels are merged.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        if num_levels < 1:
            raise ValueError(f"num_levels: got {num_levels}; allowed are 1 and more")
        arrays = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        for name, array in arrays.items():
            if use_cuda_graph and len(array or ()) != num_levels:
                raise ValueError(f"{name}_arr: got {len(array or ())} buffers; expected {num_levels}, one a level")
        self._graph = use_cuda_graph
        self._levels = []
        for level in range(num_levels):
            buffers = {name: array[level] for name, array in arrays.items()} if use_cuda_graph else {}
            self._levels.append(
                BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **buffers)
            )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]) -> None:
        """Does nothing: no workspace of the caller is used."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: keys and values may have different strides in any call."""

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Each list has one entry a level. causal holds for the last level; all shared keys are visible."""
        if window_left >= 0 and len(self._levels) > 1:
            raise NotImplementedError(f"window_left: got {window_left}; with more than one level only -1 is supported")
        if pos_encoding_mode != "NONE" and len(self._levels) > 1:
            raise NotImplementedError(
                f"pos_encoding_mode: got {pos_encoding_mode!r}; with more than one level only 'NONE' is supported"
            )
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for name, array in zip(("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr"), arrays, strict=False):
            if len(array) != len(self._levels):
                raise ValueError(f"{name}: got {len(array)} levels; expected {len(self._levels)}")
        for level, (wrapper, *tables) in enumerate(zip(self._levels, *arrays, strict=True)):
            wrapper.plan(
                *tables,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
            )

    begin_forward = plan

    @torch.no_grad()
    def run(self, q: Tensor, paged_kv_cache: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Attention of q [tokens, num_qo_heads, head_dim] over the planned pages of all levels."""
        states = [wrapper.run(q, paged_kv_cache, return_lse=True) for wrapper in self._levels]
        return _merged(*zip(*states, strict=True))[0]

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """FlashInfer's wrapper for one query a sequence, over a prefix that all share and each sequence's own pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """plan() of BatchDecodeWithPagedKVCacheWrapper for the pages that are not shared."""
        tables = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._unique.plan(*tables, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: Tensor | tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention of q [batch, num_qo_heads, head_dim] over k_shared, v_shared [shared_prefix_len, num_kv_heads,
        head_dim] (HND: heads first) and the planned pages."""
        shared = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._layout, return_lse=True)
        return merge_state(*shared, *self._unique.run(q, unique_kv_cache, return_lse=True))[0]

    def end_forward(self) -> None:
        """Does nothing."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """FlashInfer's wrapper for many queries a sequence, over a prefix that all share and each sequence's own pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Does nothing: no workspace of the caller is used."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: keys and values may have different strides in any call."""

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """plan() of BatchPrefillWithPagedKVCacheWrapper for the pages that are not shared."""
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._unique.plan(*tables, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: Tensor | tuple[Tensor, Tensor],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim] over k_shared, v_shared [shared_prefix_len, num_kv_heads,
        head_dim] (HND: heads first), all of them, and the planned pages. causal applies to the pages."""
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._layout, sm_scale=sm_scale, return_lse=True
        )
        unique = self._unique.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        return merge_state(*shared, *unique)[0]

    def end_forward(self) -> None:
        """Does nothing."""
