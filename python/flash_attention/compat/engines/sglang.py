"""An attention backend of SGLang: `--attention-backend flash_attention_library`.

SGLang loads register() through the entry point `sglang.srt.plugins`; it adds a name to SGLang's list and changes nothing
else. A version of SGLang with another interface is refused when this module is loaded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from flash_attention.compat.engines import interface
from flash_attention.compat.engines.paged import attend

NAME = "flash_attention_library"
VERSIONS = "0.5.22, 0.5.23"
_FORWARD = "self q k v layer forward_batch save_kv_cache kwargs"
interface.check(
    "sglang",
    {
        AttentionBackend.init_forward_metadata: "self forward_batch",
        interface.member(AttentionBackend, "init_forward_metadata_out_graph"): "self forward_batch in_capture",
        AttentionBackend.init_cuda_graph_state: "self max_bs max_num_tokens",
        AttentionBackend.forward_decode: _FORWARD,
        AttentionBackend.forward_extend: _FORWARD,
        interface.member(KVWriteLoc, "for_batch"): "forward_batch swa_loc full_loc",
    },
    VERSIONS,
)


def register() -> None:
    """Adds the backend to SGLang's list, and its name to the choices of the command line."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(Backend)
    server_args.add_attention_backend_choices([NAME])
    for kind in ("deterministic", "radix_supported_deterministic"):  # --enable-deterministic-inference
        getattr(server_args, f"add_{kind}_attention_backend_choices")([NAME])


@dataclass
class Metadata:
    """The data of a batch: for each sequence its number of keys, its first query and its pages; the most queries of one
    (0 = unknown). In a pool with a part for sliding windows also the pages there, and the places of the new tokens."""

    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int
    table: torch.Tensor
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None


