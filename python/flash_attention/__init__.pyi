"""Exact attention in O(seq) memory, on CPUs and NVIDIA GPUs: what the package offers, for type checkers and editors."""

from flash_attention import jax as jax
from flash_attention import masks as masks
from flash_attention import parallel as parallel
from flash_attention import sparse as sparse
from flash_attention.compat import flash_attn as flash_attn
from flash_attention.compat import flash_attn_3 as flash_attn_3
from flash_attention.compat import flash_attn_4 as flash_attn_4
from flash_attention.compat import flash_mla as flash_mla
from flash_attention.compat import flashinfer as flashinfer
from flash_attention.compat import xformers as xformers
from flash_attention.compat.flash_attn.alias import register_flash_attn as register_flash_attn
from flash_attention.compat.flash_attn.alias import unregister_flash_attn as unregister_flash_attn
from flash_attention.diagnosis import compile as compile
from flash_attention.diagnosis import devices as devices
from flash_attention.diagnosis import doctor as doctor
from flash_attention.diagnosis import explain as explain
from flash_attention.diagnosis import kernels as kernels
from flash_attention.diagnosis import version as version
from flash_attention.flex import and_masks as and_masks
from flash_attention.flex import create_block_mask as create_block_mask
from flash_attention.flex import flex_attention as flex_attention
from flash_attention.flex import or_masks as or_masks
from flash_attention.functional import attention as attention
from flash_attention.functional import attention_packed as attention_packed
from flash_attention.functional import dropout_mask as dropout_mask
from flash_attention.hugging_face import register_transformers as register_transformers
from flash_attention.masks.flashmask import flashmask_attention as flashmask_attention
from flash_attention.merge import merge_states as merge_states
from flash_attention.modules import FlashAttention as FlashAttention
from flash_attention.modules import MultiheadAttention as MultiheadAttention
from flash_attention.modules import StandardAttention as StandardAttention
from flash_attention.quantization import quantize as quantize
from flash_attention.quantization import rotate as rotate
from flash_attention.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from flash_attention.shared_prefix import shared_prefix_attention as shared_prefix_attention
from flash_attention.torch_cache import attention_over_cache as attention_over_cache
from flash_attention.torch_registry import register as register
from flash_attention.torch_registry import unregister as unregister
from flash_attention.torch_registry import why_torch as why_torch
from flash_attention.tuning import export_tuned as export_tuned
from flash_attention.tuning import import_tuned as import_tuned
from flash_attention.tuning import tune as tune

__version__: str
