"""An attention backend of vLLM: `vllm serve MODEL --attention-backend CUSTOM`.

vLLM loads register() through the entry point `vllm.general_plugins`; it only fills the place that vLLM keeps for backends
of others, and leaves it alone where another plug-in has filled it. Interface: vllm/v1/attention/backend.py of commit
0014ca6b.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flash_attention.engines.paged import attend, write_slots


def register() -> None:
    """Makes CUSTOM of vLLM's list of attention backends this one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")


class Backend(AttentionBackend):
    """What vLLM asks about the backend before it chooses it."""

    accept_output_buffer = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  (vLLM's own form)
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 576

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@dataclass
class Metadata(AttentionMetadata):
    """Of a batch, the same for every layer. Lengths and tables stay on the device."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class Builder(AttentionMetadataBuilder[Metadata]):
    """Keeps what vLLM has put together; nothing is planned or copied."""

    # A graph is captured for one number of queries a sequence; lengths and tables may differ at each replay.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError("causal: got a tensor; one answer for the whole batch is supported")
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )


class Impl(AttentionImpl[Metadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: got {attn_type}; only decoders are supported")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            allowed = ", ".join(Backend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype: got {kv_cache_dtype}, allowed: {allowed}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes key and value to their slots, attends, and leaves the result in output."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: results are not quantised")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        k_pages, v_pages = kv_cache.unbind(0)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            slots = attn_metadata.slot_mapping[:tokens]
            write_slots(k_pages, key[:tokens].view(tokens, self.num_kv_heads, self.head_size), slots)
            write_slots(v_pages, value[:tokens].view(tokens, self.num_kv_heads, self.head_size), slots)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        attend(
            query[:tokens].view(tokens, self.num_heads, self.head_size),
            k_pages,
            v_pages,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            causal=attn_metadata.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            alibi_slopes=self.alibi_slopes,
            sink=self.sinks,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
        )
        return output
