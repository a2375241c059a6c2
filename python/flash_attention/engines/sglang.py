"""An attention backend of SGLang: `--attention-backend flash_attention_library`.

SGLang loads register() through the entry point `sglang.srt.plugins`; it adds a name to SGLang's list and changes nothing
else. Interface: sglang/srt/layers/attention/base_attn_backend.py of commit 009db01a, and its attention_registry.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from flash_attention.engines.paged import attend

NAME = "flash_attention_library"


def register() -> None:
    """Adds the backend to SGLang's list, and its name to what the command line takes where SGLang lets others add to it."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(Backend)
    try:
        from sglang.srt.server_args import add_attention_backend_choices
    except ImportError:
        return
    add_attention_backend_choices([NAME])


@dataclass
class Metadata:
    """Of a batch: its pages, how many keys each sequence has, where its queries begin, the most queries of one."""

    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int


class Backend(AttentionBackend):
    """Reads SGLang's pool of tokens as pages."""

    def __init__(self, model_runner: Any) -> None:
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.page_size = getattr(model_runner, "page_size", 1) or 1
        self.device = self.req_to_token.device
        self.metadata: Metadata | None = None
        self.graphs: Metadata | None = None

    def _table(self, requests: torch.Tensor) -> torch.Tensor:
        """int32 [sequences, pages]: the pool has an index for each token, and pages begin at every page_size-th."""
        rows = self.req_to_token[requests, :: self.page_size]
        return (rows // self.page_size if self.page_size > 1 else rows).to(torch.int32)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if getattr(forward_batch, "spec_info", None) is not None:
            raise NotImplementedError("spec_info: speculative decoding is not supported")
        lengths = forward_batch.seq_lens.to(torch.int32)
        count = len(lengths)
        if mode.is_decode():
            starts, longest = torch.arange(count + 1, dtype=torch.int32, device=self.device), 1
        else:
            added = forward_batch.extend_seq_lens.to(torch.int32)
            starts = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
            starts[1:] = added.cumsum(0)
            known = getattr(forward_batch, "extend_seq_lens_cpu", None)
            longest = int(added.max()) if known is None else max(known, default=0)
        self.metadata = Metadata(self._table(forward_batch.req_pool_indices), lengths, starts, longest)

    # Decoding in CUDA graphs: what a graph reads is in buffers that are filled before each replay.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        columns = -(-self.req_to_token.shape[1] // self.page_size)
        self.graphs = Metadata(
            torch.zeros(max_bs, columns, dtype=torch.int32, device=self.device),
            torch.ones(max_bs, dtype=torch.int32, device=self.device),
            torch.arange(max_bs + 1, dtype=torch.int32, device=self.device),
            1,
        )

    def init_forward_metadata_capture_cuda_graph(
        self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
    ) -> None:
        if not forward_mode.is_decode() or spec_info is not None:
            raise NotImplementedError("forward_mode: only plain decoding is captured in CUDA graphs")
        self._fill_graph(bs, req_pool_indices, seq_lens)

    def init_forward_metadata_replay_cuda_graph(
        self, bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info, seq_lens_cpu
    ) -> None:
        self._fill_graph(bs, req_pool_indices, seq_lens)

    def _fill_graph(self, bs: int, requests: torch.Tensor, lengths: torch.Tensor) -> None:
        self.graphs.table[:bs].copy_(self._table(requests[:bs]))
        self.graphs.lengths[:bs].copy_(lengths[:bs])
        self.metadata = Metadata(
            self.graphs.table[:bs], self.graphs.lengths[:bs], self.graphs.starts[: bs + 1], self.graphs.longest
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks=None) -> torch.Tensor:
        if getattr(layer, "is_cross_attention", False):
            raise NotImplementedError("layer: cross attention is not supported")
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        k_pages, v_pages = (
            buffer.view(-1, self.page_size, *buffer.shape[1:]) for buffer in pool.get_kv_buffer(layer.layer_id)
        )
        kind = getattr(layer, "attn_type", None)
        window = getattr(layer, "sliding_window_size", None)
        out = attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k_pages,
            v_pages,
            self.metadata.table,
            self.metadata.starts,
            self.metadata.lengths,
            self.metadata.longest,
            causal=getattr(kind, "value", kind) != "encoder_only",
            window=(-1, -1) if window is None or window < 0 else (window, 0),  # SGLang counts the keys before the query
            softcap=layer.logit_cap or 0.0,
            scale=layer.scaling,
            alibi_slopes=None,
            sink=sinks,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
