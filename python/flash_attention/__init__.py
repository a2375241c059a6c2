"""attention(q, k, v, causal=True, ...): exact attention in O(seq) memory, on CPUs and NVIDIA GPUs.

    from flash_attention import attention
    out = attention(q, k, v, causal=True)  # [batch, seq, heads, head_dim]

Tensors may be of torch, NumPy, CuPy or JAX. help(attention) has all arguments: windows, masks, biases, ALiBi, soft cap,
sinks, dropout, programs of scores. The other functions:

    attention_packed             sequences of different lengths, end to end
    attention_over_cache         decoding from a cache, in pages or not; merge_states, shared_prefix_attention, shared_pages
    flex_attention               scores and masks as functions; create_block_mask, and_masks, or_masks; flashmask_attention
    FlashAttention               as a torch.nn.Module; StandardAttention, MultiheadAttention
    scaled_dot_product_attention torch's signature; register, unregister and why_torch put it in torch's place
    register_transformers        models of Hugging Face; register_flash_attn, unregister_flash_attn for `import flash_attn`
    prepare_qk                   norms and rotary embedding of q and k, in one kernel; rotary_tables, rotary_frequencies
    quantize                     tensors of 8 bits; rotate; quantize_cache, dequantize_cache: keys and values of 4 bits
    explain                      which kernel a call gets; compile, kernels, devices, doctor, version, dropout_mask
    tune                         measures choices on this device; export_tuned, import_tuned

Modules: masks, sparse (selecting keys), parallel (many GPUs), jax, and functions with the names of other libraries:
flash_attn, flash_attn_3, flash_attn_4, flash_mla, flashinfer, xformers.

Importing the package loads neither torch nor NumPy; the parts that need one load it on first use.
"""

from importlib import import_module as _import_module
from os.path import dirname as _dirname

from flash_attention._core import version as __version__
from flash_attention.compat import install as _install_short_paths
from flash_attention.diagnosis import compile, devices, doctor, explain, kernels, version
from flash_attention.functional import attention, attention_packed, dropout_mask
from flash_attention.installation import warn_of_namesake as _warn_of_namesake

_warn_of_namesake(_dirname(_dirname(__file__)))
_install_short_paths(__name__)

_LAZY = {
    "FlashAttention": "modules",
    "StandardAttention": "modules",
    "MultiheadAttention": "modules",
    "scaled_dot_product_attention": "sdpa",
    "register": "torch_registry",
    "unregister": "torch_registry",
    "why_torch": "torch_registry",
    "register_flash_attn": "compat.flash_attn.alias",
    "unregister_flash_attn": "compat.flash_attn.alias",
    "register_transformers": "hugging_face",
    "merge_states": "merge",
    "attention_over_cache": "torch_cache",
    "shared_pages": "shared_prefix",
    "shared_prefix_attention": "shared_prefix",
    "flashmask_attention": "masks.flashmask",
    "flex_attention": "flex",
    "create_block_mask": "flex",
    "and_masks": "flex",
    "or_masks": "flex",
    "prepare_qk": "prepare",
    "rotary_frequencies": "rotary",
    "rotary_tables": "rotary",
    "quantize": "quantization",
    "quantize_cache": "quantization",
    "dequantize_cache": "quantization",
    "rotate": "quantization",
    "tune": "tuning",
    "export_tuned": "tuning",
    "import_tuned": "tuning",
}
_SUBMODULES = (
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flash_mla",
    "flashinfer",
    "jax",
    "masks",
    "parallel",
    "sparse",
    "xformers",
)

# Names of other libraries that people look for here, and their places.
_PLACES = {
    "flash_attention": "attention",
    "flash_attn_func": "flash_attn.flash_attn_func",
    "flash_attn_varlen_func": "flash_attn.flash_attn_varlen_func",
    "flash_attn_qkvpacked_func": "flash_attn.flash_attn_qkvpacked_func",
    "flash_attn_with_kvcache": "flash_attn.flash_attn_with_kvcache",
    "memory_efficient_attention": "xformers.memory_efficient_attention",
    "context_attention": "parallel.context_attention",
    "append_kv": "append.append_kv",
}

__all__ = [
    "FlashAttention",
    "MultiheadAttention",
    "StandardAttention",
    "__version__",
    "and_masks",
    "attention",
    "attention_over_cache",
    "attention_packed",
    "compile",
    "create_block_mask",
    "dequantize_cache",
    "devices",
    "doctor",
    "dropout_mask",
    "explain",
    "export_tuned",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flash_mla",
    "flashinfer",
    "flashmask_attention",
    "flex_attention",
    "import_tuned",
    "jax",
    "kernels",
    "masks",
    "merge_states",
    "or_masks",
    "parallel",
    "prepare_qk",
    "quantize",
    "quantize_cache",
    "register",
    "register_flash_attn",
    "register_transformers",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
    "scaled_dot_product_attention",
    "shared_pages",
    "shared_prefix_attention",
    "sparse",
    "tune",
    "unregister",
    "unregister_flash_attn",
    "version",
    "why_torch",
    "xformers",
]


def __getattr__(name: str):
    if name in _LAZY:
        value = getattr(_imported(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return _imported(name)
    place = _PLACES.get(name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}" + (f"; it is {__name__}.{place}" if place else "")
    )


def _imported(name):
    """Imports a module of this package. `from flash_attention import x` would hide an AttributeError and its cause."""
    try:
        return _import_module(f"{__name__}.{name}")
    except AttributeError as error:
        raise ImportError(f"{__name__}.{name} cannot be imported: {error}") from error


def __dir__():
    return sorted(set(globals()) | set(__all__))