class Backend(AttentionBackend):
    """Reads SGLang's pool of tokens as pages."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if getattr(model_runner, "use_mla_backend", False):
            raise NotImplementedError("use_mla_backend: got True; latent attention is not supported")
        translator = getattr(model_runner, "kv_index_translator", None)
        if getattr(translator, "is_translating", False):
            raise NotImplementedError("enable_unified_memory: got True; only pools of their own are supported")
        self.pool = model_runner.token_to_kv_pool
        method = self.pool.get_kv_cache_quant_method()  # of codes of 4 bits; 8 bits are a plain type
        if method is not None and method.name != "unquantized":
            raise NotImplementedError(f"kv_cache_dtype: got {method.name}; 8 bits and the types of models are supported")
        self.has_windows = hasattr(self.pool, "translate_loc_from_full_to_swa")
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.page_size = model_runner.page_size
        self.device = self.req_to_token.device
        deterministic = getattr(getattr(model_runner, "server_args", None), "enable_deterministic_inference", False)
        self.invariant = True if deterministic else None  # None: as FLASH_ATTENTION_INVARIANT says
        self.chunk = getattr(model_runner, "attention_chunk_size", None) or 0
        self.forward_metadata: Metadata | None = None
        self.graphs: Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For a batch outside of CUDA graphs."""
        batch, mode = forward_batch, forward_batch.forward_mode
        lengths, added = batch.seq_lens.to(torch.int32), _tokens_each(batch)
        most_keys = batch.seq_lens_cpu
        most_keys = self.req_to_token.shape[1] if most_keys is None or not len(most_keys) else int(most_keys.max())
        if added is not None:
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device) * added
            longest = added
        else:
            starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=self.device)
            starts[1:] = batch.extend_seq_lens.cumsum(0)
            known = batch.extend_seq_lens_cpu
            longest = 0 if known is None else max(known, default=0)
        if mode.is_target_verify():  # the lengths do not count what is verified
            lengths, most_keys = lengths + added, most_keys + added
        tables = self._tables(batch.req_pool_indices, most_keys)
        self.forward_metadata = Metadata(lengths, starts, longest, *tables, self._window_slots(batch))

    def _tables(self, requests: torch.Tensor, most_keys: int) -> list[torch.Tensor | None]:
        """int32 [sequences, pages], twice: the pool has an index for each token, and pages begin at every page_size-th."""
        columns = min(most_keys, self.req_to_token.shape[1])
        slots = self.req_to_token[requests, : max(columns, 1) : self.page_size]
        of_windows = self.pool.translate_loc_from_full_to_swa(slots.long()) if self.has_windows else None
        tables = (slots, of_windows)
        return [None if table is None else (table // self.page_size).to(torch.int32) for table in tables]

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """A view [pages, page_size, heads, dim] of [slots, heads, dim] or [pages, heads, page_size, dim]."""
        if buffer.dim() not in (3, 4):
            raise NotImplementedError(f"kv_cache_layout: got buffers of {buffer.dim()} axes; 3 and 4 are supported")
        return buffer.transpose(1, 2) if buffer.dim() == 4 else buffer.view(-1, self.page_size, *buffer.shape[1:])

    def _window_slots(self, batch: Any) -> torch.Tensor | None:
        if not self.has_windows or batch.out_cache_loc is None:
            return None
        return self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)

    # Decoding and verifying in CUDA graphs: a graph reads buffers, which are filled before each replay.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        def zeros(*sizes, dtype=torch.int32):
            return torch.zeros(sizes, dtype=dtype, device=self.device)

        columns = -(-self.req_to_token.shape[1] // self.page_size)
        of_windows = (zeros(max_bs, columns), zeros(max_num_tokens, dtype=torch.int64)) if self.has_windows else ()
        starts = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self.graphs = Metadata(zeros(max_bs), starts, 1, zeros(max_bs, columns), *of_windows)
        self.starts_of_graphs = {1: starts}  # by the tokens of a sequence

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        added = _tokens_each(forward_batch)
        if added is None:
            raise NotImplementedError(
                "forward_mode: decoding and target_verify are captured in CUDA graphs, prefill is not"
            )
        count, buffers = forward_batch.batch_size, self.graphs
        if added not in self.starts_of_graphs:
            self.starts_of_graphs[added] = self.starts_of_graphs[1] * added
        verified = added if forward_batch.forward_mode.is_target_verify() else 0
        table, window_table = self._tables(forward_batch.req_pool_indices[:count], self.req_to_token.shape[1])
        buffers.table[:count].copy_(table)
        buffers.lengths[:count].copy_(forward_batch.seq_lens[:count] + verified)
        mine = [None, None]
        if self.has_windows:
            buffers.window_table[:count].copy_(window_table)
            slots = self._window_slots(forward_batch)
            buffers.window_slots[: len(slots)].copy_(slots)
            mine = [buffers.window_table[:count], buffers.window_slots[: len(slots)]]
        starts = self.starts_of_graphs[added][: count + 1]
        self.forward_metadata = Metadata(buffers.lengths[:count], starts, added, buffers.table[:count], *mine)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks=None, **others) -> torch.Tensor:
        kind = getattr(layer.attn_type, "value", layer.attn_type)
        refused = {
            "is_cross_attention": layer.is_cross_attention,
            "attn_type": kind == "decoder_bidirectional",
            "xai_temperature_len": layer.xai_temperature_len > 0,
            **{name: value is not None for name, value in others.items()},
        }
        for name, given in refused.items():
            if given:
                raise NotImplementedError(f"{name}: is not supported by {NAME}")
        meta = self.forward_metadata
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=meta.window_slots)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        k_pages, v_pages = (self._pages(buffer) for buffer in self.pool.get_kv_buffer(layer.layer_id))
        scales = {}
        if k_pages.element_size() == 1:
            scales = {"k_scale": _scale(layer.k_scale), "v_scale": _scale(layer.v_scale)}
        in_window_pool = self.has_windows and self.pool.layers_mapping[layer.layer_id][1]
        width, causal = layer.sliding_window_size, kind != "encoder_only"  # SGLang counts the keys before the query
        windowed = width is not None and width > -1
        out = attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k_pages,
            v_pages,
            meta.window_table if in_window_pool else meta.table,
            meta.starts,
            meta.lengths,
            meta.longest,
            causal=causal,
            window=(width, 0 if causal else width) if windowed else (-1, -1),
            softcap=layer.logit_cap or 0.0,
            scale=layer.scaling,
            sink=sinks,
            attention_chunk=self.chunk if layer.use_irope else 0,
            invariant=self.invariant,
            **scales,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def _tokens_each(batch: Any) -> int | None:
    """The number of new tokens of every sequence, None if they differ."""
    spec, mode = batch.spec_info, batch.forward_mode
    if mode.is_target_verify():
        if getattr(spec, "topk", 1) > 1 or getattr(spec, "ragged_verify_layout", None) is not None:
            raise NotImplementedError(
                "spec_info: chains of one length are verified; trees and ragged drafts are not supported"
            )
        return spec.draft_token_num
    if not mode.is_decode_or_idle():
        return None
    if spec is not None:
        raise NotImplementedError("spec_info: this backend verifies drafts; the model that drafts needs another one")
    return 1


def _scale(scale):
    """The scale of a cache in 8 bits."""
    return scale.reshape(1) if isinstance(scale, torch.Tensor) else 1.0 if scale is None else scale
