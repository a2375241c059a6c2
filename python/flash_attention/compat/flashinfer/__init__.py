"""FlashInfer's functions over this library: `from flash_attention.flashinfer import BatchDecodeWithPagedKVCacheWrapper`.

Signatures, layouts (NHD, HND), page tables (indptr, indices, last_page_len) and the logarithm of base 2 are FlashInfer's.
Differences: float32 and CPU tensors are accepted; any head dimension, group and page size; workspace buffers are not used.
Arguments that only choose an implementation (backend, use_tensor_cores, enable_pdl, ...) have no effect. Arguments that
would change the result and are not supported are refused by name.
"""

from flash_attention.compat.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from flash_attention.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from flash_attention.compat.flashinfer.holistic import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from flash_attention.compat.flashinfer.mla import BatchMLAPagedAttentionWrapper
from flash_attention.compat.flashinfer.msa_ops import msa_sparse_attention, msa_sparse_decode_attention
from flash_attention.compat.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from flash_attention.compat.flashinfer.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from flash_attention.compat.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from flash_attention.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flash_attention.compat.flashinfer.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
