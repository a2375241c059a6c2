"""FlashInfer's decoding: one query a sequence, or a few, over a cache."""

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.head_dim import padded_cache, padded_narrow
from flash_attention.arguments.keywords import advice, refuse_keywords
from flash_attention.arguments.names import Renamed
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
from flash_attention.compat.flashinfer.plan import Tables
from flash_attention.compat.flashinfer.positions import Positions


@torch.no_grad()
def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    **wrong: NoReturn,
) -> Any:
    """Attention of one query [num_qo_heads, head_dim] over k, v [kv_len, num_kv_heads, head_dim] (HND: heads first).

        out = single_decode_with_kv_cache(q[0, 0], k[0], v[0])

    window_left: how many keys before the last are visible; -1 = all. Returns out as q, or (out, lse [num_qo_heads] of
    base 2).
    """
    if wrong:
        refuse_keywords(single_decode_with_kv_cache, wrong)
    positions = Positions(pos_encoding_mode, rope_scale, rope_theta)
    if q.dim() != 2:
        raise ValueError(f"q: got shape {list(q.shape)}; expected [num_qo_heads, head_dim]")
    k, v = (nhd(name, tensor, kv_layout) for name, tensor in (("k", k), ("v", v)))
    q, k, v = positions.rotated(q[None], k, v)
    with Renamed(NAMES):
        out, lse = padded_narrow(
            q[None],
            k[None],
            v[None],
            scale=scale_of(q.shape[-1], sm_scale, q_scale, k_scale),
            softcap=logits_soft_cap or 0.0,
            window=(window_left, 0),
            alibi_slopes=positions.slopes(q.shape[-2], q.device),
            return_lse=True,
        )
    return finish(out[0, 0], lse[0, :, 0], v_scale, None, None, return_lse)


# The arguments after page_size in plan(), in this order.
_PLAN_OPTIONS = {
    "pos_encoding_mode": "NONE",
    "window_left": -1,
    "logits_soft_cap": None,
    "q_data_type": "float16",
    "kv_data_type": None,
    "o_data_type": None,
    "data_type": None,
    "sm_scale": None,
    "rope_scale": None,
    "rope_theta": None,
    "non_blocking": True,
    "block_tables": None,
    "seq_lens": None,
    "fixed_split_size": None,
    "disable_split_kv": False,
    "q_len_per_req": 1,
    "window_right": 0,
    "is_causal": None,
}
_BY_NAME_ONLY = ("window_right", "is_causal")


