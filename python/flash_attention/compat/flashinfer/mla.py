"""FlashInfer's multi-head latent attention over pages."""

from typing import Any

import torch
from torch import Tensor

from flash_attention.arguments.tables import check_integers, check_range, check_starts
from flash_attention.compat.flashinfer.arguments import finish, refuse_given
from flash_attention.compat.flashinfer.page import rectangle, table_over, table_width
from flash_attention.torch_cache import attention_over_cache


class BatchMLAPagedAttentionWrapper:
    """FlashInfer's wrapper: plan() takes the page tables of a batch, run() attends, for as many layers as there are.

    float_workspace_buffer only determines the device; its memory is not used. With use_cuda_graph the four buffers hold the
    tables, the batch is fixed, and a graph with run() may be replayed after a plan() with other lengths and pages.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise NotImplementedError(f"backend: got {backend!r}; allowed are 'auto', 'fa2' and 'fa3', which do the same")
        if not isinstance(float_workspace_buffer, Tensor):
            raise TypeError(f"float_workspace_buffer: expected a tensor, got {type(float_workspace_buffer).__name__}")
        self.device = float_workspace_buffer.device
        self._fixed = None
        if use_cuda_graph:
            buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
            for name, buffer in buffers.items():
                check_integers(name, buffer, ("entries",), self.device)
            self._fixed = buffers
            self._table = torch.zeros(len(kv_len_arr), len(kv_indices), dtype=torch.int32, device=self.device)
        self._planned = False

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Sequence b has the queries from qo_indptr[b] on, the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]] and
        kv_len_arr[b] keys in them. Tables on the host are checked."""
        if use_profiler:
            raise NotImplementedError("use_profiler: got True; only False is supported")
        if page_size < 1:
            raise ValueError(f"page_size: got {page_size}; allowed are 1 and more")
        if head_dim_kpe < 0 or head_dim_ckv < 1:
            raise ValueError(
                f"head_dim_ckv, head_dim_kpe: got {head_dim_ckv} and {head_dim_kpe}; allowed are 1 and 0 and more"
            )
        check_starts("qo_indptr", qo_indptr, None)
        check_integers("kv_indices", kv_indices, ("pages",))
        batch = len(qo_indptr) - 1
        check_integers("kv_indptr", kv_indptr, ("batch + 1",))
        if len(kv_indptr) < batch + 1:
            raise ValueError(f"kv_indptr: got {len(kv_indptr)} entries; expected {batch + 1} at least, as qo_indptr has")
        kv_indptr = check_starts("kv_indptr", kv_indptr[: batch + 1], len(kv_indices))  # later entries: unused
        check_integers("kv_len_arr", kv_len_arr, (batch,))
        if not kv_indptr.is_cuda and not kv_len_arr.is_cuda:
            _check_room(kv_len_arr, kv_indptr.diff() * page_size)
        self._keep(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._shape = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        self._options = {"causal": causal, "scale": sm_scale}
        self._planned = True

    def _keep(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        width = table_width(kv_indptr, kv_indices)
        here = [tensor.to(self.device, non_blocking=True) for tensor in given]
        table = rectangle(here[1], here[2], width)
        if self._fixed is None:
            lengths = None if qo_indptr.is_cuda else qo_indptr.diff()
            self._tokens = int(lengths.max()) if lengths is not None and len(lengths) else 0
            self._starts, self._lengths, self._table = here[0], here[3], table
            return
        for (name, buffer), tensor in zip(self._fixed.items(), here, strict=True):
            if len(tensor) > len(buffer) or (name != "kv_indices" and len(tensor) != len(buffer)):
                raise ValueError(f"{name}: got {len(tensor)} entries; the buffer of the graph has {len(buffer)}")
            buffer[: len(tensor)].copy_(tensor)
        self._table[:, :width].copy_(table)
        self._tokens, self._starts, self._lengths = 0, self._fixed["qo_indptr"], self._fixed["kv_len_arr"]

    @torch.no_grad()
    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        """Attention of q_nope [total, num_heads, head_dim_ckv] and q_pe [total, num_heads, head_dim_kpe] over the planned
        pages of ckv_cache [num_pages, page_size, head_dim_ckv] and kpe_cache [num_pages, page_size, head_dim_kpe].

        ckv_scale, kpe_scale: of caches in 8 bits. Returns out as q_nope, or (out, lse float32 [total, num_heads] of base 2,
        or natural with return_lse_base_on_e).
        """
        if not self._planned:
            raise RuntimeError("run: plan() has not been called")
        refuse_given(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale,
                     ckv_scale_arr=ckv_scale_arr)  # fmt: skip
        self._check(q_nope, q_pe, ckv_cache, kpe_cache)
        narrow = ckv_cache.element_size() == 1
        if narrow == (ckv_scale is None or (kpe_scale is None and q_pe.shape[-1] > 0)):
            expected = "both, for caches of 8 bits" if narrow else f"None, for caches of {ckv_cache.dtype}"
            raise ValueError(f"ckv_scale, kpe_scale: got {ckv_scale} and {kpe_scale}; expected {expected}")
        has_own = q_pe.shape[-1] > 0  # columns of a key after its value
        q = torch.cat((q_nope, q_pe), dim=-1) if has_own else q_nope
        values = ckv_cache[:, :, None]
        with_lse = return_lse or lse is not None  # lse= is written in any case
        found = attention_over_cache(
            q,
            kpe_cache[:, :, None] if has_own else values[..., values.shape[-1] :],
            values,
            page_table=table_over(self._table, values),
            seqused_kv=self._lengths,
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._tokens,
            k_scale=kpe_scale if has_own else ckv_scale,
            v_scale=ckv_scale,
            latent=True,
            return_lse=with_lse,
            **self._options,
        )
        found, natural = (found[0], found[1].T) if with_lse else (found, None)
        return finish(found, natural, None, out, lse, return_lse, "ln" if return_lse_base_on_e else "log2")

    def _check(self, q_nope, q_pe, ckv_cache, kpe_cache):
        heads, ckv, kpe, page_size = self._shape
        pages, total = ckv_cache.shape[0], q_nope.shape[0]
        of_q, of_cache = self._dtypes
        for name, tensor, shape, dtype in (
            ("q_nope", q_nope, (total, heads, ckv), of_q),
            ("q_pe", q_pe, (total, heads, kpe), of_q),
            ("ckv_cache", ckv_cache, (pages, page_size, ckv), of_cache),
            ("kpe_cache", kpe_cache, (pages, page_size, kpe), of_cache),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != self.device:
                raise ValueError(
                    f"{name}: got {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected {dtype} {list(shape)} "
                    f"on {self.device}, as planned"
                )


def _check_room(lengths, room):
    check_range("kv_len_arr", lengths, 0, 2**31 - 1)
    over = (lengths > room).nonzero()
    if len(over):
        entry = int(over[0])
        raise ValueError(f"kv_len_arr: entry {entry} is {int(lengths[entry])}; its pages hold {int(room[entry])} keys")
