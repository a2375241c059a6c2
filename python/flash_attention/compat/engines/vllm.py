"""An attention backend of vLLM: `vllm serve MODEL --attention-backend CUSTOM`.

vLLM loads register() through the entry point `vllm.general_plugins`; it only fills the place that vLLM keeps for other
backends, unless another plug-in has filled it. A version of vLLM with another interface is refused when this module is
loaded.
"""

from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from flash_attention.compat.engines import interface
from flash_attention.compat.engines.paged import attend, write_slots

VERSIONS = "0.31.0 to 0.33.0"
interface.check(
    "vllm",
    {
        AttentionBackend.get_supported_kernel_block_sizes: "kv_cache_spec",
        AttentionMetadataBuilder.__init__: "self kv_cache_spec layer_names vllm_config device",
        AttentionMetadataBuilder.build: "self common_prefix_len common_attn_metadata fast_build",
        AttentionImpl.__init__: "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
        "logits_soft_cap attn_type kv_sharing_target_layer_name",
        AttentionImpl.forward: "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    },
    VERSIONS,
)

# The element type of a cache in 8 bits, which vLLM keeps as bytes.
_CODES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def register() -> None:
    """Makes this backend the CUSTOM entry of vLLM's list of attention backends."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")


class Backend(AttentionBackend):
    """The properties that vLLM reads before it chooses the backend. Pages of any size and layout are read in place."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  (vLLM's own form)
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *_CODES]  # noqa: RUF012
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

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 576

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@dataclass
class Metadata(AttentionMetadata):
    """The data of a batch, the same for every layer. Lengths and tables stay on the device."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True


class Builder(AttentionMetadataBuilder[Metadata]):
    """Keeps vLLM's data; nothing is planned or copied."""

    # A graph is captured for one number of queries a sequence: 1, or that of a speculative step. Lengths and tables may
    # differ at each replay.
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
            raise NotImplementedError(f"kv_cache_dtype: got {kv_cache_dtype}; allowed are {allowed}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.codes = _CODES.get(kv_cache_dtype)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = None if sliding_window is None else sliding_window - 1  # vLLM counts the key of the query, too
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self.invariant = True if vllm.envs.VLLM_BATCH_INVARIANT else None  # None: as FLASH_ATTENTION_INVARIANT says

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
        """Writes key and value to their slots, attends, and leaves the result in output.

        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], a key and then its value, in any strides.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: results are not quantised")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        pages = kv_cache if self.codes is None else kv_cache.view(self.codes)
        k_pages, v_pages = pages.transpose(1, 2).split(self.head_size, dim=-1)
        scales = {}
        if self.codes is not None:
            scales = {"k_scale": layer._k_scale.reshape(1), "v_scale": layer._v_scale.reshape(1)}
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            rows = [x[:tokens].view(tokens, self.num_kv_heads, self.head_size) for x in (key, value)]
            write_slots(k_pages, v_pages, *rows, attn_metadata.slot_mapping[:tokens], **scales)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        causal, window = attn_metadata.causal, (-1, -1)
        if self.window is not None:
            window = (self.window, 0 if causal else self.window)
        attend(
            query[:tokens].view(tokens, self.num_heads, self.head_size),
            k_pages,
            v_pages,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            causal=causal,
            window=window,
            softcap=self.softcap,
            scale=self.scale,
            alibi_slopes=self.alibi_slopes,
            sink=self.sinks,
            invariant=self.invariant,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
            **scales,
        )
        return output