class BatchDecodeWithPagedKVCacheWrapper:
    """FlashInfer's wrapper: plan() takes the page tables of a batch, run() attends, for as many layers as there are.

    float_workspace_buffer only determines the device; its memory is not used. With use_cuda_graph the three buffers
    hold the tables, the batch is fixed, and a graph with run() may be replayed after a plan() with other lengths and
    pages.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_given(jit_args=jit_args)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        self._tables = Tables(float_workspace_buffer, kv_layout, use_cuda_graph, dict(zip(names, buffers, strict=True)))
        self._use_tensor_cores = use_tensor_cores
        self._options = None

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

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
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        """Sequence b has the pages indices[indptr[b] : indptr[b + 1]], the last of which holds last_page_len[b] keys.

        Tables on the host are checked and copied; those on the GPU are not read. pos_encoding_mode is "NONE", "ALIBI",
        or "ROPE_LLAMA" with rope_scale and rope_theta, which makes a rotated copy of the keys in each run. If block_tables
        and seq_lens are given, they replace the tables. fixed_split_size, disable_split_kv: with any number, or True, the
        bits of a row do not depend on the batch. window_left, window_right, logits_soft_cap, sm_scale and q_len_per_req are
        those of FlashInfer; data types and non_blocking have no effect.
        """
        options = _options(positional, keywords)
        check_heads(num_qo_heads, num_kv_heads)
        self._positions = Positions(options["pos_encoding_mode"], options["rope_scale"], options["rope_theta"])
        self._tables.plan(indptr, indices, last_page_len, page_size, options["block_tables"], options["seq_lens"])
        self._heads = (num_qo_heads, num_kv_heads, head_dim)
        self._options = options

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of q [batch * q_len_per_req, num_qo_heads, head_dim] over the planned pages of paged_kv_cache.

        kv_cache_sf: the scales of a cache in nvfp4, two codes in a byte of uint8; as paged_kv_cache, e4m3 (or its bytes),
        head_dim / 16 in a row. Returns out as q, or (out, lse float32 [batch * q_len_per_req, num_qo_heads] of base 2).
        """
        if self._options is None:
            raise RuntimeError("run: plan() has not been called")
        if skip_softmax_threshold_scale_factor is not None:
            refuse_given(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if args:
            raise NotImplementedError(f"run: got {len(args)} more positional arguments, which are those of jit_args")
        with_lse = return_lse or lse is not None  # lse= is written in any case
        options = self._options
        tokens = options["q_len_per_req"] if q_len_per_req is None else q_len_per_req
        heads_q, heads_kv, head_dim = self._heads
        expected = (self._tables.batch * tokens, heads_q, head_dim)
        if q.shape != expected:
            raise ValueError(f"q: got shape {list(q.shape)}; expected {list(expected)}, as planned")
        k, v = split_cache(paged_kv_cache, self._tables.kv_layout)
        four_bits = four_bit_options(k, kv_cache_sf, self._tables.kv_layout)
        table, lengths = self._tables.over(k, heads_kv, head_dim if four_bits is None else head_dim // 2)
        place = direct(out, q, columns_of(v, four_bits), v_scale)
        rows = q[:, None] if tokens == 1 else q.unflatten(0, (-1, tokens))
        rows, k, v, table = self._positions.over_pages(rows, k, v, table, lengths, four_bits=four_bits)
        with Renamed(NAMES):
            found = padded_cache(
                rows,
                k,
                v,
                page_table=table,
                seqused_kv=lengths,
                sink=sinks,
                alibi_slopes=self._positions.slopes(heads_q, q.device),
                scale=scale_of(head_dim, options["sm_scale"], q_scale, k_scale),
                softcap=options["logits_soft_cap"] or 0.0,
                window=(options["window_left"] if window_left is None else window_left, options["window_right"]),
                invariant=asks_for_invariant(options["fixed_split_size"], options["disable_split_kv"]),
                return_lse=with_lse,
                out=None if place is None else place.unflatten(0, (-1, tokens)),
                **(four_bits or {}),
            )
        found, natural = found if with_lse else (found, None)
        natural = natural.transpose(1, 2).flatten(0, 1) if with_lse else None
        if place is not None:
            return finish(place, natural, None, None, lse, return_lse)
        return finish(found.flatten(0, 1), natural, v_scale, out, lse, return_lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._positions = Positions(pos_encoding_mode, rope_scale, rope_theta)
        self._options = {
            **(self._options or {}),
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
        }
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Does nothing."""


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with use_cuda_graph."""

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """plan() of a decode wrapper, which programs put in its place: wrapper.plan = partial(fast_decode_plan, wrapper).

        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
        ends, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 8], dtype=torch.int32)
        fast_decode_plan(wrapper, ends, torch.tensor([0, 2, 1], dtype=torch.int32), last, 4, 4, 64, 8)
        out = wrapper.run(torch.randn(2, 4, 64), torch.randn(3, 2, 8, 4, 64))

    global_override_indptr_cpu: indptr on the host, if it is known there: then nothing waits for the GPU.
    """
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        fixed_split_size=fixed_split_size,
        q_len_per_req=q_len_per_req,
    )


def _options(positional, keywords):
    names = [name for name in _PLAN_OPTIONS if name not in _BY_NAME_ONLY]
    if len(positional) > len(names):
        raise TypeError(f"plan: got {len(positional)} arguments behind page_size; allowed are at most {len(names)}")
    given = dict(zip(names, positional, strict=False))
    for name in keywords:
        if name in given:
            raise TypeError(f"{name}: is given twice")
        if name not in _PLAN_OPTIONS:
            raise TypeError(f"plan() got an unexpected keyword argument '{name}'{advice(name, list(_PLAN_OPTIONS))}")
    options = {**_PLAN_OPTIONS, **given, **keywords}
    if options["q_len_per_req"] < 1:
        raise ValueError(f"q_len_per_req: got {options['q_len_per_req']}; allowed are 1 and more")
    if options["is_causal"] is False and options["q_len_per_req"] > 1:
        raise NotImplementedError(
            "is_causal: got False with several queries a sequence; window_right=-1 shows them all keys"
        )
    return options
